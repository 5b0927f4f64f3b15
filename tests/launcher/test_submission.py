"""Backend and ledger joined: what is stored when, and what a reconciliation makes of it."""

import io
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run

from fastlaunch.core import locks
from fastlaunch.core.data import read, to_data
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import check_home
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle.cancel import cancel
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.launcher import Launcher, Submission
from fastlaunch.lifecycle.local import finish_run
from fastlaunch.lifecycle.reconcile import reconcile
from fastlaunch.lifecycle.world import StopRequest
from fastlaunch.measure.outcome import outcome_of, read_records
from fastlaunch_train.recipes.recipes import resolve_recipe

JOB = Job(workload="vit-tiny", recipe=resolve_recipe("bf16"), batch_size=2, steps=80, num_gpus=1)
OTHER = replace(JOB, recipe=resolve_recipe("fp32"))


@dataclass
class InstantBackend:
    """Writes a job's records when it is started; it then lives for `looks` looks at its state."""

    home: Path
    ledger: Ledger
    looks: int = 1
    how: Mapping[str, Any] = field(default_factory=dict)
    refuses: bool = False
    calls: list[str] = field(default_factory=list)
    argv: list[str] = field(default_factory=list)
    alive: dict[str, int] = field(default_factory=dict)
    name: str = "local"

    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        ((run_id, job),) = jobs.items()
        request = {
            "directory": str(self.home / run_id),
            "recipe": job.recipe.label,
            "seed": job.seed,
            "batch_size": job.batch_size,
            "argv": ["train"],
        }
        return Plan(backend=self.name, operation="exec", request=request)

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        directory = Path(plan.request["directory"])
        self.calls.append(f"execute {plan.request['recipe']}")
        self.argv = plan.request["argv"]
        # Ledger before anything starts: by now the row says so, for every other process to see.
        with Ledger(self.ledger.path) as as_others_see_it:
            assert as_others_see_it.get(directory.name).state is RunState.RUNNING
        if self.refuses:
            raise UserError("cannot start")
        named = {name: plan.request[name] for name in ("recipe", "seed", "batch_size")}
        options = {"steps": 80, "workload": "vit-tiny", **named, **self.how}
        write_run(directory, **options)
        self.alive[str(directory)] = self.looks
        return {"directory": str(directory)}

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        directory = plan.request["directory"]
        return {"directory": directory} if Path(directory).exists() else None

    def state(self, handle: Mapping[str, Any]) -> RunState:
        if self.alive.get(handle["directory"], 0) > 0:
            self.alive[handle["directory"]] -= 1
            return RunState.RUNNING
        return outcome_of(read_records(self.collect(handle))[0]).state

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        return tuple(Path(handle["directory"]).glob("*.jsonl"))

    def stop(self, handle: Mapping[str, Any]) -> None:
        self.calls.append("stop")
        self.alive.clear()

    def kill(self, handle: Mapping[str, Any]) -> None:
        self.calls.append("kill")
        self.alive.clear()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.fixture
def backend(tmp_path: Path, ledger: Ledger) -> InstantBackend:
    return InstantBackend(home=tmp_path / "runs", ledger=ledger)


def launcher(backend: InstantBackend, stop: StopRequest | None = None) -> Launcher:
    return Launcher(
        backends={"local": backend},
        ledger=backend.ledger,
        settings=Settings(home=backend.home.parent),
        display=PlainLines(stream=io.StringIO(), clock=lambda: 0.0),
        stop=stop or StopRequest(),
        sleep=lambda seconds: None,
    )


def jobs(*specs: Job) -> Submission:
    return Submission(jobs_at=lambda here: specs)


def planned(backend: InstantBackend) -> str:
    """Id of a row that a launcher left behind in state `planned`."""
    submission_id = backend.ledger.add_submission("fastlaunch submit")
    run_id = backend.ledger.new_run_id()
    plan = backend.plan({run_id: JOB})
    backend.ledger.add_run(
        submission_id,
        run_id,
        spec=JOB.to_json(),
        plan=to_data(plan),
        workload=JOB.workload,
        recipe=JOB.recipe.label,
        backend="local",
        directory=Path(plan.request["directory"]),
    )
    return run_id


def test_jobs_run_one_after_another_and_are_summarised(backend: InstantBackend) -> None:
    runs = launcher(backend).submit(jobs(JOB, OTHER, OTHER, JOB), command="fastlaunch submit")
    assert backend.calls == ["execute bf16", "execute fp32", "execute fp32", "execute bf16"]
    assert [run.recipe for run in runs] == ["bf16", "fp32", "fp32", "bf16"]
    assert {run.state for run in runs} == {RunState.COMPLETED}
    summaries = [run.summary for run in runs]
    assert all(summary and summary.timing.step_time_s for summary in summaries)
    spec = Job.from_json(runs[0].spec or {})
    assert spec == replace(JOB, session=runs[0].submission_id)
    assert read(Plan, runs[0].plan, "plan") == backend.plan({runs[0].id: spec})


def interrupted(backend: InstantBackend, *checkpoints: str) -> Run:
    """A run that was stopped after 40 of its 80 steps."""
    backend.how = {"status": "interrupted", "steps": 40, "header": {"steps": 80}}
    (run,) = launcher(backend).submit(jobs(JOB), command="")
    assert run.state is RunState.INTERRUPTED and run.directory is not None
    for name in checkpoints:
        (run.directory / "checkpoints").mkdir(exist_ok=True)
        (run.directory / "checkpoints" / name).touch()
    return run


@pytest.mark.parametrize(
    ("status", "state"),
    [("completed", RunState.COMPLETED), ("failed", RunState.FAILED), ("interrupted", RunState.INTERRUPTED)],
)
def test_a_run_of_this_machine_goes_on_from_its_checkpoint(
    backend: InstantBackend, status: str, state: RunState
) -> None:
    run = interrupted(backend, "step-00000020.pt", "step-00000040.pt", "step-00000060.partial")
    backend.how = {"attempt": 2, "first_step": 41, "steps": 40, "status": status}
    resumed = launcher(backend).resume(run)
    assert (resumed.id, resumed.state) == (run.id, state)
    assert backend.argv == ["train", "--resume"]
    assert resumed.summary is not None and resumed.summary.num_steps == 80
    first, second = backend.ledger.attempts_of(run.id)
    assert (first.state, second.state) == (RunState.INTERRUPTED, state)
    assert second.ended_at is not None and "cancel" not in (resumed.reason or "")
    assert "step-00000040.pt" in [event.reason or "" for event in backend.ledger.history(run.id)][-3]
    assert [each.id for each in backend.ledger.fetch_comparable(all_runs=True)] == [run.id]


def test_a_run_of_this_machine_that_cannot_go_on_says_why(backend: InstantBackend) -> None:
    run = interrupted(backend, "step-00000040.partial")
    with pytest.raises(UserError, match="saved no checkpoint"):
        launcher(backend).resume(run)
    backend.how = {}
    (done,) = launcher(backend).submit(jobs(JOB), command="")
    with pytest.raises(UserError, match="is completed"):
        launcher(backend).resume(done)
    assert len(backend.ledger.attempts_of(run.id)) == 1


def test_a_job_whose_like_failed_is_not_tried_again(backend: InstantBackend) -> None:
    backend.how = {"status": "out_of_memory"}
    runs = launcher(backend).submit(jobs(JOB, OTHER, OTHER, JOB), command="")
    assert backend.calls == ["execute bf16", "execute fp32"]
    assert [run.state for run in runs] == [*[RunState.FAILED] * 2, *[RunState.CANCELLED] * 2]
    assert runs[3].reason == "an earlier run of this recipe failed"


def test_runs_removed_while_others_run_do_not_disturb_them(backend: InstantBackend) -> None:
    def tidy_up(seconds: float) -> None:
        with Ledger(backend.ledger.path) as other:
            if len(backend.calls) == 2:
                last = other.select()[-1]
                other.set_state(last.id, RunState.CANCELLED)
                ended = [run.id for run in other.select() if run.state.is_final]
                other.remove(ended)

    runs = replace(launcher(backend), sleep=tidy_up).submit(jobs(JOB, OTHER, JOB), command="")
    assert backend.calls == ["execute bf16", "execute fp32"]
    assert [(run.recipe, run.state) for run in runs] == [("fp32", RunState.COMPLETED)]


def test_contradicting_record_fails_the_run(backend: InstantBackend) -> None:
    backend.how = {"seed": 5}
    (run,) = launcher(backend).submit(jobs(JOB), command="")
    assert run.state is RunState.FAILED
    assert run.reason == "the record contradicts the request: seed 5 for 0"
    assert run.summary is not None and run.reason in run.summary.problems


def test_job_that_cannot_be_started_fails_and_the_rest_is_cancelled(backend: InstantBackend) -> None:
    backend.refuses = True
    with pytest.raises(UserError, match="cannot start"):
        launcher(backend).submit(jobs(JOB, OTHER), command="")
    first, second = backend.ledger.select()
    assert (first.state, first.reason) == (RunState.FAILED, "cannot start")
    assert second.state is RunState.CANCELLED


def test_stop_before_the_first_job_starts_none(backend: InstantBackend) -> None:
    runs = launcher(backend, StopRequest(by="SIGTERM")).submit(jobs(JOB), command="")
    assert backend.calls == []
    assert (runs[0].state, runs[0].reason) == (RunState.CANCELLED, "stopped by SIGTERM")


def test_error_while_following_kills_the_job(backend: InstantBackend) -> None:
    def fail(seconds: float) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        replace(launcher(backend), sleep=fail).submit(jobs(JOB, OTHER), command="")
    assert backend.calls == ["execute bf16", "kill"]


def test_rows_of_a_dead_launcher_are_lost_and_of_a_living_one_left_alone(backend: InstantBackend) -> None:
    run_id = planned(backend)
    lock = backend.ledger.launcher_lock(backend.ledger.get(run_id).submission_id)
    lock.parent.mkdir()
    with locks.held(lock):
        reconcile(backend.ledger, {"local": backend}, Settings(home=Path()))
        assert backend.ledger.get(run_id).state is RunState.PLANNED
    reconcile(backend.ledger, {"local": backend}, Settings(home=Path()))
    run = backend.ledger.get(run_id)
    assert (run.state, run.reason) == (RunState.LOST, "its launcher ended before it started")


def test_job_whose_start_was_not_noted_is_found_again(backend: InstantBackend) -> None:
    run_id = planned(backend)
    directory = backend.home / run_id
    write_run(directory, steps=80, workload="vit-tiny")
    backend.alive[str(directory)] = 1
    backend.ledger.set_state(run_id, RunState.RUNNING)
    reconcile(backend.ledger, {"local": backend}, Settings(home=Path()))
    assert backend.ledger.get(run_id).state is RunState.RUNNING
    reconcile(backend.ledger, {"local": backend}, Settings(home=Path()))
    run = backend.ledger.get(run_id)
    assert run.state is RunState.COMPLETED
    assert run.summary is not None and run.summary.num_steps == 80


def test_damaged_record_is_the_reason(backend: InstantBackend) -> None:
    run_id = planned(backend)
    (path,) = write_run(backend.home / run_id, steps=80, workload="vit-tiny")
    path.write_text("not a record\n")
    reconcile(backend.ledger, {"local": backend}, Settings(home=Path()))
    run = backend.ledger.get(run_id)
    assert (run.state, run.reason) == (RunState.LOST, f"{path}:1: not a fastlaunch record")
    assert run.summary is None


def test_second_to_finish_changes_nothing(backend: InstantBackend) -> None:
    (run,) = launcher(backend).submit(jobs(JOB), command="")
    handle = {"directory": str(run.directory)}
    for path in backend.collect(handle):
        path.unlink()
    assert finish_run(run, handle, backend=backend, ledger=backend.ledger) is RunState.COMPLETED
    assert backend.ledger.get(run.id) == run


def test_cancel_of_a_planned_run_keeps_it_from_starting(backend: InstantBackend) -> None:
    run = backend.ledger.get(planned(backend))
    assert cancel(run, backend=backend, ledger=backend.ledger) is RunState.CANCELLED
    assert backend.calls == []


@pytest.mark.parametrize(("cancelled", "state"), [(True, RunState.INTERRUPTED), (False, RunState.LOST)])
def test_job_that_cancel_stopped_before_its_launcher_had_noted_it_is_interrupted(
    backend: InstantBackend, cancelled: bool, state: RunState
) -> None:
    run_id = planned(backend)
    backend.ledger.set_state(run_id, RunState.RUNNING)
    attempt, _ = backend.ledger.add_attempt([run_id])
    if cancelled:
        backend.ledger.end_attempt(attempt, RunState.CANCELLED, ending=Ending.CANCELLED)
    handle = {"directory": str(backend.home / run_id)}
    backend.ledger.set_handle(attempt, handle)
    finish_run(backend.ledger.get(run_id), handle, backend=backend, ledger=backend.ledger)
    assert backend.ledger.get(run_id).state is state


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_home_must_take_a_megabyte(tmp_path: Path) -> None:
    runs = tmp_path / "home" / "runs"
    check_home(tmp_path / "home")
    assert list(runs.iterdir()) == []
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"{tmp_path / 'file'} is no folder") as refused:
            check_home(home)
        # A full disk is not what is wrong.
        assert "space" not in (refused.value.hint or "")
    # The name leads to a device that is always full.
    (runs / f".probe-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        check_home(tmp_path / "home")
    assert list(runs.iterdir()) == []


def test_stop_request_notes_the_first_signal_and_raises_at_the_second() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.by is None
        signal.raise_signal(signal.SIGTERM)
        assert stop.by == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_stop_request_leaves_what_is_ignored_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.by is None
    finally:
        signal.signal(signal.SIGHUP, before)
