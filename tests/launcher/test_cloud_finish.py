"""How attempts end, by what their nodes and AWS say, and what becomes of their runs."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
from attempt_builders import add_attempt, attempt_with
from ec2_builders import job
from fake_records import write_run

from fastlaunch.backends.node_report import in_words
from fastlaunch.backends.protocol import AttemptStatus, Billed, CloudBackend
from fastlaunch.backends.s3_sync import SyncResult, run_folder
from fastlaunch.core.errors import BadConfiguration, CloudRefused
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.finish import AttemptResult, finish_attempt, how_it_ended
from fastlaunch_train.node.protocol import BLOCK, IDLE, IDLE_CODE

START = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
GONE = AttemptStatus(has_ended=True)
ATTEMPT = attempt_with(backend="sagemaker", handle={"launched_at": START.isoformat()})


def gone(problem: str | None = None, ending: Ending | None = None, **more: Any) -> AttemptStatus:
    """What AWS shows in the end."""
    return replace(GONE, problem=problem and CloudRefused(problem), ending=ending, **more)


INTERRUPTED = AttemptResult(state=RunState.INTERRUPTED)
FAILED = AttemptResult(state=RunState.FAILED)
SPOT = replace(INTERRUPTED, ending=Ending.RECLAIMED, reason="SageMaker took the spot instance back")
TIME_UP = replace(INTERRUPTED, ending=Ending.TIME_LIMIT, reason="its 60 minutes were up")
STOPPED = replace(INTERRUPTED, ending=Ending.STOPPED, reason="by x")
AT_SERVICE = replace(STOPPED, reason="someone stopped it at SageMaker")
FAULTY = AttemptResult(
    state=RunState.INTERRUPTED, ending=Ending.FAULTY_GPU, reason="its machine is faulty: GPU 3: x"
)
SILENT = {"outcome": "failed", "reason": "node 1 ended without a last word", "missing": [1]}


@pytest.mark.parametrize(
    ("aws_status", "status", "noted", "result"),
    [
        # What the nodes said comes before what AWS says.
        (gone("AlgorithmError"), {"outcome": "completed"}, None, AttemptResult(state=RunState.COMPLETED)),
        (GONE, {"outcome": "completed"}, Ending.STOPPED, AttemptResult(state=RunState.COMPLETED)),
        (gone("AlgorithmError"), {"outcome": "failed", "reason": "x"}, None, replace(FAILED, reason="x")),
        (GONE, {"outcome": "configuration", "reason": "x"}, None, replace(FAILED, reason="x")),
        # Whoever stopped it comes before what ended it; another note is none of a stop.
        (gone(ending=Ending.STOPPED), {}, Ending.STOPPED, STOPPED),
        (gone(ending=Ending.RECLAIMED), {}, Ending.CANCELLED, replace(STOPPED, ending=Ending.CANCELLED)),
        (gone(ending=Ending.STOPPED), {}, None, AT_SERVICE),
        (gone(ending=Ending.RECLAIMED), {}, None, SPOT),
        (gone("AlgorithmError"), {"outcome": "hardware", "reason": "GPU 3: x"}, None, FAULTY),
        (GONE, {"outcome": "interrupted", "reason": "spot"}, None, SPOT),
        (GONE, {"outcome": "interrupted", "reason": "watchdog"}, None, TIME_UP),
        (gone(ending=Ending.TIME_LIMIT), {}, None, TIME_UP),
        # Its container was told to stop by the same.
        (gone(ending=Ending.TIME_LIMIT), {"outcome": "interrupted", "reason": "stop"}, None, TIME_UP),
        # AWS knows more of a silent node than the others do.
        (gone("Server.InternalError"), SILENT, None, replace(FAILED, reason="Server.InternalError")),
        (GONE, SILENT, None, replace(FAILED, reason=SILENT["reason"])),
    ],
)
def test_how_an_attempt_ended(
    aws_status: AttemptStatus, status: Mapping[str, Any], noted: Ending | None, result: AttemptResult
) -> None:
    attempt = replace(ATTEMPT, ending=noted, reason="by x")
    assert how_it_ended(attempt, aws_status, status or None, service="SageMaker") == result


def test_of_several_nodes_one_was_taken() -> None:
    cluster = replace(ATTEMPT, num_nodes=2)
    said = {"outcome": "failed", "reason": "peer"}
    result = how_it_ended(cluster, gone(ending=Ending.RECLAIMED), said, service="EC2")
    assert (result.reason, result.can_go_on) == ("EC2 took a spot instance back", True)
    said = {"outcome": "hardware", "reason": "fabric manager", "node": 1}
    assert "the machine of node 1 is faulty" in str(how_it_ended(cluster, GONE, said, service="EC2").reason)


@pytest.mark.parametrize(
    ("aws_status", "begun", "try_next"),
    [
        (gone("CapacityError", Ending.NO_CAPACITY), False, True),
        (gone("CapacityError", Ending.NO_CAPACITY), True, False),
        # A host that failed says nothing of another one's capacity, nor does a program that failed early.
        (gone("Server.InternalError"), False, False),
    ],
)
def test_only_what_never_had_machines_is_tried_elsewhere(
    aws_status: AttemptStatus, begun: bool, try_next: bool
) -> None:
    assert aws_status.problem is not None
    result = how_it_ended(ATTEMPT, aws_status, None, service="SageMaker", has_begun=begun)
    assert result.try_next is try_next
    if try_next:
        assert (result.state, result.reason) == (RunState.FAILED, aws_status.problem.message)


def test_spot_that_did_not_come_back_can_go_on() -> None:
    waited = gone("there were none", Ending.NO_CAPACITY, is_spot=True)
    result = how_it_ended(ATTEMPT, waited, None, service="SageMaker")
    assert (result.state, result.ending) == (RunState.INTERRUPTED, Ending.RECLAIMED)


def test_everything_that_a_node_cannot_do_is_explained() -> None:
    """Read in the agent's code: a reason that is added there needs words here."""
    names = ("agent.py", "ec2.py", "peers.py")
    code = "".join((files("fastlaunch_train") / "node" / name).read_text() for name in names)
    # Given at once, after some tries, and after a run that has failed.
    pattern = r'fail\("([a-z0-9 ]+)"[,)]|, "([a-z0-9 ]+)", \d+, \d+|return "([a-z ]+)"$'
    reasons = {next(filter(None, groups)) for groups in re.findall(pattern, code, re.M)} | {BLOCK}
    reasons |= set(re.findall(r'self\._try\(\d+, \d+, [\w.]+, "([a-z0-9 ]+)"\)', code)) | {"slowdown"}
    assert {"peers", "rank 0", "image pull", "driver", "fabric manager", "disk full"} <= reasons
    assert [reason for reason in reasons if len(in_words(reason)) < len(reason) + 20] == []
    assert "--allow-tcp" in in_words("fabric")
    assert "exit code 125" in in_words("container: exit code 125")
    assert "requirements could not be installed: No match" in in_words("requirements: No match")
    assert "iam print --input" in in_words("input d: s3://b/p/ cannot be read")
    assert in_words("no GPU") == "no GPU"


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
    spec = job(steps=20, batch_size=64, backend="sagemaker")
    with Ledger(tmp_path / "ledger.sqlite", clock=lambda: START) as ledger:
        attempt = add_attempt(
            ledger, spec, spec, plan=lambda jobs, n: plan(num_nodes), max_minutes=60, usd_per_hour=63.0
        )
        ledger.set_handle(attempt.id, {"token": attempt.token, "launched_at": START.isoformat()})
        for run_id in attempt.run_ids:
            ledger.set_state(run_id, RunState.RUNNING)
        yield Scene(ledger, tmp_path, ledger.attempt(attempt.id), FakeBackend(home=tmp_path))


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


def test_runs_of_a_job_without_capacity_wait_for_another_place(scene: Scene) -> None:
    result = scene.finish(gone("CapacityError", Ending.NO_CAPACITY), go_on=True)
    assert result.left == scene.attempt.run_ids and result.try_next
    assert scene.ended() == (RunState.RUNNING, "CapacityError; to be tried elsewhere")
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


def test_a_run_that_idled_failed_whatever_its_records_say(scene: Scene) -> None:
    first, second = scene.attempt.run_ids
    asked = scene.records(first, status="interrupted", message="SIGTERM", steps=2)
    runs = [
        {"run_id": first, "state": "failed", "exit_code": IDLE_CODE},
        {"run_id": second, "state": "completed", "exit_code": 0},
    ]
    failed = {"outcome": "failed", "reason": f"run {first}: exit code {IDLE_CODE}", "runs": runs}
    scene.upload(*asked, *scene.records(second), status=failed)
    scene.finish()
    assert scene.ended() == (RunState.FAILED, IDLE)
    assert scene.ended(1)[0] is RunState.COMPLETED


@pytest.mark.parametrize("scene", [2], indirect=True)
def test_nodes_that_are_gone_are_told_by_those_that_spoke(scene: Scene) -> None:
    first, second = scene.attempt.run_ids
    runs = [{"run_id": run_id, "state": "interrupted", "exit_code": 143} for run_id in (first, second)]
    said = {0: {"outcome": "interrupted", "reason": "peer", "runs": runs}}
    scene.upload(statuses=said)
    scene.finish()
    assert scene.ended() == (RunState.FAILED, "node 1 ended without a last word")


def test_machines_that_shut_down_end_the_runs_and_not_the_attempt(scene: Scene) -> None:
    scene.upload(status={"outcome": "failed", "reason": "no space", "runs": []})
    scene.finish(AttemptStatus(has_ended=False, launched_at=START + timedelta(minutes=1)))
    assert scene.ended()[0] is RunState.FAILED
    assert scene.ledger.attempt(scene.attempt.id).ended_at is None
