"""What is here of a cloud run, what is missing and why, and what is said of it while it is under way."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from attempt_builders import attempt_with, run_with
from fake_records import write_run
from fake_summaries import PLAIN

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import StoredObject
from fastlaunch.backends import s3_sync
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.core.data import to_data
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.ledger import Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.collect import checkpoints, doing, missing_of, occupancy, with_start
from fastlaunch.lifecycle.describe import attempt_to_dict, ceiling_usd
from fastlaunch.lifecycle.display import RecordTail
from fastlaunch.lifecycle.follow import LiveRun, live_run

FIRST, SECOND = "20261121-090000-aaaa", "20261121-090000-bbbb"
NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


def run(run_id: str = FIRST, state: RunState = RunState.RUNNING, **changes: Any) -> Run:
    usual = {
        "submission_id": "sub-1",
        "purchase": None,
        "spec": {"num_gpus": 2, "image": "registry/pytorch@sha256:00"},
    }
    return run_with(id=run_id, state=state, **usual | changes)


def attempt(n: int = 1, **changes: Any) -> Attempt:
    usual = {
        "id": n,
        "token": f"{FIRST}-a{n}",
        "n": n,
        "handle": {"region": "us-east-1", "instance_id": f"i-{n}"},
        "run_ids": (FIRST, SECOND),
        "zone": "us-east-1a",
        "output": f"s3://acme/fastlaunch/runs/{FIRST}/attempt-{n}",
        "usd_per_hour": 48.0,
        "launched_at": (NOW - timedelta(minutes=30)).isoformat(),
    }
    return attempt_with(**{**usual, **changes})


def ended(n: int = 1, **changes: Any) -> Attempt:
    return attempt(
        n,
        **{
            "state": RunState.COMPLETED,
            "ended_at": NOW.isoformat(),
            "billed_s": 1800.0,
            "source": "node",
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


def live(home: Path, of: Run, *attempts: Attempt) -> LiveRun:
    return live_run(of, attempts, progress=None, home=home, now=NOW)


def does(home: Path, of: Run, *attempts: Attempt) -> str:
    return doing(of, attempts, home, RecordTail(home / "runs" / of.id).read())


def missing(home: Path, of: Run, *attempts: Attempt) -> str:
    return "; ".join(missing_of(of, attempts, home))


def test_what_is_missing_of_a_run_under_way_is_what_it_is_doing(tmp_path: Path) -> None:
    assert (
        missing(tmp_path, run(state=RunState.PLANNED)) == "under way: waiting for a machine to be requested"
    )
    assert missing(tmp_path, run(), attempt(handle=None, reason="no answer")) == "under way: no answer"


def test_what_is_missing_in_the_end_and_why(tmp_path: Path) -> None:
    failed = run(state=RunState.FAILED)
    assert missing(tmp_path, failed) == "no machine was ever requested"
    refused = ended(handle=None, billed_s=None, reason="no capacity")
    assert missing(tmp_path, failed, refused) == "no machine was started: no capacity"
    assert missing(tmp_path, failed, ended()) == "the node never started"
    say(tmp_path, "boot")
    record(tmp_path, ranks=1)
    words = missing(tmp_path, failed, ended())
    assert "without a last word" in words and "no record of rank 1" in words and "no log" in words
    say(tmp_path, "status", runs=[{"run_id": FIRST, "state": "completed"}])
    record(tmp_path)
    (tmp_path / "runs" / FIRST / "log.txt").touch()
    assert missing(tmp_path, run(state=RunState.COMPLETED), ended()) == ""


def test_a_run_whose_turn_did_not_come_says_so(tmp_path: Path) -> None:
    say(tmp_path, "boot")
    say(tmp_path, "status", reason="spot", runs=[{"run_id": SECOND, "state": "not-started"}])
    words = missing(tmp_path, run(SECOND, RunState.INTERRUPTED), ended())
    assert words == "the node ended before the run's turn: spot"


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
    first = occupancy(run(), ended(billed_s=1000.0), tmp_path)
    assert (first.own_s, first.shared_s) == (300, 340)
    second = occupancy(run(SECOND), ended(billed_s=None), tmp_path)
    assert (second.own_s, second.shared_s) == (360, 240)


class Bucket(Aws):
    def __init__(self, **keys: int) -> None:
        super().__init__()
        self.objects = [StoredObject(key=key, size=size) for key, size in sorted(keys.items())]

    def list_objects(self, region: str, bucket: str, prefix: str, **_: object) -> list[StoredObject]:
        assert bucket == "acme"
        return [one for one in self.objects if one.key.startswith(prefix)]


def test_the_newest_checkpoint_is_the_one_of_the_highest_step() -> None:
    folder = f"fastlaunch/runs/{SECOND}/checkpoints"
    bucket = Bucket(
        **{f"{folder}/step-00000020.pt": 2, f"{folder}/step-00000100.pt": 7, f"{folder}/notes.txt": 1}
    )
    backends = {"ec2": Ec2Backend(aws=bucket, home=Path())}
    newest = checkpoints(run(SECOND), [attempt(handle=None, output=None), attempt(2)], backends)
    assert newest is not None
    assert (newest.step, newest.num_bytes) == (100, 7)
    assert newest.newest == f"s3://acme/{folder}/step-00000100.pt"
    shards = {f"{folder}/step-00000200-a2.{rank:05d}-of-00002.distcp": 50 for rank in (0, 1)}
    bucket = Bucket(
        **{f"{folder}/step-00000200-a2-of-00002.pt": 3, f"{folder}/step-00000100.pt": 7, **shards}
    )
    newest = checkpoints(run(SECOND), [attempt(2)], {"ec2": Ec2Backend(aws=bucket, home=Path())})
    assert newest is not None and (newest.step, newest.num_bytes) == (200, 103)
    assert newest.newest == f"s3://acme/{folder}/step-00000200-a2-of-00002.pt"
    none = checkpoints(run(), [attempt()], {"ec2": Ec2Backend(aws=Bucket(), home=Path())})
    assert none is not None and (none.newest, none.step) == (None, 0)
    assert none.uri == f"s3://acme/fastlaunch/runs/{FIRST}/checkpoints/"
    assert checkpoints(run(), [], backends) is None


def test_everything_as_data(tmp_path: Path) -> None:
    say(tmp_path, "boot", lifecycle="spot", booted_at="2026-11-21T09:01:00+00:00")
    say(tmp_path, "status", boot_s=40, pull_s=90, outcome="completed", runs=[])
    record(tmp_path)
    done = run(state=RunState.COMPLETED)
    own = attempt_to_dict(done, ended(), home=tmp_path, now=NOW)
    assert (own["lifecycle"], own["pull_s"], own["instance_id"]) == ("spot", 90, "i-1")
    assert (own["billed_seconds"], own["cost_usd"]) == (1800.0, 24.0)
    json.dumps(own)
    assert live(tmp_path, done, ended()).to_dict(home=tmp_path, now=NOW)["doing"] is None
    under_way = live(tmp_path, run(), attempt()).to_dict(home=tmp_path, now=NOW)
    assert under_way["doing"] == "starting"
    costs = ("cost_usd", "max_cost_usd", "cost_is_final")
    assert [under_way[name] for name in costs] == [24.0, 56.0, False]


def test_what_a_run_is_doing(tmp_path: Path) -> None:
    assert does(tmp_path, run()) == "waiting for a machine to be requested"
    assert does(tmp_path, run(), attempt(handle=None)) == "asking EC2 for a machine"
    assert does(tmp_path, run(), attempt()) == "waiting for the machine to boot"
    say(tmp_path, "boot")
    assert does(tmp_path, run(), attempt()) == "pulling the image and starting"
    log = s3_sync.node_log_path(tmp_path, attempt().token)
    log.write_bytes(b"pulling\nlayer 3\x1b[2J\n\n")
    assert does(tmp_path, run(), attempt()) == r"layer 3\x1b[2J"
    log.unlink()
    write_run(tmp_path / "runs" / FIRST, steps=20, status=None)
    assert does(tmp_path, run(), attempt()).startswith("step ")
    assert does(tmp_path, run(SECOND), attempt()) == "waiting for its turn on the machine"
    # What an attempt before it recorded is not what this one does.
    say(tmp_path, "boot", 2)
    assert does(tmp_path, run(), ended(1), attempt(2)) == "pulling the image and starting"
    say(tmp_path, "status", 2)
    assert does(tmp_path, run(), ended(1), attempt(2)) == "its machine is shutting down"


def test_the_note_tells_place_cost_and_ceiling(tmp_path: Path) -> None:
    # Half an hour at $48, and of 60 minutes and 10 more at most.
    assert live(tmp_path, run(), attempt()).in_words() == (
        "waiting for the machine to boot; attempt 1 in us-east-1a; $24.00 so far, at most $56.00 for 2 runs"
    )
    assert live(tmp_path, run(), ended(1), attempt(2, run_ids=(FIRST,))).in_words() == (
        "waiting for the machine to boot; attempt 2 in us-east-1a; $48.00 so far, at most $80.00"
    )
    # Over its ceiling.
    unseen = live(tmp_path, run(), attempt(max_minutes=10, absences=[NOW.isoformat()])).in_words()
    assert (unseen or "").endswith("; attempt 1 in us-east-1a; at most $16.00 if it ended in time for 2 runs")
    failed = run(state=RunState.FAILED, reason="out of memory")
    assert live(tmp_path, failed, ended()).in_words() == "out of memory; $24.00"
    assert live(tmp_path, run(reason="why")).in_words() == "why"


# Several nodes, SageMaker, blocks


def both(n: int = 1, **changes: Any) -> Attempt:
    """An attempt on two nodes."""
    ids = {"instance_id": f"i-{n}0", "instance_ids": [f"i-{n}0", f"i-{n}1"]}
    return attempt(n, **{"num_nodes": 2, "handle": {"region": "us-east-1", **ids}, **changes})


def test_nodes_that_did_not_speak_are_named(tmp_path: Path) -> None:
    over = both(ended_at=NOW.isoformat(), state=RunState.FAILED)
    failed = run(state=RunState.FAILED)
    assert missing(tmp_path, failed, over) == "nodes 0, 1 never started"
    say(tmp_path, "boot")
    say(tmp_path, "boot-node-1")
    say(tmp_path, "status", node=0, outcome="failed", runs=[{"run_id": FIRST, "state": "failed"}])
    assert "node 1 ended without a last word" in missing(tmp_path, failed, over)
    say(tmp_path, "status-node-1", node=1, outcome="failed", runs=[{"run_id": FIRST, "state": "failed"}])
    assert "last word" not in missing(tmp_path, failed, over)


def test_the_first_nodes_times_are_told_though_the_other_never_spoke(tmp_path: Path) -> None:
    say(tmp_path, "status", uptime_s=900.0, runs=[{"run_id": FIRST, "started_s": 200, "ended_s": 500}])
    over = both(ended_at=NOW.isoformat(), billed_s=1000.0)
    assert occupancy(run(), over, tmp_path).own_s == 300
    assert occupancy(run(), both(), tmp_path).own_s is None


def test_seconds_that_are_not_billed_are_nobodys(tmp_path: Path) -> None:
    # SageMaker's spot: 300 of 1000 seconds are billed.
    runs = [
        {"run_id": FIRST, "started_s": 0, "ended_s": 500},
        {"run_id": SECOND, "started_s": 500, "ended_s": 800},
    ]
    say(tmp_path, "status", uptime_s=900.0, runs=runs)
    over = ended(backend="sagemaker", billed_s=300.0, lived_s=1000.0)
    first, second = (occupancy(run(one), over, tmp_path) for one in (FIRST, SECOND))
    assert (first.own_s, second.own_s) == (pytest.approx(150), pytest.approx(90))
    assert first.shared_s == second.shared_s == pytest.approx(60)


def trained(**changes: Any) -> Attempt:
    """An attempt on SageMaker that waits for machines."""
    handle = {"region": "us-east-1", "job_name": f"{FIRST}-a1", "launched_at": NOW.isoformat()}
    usual = {"backend": "sagemaker", "zone": None, "launched_at": None, "handle": handle}
    return attempt(**{**usual, **changes})


def test_what_a_run_waits_for_is_told_by_its_service(tmp_path: Path) -> None:
    on_sagemaker = run(backend="sagemaker")
    assert does(tmp_path, on_sagemaker, trained(handle=None)) == "asking SageMaker for a machine"
    assert does(tmp_path, on_sagemaker, trained()) == "waiting for the job's container"
    assert does(tmp_path, on_sagemaker, trained(handle=None, num_nodes=4)).endswith("for 4 machines")
    waiting = run(backend="sagemaker", reason="waiting for capacity")
    assert live(tmp_path, waiting, trained()).in_words() == (
        "waiting for capacity; attempt 1 in us-east-1; $0.00 so far, at most $56.00 for 2 runs"
    )


def test_a_job_that_sagemaker_started_again_shows_its_newest_record(tmp_path: Path) -> None:
    say(tmp_path, "boot")
    write_run(tmp_path / "runs" / FIRST, steps=20, status=None, attempt=3)
    assert does(tmp_path, run(), trained(n=2, token=f"{FIRST}-a1")).startswith("step ")


def test_ceilings_count_nodes() -> None:
    # 60 minutes and 10 more of two machines at $48.
    assert ceiling_usd([both()]) == pytest.approx(112.0)
    end = NOW.isoformat()
    assert ceiling_usd([both(ended_at=end, billed_s=1800.0)]) == pytest.approx(48.0)
    assert ceiling_usd([both(ended_at=end, billed_s=0.0)]) == 0


# What a machine took to start


def test_the_pull_is_what_came_after_the_boot(tmp_path: Path) -> None:
    phases = [("requirements", 12.5, 9), ("input a", 20, 2000), ("input b", 2.5, 50)]
    listed = [dict(zip(("name", "seconds", "bytes"), each, strict=True)) for each in phases]
    say(tmp_path, "status", boot_s=40.5, pull_s=100, phases=listed, outcome="completed", runs=[])
    summary = with_start(PLAIN, [attempt()], tmp_path)
    startup = summary.startup
    assert (startup.boot_s, startup.pull_s) == (40.5, 59.5)
    assert (startup.install_s, startup.inputs_s, startup.input_bytes) == (12.5, 22.5, 2050)


@pytest.mark.parametrize("pull_s", [None, 10])
def test_a_machine_that_pulled_nothing_has_no_pull(tmp_path: Path, pull_s: int | None) -> None:
    say(tmp_path, "status", boot_s=40, pull_s=pull_s, outcome="failed", runs=[])
    summary = with_start(PLAIN, [attempt()], tmp_path)
    assert (summary.startup.boot_s, summary.startup.pull_s) == (40, None)


def test_without_a_word_nothing_is_known(tmp_path: Path) -> None:
    assert with_start(PLAIN, [attempt()], tmp_path) == PLAIN
    assert with_start(PLAIN, [], tmp_path) == PLAIN
    assert "boot_s" not in json.dumps(to_data(PLAIN))
