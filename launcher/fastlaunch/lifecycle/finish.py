"""How an attempt on AWS and its runs ended, judged by the records, then the nodes, then AWS."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.node_report import in_words, merged
from fastlaunch.backends.protocol import AttemptStatus, CloudBackend
from fastlaunch.core.errors import BadConfiguration
from fastlaunch.core.log_file import LOG, last_words
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.core.terminal import printable
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.collect import run_entries, summarize_run, with_start
from fastlaunch.lifecycle.sight import managed_spot_price
from fastlaunch.measure.outcome import Outcome, outcome_of, read_records
from fastlaunch_train.node.protocol import BLOCK, HARDWARE, IDLE, IDLE_CODE, PEER, SPOT, STOP, WATCHDOG

if TYPE_CHECKING:
    from fastlaunch.measure.summary import RunSummary

#: Exit code of a training that needs what the machines lack, such as EFA.
CONFIGURATION_EXIT = 78


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """How an attempt ended, and what is left of it."""

    state: RunState
    ending: Ending | None = None
    reason: str | None = None
    #: Ids of the runs that another attempt may go on with.
    left: tuple[str, ...] = ()

    @property
    def can_go_on(self) -> bool:
        """Whether another machine may continue the attempt's runs."""
        return self.ending is not None and self.ending.can_go_on

    @property
    def try_next(self) -> bool:
        """Whether nothing began because of missing capacity, so that another site may be tried."""
        return self.ending is Ending.NO_CAPACITY

    def outcome(self, state: RunState) -> Outcome:
        """Return the outcome of a run that ended for the same reason as the attempt."""
        return Outcome(state=state, ending=self.ending, reason=self.reason)


def finish_attempt(
    attempt: Attempt,
    aws_status: AttemptStatus,
    *,
    backend: CloudBackend,
    ledger: Ledger,
    why: str | None = None,
    go_on: bool = False,
) -> AttemptResult:
    """End the attempt and its runs in the ledger, except the runs that another attempt may continue.

    Call it once no machine is live. While machines shut down, their runs end, and the attempt stays open
    until they are terminated. A second call changes nothing. why: the launcher's reason, if it ended the
    attempt. go_on: whether another attempt follows if AWS took a machine or had no capacity; otherwise all
    runs end. Raises subclasses of CloudRefused if the bucket cannot be read now.
    """
    handle = attempt.handle
    assert handle is not None
    files: Collection[Path] | None
    try:
        synced = backend.sync(handle)
        files = frozenset(synced.files)
    except BadConfiguration:
        # The bucket is gone, so no more files will come.
        synced, files = s3_sync.kept(backend.home, attempt.token, attempt.num_nodes), None
    # The machines are gone, so a missing final report will not come.
    status = synced.status or merged(synced.statuses, attempt.num_nodes, partial=True)
    # Read again: someone may have asked it to stop since.
    attempt = ledger.attempt(attempt.id)
    has_begun = status is not None or bool(synced.num_booted or files)
    result = how_it_ended(attempt, aws_status, status, service=backend.service, why=why, has_begun=has_begun)
    goes_on = go_on and (result.can_go_on or result.try_next)
    nodes = {entry["run_id"]: entry for entry in run_entries(status)}
    results = [
        (run, *_run_result(run, attempt, nodes.get(run.id, {}), result, backend.home, files))
        for run in _undecided(ledger, attempt)
    ]
    launched_at = datetime.fromisoformat(attempt.launched_at or handle["launched_at"])
    # A queue may start a job several times, each time for its whole time limit.
    max_minutes = (attempt.max_minutes or 0) * handle.get("num_starts", 1)
    billed = backend.billed(
        launched_at=launched_at, max_minutes=max_minutes, aws_status=aws_status, status=status
    )
    if billed.billing == "limit":
        # The time of the end is unknown, except that it is in the past.
        at_most_s = min(billed.lived_s, max(0.0, (backend.now() - launched_at).total_seconds()))
        billed = replace(billed, lived_s=at_most_s, billed_s=at_most_s)
    left = []
    with ledger.transaction():
        # Another command may have ended the attempt since and resumed its runs, or asked it to stop.
        now = ledger.attempt(attempt.id)
        is_outdated = now.ended_at is None and now.ending != attempt.ending
        is_open = now.ended_at is None and not is_outdated
        undecided = {run.id for run in _undecided(ledger, attempt)} if is_open else set()
        for run, outcome, summary in results:
            if run.id not in undecided:
                continue
            if run.price and (price := managed_spot_price(run.price, aws_status)):
                ledger.set_price(run.id, price)
            if goes_on and (result.try_next or outcome.state in _UNDONE):
                further = "tried elsewhere" if result.try_next else "resumed on another"
                ledger.explain(run.id, f"{result.reason}; to be {further}")
                left.append(run.id)
            elif ledger.set_state(run.id, outcome.state, outcome.reason, ending=outcome.ending) and summary:
                ledger.set_summary(run.id, summary)
        if aws_status.has_ended and not is_outdated:
            ledger.end_attempt(
                attempt.id,
                result.state,
                ending=result.ending,
                reason=result.reason,
                billed_seconds=billed.billed_s,
                billing=billed.billing,
                lived_s=billed.lived_s,
            )
    if is_outdated:
        return finish_attempt(attempt, aws_status, backend=backend, ledger=ledger, why=why, go_on=go_on)
    return replace(result, left=tuple(left))


_UNDONE = (RunState.INTERRUPTED, RunState.LOST, RunState.CANCELLED)


def how_it_ended(
    attempt: Attempt,
    aws_status: AttemptStatus,
    status: Mapping[str, Any] | None,
    *,
    service: str,
    why: str | None = None,
    has_begun: bool = True,
) -> AttemptResult:
    """Return how the attempt ended, from the nodes' final report, any request to stop, and AWS's status.

    status: the merged final report of the nodes. has_begun: whether any node reported. why: see
    `finish_attempt`.
    """
    outcome, reason = (printable(str((status or {}).get(name) or "")) for name in ("outcome", "reason"))
    if outcome == "completed":
        return AttemptResult(state=RunState.COMPLETED)
    if attempt.ending is not None:
        return AttemptResult(state=RunState.INTERRUPTED, ending=attempt.ending, reason=attempt.reason)
    if reason == SPOT or aws_status.ending is Ending.RECLAIMED:
        which = "the spot instance" if attempt.num_nodes == 1 else "a spot instance"
        return _interrupted(f"{service} took {which} back", Ending.RECLAIMED)
    if not has_begun and aws_status.ending is Ending.NO_CAPACITY:
        assert aws_status.problem is not None
        return AttemptResult(
            state=RunState.FAILED, ending=Ending.NO_CAPACITY, reason=aws_status.problem.message
        )
    if outcome == HARDWARE:
        which = (
            "its machine" if attempt.num_nodes == 1 else f"the machine of node {(status or {}).get('node')}"
        )
        return _interrupted(f"{which} is faulty: {in_words(reason)}", Ending.FAULTY_GPU)
    time_is_up = _interrupted(f"its {attempt.max_minutes} minutes were up", Ending.TIME_LIMIT)
    if aws_status.ending is Ending.TIME_LIMIT:
        return time_is_up
    if aws_status.ending is Ending.NO_CAPACITY and aws_status.is_spot:
        reason = f"{service} took the spot instances back, and had no others in time"
        return _interrupted(reason, Ending.RECLAIMED)
    if aws_status.ending is Ending.STOPPED:
        return _interrupted(f"someone stopped it at {service}", Ending.STOPPED)
    silent = (status or {}).get("missing") or ()
    if service == "EC2" and (status or {}).get("node") in silent:
        why = f" ({aws_status.problem.message})" if aws_status.problem else ""
        return _interrupted(f"{reason}{why}", Ending.NODE_LOST)
    if outcome == "interrupted" and reason == WATCHDOG:
        return time_is_up
    if outcome == "interrupted":
        reasons = {
            STOP: "it was asked to stop" + (" through its bucket" if service == "EC2" else ""),
            BLOCK: "the capacity block is about to end",
            PEER: "another of its nodes ended first",
        }
        return _interrupted(reasons.get(reason, f"the node was stopped: {reason}"))
    if outcome == "configuration" and reason == "fabric":
        return AttemptResult(state=RunState.FAILED, reason=in_words(reason))
    # AWS's status of a silent node tells more than what the other nodes noticed.
    if outcome and not ((status or {}).get("missing") and aws_status.problem):
        explanation = in_words(reason) if outcome == "configuration" else reason
        return AttemptResult(state=RunState.FAILED, reason=explanation or f"the node ended: {outcome}")
    if why:
        return AttemptResult(state=RunState.FAILED, reason=why)
    if aws_status.problem is not None:
        return AttemptResult(state=RunState.FAILED, reason=aws_status.problem.message)
    return AttemptResult(
        state=RunState.LOST,
        reason=f"its {'training job' if service == 'SageMaker' else 'machine'} ended without saying why"
        + (f" ({aws_status.detail})" if aws_status.detail else ""),
    )


def _interrupted(reason: str, ending: Ending | None = None) -> AttemptResult:
    return AttemptResult(state=RunState.INTERRUPTED, ending=ending, reason=reason)


def settle_run(ledger: Ledger, run_id: str, why: str, ending: Ending | None = None) -> None:
    """End a run without an attempt: it never started, was refused, or was interrupted for good."""
    run = ledger.get(run_id)
    if run.state.is_final:
        return
    attempts = ledger.attempts_of(run_id)
    # An attempt that never got its machines did nothing and counts as refused.
    if any(attempt.handle and attempt.billing.lived_s != 0 for attempt in attempts):
        state = RunState.INTERRUPTED
    elif not attempts or ending in (Ending.STOPPED, Ending.CANCELLED):
        state = RunState.CANCELLED
    else:
        state = RunState.FAILED
    ledger.set_state(run_id, state, why, ending=ending)


def held_runs(ledger: Ledger, backends: Collection[str], *, without: Collection[int] = ()) -> set[str]:
    """Return the ids of the runs in unfinished attempts. without: ids of attempts to treat as finished."""
    unfinished = [attempt for name in backends for attempt in ledger.unfinished_attempts(name)]
    return {run_id for attempt in unfinished if attempt.id not in without for run_id in attempt.run_ids}


def _run_result(
    run: Run,
    attempt: Attempt,
    node: Mapping[str, Any],
    result: AttemptResult,
    home: Path,
    files: Collection[Path] | None,
) -> "tuple[Outcome, RunSummary | None]":
    """Return the outcome of one run, with the summary over all its attempts.

    node: the nodes' final entry for the run. files: the files under the attempt's output; None if the bucket
    is gone. Only then is a record assigned by its attempt number, because AWS may start an attempt's training
    several times, and each start has a number.
    """
    records, unreadable = read_records(s3_sync.record_paths(home, run.id))
    if files is None:
        attempt_records = [record for record in records if record.header["attempt"] >= attempt.n]
    else:
        attempt_records = [record for record in records if record.path in files]
    outcome = outcome_of(attempt_records)
    if outcome.state in (RunState.LOST, RunState.INTERRUPTED):
        folder = s3_sync.run_folder(home, run.id)
        has_begun = bool(records) or (folder / LOG).exists()
        words = None if attempt_records else last_words(folder)
        outcome = _outcome_by_node(
            outcome, node, result, has_begun=has_begun, words=words, records=attempt_records
        )
    if result.ending and result.ending.is_replaced and node.get("state") == "interrupted":
        # The run's own error only describes a consequence of the fault, or of a lost peer.
        outcome = result.outcome(RunState.INTERRUPTED)
    if node.get("exit_code") == IDLE_CODE and outcome.state is not RunState.COMPLETED:
        # Its records say that it was asked to end.
        outcome = Outcome(state=RunState.FAILED, reason=IDLE)
    if node.get("exit_code") == CONFIGURATION_EXIT and result.state is RunState.FAILED:
        outcome = result.outcome(RunState.FAILED)
    if unreadable and outcome.state is not RunState.COMPLETED:
        outcome = replace(
            outcome,
            reason="; ".join(filter(None, [outcome.reason, *(error.message for error in unreadable)])),
        )
    summary, contradiction = summarize_run(run.spec, records)
    # The reason of a failure tells more.
    if contradiction and outcome.state is not RunState.FAILED:
        outcome = Outcome(state=RunState.FAILED, reason=contradiction)
    return outcome, summary and with_start(summary, [attempt], home)


def _outcome_by_node(
    by_records: Outcome,
    node: Mapping[str, Any],
    result: AttemptResult,
    *,
    has_begun: bool,
    words: str | None,
    records: Sequence[Any],
) -> Outcome:
    """Return the outcome of a run whose records show neither a failure nor a last step.

    has_begun: it left files here, now or in an earlier attempt. words: the last line that it printed.
    """
    state, exit_code = node.get("state"), node.get("exit_code")
    if state == "failed" and exit_code:
        # Check this first: the machine ended later, while another run was on it.
        outcome = outcome_of(records, exit_code=exit_code)
        return replace(outcome, reason=f"{outcome.reason}: {words}") if words else outcome
    if result.state is RunState.INTERRUPTED:
        if not has_begun and not result.can_go_on:
            return replace(result.outcome(RunState.CANCELLED), reason=f"{result.reason} before it started")
        return result.outcome(RunState.INTERRUPTED)
    if state == "not-started" and result.state is not RunState.FAILED:
        return Outcome(state=RunState.CANCELLED, reason=result.reason or "the node did not start it")
    if by_records.state is RunState.INTERRUPTED:
        return by_records
    if result.state is RunState.FAILED:
        # The node failed, or the launcher ended it, before this run could report.
        return result.outcome(RunState.FAILED)
    reason = by_records.reason if result.state is RunState.COMPLETED or records else result.reason
    return Outcome(state=RunState.LOST, reason=reason)


def _undecided(ledger: Ledger, attempt: Attempt) -> list[Run]:
    """Return, in order, the attempt's unfinished runs that no later attempt took over."""
    known = ledger.existing(attempt.run_ids)
    runs = [ledger.get(run_id) for run_id in attempt.run_ids if run_id in known]
    return [run for run in runs if not run.state.is_final and ledger.attempts_of(run.id)[-1].id == attempt.id]
