"""Joins backend and ledger: rows first, then the jobs one after another, each collected and summarised."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastlaunch.backends import Backend, Plan, RunState
from fastlaunch.backends.protocol import CLOUD_BACKENDS, CloudBackend
from fastlaunch.core import locks
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import last_words
from fastlaunch.core.settings import Settings, load_settings
from fastlaunch.jobs.spec import JobSpec, names_apart
from fastlaunch.measure.outcome import contradictions, outcome_of, read_records
from fastlaunch.runs.display import Display, RecordTail
from fastlaunch.runs.stop_request import StopRequest

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run

#: Between two looks at a running job.
LOOK_INTERVAL_S = 0.2
#: What must fit on the disk before anything starts: more than the records of a few hundred steps.
_PROBE_BYTES = 2**20
#: How long `cancel` leaves it to a launcher that lives to note the end of its job.
_LAUNCHER_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """What a submission needs: where it runs, where it is noted, how it is shown, and how it is stopped."""

    backend: Backend
    ledger: "Ledger"
    display: Display
    stop: StopRequest
    sleep: Callable[[float], None] = time.sleep

    def submit(self, jobs: Sequence[JobSpec], *, command: str) -> list["Run"]:
        """The runs of `jobs`, each ended or not started; every row is committed before the first job starts.

        A job whose like failed is not tried again. Raises UserError where a job cannot be started at all.
        """
        submission_id = self.ledger.add_submission(command)
        lock = launcher_lock(self.ledger, submission_id)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with locks.held(lock), self.display:
            run_ids = self._add_rows(submission_id, jobs)
            try:
                self._run_all(run_ids, jobs)
            finally:
                why = f"stopped by {self.stop.by}" if self.stop.by else "its launcher could not go on"
                # Those that have ended may have been removed meanwhile.
                for run in self.ledger.select(["state=planned"], submission=submission_id):
                    self.ledger.set_state(run.id, RunState.CANCELLED, why)
        return self.ledger.select(submission=submission_id)

    def _run_all(self, run_ids: Sequence[str], jobs: Sequence[JobSpec]) -> None:
        failed: set[JobSpec] = set()
        names = names_apart(jobs)
        for number, (run_id, job) in enumerate(zip(run_ids, jobs, strict=True), start=1):
            if self.stop.by:
                return
            if not self.ledger.existing([run_id]):
                # Cancelled and removed by another command while its turn was to come.
                continue
            if job.without_seed in failed:
                self.ledger.set_state(run_id, RunState.CANCELLED, "an earlier run of this recipe failed")
                continue
            place = f"[{number}/{len(jobs)}] " if len(jobs) > 1 else ""
            state = self._run(run_id, place + names[number - 1])
            if state in (RunState.FAILED, RunState.LOST):
                failed.add(job.without_seed)

    def _add_rows(self, submission_id: str, jobs: Sequence[JobSpec]) -> list[str]:
        run_ids = []
        with self.ledger.transaction():
            for job in jobs:
                run_ids.append(self.ledger.new_run_id())
                plan = self.backend.plan({run_ids[-1]: job})
                self.ledger.add_run(
                    submission_id,
                    run_ids[-1],
                    spec=job.to_json(),
                    plan=plan.to_json(),
                    workload=job.workload,
                    recipe=job.recipe.label,
                    instance=job.instance,
                    backend=self.backend.name,
                    directory=Path(plan.request["directory"]),
                )
        return run_ids

    def _run(self, run_id: str, label: str) -> RunState:
        run = self.ledger.get(run_id)
        assert run.plan is not None and run.spec is not None and run.directory is not None
        # Claimed before it is started: whoever cancels it meanwhile finds it planned or running, not between.
        if not self.ledger.set_state(run_id, RunState.RUNNING):
            return self.ledger.get(run_id).state
        attempt, _ = self.ledger.add_attempt([run_id])
        try:
            handle = self.backend.execute(Plan.from_json(run.plan))
        except UserError as error:
            self.ledger.set_state(run_id, RunState.FAILED, error.message)
            self.ledger.end_attempt(attempt, RunState.FAILED)
            raise
        try:
            self.ledger.set_handle(attempt, handle)
            self.display.start(label, run.spec["steps"])
            self._follow(handle, run.directory)
        except BaseException:
            # A second Ctrl-C, a ledger that cannot be written, a bug: nobody would follow the job any more.
            self.backend.kill(handle)
            if self.stop.by:
                finish(run, handle, backend=self.backend, ledger=self.ledger, stopped_by=self.stop.by)
            raise
        state = finish(run, handle, backend=self.backend, ledger=self.ledger, stopped_by=self.stop.by)
        self.display.finish(str(state))
        return state

    def _follow(self, handle: Mapping[str, Any], directory: Path) -> None:
        tail = RecordTail(directory)
        while self.backend.state(handle) is RunState.RUNNING:
            if self.stop.by:
                self.backend.stop(handle)
                break
            self._show(tail)
            self.sleep(LOOK_INTERVAL_S)
        self._show(tail)

    def _show(self, tail: RecordTail) -> None:
        progress = tail.read()
        if progress:
            self.display.show(progress)


def finish(
    run: "Run",
    handle: Mapping[str, Any],
    *,
    backend: Backend,
    ledger: "Ledger",
    stopped_by: str | None = None,
) -> RunState:
    """The final state of a run whose job is no longer alive, stored with its reason and summary.

    Whoever comes second, of a launcher and another command, changes nothing.
    """
    # Imported late: it brings numpy.
    from fastlaunch.measure.summarize import summarize

    assert run.spec is not None
    records, unreadable = read_records(backend.collect(handle))
    told = outcome_of(records)
    state, reason = backend.state(handle), "; ".join(unreadable) or told.reason
    if not records and run.directory and (words := last_words(run.directory)):
        reason = f"{reason}: {words}"
    if any(attempt.ended_at for attempt in ledger.attempts_of(run.id)):
        # Only `cancel` ends an attempt before its run.
        stopped_by = "fastlaunch cancel"
    if stopped_by and told.state in (RunState.LOST, RunState.INTERRUPTED):
        state, reason = RunState.INTERRUPTED, f"stopped by {stopped_by}"
    problems = contradictions(JobSpec.from_json(run.spec), records)
    summary = summarize(records) if records else None
    if summary and problems:
        summary = replace(summary, problems=(*summary.problems, *problems))
        state, reason = RunState.FAILED, problems[0]
    with ledger.transaction():
        if ledger.set_state(run.id, state, reason):
            if summary:
                ledger.set_summary(run.id, summary)
            for attempt in ledger.attempts_of(run.id):
                ledger.end_attempt(attempt.id, state)
    return ledger.get(run.id).state


def reconcile(ledger: "Ledger", backends: Mapping[str, Backend], *, settings: Settings | None = None) -> None:
    """Bring the ledger up to what is true: end the runs that ended while their launcher was gone.

    A run whose launcher lives is left to it. What AWS does not answer stays as it is, with a warning.
    settings: for prices; the user's own unless given.
    """
    runs = ledger.select(["state=planned", "state=running"])
    if any(run.backend in CLOUD_BACKENDS for run in runs) or concerns_cloud(ledger):
        _reconcile_cloud(ledger, backends, settings or load_settings())
    for run in runs:
        backend = backends.get(run.backend)
        is_cloud = run.backend in CLOUD_BACKENDS
        if is_cloud or backend is None or run.plan is None or launcher_lives(ledger, run):
            continue
        handle = handle_of(run, ledger=ledger, backend=backend)
        if handle is None:
            # Refused if its launcher, alive a moment ago, has ended it since.
            ledger.set_state(run.id, RunState.LOST, "its launcher ended before it started")
        elif backend.state(handle) is RunState.RUNNING:
            ledger.set_state(run.id, RunState.RUNNING)
        else:
            finish(run, handle, backend=backend, ledger=ledger)


def concerns_cloud(ledger: "Ledger") -> bool:
    """Whether something on AWS may be under way, or left, that the ledger knows of."""
    return bool(any(map(ledger.unfinished_attempts, CLOUD_BACKENDS)) or ledger.scheduled_attempts())


def cancel(
    run: "Run",
    *,
    backend: Backend,
    ledger: "Ledger",
    sleep: Callable[[float], None] = time.sleep,
    settings: Settings | None = None,
) -> RunState:
    """The final state of `run` after it was stopped, or was kept from starting. settings: see `reconcile`."""
    if run.backend in CLOUD_BACKENDS:
        from fastlaunch.runs.reconcile import cancel_cloud

        return cancel_cloud(
            run,
            backend=cast(CloudBackend, backend),
            ledger=ledger,
            settings=settings or load_settings(),
            tell=tell,
        )
    if ledger.get(run.id).state is RunState.PLANNED:
        ledger.set_state(run.id, RunState.CANCELLED, "cancelled before it started")
    if ledger.get(run.id).state.is_final:
        return ledger.get(run.id).state
    handle = handle_of(run, ledger=ledger, backend=backend)
    waited_s = 0.0
    while handle is None and launcher_lives(ledger, run) and waited_s < _LAUNCHER_GRACE_S:
        sleep(LOOK_INTERVAL_S)
        waited_s += LOOK_INTERVAL_S
        handle = handle_of(run, ledger=ledger, backend=backend)
    if handle is None:
        ledger.set_state(run.id, RunState.LOST, "its launcher ended before it started")
        return ledger.get(run.id).state
    for attempt in ledger.attempts_of(run.id):
        # A note for its launcher, which may be the first to see the job end.
        ledger.end_attempt(attempt.id, RunState.CANCELLED)
    backend.stop(handle)
    return finish(run, handle, backend=backend, ledger=ledger)


def tell(line: str) -> None:
    """Write a line for the user, whose terminal may be gone."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _reconcile_cloud(ledger: "Ledger", backends: Mapping[str, Backend], settings: Settings) -> None:
    # Imported late: it brings the modules that speak to AWS.
    from fastlaunch.runs.reconcile import reconcile_cloud

    cloud = cloud_only(backends)
    reconcile_cloud(ledger, cloud, settings=settings, warn=lambda line: tell(f"warning: {line}"))


def cloud_only(backends: Mapping[str, Backend]) -> dict[str, CloudBackend]:
    """Those of the backends whose plans cost money, by name."""
    return {name: cast(CloudBackend, backends[name]) for name in CLOUD_BACKENDS if name in backends}


def handle_of(run: "Run", *, ledger: "Ledger", backend: Backend) -> Mapping[str, Any] | None:
    """What finds the run's job: the handle noted when it was started, or else found by its plan."""
    for attempt in reversed(ledger.attempts_of(run.id)):
        if attempt.handle is not None:
            return attempt.handle
    return backend.find(Plan.from_json(run.plan)) if run.plan else None


def launcher_lock(ledger: "Ledger", submission_id: str) -> Path:
    """The file whose lock is held by the launcher of a submission as long as it lives."""
    return ledger.path.parent / "launchers" / f"{submission_id}.lock"


def launcher_lives(ledger: "Ledger", run: "Run") -> bool:
    """Whether the process that submitted `run` still follows it."""
    return locks.is_held(launcher_lock(ledger, run.submission_id))


def check_home(home: Path) -> None:
    """Nothing, if the home folder can take a run's files; else UserError."""
    probe = home / "runs" / f".probe-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{home} cannot be written: {error.strerror}",
            "free some space, or set FASTLAUNCH_HOME to a folder that can be written",
        ) from None
