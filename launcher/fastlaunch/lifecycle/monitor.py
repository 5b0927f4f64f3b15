"""Follows an attempt on AWS until it has ended: downloads and shows its progress, ends machines that hang."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import AttemptStatus, CloudBackend
from fastlaunch.core.errors import CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.ledger.ledger import Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.collect import doing
from fastlaunch.lifecycle.describe import how_to_stop, machine_of, machines_of, once_more
from fastlaunch.lifecycle.display import Progress, RecordTail
from fastlaunch.lifecycle.finish import AttemptResult, finish_attempt
from fastlaunch.lifecycle.rounds import PlannedLooks
from fastlaunch.lifecycle.schedules import disarm
from fastlaunch.lifecycle.sight import look
from fastlaunch.lifecycle.world import PROGRESS, LaunchContext
from fastlaunch.measure.outcome import outcome_of, read_records

LOOK_INTERVAL_S = 10.0
SYNC_INTERVAL = timedelta(seconds=20)
#: Time to shut down after the node's last word: usually a minute, after a spot interruption two.
LINGER_LIMIT = timedelta(minutes=4)
#: Time after one of several machines ended before they began: the others wait for it in vain.
_LOST_LIMIT = timedelta(minutes=2)
#: Time after one of several machines ended later: by then the others have sent all that they had, and ended.
_STRAGGLER_LIMIT = timedelta(minutes=35)
#: Large machines take many minutes to terminate, unbilled.
SHUTDOWN_WAIT = timedelta(minutes=1)
#: How long to wait for a machine out of sight after its time, and for its uploads after its end.
_LOST_CONTACT = timedelta(minutes=30)
#: Between two looks at `stop`.
_PAUSE_S = 1.0


@dataclass(kw_only=True)
class AttemptDisplay:
    """Shows the runs of an attempt, one after another."""

    launch: LaunchContext
    attempt: Attempt
    #: By id, how the runs of the submission are shown, in the order in which machines do them.
    labels: Mapping[str, str]
    #: The run that is shown.
    current: Run = field(init=False)
    _runs: Sequence[Run] = ()
    _tail: RecordTail = field(init=False)

    def start(self) -> None:
        """Show the first run."""
        ids = [run_id for run_id in self.labels if run_id in self.attempt.run_ids]
        self._runs = [self.launch.ledger.get(run_id) for run_id in ids]
        self._show_start(self._runs[0])

    def update(self, aws_status: AttemptStatus, files: Collection[Path]) -> None:
        """Show what is known now, from AWS and from the files that the attempt uploaded."""
        for run in self._runs[self._runs.index(self.current) + 1 :]:
            if self._has_begun(run, files):
                records, _ = read_records(self._records(self.current, files))
                # The node's last word on the run comes later.
                state = str(outcome_of(records).state) if records else "ended without a record"
                self.launch.display.finish(state)
                self._show_start(run)
        # Records of earlier attempts are not this one's progress.
        progress = self._tail.read() if self._has_begun(self.current, files) else None
        if progress is None:
            num_steps, stage = self.current.job.steps or 0, self._stage(aws_status)
            progress = Progress(step=0, num_steps=num_steps, phase=stage)
        self.launch.display.show(progress)

    def _records(self, run: Run, files: Collection[Path]) -> list[Path]:
        return [path for path in s3_sync.record_paths(self.launch.home, run.id) if path in files]

    def _has_begun(self, run: Run, files: Collection[Path]) -> bool:
        return any(path.name.startswith("rank-00000-") for path in self._records(run, files))

    def _show_start(self, run: Run) -> None:
        self.current, self._tail = run, RecordTail(s3_sync.run_folder(self.launch.home, run.id))
        self.launch.display.start(self.labels[run.id], run.job.steps)

    def _stage(self, aws_status: AttemptStatus) -> str:
        if not aws_status.is_seen or (aws_status.is_live and not aws_status.is_up):
            place = f"{machines_of(self.attempt)} in {self.attempt.zone or self.attempt.region}"
            return f"{place}: {aws_status.detail or 'pending'}"
        machine = machine_of(self.attempt, self.launch.cloud_backends[self.attempt.backend])
        if not aws_status.is_live:
            return f"{machine}: {aws_status.detail or 'shutting down'}"
        return f"{machine}: {doing(self.current, [self.attempt], self.launch.home, None)}"


@dataclass(kw_only=True)
class AttemptMonitor:
    """Follows `attempt`, which has a handle."""

    launch: LaunchContext
    attempt: Attempt
    shown: AttemptDisplay
    #: Ends rows that are settled; None if all runs are to be done.
    looks: PlannedLooks | None = None
    #: Why this monitor ended the machines, if it did.
    _why: str | None = None
    _warnings: set[str] = field(default_factory=set)
    _is_stopping: bool = False
    _unseen_since: datetime | None = None
    _runs_since: datetime | None = None
    _done_since: datetime | None = None
    _down_since: datetime | None = None
    _lost_since: datetime | None = None
    _synced_at: datetime | None = None
    _synced: s3_sync.SyncResult = field(
        default_factory=lambda: s3_sync.SyncResult(boot=None, status=None, is_complete=False)
    )

    @cached_property
    def backend(self) -> CloudBackend:
        return self.launch.cloud_backends[self.attempt.backend]

    def follow(self) -> AttemptResult:
        """Return how the attempt ended, with the runs that are left for another one; see `finish_attempt`.

        The first signal stops the machine and lets it write its end. A second one, or a bug here, ends it at
        once. Raises CloudRefused's kinds, or UserError, if AWS or the disk does not let it be followed; the
        machine then goes on.
        """
        try:
            with self.launch.advice.guard(PROGRESS):
                self.shown.start()
            aws_status = self._until_ended()
        except UserError as error:
            if self.launch.stop.by and not isinstance(error, CloudRefused):
                self._kill()
                raise
            raise self._unfollowed(error) from None
        except BaseException:
            self._kill()
            raise
        result = self._finish(aws_status)
        if self.launch.ledger.attempt(self.attempt.id).ended_at is not None:
            disarm(self.launch.ledger, self.backend.aws, self.attempt)
        with self.launch.advice.guard(PROGRESS):
            run_id = self.shown.current.id
            if run_id in result.left:
                self.launch.display.finish("no capacity" if result.try_next else str(RunState.INTERRUPTED))
            elif self.launch.ledger.existing([run_id]):
                self.launch.display.finish(str(self.launch.ledger.get(run_id).state))
        return result

    def _finish(self, aws_status: AttemptStatus) -> AttemptResult:
        """Return what `finish_attempt` does, with patience for a network that fails for a while."""
        deadline = self.backend.now() + _LOST_CONTACT
        while True:
            try:
                return finish_attempt(
                    self.attempt,
                    aws_status,
                    backend=self.backend,
                    ledger=self.launch.ledger,
                    why=self._why,
                    go_on=not self.launch.stop.by,
                )
            except CloudRefused as error:
                may_pass = isinstance(error, Throttled | Unreachable) and self.backend.now() < deadline
                if not may_pass or self.launch.stop.by:
                    message = (
                        f"{self._machine} has ended; what it uploaded cannot be read now: {error.message}"
                    )
                    raise type(error)(message, "to look again: fastlaunch status") from None
                self._warn_once(error.message)
            self._pause()

    def _until_ended(self) -> AttemptStatus:
        last = AttemptStatus(has_ended=False, is_seen=False)
        while True:
            if self.launch.stop.by and not self._is_stopping:
                self._stop()
            # A machine out of sight for a moment is taken to be as before.
            last = self._see() or last
            if last.has_ended:
                return last
            self._sync()
            with self.launch.advice.guard(PROGRESS):
                self.shown.update(last, set(self._synced.files))
            if self._is_down(last):
                return last
            self._end_what_hangs(last)
            self._pause()

    def _is_down(self, aws_status: AttemptStatus) -> bool:
        """Return whether the machine has been shutting down for a while: its costs and uploads are over."""
        if not aws_status.is_seen or aws_status.is_live:
            return False
        self._down_since = self._down_since or self.backend.now()
        return self.backend.now() - self._down_since > SHUTDOWN_WAIT

    def _see(self) -> AttemptStatus | None:
        try:
            (aws_status,) = look(self.launch.ledger, self.backend, [self.attempt])
        except (Throttled, Unreachable) as error:
            now = self.backend.now()
            # A laptop that slept for hours finds its network a while after its clock.
            self._unseen_since = self._unseen_since or now
            if now > max(self._ends_at(), self._unseen_since) + _LOST_CONTACT:
                raise
            self._warn_once(error.message)
            return None
        self._unseen_since = None
        return aws_status

    def _sync(self) -> None:
        """Download what is new. An error here, such as a full disk, ends no machine."""
        now = self.backend.now()
        # A clock that was set back must not make it wait for long.
        if self._synced_at is not None and timedelta() <= now - self._synced_at < SYNC_INTERVAL:
            return
        try:
            before, self._synced = self._synced, self.backend.sync(self._handle)
            self._synced_at = now
            if self._synced.left_out and not before.left_out:
                self.launch.report(self._synced.left_out.message)
            self._skip_settled()
            if self._unseen_since is None:
                self._warnings.clear()
        except UserError as error:
            self._warn_once(error.message)

    def _skip_settled(self) -> None:
        """Have the machines leave out the runs of rows that are settled.

        A run that is under way is completed. SageMaker's containers take no such request: their job goes on
        until all rows are settled, and is stopped then.
        """
        unneeded = self.looks.unneeded() if self.looks and not self._is_stopping else {}
        if self.looks is None or not unneeded:
            return
        can_skip = self.backend.skip(self._handle, tuple(unneeded))
        if not can_skip and not self.looks.are_all_settled:
            return
        for run_id, why in unneeded.items():
            self.launch.ledger.set_state(run_id, RunState.CANCELLED, why, ending=Ending.NOT_NEEDED)
        if not can_skip:
            self.launch.ledger.note_stop(self.attempt.id, "fastlaunch: all rows are settled")
            self._is_stopping = True
            self.backend.stop(self._handle)

    def _end_what_hangs(self, aws_status: AttemptStatus) -> None:
        """End machines that never boot, have lost one of them, are over their time, or linger."""
        now, boot_limit = self.backend.now(), self.backend.boot_limit
        # Without a boot limit AWS itself ends what hangs, and keeps its time limit.
        if not aws_status.is_live or self._why is not None or boot_limit is None:
            return
        if aws_status.is_up and self._runs_since is None:
            self._runs_since = now
        if self._synced.status is not None and self._done_since is None:
            self._done_since = now
        has_booted = self._synced.num_booted >= self.attempt.num_nodes or self._synced.status is not None
        # Only what the bucket said lately counts: it may be the bucket that cannot be reached.
        is_fresh = self._synced_at is not None and now - self._synced_at <= 2 * SYNC_INTERVAL
        if self._runs_since and now - self._runs_since > boot_limit and not has_booted and is_fresh:
            self._terminate(self._why_not_booted(boot_limit))
        elif is_fresh and self._is_one_lost(aws_status):
            since = "before they began" if not self._has_begun() else "long before the others"
            why = f"{aws_status.num_ended} of its {self.attempt.num_nodes} nodes ended {since}"
            self._terminate(f"{why}: {aws_status.problem.message}" if aws_status.problem else why)
        elif now > self._ends_at():
            self._terminate(f"it had not ended {MARGIN_MINUTES} minutes after its time")
        elif self._done_since and now - self._done_since > LINGER_LIMIT:
            # The results are known by its last word; only the machine hangs.
            self._terminate("its machine did not turn itself off")

    def _is_one_lost(self, aws_status: AttemptStatus) -> bool:
        """Return whether a machine ended a while ago: without a last word, if no step was recorded before."""
        has_begun = self._has_begun()
        if aws_status.num_ended <= (0 if has_begun else len(self._synced.statuses)):
            self._lost_since = None
            return False
        self._lost_since = self._lost_since or self.backend.now()
        limit = _STRAGGLER_LIMIT if has_begun else _LOST_LIMIT
        return self.backend.now() - self._lost_since > limit

    def _has_begun(self) -> bool:
        return any(path.name.startswith("rank-") for path in self._synced.files)

    def _why_not_booted(self, limit: timedelta) -> str:
        within, num_nodes = f"within {limit.total_seconds() / 60:.0f} minutes", self.attempt.num_nodes
        why = f"only {self._synced.num_booted} of its {num_nodes} nodes booted {within}"
        if num_nodes == 1:
            why = f"its node did not boot {within}"
        try:
            return f"{why}; what it printed is in {self.backend.console_log(self._handle)}"
        except CloudRefused as error:
            return f"{why}; what it printed cannot be read: {error.message}"

    def _terminate(self, why: str) -> None:
        self.launch.report(f"{self._machine}: {why}; terminating it")
        # Set first: if terminating fails, nobody tries again, but the reason is known.
        self._why = why
        self.backend.kill(self._handle)

    def _stop(self) -> None:
        self._is_stopping = True
        self._note_stop()
        self.launch.report(f"stopping {self._machine}: it saves what it can; {once_more(self.backend)}")
        self.backend.stop(self._handle)

    def _note_stop(self) -> None:
        # A full disk must not keep the machine alive.
        with suppress(UserError):
            self.launch.ledger.note_stop(self.attempt.id, str(self.launch.stop.by))

    def _kill(self) -> None:
        """End the machine at once; if that fails, report what may be running."""
        if self.launch.stop.by:
            self._note_stop()
        try:
            self.backend.kill(self._handle)
            self.launch.report(f"{self._machine} was told to end")
        except BaseException as error:
            self.launch.report(
                f"{self._machine} may still be running ({error}); {how_to_stop(self.attempt, self.backend)}"
            )
            if not isinstance(error, CloudRefused):
                raise
            return
        with suppress(UserError):
            (aws_status,) = look(self.launch.ledger, self.backend, [self.attempt])
            # While it is still shutting down, whoever looks next ends it in the ledger.
            if aws_status.has_ended:
                finish_attempt(self.attempt, aws_status, backend=self.backend, ledger=self.launch.ledger)
                disarm(self.launch.ledger, self.backend.aws, self.attempt)

    def _unfollowed(self, error: UserError) -> UserError:
        hint = f"{error.hint}; " if error.hint else ""
        kind = type(error) if isinstance(error, CloudRefused) else UserError
        return kind(
            f"{self._machine} cannot be followed any more, and goes on: {error.message}",
            f"{hint}{how_to_stop(self.attempt, self.backend)}",
        )

    @property
    def _handle(self) -> Mapping[str, Any]:
        assert self.attempt.handle is not None
        return self.attempt.handle

    @property
    def _machine(self) -> str:
        return machine_of(self.attempt, self.backend)

    def _ends_at(self) -> datetime:
        started = datetime.fromisoformat(self._handle["launched_at"])
        return started + timedelta(minutes=(self.attempt.max_minutes or 0) + MARGIN_MINUTES)

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            self.launch.report(f"{message}; trying again")

    def _pause(self) -> None:
        # Counted, not timed: a clock that is set back must not make it last.
        for _ in range(round(LOOK_INTERVAL_S / _PAUSE_S)):
            if self.launch.stop.by and not self._is_stopping:
                return
            self.backend.sleep(_PAUSE_S)
