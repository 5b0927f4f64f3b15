"""Runs a job on this machine: starts it, follows it, and stores how it ended."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastlaunch.backends.protocol import Backend
from fastlaunch.core.data import read
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import last_words
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.terminal import as_warning
from fastlaunch.jobs.contents import script_now
from fastlaunch.jobs.job import Script, contents_environment
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle.collect import summarize_run
from fastlaunch.lifecycle.display import Display, RecordTail
from fastlaunch.lifecycle.world import PROGRESS, Advice, StopRequest
from fastlaunch.measure.headers import changed_files
from fastlaunch.measure.outcome import outcome_of, read_records

#: Between two looks at a running job: at first, and once it has run for a second.
_FIRST_LOOK_S, LOOK_INTERVAL_S = 0.02, 0.2


@dataclass(frozen=True, kw_only=True)
class LocalRunner:
    """Runs planned runs of this machine, one at a time."""

    backend: Backend
    ledger: Ledger
    display: Display
    stop: StopRequest
    sleep: Callable[[float], None]
    advice: Advice
    #: fastlaunch's home folder, which is no part of a script.
    home: Path
    #: Called with a line for the user.
    report: Callable[[str], None]

    def run(self, run_id: str, label: str) -> RunState:
        """Return the run's final state. Raises UserError, with the run failed, where it cannot be started.

        After an earlier attempt it goes on from its last checkpoint; a script, from its output folder.
        """
        run = self.ledger.get(run_id)
        assert run.plan is not None and run.spec is not None and run.directory is not None
        is_resumed = bool(self.ledger.attempts_of(run_id))
        # Claimed before it is started: whoever cancels it meanwhile finds it planned or running, not between.
        if not self.ledger.set_state(run_id, RunState.RUNNING):
            return self.ledger.get(run_id).state
        attempt_id, token = self.ledger.add_attempt([run_id])
        try:
            plan = self._with_contents(read(Plan, run.plan, "plan"), run)
            if is_resumed:
                plan = _resuming(plan, number=token.rpartition("-a")[2], is_script="script" in run.spec)
            handle = self.backend.execute(plan)
        except UserError as error:
            self.ledger.set_state(run_id, RunState.FAILED, error.message)
            self.ledger.end_attempt(attempt_id, RunState.FAILED)
            raise
        try:
            self.ledger.set_handle(attempt_id, handle)
            with self.advice.guard(PROGRESS):
                self.display.start(label, run.spec.get("steps"))
            self._follow(handle, RecordTail(run.directory))
        except BaseException:
            # A second Ctrl-C, a ledger that cannot be written, a bug: nobody would follow the job any more.
            self.backend.kill(handle)
            if self.stop.by:
                self._finish(run, handle)
            raise
        state = self._finish(run, handle)
        with self.advice.guard(PROGRESS):
            self.display.finish(str(state))
        return state

    def _with_contents(self, plan: Plan, run: Run) -> Plan:
        """Return the plan with the script's contents as they are now. Reports if they changed meanwhile."""
        folder = plan.request.get("working_directory")
        runs = self.ledger.times_of_attempts("local")
        script = script_now(run.job, folder, home=self.home, runs=runs) if folder else None
        if script is None:
            return plan
        earlier = [*self.ledger.select(submission=run.submission_id), run]
        if edited := edited_since(earlier, run.recipe, script):
            text = f"{edited} changed since the last such run: those from here on are another row"
            self.report(as_warning(text))
        # A workload's commit is that of the code that trains it.
        contents = contents_environment(script if run.script else replace(script, commit=None))
        environment = {**plan.request["env"], **contents}
        return replace(plan, request={**plan.request, "env": environment})

    def _follow(self, handle: Mapping[str, Any], tail: RecordTail) -> None:
        pause_s = _FIRST_LOOK_S
        while self.backend.state(handle) is RunState.RUNNING:
            if self.stop.by:
                self.backend.stop(handle)
                break
            self._show(tail)
            self.sleep(pause_s)
            pause_s = min(1.25 * pause_s, LOOK_INTERVAL_S)
        self._show(tail)

    def _show(self, tail: RecordTail) -> None:
        with self.advice.guard(PROGRESS):
            if progress := tail.read():
                self.display.show(progress)

    def _finish(self, run: Run, handle: Mapping[str, Any]) -> RunState:
        return finish_run(run, handle, backend=self.backend, ledger=self.ledger, stopped_by=self.stop.by)


def _resuming(plan: Plan, *, number: str, is_script: bool) -> Plan:
    """Return the plan of an attempt that goes on. number: of the attempt, for a script."""
    request = plan.request
    if is_script:
        return replace(plan, request={**request, "env": {**request["env"], "FASTLAUNCH_ATTEMPT": number}})
    return replace(plan, request={**request, "argv": [*request["argv"], "--resume"]})


def finish_run(
    run: Run, handle: Mapping[str, Any], *, backend: Backend, ledger: Ledger, stopped_by: str | None = None
) -> RunState:
    """Store state, reason and summary of a run whose job is no longer alive; return its state.

    Whoever comes second, a launcher or another command, changes nothing.
    """
    assert run.spec is not None
    records, unreadable = read_records(backend.collect(handle))
    outcome = outcome_of(records)
    state, reason = backend.state(handle), "; ".join(error.message for error in unreadable) or outcome.reason
    if not records and run.directory and (words := last_words(run.directory)):
        reason = f"{reason}: {words}"
    summary, contradiction = summarize_run(run.spec, records)
    ending = Ending.STOPPED if stopped_by else None
    with ledger.transaction():
        if any(attempt.ending is Ending.CANCELLED for attempt in ledger.attempts_of(run.id)[-1:]):
            stopped_by, ending = "fastlaunch cancel", Ending.CANCELLED
        if stopped_by and outcome.state in (RunState.LOST, RunState.INTERRUPTED):
            state, reason = RunState.INTERRUPTED, f"stopped by {stopped_by}"
        # Why a run failed is worth more.
        if contradiction and state is not RunState.FAILED:
            state, reason = RunState.FAILED, contradiction
        if state is not RunState.INTERRUPTED:
            ending = None
        if ledger.set_state(run.id, state, reason, ending=ending):
            if summary:
                ledger.set_summary(run.id, summary)
            for attempt in ledger.attempts_of(run.id):
                ledger.end_attempt(attempt.id, state, ending=ending)
    return ledger.get(run.id).state


def edited_since(runs: Iterable[Run], label: str, script: Script) -> str:
    """Return which files of a script changed since the last run with that label; empty if none."""
    known: Mapping[str, str] = {}
    for run in runs:
        ran = run.summary.environment.files if run.summary else None
        files = ran or dict(run.script.files if run.script else ())
        if run.recipe == label and files:
            known = files
    return changed_files(dict(script.files), known) if known and script.files else ""
