"""How an attempt on AWS ended and what became of its runs: told by the records, then the nodes, then AWS."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import RunState, s3_sync
from fastlaunch.backends.node_report import merged
from fastlaunch.backends.protocol import CloudBackend, Sight
from fastlaunch.core.errors import BadConfiguration, NoCapacity
from fastlaunch.core.log_file import last_words
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.machine_start import with_start
from fastlaunch.measure.outcome import Outcome, contradictions, outcome_of, read_records
from fastlaunch.node_reasons import in_words
from fastlaunch.runs.attempt_price import managed_spot_price

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.measure.summarize import RunSummary
    from fastlaunch.run_attempts import Attempt

#: How the ledger's `reason` of an attempt begins that someone asked to stop.
STOPPED_BY = "stopped by "
#: Exit code of a training that was asked for what the machines cannot do, such as EFA.
CONFIGURATION_EXIT = 78
#: What a service calls that which ends.
_MACHINE = {"SageMaker": "training job"}
#: AWS's words for machines that it never had, after which another place may have some.
_NEVER_HAD = (
    "InsufficientInstanceCapacity",
    "CapacityError",
    "MaxWaitTimeExceeded",
    "MaxPendingTimeExceeded",
)


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended. can_go_on: a machine was taken, and another one may do the rest.

    try_next: there was no capacity and nothing began, so that another place may be tried.
    """

    state: RunState
    reason: str | None = None
    can_go_on: bool = False
    try_next: bool = False


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What `finish_attempt` did. left: ids of the runs that another attempt may go on with."""

    left: tuple[str, ...]
    end: End


@dataclass(frozen=True, kw_only=True)
class _RunEnd:
    run: "Run"
    outcome: Outcome
    summary: "RunSummary | None"


def finish_attempt(
    attempt: "Attempt",
    sight: Sight,
    *,
    backend: CloudBackend,
    ledger: "Ledger",
    why: str | None = None,
    go_on: bool = False,
) -> Finished:
    """The end of the attempt and the runs left for another; the other runs, and the attempt, have ended.

    Call it when no machine is live any more. sight: of them; while they are shutting down their runs end, and
    the attempt stays for whoever looks when they are terminated. why: for which the launcher itself ended it.
    go_on: whether there will be another attempt if AWS took a machine, or had none; else no run is left.
    Whoever comes second changes nothing. Raises CloudRefused's kinds if the bucket cannot be read now.
    """
    handle = attempt.handle
    assert handle is not None
    files: Collection[Path] | None
    try:
        synced = backend.sync(handle)
        files = frozenset(synced.files)
    except BadConfiguration:
        # The bucket is there no more: all that there will ever be is here.
        synced, files = s3_sync.kept(backend.home, attempt.token, attempt.num_nodes), None
    # Of nodes that are gone, whoever has not spoken never will.
    status = synced.status or merged(synced.statuses, attempt.num_nodes, partial=True)
    # Read again: someone may have asked it to stop since.
    attempt = ledger.attempt(attempt.id)
    has_begun = status is not None or bool(synced.num_booted or files)
    end = how_it_ended(attempt, sight, status, service=backend.service, why=why, has_begun=has_begun)
    go_on = go_on and (end.can_go_on or end.try_next)
    nodes = {node.get("run_id"): node for node in _listed(status)}
    open_runs = [ledger.get(run_id) for run_id in _undecided(ledger, attempt)]
    ends = [_run_end(run, attempt, nodes.get(run.id), end, backend.home, files) for run in open_runs]
    time = backend.billed(
        launched_at=datetime.fromisoformat(attempt.launched_at or handle["launched_at"]),
        max_minutes=attempt.max_minutes or 0,
        sight=sight,
        status=status,
    )
    left = []
    with ledger.transaction():
        for item in ends:
            if item.run.price and (price := managed_spot_price(item.run.price, sight)):
                ledger.set_price(item.run.id, price)
            if go_on and (end.try_next or item.outcome.state in _UNDONE):
                ledger.explain(item.run.id, f"{end.reason}; to be {_further(end)}")
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
    return Finished(left=tuple(left), end=end)


_UNDONE = (RunState.INTERRUPTED, RunState.LOST, RunState.CANCELLED)


def _further(end: End) -> str:
    return "tried elsewhere" if end.try_next else "resumed on another"


def how_it_ended(
    attempt: "Attempt",
    sight: Sight,
    status: Mapping[str, Any] | None,
    *,
    service: str,
    why: str | None = None,
    has_begun: bool = True,
) -> End:
    """The attempt's end, by what the nodes said last, who asked them to stop, and why AWS says that they did.

    status: of all nodes together. service: see `CloudBackend`. has_begun: whether a node said anything.
    """
    outcome, reason = (str((status or {}).get(name) or "") for name in ("outcome", "reason"))
    stopped = attempt.reason if (attempt.reason or "").startswith(STOPPED_BY) else None
    if outcome == "completed":
        return End(state=RunState.COMPLETED)
    if stopped:
        return End(state=RunState.INTERRUPTED, reason=stopped)
    if reason == "spot" or sight.is_taken:
        which = "the spot instance" if attempt.num_nodes == 1 else "a spot instance"
        return End(state=RunState.INTERRUPTED, reason=f"{service} took {which} back", can_go_on=True)
    if not has_begun and _is_without_capacity(sight):
        assert sight.problem is not None
        return End(state=RunState.FAILED, reason=sight.problem.message, try_next=True)
    if ended_by_aws := _ended_by_service(attempt, sight, service):
        return ended_by_aws
    if outcome == "interrupted":
        told = {
            "watchdog": f"its {attempt.max_minutes} minutes were up",
            "stop": "it was asked to stop" + (" through its bucket" if service == "EC2" else ""),
            "block": "the capacity block is about to end",
            "peer": "another of its nodes ended first",
        }.get(reason)
        return End(state=RunState.INTERRUPTED, reason=told or f"the node was stopped: {reason}")
    if outcome == "configuration" and reason == "fabric":
        return End(state=RunState.FAILED, reason=in_words(reason))
    # What AWS says of a node that said nothing is more than what the others noticed.
    if outcome and not ((status or {}).get("missing") and sight.problem):
        told = in_words(reason) if outcome == "configuration" else reason
        return End(state=RunState.FAILED, reason=told or f"the node ended: {outcome}")
    if why:
        return End(state=RunState.FAILED, reason=why)
    if sight.problem is not None:
        return End(state=RunState.FAILED, reason=sight.problem.message)
    return End(
        state=RunState.LOST,
        reason=f"its {_MACHINE.get(service, 'machine')} ended without saying why"
        + (f" ({sight.told})" if sight.told else ""),
    )


def _is_without_capacity(sight: Sight) -> bool:
    """Whether AWS never had the machines, so that others may be had elsewhere."""
    code = (sight.problem.code or "") if sight.problem else ""
    return isinstance(sight.problem, NoCapacity) and code.endswith(_NEVER_HAD)


def _ended_by_service(attempt: "Attempt", sight: Sight, service: str) -> End | None:
    """The end that SageMaker itself made to a job that had begun; None where it made none, and on EC2."""
    told = (sight.told or "").partition(":")[0]
    if told == "MaxRuntimeExceeded":
        return End(state=RunState.INTERRUPTED, reason=f"its {attempt.max_minutes} minutes were up")
    if told == "MaxWaitTimeExceeded":
        reason = f"{service} took the spot instances back, and had no others in time"
        return End(state=RunState.INTERRUPTED, reason=reason, can_go_on=True)
    if told == "Stopped":
        return End(state=RunState.INTERRUPTED, reason=f"someone stopped it at {service}")
    return None


def settle_run(ledger: "Ledger", run_id: str, why: str, *, stopped: bool = False) -> None:
    """End a run that no attempt holds: never started, refused, or interrupted and not gone on with."""
    run = ledger.get(run_id)
    if run.state.is_final:
        return
    attempts = ledger.attempts_of(run_id)
    # One that never got its machines did nothing, and is as one that was refused.
    if any(attempt.handle and attempt.lived_s != 0 for attempt in attempts):
        ledger.set_state(run_id, RunState.INTERRUPTED, why)
    elif stopped or not attempts:
        ledger.set_state(run_id, RunState.CANCELLED, why)
    else:
        ledger.set_state(run_id, RunState.FAILED, why)


def _run_end(
    run: "Run",
    attempt: "Attempt",
    node: Mapping[str, Any] | None,
    end: End,
    home: Path,
    files: Collection[Path] | None,
) -> _RunEnd:
    """What became of one run, with what it measured over all its attempts.

    files: what lies under the attempt's output. A record's number alone says whose it is only where nothing
    else is left: AWS may have started the attempt's training several times, each of which has a number.
    """
    # Imported late: it brings numpy.
    from fastlaunch.measure.summarize import summarize

    records, unreadable = read_records(s3_sync.record_paths(home, run.id))
    if files is None:
        own = [record for record in records if record.header["attempt"] >= attempt.n]
    else:
        own = [record for record in records if record.path in files]
    outcome = outcome_of(own)
    if outcome.state in (RunState.LOST, RunState.INTERRUPTED):
        folder = s3_sync.run_folder(home, run.id)
        has_begun = bool(records) or (folder / "log.txt").exists()
        words = None if own else last_words(folder)
        outcome = _by_the_node(outcome, node, end, has_begun=has_begun, words=words, records=own)
    if (node or {}).get("exit_code") == CONFIGURATION_EXIT and end.state is RunState.FAILED:
        outcome = Outcome(state=RunState.FAILED, reason=end.reason)
    if unreadable and outcome.state is not RunState.COMPLETED:
        outcome = replace(
            outcome, reason="; ".join([*([outcome.reason] if outcome.reason else []), *unreadable])
        )
    summary = with_start(summarize(records), [attempt], home) if records else None
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
