"""How attempts end, by what their nodes and AWS say, and what becomes of their runs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from attempt_builders import attempt_with
from ec2_builders import job
from fake_records import write_run

from fastlaunch.backends.protocol import AttemptStatus, Billed, CloudBackend
from fastlaunch.backends.s3_sync import SyncResult, run_folder
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.runs.finish import AttemptResult, finish_attempt, how_it_ended

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
GONE = AttemptStatus(has_ended=True)
TAKEN = AttemptStatus(has_ended=True, is_spot=True, is_taken=True)
ATTEMPT = attempt_with(backend="sagemaker", handle={"launched_at": START.isoformat()})


def refused(kind: type[CloudRefused], message: str, code: str) -> CloudRefused:
    error = kind(message)
    error.code = code
    return error


NO_CAPACITY = refused(NoCapacity, "training job x got no machines", "CapacityError")
CRASHED = refused(CloudRefused, "training job x failed: AlgorithmError: exit code 1", "AlgorithmError")
WAITED = refused(NoCapacity, "there were no spot machines for long enough", "MaxWaitTimeExceeded")


def end(
    aws_status: AttemptStatus = GONE, *, service: str = "SageMaker", begun: bool = True, **said: Any
) -> AttemptResult:
    """The attempt's end; said: of the nodes' last word, none without."""
    attempt = replace(ATTEMPT, reason=said.pop("noted", None))
    why = said.pop("why", None)
    return how_it_ended(attempt, aws_status, said or None, service=service, why=why, has_begun=begun)


def test_what_the_nodes_said_comes_before_what_aws_says() -> None:
    assert end(replace(GONE, problem=CRASHED), outcome="completed") == AttemptResult(state=RunState.COMPLETED)
    assert end(replace(GONE, problem=CRASHED), outcome="failed", reason="no space").reason == "no space"
    assert end(GONE, outcome="completed", noted="stopped by Ctrl-C").state is RunState.COMPLETED


def test_whoever_stopped_it_comes_before_what_ended_it() -> None:
    stopped = end(
        replace(GONE, detail="Stopped: someone asked it to stop"), noted="stopped by fastlaunch cancel"
    )
    assert stopped == AttemptResult(state=RunState.INTERRUPTED, reason="stopped by fastlaunch cancel")
    # Another note is none of a stop.
    assert (
        end(replace(GONE, detail="Stopped: x"), noted="on its way").reason
        == "someone stopped it at SageMaker"
    )


@pytest.mark.parametrize("service", ["EC2", "SageMaker"])
def test_spot_names_the_service_that_took_it(service: str) -> None:
    told = AttemptResult(
        state=RunState.INTERRUPTED, reason=f"{service} took the spot instance back", can_go_on=True
    )
    assert end(TAKEN, service=service) == told
    assert end(GONE, service=service, outcome="interrupted", reason="spot") == told


def test_of_several_nodes_one_was_taken() -> None:
    cluster = replace(ATTEMPT, num_nodes=2)
    told = how_it_ended(cluster, TAKEN, {"outcome": "failed", "reason": "peer"}, service="EC2")
    assert (told.reason, told.can_go_on) == ("EC2 took a spot instance back", True)


def test_a_missing_fabric_says_what_to_do() -> None:
    told = end(GONE, outcome="configuration", reason="fabric")
    assert told.state is RunState.FAILED and told.reason is not None
    for word in ("EFA", "--allow-tcp", "security group", "image"):
        assert word in told.reason
    assert "S3" in (end(GONE, outcome="configuration", reason="peers").reason or "")
    # Another fault of the configuration says itself what it is.
    assert end(GONE, outcome="configuration", reason="no GPU").reason == "no GPU"


def test_a_job_without_capacity_may_be_tried_elsewhere_before_it_has_begun() -> None:
    aws_status = replace(GONE, problem=NO_CAPACITY, detail="failed")
    told = end(aws_status, begun=False)
    assert told == AttemptResult(state=RunState.FAILED, reason=NO_CAPACITY.message, try_next=True)
    assert not end(aws_status, begun=True).try_next
    assert end(replace(GONE, problem=WAITED, detail="MaxWaitTimeExceeded: x"), begun=False).try_next
    # SageMaker calls one that waited too long for machines stopped, as if somebody had done it.
    pending = refused(NoCapacity, "no machines for 30 minutes", "MaxPendingTimeExceeded")
    stopped = replace(GONE, problem=pending, detail="Stopped: someone asked it to stop")
    assert end(stopped, begun=False) == AttemptResult(
        state=RunState.FAILED, reason=pending.message, try_next=True
    )
    on_ec2 = refused(NoCapacity, "was not started", "Server.InsufficientInstanceCapacity")
    assert end(replace(GONE, problem=on_ec2), begun=False, service="EC2").try_next
    # A host that failed says nothing of another one's capacity.
    host = refused(NoCapacity, "ended by an error of its host", "Server.InternalError")
    assert not end(replace(GONE, problem=host), begun=False, service="EC2").try_next
    # Nor does a program that failed before it said a word.
    assert not end(replace(GONE, problem=CRASHED), begun=False).try_next


def test_time_that_was_up_is_an_interruption() -> None:
    told = end(replace(GONE, detail="MaxRuntimeExceeded: the time limit was reached"))
    assert told == AttemptResult(state=RunState.INTERRUPTED, reason="its 60 minutes were up")
    # Its container was told to stop by the same.
    late = replace(GONE, detail="MaxRuntimeExceeded: the time limit was reached")
    assert end(late, outcome="interrupted", reason="stop").reason == "its 60 minutes were up"
    assert end(GONE, outcome="interrupted", reason="watchdog").reason == "its 60 minutes were up"


def test_spot_that_did_not_come_back_can_go_on() -> None:
    told = end(replace(GONE, problem=WAITED, detail="MaxWaitTimeExceeded: x"))
    assert (told.state, told.can_go_on) == (RunState.INTERRUPTED, True)


def test_aws_knows_more_of_a_silent_node_than_the_others_do() -> None:
    host = refused(NoCapacity, "instance i-2 ended by an error of its host", "Server.InternalError")
    silent = {"outcome": "failed", "reason": "node 1 ended without a last word", "missing": [1]}
    assert end(replace(GONE, problem=host), **silent).reason == host.message
    assert end(GONE, **silent).reason == "node 1 ended without a last word"


# Runs


@dataclass(kw_only=True)
class FakeBackend:
    """A backend of which only what `finish_attempt` asks for is here."""

    home: Path
    service: str = "SageMaker"
    synced: SyncResult | BadConfiguration = field(
        default_factory=lambda: SyncResult(boot=None, status=None, is_complete=False)
    )

    def sync(self, handle: Mapping[str, Any]) -> SyncResult:
        if isinstance(self.synced, BadConfiguration):
            raise self.synced
        return self.synced

    def billed(self, **known: Any) -> Billed:
        return Billed(lived_s=1000.0, billed_s=300.0, billing="times")


@dataclass
class Scene:
    """An attempt at two runs, and what of it is here."""

    ledger: Ledger
    home: Path
    attempt: Attempt
    backend: FakeBackend

    def records(self, run_id: str, **how: Any) -> list[Path]:
        """Records of a run, here but not said to be this attempt's."""
        usual = {"steps": 20, "header": {"steps": 20}, "world_size": 8, "batch_size": 64, "instance": None}
        return write_run(run_folder(self.home, run_id), run_id=run_id, **{**usual, **how})

    def upload(self, *paths: Path, status: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Say that these files are the attempt's."""
        synced = SyncResult(boot={}, status=status, is_complete=True, files=paths, num_booted=1)
        self.backend.synced = replace(synced, **changes)

    def finish(self, aws_status: AttemptStatus = GONE, **how: Any) -> AttemptResult:
        backend = cast(CloudBackend, self.backend)
        return finish_attempt(self.attempt, aws_status, backend=backend, ledger=self.ledger, **how)

    def ended(self, number: int = 0) -> tuple[RunState, str | None]:
        run = self.ledger.get(self.attempt.run_ids[number])
        return run.state, run.reason


def plan(num_nodes: int) -> Plan:
    machines = {"InstanceType": "ml.p5.48xlarge", "InstanceCount": num_nodes}
    return Plan(backend="sagemaker", operation="CreateTrainingJob", request={"ResourceConfig": machines})


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    num_nodes = getattr(request, "param", 1)
    with Ledger(tmp_path / "ledger.sqlite", clock=lambda: START) as ledger:
        submission = ledger.add_submission("x")
        ids = [ledger.new_run_id() for _ in range(2)]
        for run_id in ids:
            ledger.add_run(
                submission,
                run_id,
                spec=job(steps=20, batch_size=64, backend="sagemaker").to_json(),
                plan=None,
                workload="vit-huge",
                recipe="bf16",
                backend="sagemaker",
            )
        attempt_id, token = ledger.add_attempt(
            ids, max_minutes=60, usd_per_hour=63.0, make_plan=lambda n: plan(num_nodes)
        )
        ledger.set_handle(attempt_id, {"token": token, "launched_at": START.isoformat()})
        for run_id in ids:
            ledger.set_state(run_id, RunState.RUNNING)
        yield Scene(ledger, tmp_path, ledger.attempt(attempt_id), FakeBackend(home=tmp_path))


def test_records_under_the_attempts_output_are_its_own_whatever_their_number(scene: Scene) -> None:
    first, second = scene.attempt.run_ids
    # SageMaker started the job a second time.
    records = scene.records(first, attempt=2)
    scene.upload(*records, *scene.records(second, attempt=2))
    assert scene.finish().left == ()
    assert scene.ended() == (RunState.COMPLETED, None) == scene.ended(1)
    assert scene.ledger.get(first).summary is not None


def test_records_of_an_earlier_attempt_are_none_of_its_own(scene: Scene) -> None:
    scene.records(scene.attempt.run_ids[0], attempt=1)
    scene.upload(status={"outcome": "failed", "reason": "no space", "runs": []})
    scene.finish()
    assert scene.ended() == (RunState.FAILED, "no space")


def test_without_a_bucket_records_are_told_by_their_number(scene: Scene) -> None:
    first, second = scene.attempt.run_ids
    scene.records(first, attempt=4)
    scene.records(second, attempt=scene.attempt.n)
    scene.backend.synced = BadConfiguration("there is no bucket")
    scene.finish()
    assert scene.ended()[0] is RunState.COMPLETED is scene.ended(1)[0]


def test_what_a_job_is_billed_is_stored(scene: Scene) -> None:
    scene.finish()
    attempt = scene.ledger.attempt(scene.attempt.id)
    billing = attempt.billing
    assert (billing.lived_s, billing.billed_s, billing.source) == (1000.0, 300.0, "times")


def test_runs_of_a_job_without_capacity_wait_for_another_place(scene: Scene) -> None:
    aws_status = replace(GONE, problem=NO_CAPACITY)
    scene.backend.synced = SyncResult(boot=None, status=None, is_complete=False)
    found = scene.finish(aws_status, go_on=True)
    assert found.left == scene.attempt.run_ids and found.try_next
    assert scene.ended() == (RunState.RUNNING, "training job x got no machines; to be tried elsewhere")
    assert scene.ledger.attempt(scene.attempt.id).state is RunState.FAILED


def test_a_run_without_its_fabric_is_told_by_the_sentence(scene: Scene) -> None:
    first, second = scene.attempt.run_ids
    failed = scene.records(first, status="failed", message="exit 78", steps=2)
    runs = [
        {"run_id": first, "state": "failed", "exit_code": 78},
        {"run_id": second, "state": "not-started", "exit_code": None},
    ]
    scene.upload(*failed, status={"outcome": "configuration", "reason": "fabric", "runs": runs})
    scene.finish()
    assert scene.ended()[0] is RunState.FAILED is scene.ended(1)[0]
    assert "--allow-tcp" in (scene.ended()[1] or "") and "--allow-tcp" in (scene.ended(1)[1] or "")


@pytest.mark.parametrize("scene", [2], indirect=True)
def test_nodes_that_are_gone_are_told_by_those_that_spoke(scene: Scene) -> None:
    first, second = scene.attempt.run_ids
    runs = [{"run_id": one, "state": "interrupted", "exit_code": 143} for one in (first, second)]
    said = {0: {"outcome": "interrupted", "reason": "peer", "runs": runs}}
    scene.upload(statuses=said)
    scene.finish()
    assert scene.ended() == (RunState.FAILED, "node 1 ended without a last word")


def test_machines_that_shut_down_end_the_runs_and_not_the_attempt(scene: Scene) -> None:
    scene.upload(status={"outcome": "failed", "reason": "no space", "runs": []})
    scene.finish(AttemptStatus(has_ended=False, launched_at=START + timedelta(minutes=1)))
    assert scene.ended()[0] is RunState.FAILED
    assert scene.ledger.attempt(scene.attempt.id).ended_at is None
