"""Follows an attempt on AWS until its machine has ended, brings home what it uploads, and ends what hangs."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fastlaunch import s3_sync
from fastlaunch.attempt_price import note_machines
from fastlaunch.backends import RunState
from fastlaunch.backends.ec2 import LOOK_INTERVAL_S, Ec2Backend, Sight
from fastlaunch.cloud_display import AttemptDisplay
from fastlaunch.cloud_finish import STOPPED_BY, finish_attempt
from fastlaunch.cost_ceiling import MARGIN_MINUTES
from fastlaunch.errors import CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.stop_request import StopRequest

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger

#: A machine that runs boots within two or three minutes.
BOOT_LIMIT = timedelta(minutes=12)
SYNC_INTERVAL = timedelta(seconds=20)
#: After the node's last word: shutting down takes a minute, and a spot interruption two.
LINGER_LIMIT = timedelta(minutes=4)
#: Large machines take many minutes to be terminated, for which nothing is billed.
SHUTDOWN_WAIT = timedelta(minutes=1)
#: After its time, how long a machine that cannot be seen is waited for; after its end, what it uploaded.
_LOST_CONTACT = timedelta(minutes=30)
#: Between two looks at whether the user wants to stop.
_PAUSE_S = 1.0


@dataclass(kw_only=True)
class Follower:
    """Follows `attempt`, which has a handle. tell: a line for the user."""

    attempt: "Attempt"
    backend: Ec2Backend
    ledger: "Ledger"
    shown: AttemptDisplay
    stop: StopRequest
    tell: Callable[[str], None]
    _why: str | None = None
    _told: set[str] = field(default_factory=set)
    _is_stopping: bool = False
    _unseen_since: datetime | None = None
    _runs_since: datetime | None = None
    _done_since: datetime | None = None
    _down_since: datetime | None = None
    _synced_at: datetime | None = None
    _synced: s3_sync.Synced = field(
        default_factory=lambda: s3_sync.Synced(boot=None, status=None, is_complete=False)
    )

    def follow(self) -> tuple[str, ...]:
        """Ids of the runs that are left for another attempt, after the attempt ended; see `finish_attempt`.

        The first signal stops the machine, and lets it write its end. A second one, or a bug here, ends it at
        once. Raises CloudRefused's kinds, or UserError, where AWS or the disk does not let it be followed;
        the machine then goes on.
        """
        try:
            self.shown.start()
            sight = self._until_ended()
        except UserError as error:
            if self.stop.by and not isinstance(error, CloudRefused):
                self._kill()
                raise
            raise self._unfollowed(error) from None
        except BaseException:
            self._kill()
            raise
        left = self._finish(sight)
        run_id = self.shown.current.id
        if run_id in left:
            self.shown.finish(str(RunState.INTERRUPTED))
        elif self.ledger.existing([run_id]):
            self.shown.finish(str(self.ledger.get(run_id).state))
        return left

    def _finish(self, sight: Sight) -> tuple[str, ...]:
        """What `finish_attempt` returns, with patience for a network that fails for a while."""
        deadline = self.backend.now() + _LOST_CONTACT
        while True:
            try:
                return finish_attempt(
                    self.attempt,
                    sight,
                    backend=self.backend,
                    ledger=self.ledger,
                    why=self._why,
                    go_on=not self.stop.by,
                )
            except CloudRefused as error:
                passes = isinstance(error, Throttled | Unreachable) and self.backend.now() < deadline
                if not passes or self.stop.by:
                    told = f"{self._machine} has ended; what it uploaded cannot be read now: {error.message}"
                    raise type(error)(told, "to look again: fastlaunch status") from None
                self._tell_once(error.message)
            self._pause()

    def _until_ended(self) -> Sight:
        last = Sight(instance=None, has_ended=False)
        while True:
            if self.stop.by and not self._is_stopping:
                self._stop()
            # What cannot be seen for a moment is as it was.
            last = self._see() or last
            if last.has_ended:
                return last
            seen = [(self.ledger.attempt(self.attempt.id), last.instance)]
            note_machines(self.ledger, self.backend.aws, seen, self.backend.now().date())
            self._sync()
            self.shown.update(last.instance)
            if self._is_down(last):
                return last
            self._end_what_hangs(last)
            self._pause()

    def _is_down(self, sight: Sight) -> bool:
        """Whether the machine has been shutting down for a while: it costs nothing, and uploads no more."""
        if sight.instance is None or sight.instance.is_live:
            return False
        self._down_since = self._down_since or self.backend.now()
        return self.backend.now() - self._down_since > SHUTDOWN_WAIT

    def _see(self) -> Sight | None:
        assert self.attempt.handle is not None
        try:
            sight = self.backend.see([self.attempt.handle])[0]
        except (Throttled, Unreachable) as error:
            now = self.backend.now()
            # A laptop that slept for hours finds its network a while after its clock.
            self._unseen_since = self._unseen_since or now
            if now > max(self._ends_at(), self._unseen_since) + _LOST_CONTACT:
                raise
            self._tell_once(error.message)
            return None
        self._unseen_since = None
        return sight

    def _sync(self) -> None:
        """Bring what is new. What keeps that from being done, such as a full disk, ends no machine."""
        now = self.backend.now()
        # A clock that was set back would have it wait for long.
        if self._synced_at is not None and timedelta() <= now - self._synced_at < SYNC_INTERVAL:
            return
        assert self.attempt.handle is not None
        try:
            self._synced = self.backend.sync(self.attempt.handle)
            self._synced_at = now
            if self._unseen_since is None:
                self._told.clear()
        except UserError as error:
            self._tell_once(error.message)

    def _end_what_hangs(self, sight: Sight) -> None:
        """Terminate a machine that never boots, has had its time, or lingers after its last word."""
        instance, now = sight.instance, self.backend.now()
        if instance is None or not instance.is_live or self._why is not None:
            return
        if instance.state == "running" and self._runs_since is None:
            self._runs_since = now
        if self._synced.status is not None and self._done_since is None:
            self._done_since = now
        booted = self._synced.boot is not None or self._synced.status is not None
        # Only what the bucket said lately counts: it may be the bucket that cannot be reached.
        is_fresh = self._synced_at is not None and now - self._synced_at <= 2 * SYNC_INTERVAL
        if self._runs_since and now - self._runs_since > BOOT_LIMIT and not booted and is_fresh:
            minutes = BOOT_LIMIT.total_seconds() / 60
            self._terminate(f"its node did not boot within {minutes:.0f} minutes{self._console()}")
        elif now > self._ends_at():
            self._terminate(f"it had not ended {MARGIN_MINUTES} minutes after its time")
        elif self._done_since and now - self._done_since > LINGER_LIMIT:
            # Its runs are told by its last word; only the machine hangs.
            self._terminate("its machine did not turn itself off")

    def _terminate(self, why: str) -> None:
        assert self.attempt.handle is not None
        self.tell(f"{self._machine}: {why}; terminating it")
        # Set first: what cannot be terminated now is tried again by nobody else, but told.
        self._why = why
        self.backend.kill(self.attempt.handle)

    def _console(self) -> str:
        assert self.attempt.handle is not None
        try:
            return f"; what it printed is in {self.backend.console(self.attempt.handle)}"
        except CloudRefused as error:
            return f"; its console cannot be read: {error.message}"

    def _stop(self) -> None:
        assert self.attempt.handle is not None
        self._is_stopping = True
        self._note_stop()
        self.tell(
            f"stopping {self._machine}: it saves what it can; once more ends it at once, saving nothing"
        )
        self.backend.stop(self.attempt.handle)

    def _note_stop(self) -> None:
        # A disk that is full does not keep the machine alive.
        with suppress(UserError):
            self.ledger.explain_attempt(self.attempt.id, f"{STOPPED_BY}{self.stop.by}")

    def _kill(self) -> None:
        """End the machine at once; where that fails, say what may be running."""
        assert self.attempt.handle is not None
        if self.stop.by:
            self._note_stop()
        try:
            self.backend.kill(self.attempt.handle)
            self.tell(f"{self._machine} is terminated")
        except BaseException as error:
            self.tell(f"{self._machine} may still be running ({error}); {self._how_to_stop()}")
            if not isinstance(error, CloudRefused):
                raise
            return
        with suppress(UserError):
            sight = self.backend.see([self.attempt.handle])[0]
            # One that is only shutting down yet is ended in the ledger by whoever looks next.
            if sight.has_ended:
                finish_attempt(self.attempt, sight, backend=self.backend, ledger=self.ledger)

    def _unfollowed(self, error: UserError) -> UserError:
        told = f"{error.hint}; " if error.hint else ""
        kind = type(error) if isinstance(error, CloudRefused) else UserError
        return kind(
            f"{self._machine} cannot be followed any more, and goes on: {error.message}",
            f"{told}{self._how_to_stop()}",
        )

    def _how_to_stop(self) -> str:
        """What protects the user's money without this launcher, and how to stop the machine."""
        return (
            f"it turns itself off within {self.attempt.max_minutes} min; to stop it: "
            f"fastlaunch cancel {self.attempt.run_ids[0]}   (or: fastlaunch reap "
            f"--region {self.attempt.region})"
        )

    @property
    def _machine(self) -> str:
        assert self.attempt.handle is not None
        return f"instance {self.attempt.handle['instance_id']} in {self.attempt.region}"

    def _ends_at(self) -> datetime:
        assert self.attempt.handle is not None
        started = datetime.fromisoformat(self.attempt.handle["launched_at"])
        return started + timedelta(minutes=(self.attempt.max_minutes or 0) + MARGIN_MINUTES)

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.tell(f"{message}; trying again")

    def _pause(self) -> None:
        # Counted, not timed: a clock that is set back would make it last.
        for _ in range(round(LOOK_INTERVAL_S / _PAUSE_S)):
            if self.stop.by and not self._is_stopping:
                return
            self.backend.sleep(_PAUSE_S)
