"""Runs a job on this machine: starts it, follows it, and stores how it ended."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from fastlaunch.backends.protocol import Backend
from fastlaunch.core.data import read
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import last_words
from fastlaunch.core.ownership import parse_token
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.core.terminal import as_warning
from fastlaunch.jobs.contents import script_now
from fastlaunch.jobs.job import Script, contents_environment
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle.collect import summarize_run
from fastlaunch.lifecycle.display import RecordTail
from fastlaunch.lifecycle.world import PROGRESS, LaunchContext
from fastlaunch.measure.headers import changed_files
from fastlaunch.measure.outcome import outcome_of, read_records

#: Between two looks at a running job: at first, and once it has run for a second.
_FIRST_LOOK_S, LOOK_INTERVAL_S = 0.02, 0.2


def run_here(launch: LaunchContext, run_id: str, label: str) -> RunState:
    """Carry out a planned run of this machine; return its final state.

    After an earlier attempt it goes on from its last checkpoint; a script, from its output folder. Raises
    UserError, with the run failed, if it cannot be started.
    """
    ledger, backend = launch.ledger, cast(Backend, launch.backends["local"])
    run = ledger.get(run_id)
    assert run.plan is not None and run.spec is not None and run.directory is not None
    is_resumed = bool(ledger.attempts_of(run_id))
    # Claim it before it starts: a command that cancels it meanwhile sees it planned or running, not between.
    if not ledger.set_state(run_id, RunState.RUNNING):
        return ledger.get(run_id).state
    attempt_id, token = ledger.add_attempt([run_id])
    try:
        plan = _with_contents(launch, read(Plan, run.plan, "plan"), run)
        if is_resumed:
            request = plan.request
            if run.script:
                request = {
                    **request,
                    "env": {**request["env"], "FASTLAUNCH_ATTEMPT": parse_token(token)[1]},
                }
            else:
                request = {**request, "argv": [*request["argv"], "--resume"]}
            plan = replace(plan, request=request)
        handle = backend.execute(plan)
    except UserError as error:
        ledger.set_state(run_id, RunState.FAILED, error.message)
        ledger.end_attempt(attempt_id, RunState.FAILED)
        raise
    try:
        ledger.set_handle(attempt_id, handle)
        with launch.advice.guard(PROGRESS):
            launch.display.start(label, run.spec.get("steps"))
        _follow(launch, backend, handle, RecordTail(run.directory))
    except BaseException:
        # After a second Ctrl-C, an unwritable ledger or a bug, nobody would follow the job any more.
        backend.kill(handle)
        if launch.stop.by:
            finish_run(run, handle, backend=backend, ledger=ledger, stopped_by=launch.stop.by)
        raise
    state = finish_run(run, handle, backend=backend, ledger=ledger, stopped_by=launch.stop.by)
    with launch.advice.guard(PROGRESS):
        launch.display.finish(str(state))
    return state


def _with_contents(launch: LaunchContext, plan: Plan, run: Run) -> Plan:
    """Return the plan with the script's contents as they are now. Report if they changed meanwhile."""
    folder = plan.request.get("working_directory")
    runs = launch.ledger.times_of_attempts("local")
    script = script_now(run.job, folder, home=launch.home, runs=runs) if folder else None
    if script is None:
        return plan
    earlier = [*launch.ledger.select(submission=run.submission_id), run]
    if edited := edited_since(earlier, run.recipe, script):
        text = f"{edited} changed since the last such run: those from here on are another row"
        launch.report(as_warning(text))
    # A workload's commit is that of the code that trains it.
    contents = contents_environment(script if run.script else replace(script, commit=None))
    environment = {**plan.request["env"], **contents}
    return replace(plan, request={**plan.request, "env": environment})


def _follow(launch: LaunchContext, backend: Backend, handle: Mapping[str, Any], tail: RecordTail) -> None:
    """Show the job's progress until it has ended, or stop it if the user asks."""
    pause_s, is_running = _FIRST_LOOK_S, True
    while is_running:
        is_running = backend.state(handle) is RunState.RUNNING
        if is_running and launch.stop.by:
            backend.stop(handle)
            is_running = False
        with launch.advice.guard(PROGRESS):
            if progress := tail.read():
                launch.display.show(progress)
        if is_running:
            launch.sleep(pause_s)
            pause_s = min(1.25 * pause_s, LOOK_INTERVAL_S)


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
