"""A ledger written before attempts cost anything opens with all that it held; what the new columns hold."""

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fastlaunch.core.errors import BadFile
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.ledger.db import MIGRATIONS, LedgerFile
from fastlaunch.ledger.ledger import Ledger

NOW = datetime(2026, 11, 21, 9, 3, 12, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    ledger = Ledger(path, clock=lambda: NOW, randomness=random.Random(0))
    submission = ledger.add_submission("fastlaunch submit")
    for run_id in ("run-a", "run-b"):
        add_run(ledger, submission, run_id)
    return ledger


def add_run(ledger: Ledger, submission: str, run_id: str) -> None:
    ledger.add_run(
        submission, run_id, spec={"steps": 3}, plan=None, workload="vit-tiny", recipe="bf16", backend="ec2"
    )


def plan(n: int, run_id: str = "run-a") -> Plan:
    tags = [{"Key": "fastlaunch:output", "Value": f"s3://b/runs/{run_id}/attempt-{n}"}]
    request = {
        "InstanceType": "p5.48xlarge",
        "ClientToken": f"{run_id}-a{n}",
        "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
    }
    return Plan(backend="ec2", operation="RunInstances", request=request, region="us-east-1")


def test_a_ledger_of_version_1_keeps_everything(path: Path) -> None:
    file = LedgerFile(path, migrations=MIGRATIONS[:1])
    with file.transaction():
        file.write("INSERT INTO submissions VALUES ('sub-1', '2026-11-20', 'fastlaunch submit')")
        file.write(
            "INSERT INTO runs (id, submission_id, created_at, backend, state, workload, recipe, spec, plan)"
            " VALUES ('run-a', 'sub-1', '2026-11-20', 'local', 'completed', 'vit', 'bf16', '{}', '{}')"
        )
        file.write(
            "INSERT INTO attempts (id, token, n, backend, handle, state, started_at, billed_seconds)"
            " VALUES (7, 'run-a-a1', 1, 'local', '{\"pid\":5}', 'completed', '2026-11-20', NULL)"
        )
        file.write("INSERT INTO attempt_runs VALUES (7, 'run-a', 0)")
    file.close()
    with Ledger(path) as ledger:
        assert ledger.get("run-a").state is RunState.COMPLETED
        (attempt,) = ledger.attempts_of("run-a")
        assert (attempt.id, attempt.token, attempt.handle) == (7, "run-a-a1", {"pid": 5})
        assert (attempt.reason, attempt.instance, attempt.billing.usd_per_hour) == (None, None, None)
        assert ledger.plan_of(7) is None
        assert ledger.sites_of("sub-1") == []


def test_the_plan_is_stored_with_the_number_it_was_made_for(ledger: Ledger) -> None:
    with ledger:
        first, token = ledger.add_attempt(["run-a", "run-b"], max_minutes=130, make_plan=plan)
        assert token == "run-a-a1"
        stored = ledger.plan_of(first)
        assert stored == plan(1)
        attempt = ledger.attempt(first)
        assert (attempt.region, attempt.instance, attempt.max_minutes) == ("us-east-1", "p5.48xlarge", 130)
        assert attempt.output == "s3://b/runs/run-a/attempt-1"
        ledger.end_attempt(first, RunState.FAILED)
        second, token = ledger.add_attempt(["run-a"], make_plan=plan)
        assert token == "run-a-a2"
        ledger.end_attempt(second, RunState.FAILED)
        # Its files carry the attempt's number: run-a has used 2, though run-b has not.
        third, token = ledger.add_attempt(["run-b", "run-a"], make_plan=lambda n: plan(n, "run-b"))
        assert token == "run-b-a3"
        assert ledger.attempts_by_token(["run-b-a3", "no-such"])["run-b-a3"].id == third


def test_a_handle_that_comes_late_does_not_bring_an_attempt_back(ledger: Ledger) -> None:
    with ledger:
        attempt, _ = ledger.add_attempt(["run-a"])
        ledger.end_attempt(attempt, RunState.CANCELLED, reason="fastlaunch cancel")
        ledger.set_handle(attempt, {"instance_id": "i-1"})
        found = ledger.attempt(attempt)
        assert (found.state, found.handle) == (RunState.CANCELLED, {"instance_id": "i-1"})
        assert ledger.unfinished_attempts("ec2") == []
        ledger.explain_attempt(attempt, "something else")
        assert ledger.attempt(attempt).reason == "fastlaunch cancel"


def test_what_a_machine_cost_is_stored_with_how_it_is_known(ledger: Ledger) -> None:
    with ledger:
        attempt, _ = ledger.add_attempt(["run-a", "run-b"], max_minutes=60)
        ledger.set_machine(attempt, zone="us-east-1a", launched_at=NOW, usd_per_hour=55.04)
        (unfinished,) = ledger.unfinished_attempts("ec2")
        assert unfinished.run_ids == ("run-a", "run-b")
        assert ledger.end_attempt(
            attempt, RunState.COMPLETED, billed_seconds=90.0, billing="times", lived_s=91.0
        )
        found = ledger.attempt(attempt)
        assert (found.zone, found.billing.usd_per_hour) == ("us-east-1a", 55.04)
        assert found.launched_at == "2026-11-21T09:03:12.000+00:00"
        billing = found.billing
        assert (billing.billed_s, billing.source, billing.lived_s) == (90.0, "times", 91.0)


@pytest.mark.parametrize("state", [RunState.INTERRUPTED, RunState.FAILED, RunState.LOST])
def test_a_run_that_did_not_complete_is_reopened(ledger: Ledger, state: RunState) -> None:
    with ledger:
        ledger.set_state("run-a", RunState.RUNNING)
        ledger.set_state("run-a", state, "EC2 took it")
        assert ledger.reopen("run-a", "resumed")
        assert ledger.get("run-a").state is RunState.PLANNED
        assert not ledger.reopen("run-a", "again")
        assert ledger.set_state("run-a", RunState.RUNNING)
        assert [event.state for event in ledger.history("run-a")][-3:] == [state, "planned", "running"]


def test_a_run_is_placed_anew_for_every_candidate(ledger: Ledger) -> None:
    with ledger:
        ledger.place("run-a", spec={"steps": 3, "num_gpus": 8}, instance="p5.48xlarge", price=None)
        ledger.explain("run-a", "no answer yet")
        run = ledger.get("run-a")
        assert (run.instance, run.spec, run.reason) == (
            "p5.48xlarge",
            {"steps": 3, "num_gpus": 8},
            "no answer yet",
        )
        assert run.plan is None and run.price is None


def test_sites_are_kept_and_damaged_ones_told(ledger: Ledger) -> None:
    with ledger:
        submission = ledger.last_submission()
        assert submission is not None
        ledger.set_sites(submission, [{"region": "us-east-1"}])
        assert ledger.sites_of(submission) == [{"region": "us-east-1"}]
        attempt, _ = ledger.add_attempt(["run-a"], make_plan=plan)
        with ledger.transaction():
            ledger._file.write("UPDATE submissions SET sites = '{'")
            ledger._file.write("UPDATE attempts SET plan = '{}'")
        with pytest.raises(BadFile, match="ledger is damaged"):
            ledger.sites_of(submission)
        with pytest.raises(BadFile, match="plan of attempt run-a-a1"):
            ledger.plan_of(attempt)
