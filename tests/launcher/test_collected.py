"""What is here of a cloud run, what is missing and why, and what is said of it while it is under way."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run

from fastlaunch.aws import StoredObject
from fastlaunch.backends import RunState
from fastlaunch.cloud_view import ceiling_usd, cloud_as_json, cloud_note, doing
from fastlaunch.collected import as_json, checkpoints, collected, occupancy
from fastlaunch.run_attempts import Attempt
from fastlaunch.runs import Run

FIRST, SECOND = "20261121-090000-aaaa", "20261121-090000-bbbb"
NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


def run(run_id: str = FIRST, state: RunState = RunState.RUNNING, **changes: Any) -> Run:
    usual = Run(
        id=run_id,
        submission_id="sub-1",
        created_at="2026-11-21T09:00:00+00:00",
        backend="ec2",
        state=state,
        reason=None,
        workload="vit-tiny",
        recipe="bf16",
        instance="p5.48xlarge",
        directory=None,
        price=None,
        summary=None,
        spec={"num_gpus": 2, "image": "registry/pytorch@sha256:00"},
    )
    return replace(usual, **changes)


def attempt(n: int = 1, **changes: Any) -> Attempt:
    usual = Attempt(
        id=n,
        token=f"{FIRST}-a{n}",
        n=n,
        backend="ec2",
        region="us-east-1",
        handle={"region": "us-east-1", "instance_id": f"i-{n}"},
        state=RunState.RUNNING,
        started_at="2026-11-21T09:00:00+00:00",
        ended_at=None,
        billed_seconds=None,
        run_ids=(FIRST, SECOND),
        zone="us-east-1a",
        output=f"s3://acme/fastlaunch/runs/{FIRST}/attempt-{n}",
        max_minutes=60,
        usd_per_hour=48.0,
        launched_at=(NOW - timedelta(minutes=30)).isoformat(),
    )
    return replace(usual, **changes)


def ended(n: int = 1, **changes: Any) -> Attempt:
    return attempt(
        n,
        **{
            "state": RunState.COMPLETED,
            "ended_at": NOW.isoformat(),
            "billed_seconds": 1800.0,
            "billing": "node",
            **changes,
        },
    )


def say(home: Path, name: str, n: int = 1, **values: Any) -> None:
    """Write what the attempt's node said: `boot` or `status`."""
    path = home / "runs" / FIRST / f"{name}-a{n}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "token": f"{FIRST}-a{n}", **values}))


def record(home: Path, *, ranks: int = 2, attempt: int = 1, run_id: str = FIRST) -> None:
    folder = home / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        (folder / f"rank-{rank:05d}-attempt-{attempt}.jsonl").touch()


def missing(home: Path, of: Run, *attempts: Attempt) -> str:
    return "; ".join(collected(of, attempts, home).missing)


def test_what_is_missing_while_a_run_is_under_way(tmp_path: Path) -> None:
    assert missing(tmp_path, run(state=RunState.PLANNED)) == "no machine was asked for yet"
    assert missing(tmp_path, run(), attempt(handle=None)) == "EC2 has not answered yet"
    assert missing(tmp_path, run(), attempt(handle=None, reason="no answer")) == "no answer"
    assert missing(tmp_path, run(), attempt()) == "the machine has not booted yet"
    say(tmp_path, "boot")
    assert missing(tmp_path, run(), attempt()) == "under way: the rest comes when it is uploaded"


def test_what_is_missing_in_the_end_and_why(tmp_path: Path) -> None:
    failed = run(state=RunState.FAILED)
    assert missing(tmp_path, failed) == "no machine was ever asked for"
    refused = ended(handle=None, billed_seconds=None, reason="no capacity")
    assert missing(tmp_path, failed, refused) == "no machine was started: no capacity"
    assert missing(tmp_path, failed, ended()) == "the node never said that it booted"
    say(tmp_path, "boot")
    (tmp_path / "runs" / FIRST / "console-a1.log").touch()
    record(tmp_path, ranks=1)
    told = missing(tmp_path, failed, ended())
    assert "without a last word" in told and "no record of rank 1" in told and "no log" in told
    say(tmp_path, "status", runs=[{"run_id": FIRST, "state": "completed"}])
    record(tmp_path)
    (tmp_path / "runs" / FIRST / "log.txt").touch()
    assert missing(tmp_path, run(state=RunState.COMPLETED), ended()) == ""


def test_a_node_that_never_booted_points_at_its_console(tmp_path: Path) -> None:
    console = tmp_path / "runs" / FIRST / "console-a1.log"
    console.parent.mkdir(parents=True)
    console.touch()
    assert missing(tmp_path, run(state=RunState.FAILED), ended()).endswith(f"; see {console}")


def test_a_run_whose_turn_did_not_come_says_so(tmp_path: Path) -> None:
    say(tmp_path, "boot")
    say(tmp_path, "status", reason="spot", runs=[{"run_id": SECOND, "state": "not-started"}])
    told = missing(tmp_path, run(SECOND, RunState.INTERRUPTED), ended())
    assert told == "the node ended before the run's turn: spot"


@pytest.mark.parametrize(
    "runs", [None, 5, [5], [{}], [{"run_id": FIRST}], [{"run_id": FIRST, "ended_s": "x"}]]
)
def test_a_last_word_of_another_form_is_no_fault(tmp_path: Path, runs: Any) -> None:
    say(tmp_path, "boot")
    say(tmp_path, "status", runs=runs)
    found = collected(run(state=RunState.FAILED), [ended()], tmp_path)
    assert "no log" in found.missing
    assert occupancy(run(), ended(), tmp_path).own_s in (None, 0.0)


def test_seconds_are_shared_by_occupancy(tmp_path: Path) -> None:
    say(
        tmp_path,
        "status",
        uptime_s=900.0,
        runs=[
            {"run_id": FIRST, "started_s": 200, "ended_s": 500},
            {"run_id": SECOND, "started_s": 500, "ended_s": 860},
        ],
    )
    first = occupancy(run(), ended(billed_seconds=1000.0), tmp_path)
    assert (first.own_s, first.shared_s) == (300, 340)
    second = occupancy(run(SECOND), ended(billed_seconds=None), tmp_path)
    assert (second.own_s, second.shared_s) == (360, 240)


class Bucket:
    def __init__(self, **keys: int) -> None:
        self.objects = [StoredObject(key=key, size=size) for key, size in sorted(keys.items())]

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]:
        assert bucket == "acme"
        return [one for one in self.objects if one.key.startswith(prefix)]


def test_the_newest_checkpoint_is_the_one_of_the_highest_step() -> None:
    folder = f"fastlaunch/runs/{SECOND}/checkpoints"
    bucket = Bucket(
        **{f"{folder}/step-00000020.pt": 2, f"{folder}/step-00000100.pt": 7, f"{folder}/notes.txt": 1}
    )
    found = checkpoints(bucket, run(SECOND), [attempt(handle=None, output=None), attempt(2)])
    assert found is not None
    assert (found.step, found.num_bytes) == (100, 7)
    assert found.newest == f"s3://acme/{folder}/step-00000100.pt"
    none = checkpoints(Bucket(), run(), [attempt()])
    assert none is not None and (none.newest, none.step) == (None, 0)
    assert none.uri == f"s3://acme/fastlaunch/runs/{FIRST}/checkpoints/"
    assert checkpoints(bucket, run(), []) is None


def test_everything_as_data(tmp_path: Path) -> None:
    say(tmp_path, "boot", lifecycle="spot", booted_at="2026-11-21T09:01:00+00:00")
    say(tmp_path, "status", boot_s=40, pull_s=90, outcome="completed", runs=[])
    record(tmp_path)
    found = collected(run(state=RunState.COMPLETED), [ended()], tmp_path)
    told = as_json(found, home=tmp_path, now=NOW, discount=0.1, stored=None, refused={})
    assert (told["num_ranks"], len(told["records"]), told["cost_usd"]) == (2, 2, 24.0)
    assert told["image"] == "registry/pytorch@sha256:00"
    (own,) = told["attempts"]
    assert (own["lifecycle"], own["pull_s"], own["instance_id"]) == ("spot", 90, "i-1")
    assert own["billed_seconds"] == 1800.0
    json.dumps(told)


def test_what_a_run_is_doing(tmp_path: Path) -> None:
    assert doing(run(), [], tmp_path) == "waiting for a machine to be asked for"
    assert doing(run(), [attempt(handle=None)], tmp_path) == "asking EC2 for a machine"
    assert doing(run(), [attempt()], tmp_path) == "waiting for the machine to boot"
    say(tmp_path, "boot")
    assert doing(run(), [attempt()], tmp_path) == "pulling the image and starting"
    write_run(tmp_path / "runs" / FIRST, steps=20, status=None)
    assert doing(run(), [attempt()], tmp_path).startswith("step ")
    assert doing(run(SECOND), [attempt()], tmp_path) == "waiting for its turn on the machine"
    # What an attempt before it recorded is not what this one does.
    say(tmp_path, "boot", 2)
    assert doing(run(), [ended(1), attempt(2)], tmp_path) == "pulling the image and starting"
    say(tmp_path, "status", 2)
    assert doing(run(), [ended(1), attempt(2)], tmp_path) == "the machine is shutting down"


def test_the_note_tells_place_cost_and_ceiling(tmp_path: Path) -> None:
    # Half an hour at $48, and of 60 minutes and 10 more at most.
    assert cloud_note(run(), [attempt()], home=tmp_path, now=NOW) == (
        "waiting for the machine to boot; attempt 1 in us-east-1a; $24.00 so far, at most $56.00 for 2 runs"
    )
    both = [ended(1), attempt(2, run_ids=(FIRST,))]
    assert cloud_note(run(), both, home=tmp_path, now=NOW) == (
        "waiting for the machine to boot; attempt 2 in us-east-1a; $48.00 so far, at most $80.00"
    )
    done = run(state=RunState.FAILED, reason="out of memory")
    assert cloud_note(done, [ended()], home=tmp_path, now=NOW) == "out of memory; $24.00"
    assert cloud_note(run(reason="why"), [], home=tmp_path, now=NOW) == "why"


def test_without_a_price_there_is_no_ceiling() -> None:
    assert ceiling_usd([attempt(usd_per_hour=None)]) is None
    assert ceiling_usd([attempt(max_minutes=None)]) is None
    assert ceiling_usd([ended(usd_per_hour=None)]) is None
    assert ceiling_usd([ended(billed_seconds=None, usd_per_hour=None)]) == 0


def test_status_as_data(tmp_path: Path) -> None:
    told = cloud_as_json(run(), [attempt()], home=tmp_path, now=NOW)
    assert (told["doing"], told["cost_usd"], told["max_cost_usd"], told["cost_is_final"]) == (
        "waiting for the machine to boot",
        24.0,
        56.0,
        False,
    )
    assert cloud_as_json(run(state=RunState.COMPLETED), [ended()], home=tmp_path, now=NOW)["doing"] is None
