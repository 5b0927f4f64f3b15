"""How an attempt on AWS ended and what became of its runs: told by the records, then the node, then EC2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fastlaunch import s3_sync
from fastlaunch.attempt_cost import billed
from fastlaunch.aws import Instance
from fastlaunch.aws_errors import is_spot_interruption, state_reason_problem
from fastlaunch.backends import RunState
from fastlaunch.backends.ec2 import Ec2Backend, Sight
from fastlaunch.errors import BadConfiguration
from fastlaunch.job import JobSpec
from fastlaunch.log_file import last_words
from fastlaunch.outcome import Outcome, contradictions, outcome_of, read_records

if TYPE_CHECKING:
    from fastlaunch.metrics import RunSummary
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger, Run

#: How the ledger's `reason` of an attempt begins that someone asked to stop.
STOPPED_BY = "stopped by "
_TAKEN = "EC2 took the spot instance back"


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended. can_go_on: the machine was taken, and another one may do the rest."""

    state: RunState
    reason: str | None = None
    can_go_on: bool = False


@dataclass(frozen=True, kw_only=True)
class _RunEnd:
    run: "Run"
    outcome: Outcome
    summary: "RunSummary | None"


def finish_attempt(
    attempt: "Attempt",
    sight: Sight,
    *,
    backend: Ec2Backend,
    ledger: "Ledger",
    why: str | None = None,
    go_on: bool = False,
) -> tuple[str, ...]:
    """Ids of the runs that another machine may go on with; the others, and the attempt, have ended.

    Call it when the machine is not live any more. sight: of it; while it is shutting down its runs end, and
    the attempt stays for whoever looks when it is terminated. why: for which the launcher itself ended it.
    go_on: whether there will be another attempt if EC2 took the machine; else no run is left. Whoever comes
    second changes nothing. Raises CloudRefused's kinds if the bucket cannot be read now.
    """
    handle, instance = attempt.handle, sight.instance
    assert handle is not None
    try:
        status = backend.sync(handle).status
    except BadConfiguration:
        # The bucket is there no more: all that there will ever be is here.
        status = s3_sync.kept(backend.home, attempt.token).status
    # Read again: someone may have asked it to stop since.
    attempt = ledger.attempt(attempt.id)
    end = how_it_ended(attempt, instance, status, why=why)
    go_on = go_on and end.can_go_on
    nodes = {node.get("run_id"): node for node in _listed(status)}
    open_runs = [ledger.get(run_id) for run_id in _undecided(ledger, attempt)]
    ends = [_run_end(run, attempt, nodes.get(run.id), end, backend) for run in open_runs]
    time = billed(
        launched_at=datetime.fromisoformat(attempt.launched_at or handle["launched_at"]),
        max_minutes=attempt.max_minutes or 0,
        instance=instance,
        status=status,
    )
    left = []
    with ledger.transaction():
        for item in ends:
            if go_on and item.outcome.state in (RunState.INTERRUPTED, RunState.LOST, RunState.CANCELLED):
                ledger.explain(item.run.id, f"{end.reason}; to be resumed on another")
                left.append(item.run.id)
            elif ledger.set_state(item.run.id, item.outcome.state, item.outcome.reason) and item.summary:
                ledger.set_summary(item.run.id, item.summary)
        if sight.has_ended:
            ledger.end_attempt(
                attempt.id,
                end.state,
                reason=end.reason,
                billed_seconds=time.billed_s,
                billing=time.billing,
                lived_s=time.lived_s,
            )
    return tuple(left)


def how_it_ended(
    attempt: "Attempt",
    instance: Instance | None,
    status: Mapping[str, Any] | None,
    *,
    why: str | None = None,
) -> End:
    """The attempt's end, by what the node said last, who asked it to stop, and why EC2 says that it ended."""
    outcome, reason = (str((status or {}).get(name) or "") for name in ("outcome", "reason"))
    stopped = attempt.reason if (attempt.reason or "").startswith(STOPPED_BY) else None
    if outcome == "completed":
        return End(state=RunState.COMPLETED)
    if stopped:
        return End(state=RunState.INTERRUPTED, reason=stopped)
    if reason == "spot" or (instance is not None and is_spot_interruption(instance)):
        return End(state=RunState.INTERRUPTED, reason=_TAKEN, can_go_on=True)
    if outcome == "interrupted":
        told = {
            "watchdog": f"its {attempt.max_minutes} minutes were up",
            "stop": "it was asked to stop through its bucket",
        }
        return End(state=RunState.INTERRUPTED, reason=told.get(reason, f"the node was stopped: {reason}"))
    if outcome:
        return End(state=RunState.FAILED, reason=reason or f"the node ended: {outcome}")
    if why:
        return End(state=RunState.FAILED, reason=why)
    problem = state_reason_problem(instance) if instance else None
    if problem is not None:
        return End(state=RunState.FAILED, reason=problem.message)
    told_by_ec2 = (instance.state_reason or instance.transition_reason) if instance else None
    return End(
        state=RunState.LOST,
        reason=f"its machine ended without saying why{f' ({told_by_ec2})' if told_by_ec2 else ''}",
    )


def settle_run(ledger: "Ledger", run_id: str, why: str, *, stopped: bool = False) -> None:
    """End a run that no attempt holds: never started, refused, or interrupted and not gone on with."""
    run = ledger.get(run_id)
    if run.state.is_final:
        return
    attempts = ledger.attempts_of(run_id)
    if any(attempt.handle for attempt in attempts):
        ledger.set_state(run_id, RunState.INTERRUPTED, why)
    elif stopped or not attempts:
        ledger.set_state(run_id, RunState.CANCELLED, why)
    else:
        ledger.set_state(run_id, RunState.FAILED, why)


def _run_end(
    run: "Run", attempt: "Attempt", node: Mapping[str, Any] | None, end: End, backend: Ec2Backend
) -> _RunEnd:
    """What became of one run, with what it measured over all its attempts."""
    # Imported late: it brings numpy.
    from fastlaunch.metrics import summarize

    records, unreadable = read_records(s3_sync.record_paths(backend.home, run.id))
    own = [record for record in records if record.header["attempt"] == attempt.n]
    outcome = outcome_of(own)
    if outcome.state in (RunState.LOST, RunState.INTERRUPTED):
        folder = s3_sync.run_folder(backend.home, run.id)
        has_begun = bool(records) or (folder / "log.txt").exists()
        words = None if own else last_words(folder)
        outcome = _by_the_node(outcome, node, end, has_begun=has_begun, words=words, records=own)
    if unreadable and outcome.state is not RunState.COMPLETED:
        outcome = replace(
            outcome, reason="; ".join([*([outcome.reason] if outcome.reason else []), *unreadable])
        )
    summary = summarize(records) if records else None
    problems = contradictions(JobSpec.from_json(run.spec), own) if run.spec else ()
    if summary and problems:
        summary = replace(summary, problems=(*summary.problems, *problems))
        outcome = Outcome(state=RunState.FAILED, reason=problems[0])
    return _RunEnd(run=run, outcome=outcome, summary=summary)


def _by_the_node(
    by_records: Outcome,
    node: Mapping[str, Any] | None,
    end: End,
    *,
    has_begun: bool,
    words: str | None,
    records: Sequence[Any],
) -> Outcome:
    """The outcome of a run whose records do not tell of a failure or a last step.

    has_begun: it left something here, now or in an earlier attempt. words: the last line it printed.
    """
    state, exit_code = (node or {}).get("state"), (node or {}).get("exit_code")
    if state == "failed" and isinstance(exit_code, int) and exit_code != 0:
        # Before what ended the machine: that came later, while another run was on it.
        told = outcome_of(records, exit_code=exit_code)
        return replace(told, reason=f"{told.reason}: {words}" if words else told.reason)
    if end.state is RunState.INTERRUPTED:
        if not has_begun and not end.can_go_on:
            return Outcome(state=RunState.CANCELLED, reason=f"{end.reason} before it started")
        return Outcome(state=RunState.INTERRUPTED, reason=end.reason)
    if state == "not-started" and end.state is not RunState.FAILED:
        return Outcome(state=RunState.CANCELLED, reason=end.reason or "the node did not start it")
    if by_records.state is RunState.INTERRUPTED:
        return by_records
    if end.state is RunState.FAILED:
        # The node itself failed, or the launcher ended it: before this run came to a word of its own.
        return Outcome(state=RunState.FAILED, reason=end.reason)
    reason = by_records.reason if end.state is RunState.COMPLETED or records else end.reason
    return Outcome(state=RunState.LOST, reason=reason)


def _listed(status: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    runs = (status or {}).get("runs")
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []


def _undecided(ledger: "Ledger", attempt: "Attempt") -> list[str]:
    """The attempt's runs that have not ended and that no later attempt went on with, in its order."""
    known = ledger.existing(attempt.run_ids)
    return [
        run_id
        for run_id in attempt.run_ids
        if run_id in known
        and not ledger.get(run_id).state.is_final
        and ledger.attempts_of(run_id)[-1].id == attempt.id
    ]
