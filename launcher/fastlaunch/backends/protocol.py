"""What a backend does. Backends import neither each other nor the ledger."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from fastlaunch.aws.client import Aws
from fastlaunch.backends import s3_sync
from fastlaunch.backends.s3_sync import SyncResult
from fastlaunch.backends.site import Site
from fastlaunch.core.activity import note_wait
from fastlaunch.core.errors import CloudRefused, Throttled, Unreachable
from fastlaunch.core.plan import Ending, Plan, RunState
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import SERVICES

#: The backends whose plans cost money, by name.
CLOUD_BACKENDS = tuple(SERVICES)
#: How long AWS may take to show what it started.
FORGOTTEN_AFTER = timedelta(minutes=15)
#: How long to wait until an order to end shows, and between looks.
KILL_WAIT_S = 180.0
KILL_INTERVAL_S = 5.0


class Backend(Protocol):
    """Where plans run. A handle is JSON-able data that finds the job again from another process."""

    name: str

    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        """Return the plan that carries out `jobs`, by run id, one after another on one machine.

        Pure: no network, credentials, clock or randomness. attempt: which one of these runs it is, from 1.
        """

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Send the plan's request as it is; return the handle."""

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """Return the handle of the plan's job if there is one, though nobody noted that it was started."""

    def state(self, handle: Mapping[str, Any]) -> RunState:
        """Return what the backend says of the job now."""

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        """Return the job's record files of every rank."""

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Stop the job and let it write its end; a job that has ended is no error."""

    def kill(self, handle: Mapping[str, Any]) -> None:
        """End the job at once, whatever it loses."""


@dataclass(frozen=True, kw_only=True)
class AttemptStatus:
    """What AWS shows of an attempt's machines now."""

    #: AWS shows that all have ended. What it does not show may live: `lifecycle/sight.py` decides.
    has_ended: bool
    #: AWS shows at least one.
    is_seen: bool = True
    #: Machines or jobs that were started, and that AWS does not show.
    num_unseen: int = 0
    #: At least one costs, or soon will.
    is_live: bool = False
    #: All run, so their programs should have reported.
    is_up: bool = False
    #: Machines that AWS shows, and that have ended or are about to.
    num_ended: int = 0
    #: Bought as spot.
    is_spot: bool = False
    #: What ended them, by what AWS says.
    ending: Ending | None = None
    #: Without `ml.`
    instance_type: str | None = None
    #: The first machine's.
    zone: str | None = None
    #: When the first machine was started, with its time zone, and when the last one ended.
    launched_at: datetime | None = None
    ended_at: datetime | None = None
    #: Seconds of one machine, where AWS itself counts them: with the spot discount, and without it.
    billable_s: float | None = None
    training_s: float | None = None
    #: What AWS says went wrong.
    problem: CloudRefused | None = None
    #: For a job in a queue: ARNs of what the queue started for it, when the live one of them got machines,
    #: and the billed seconds of those that have ended.
    started_jobs: tuple[str, ...] = ()
    restarted_at: datetime | None = None
    earlier_s: float = 0.0
    #: AWS's own words for what the machines do, or why they ended.
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Billed:
    """How long one machine lived, and how much of that is billed."""

    lived_s: float
    billed_s: float
    #: How that is known: `times`, from AWS; `node`, from the node's last object; `limit`, not known, so that
    #: the limit counts; `free`, because EC2 took a spot instance back within its first hour.
    billing: str


@dataclass(kw_only=True)
class CloudBackend(ABC):
    """A backend whose plans cost money, and whose files are kept under `home`.

    An attempt is one request, which starts machines that do its runs together. All handles have `region`,
    `token`, `output` (URI of what the attempt uploads), `num_nodes` and `launched_at` (ISO 8601, the time of
    the request until AWS gives its own). Those that the ledger gives also have `run_ids`, the attempt's runs.
    """

    name: ClassVar[str]
    #: How long a machine may be up without a report; None if AWS itself watches that.
    boot_limit: ClassVar[timedelta | None]
    #: How long to wait for machines before their time limit begins.
    wait_limit: ClassVar[timedelta] = timedelta()
    #: The command that shows machines or jobs, whose names follow it.
    _look_command: ClassVar[str]

    aws: Aws
    home: Path
    #: Where its plans run, and how long they may take; see `at`.
    site: Site | None = None
    root: str | None = None
    max_minutes: int = 120
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    #: What `sync` brought, of all attempts.
    known_segments: s3_sync.KnownSegments = field(default_factory=dict, repr=False, compare=False)

    @property
    def service(self) -> str:
        """The service as the user knows it, such as `EC2`."""
        return SERVICES[self.name]

    def at(self, site: Site, max_minutes: int, *, root: str | None = None) -> Self:
        """Return this backend for plans at `site`. root: id of the run whose attempts wrote earlier."""
        assert site.backend == self.name
        return replace(self, site=site, max_minutes=max_minutes, root=root)

    @abstractmethod
    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        """See `Backend`."""

    @abstractmethod
    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Send the plan's request as it is; return the handle. Raises a kind of CloudRefused."""

    def skip(self, handle: Mapping[str, Any], run_ids: Sequence[str]) -> bool:
        """Tell the nodes to leave out runs that they have not begun; return whether they can.

        Raises a kind of CloudRefused.
        """
        return False

    @abstractmethod
    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """Return the handle of what the plan started; None if AWS shows nothing (yet)."""

    @abstractmethod
    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        """Return the handles of those plans whose machines AWS shows, by token, in few requests."""

    @abstractmethod
    def describe(self, handles: Sequence[Mapping[str, Any]]) -> list[AttemptStatus]:
        """Return what AWS shows of the attempts now, in few requests."""

    @abstractmethod
    def stop(self, handle: Mapping[str, Any]) -> None:
        """Ask the attempt to save and end, and bring what it saves meanwhile."""

    def kill(self, handle: Mapping[str, Any]) -> None:
        """End the attempt at once and wait until that shows. Raises a kind of CloudRefused if it does not."""
        deadline = self.now() + timedelta(seconds=KILL_WAIT_S)
        while True:
            try:
                # We repeat the order, as it may miss what AWS does not show yet.
                left = self._order_end(handle)
                if not left:
                    return
            except (Throttled, Unreachable):
                if self.now() >= deadline:
                    raise
            else:
                if self.now() >= deadline:
                    command = self._look_command_for(handle)
                    raise CloudRefused(
                        f"{', '.join(left)} in {handle['region']} was told to end, and is not seen to",
                        f"look: {command} {' '.join(left)}",
                    )
            self.pause(handle, KILL_INTERVAL_S, until=deadline)

    def _look_command_for(self, handle: Mapping[str, Any]) -> str:
        return self._look_command.format(region=handle["region"])

    def pause(self, handle: Mapping[str, Any], seconds: float, *, until: datetime) -> None:
        """Sleep between two looks, and say that we wait for the attempt's end. until: when we give up."""
        note_wait(
            f"waiting for {self.service} to show that {self.resource_name(handle)} has ended, until "
            f"{until.astimezone(UTC):%H:%M:%S} UTC at most"
        )
        self.sleep(seconds)

    @abstractmethod
    def _order_end(self, handle: Mapping[str, Any]) -> list[str]:
        """Order the end of all that the attempt has left; return the names of what does not seem to end."""

    @staticmethod
    @abstractmethod
    def billed(
        *,
        launched_at: datetime,
        max_minutes: int,
        aws_status: AttemptStatus,
        status: Mapping[str, Any] | None,
    ) -> Billed:
        """Return what one machine of an attempt that has ended is billed. status: the node's last object."""

    @abstractmethod
    def resource_name(self, handle: Mapping[str, Any]) -> str:
        """Return `instance i-0ab in us-east-1`, or `training job X in us-east-1`."""

    @abstractmethod
    def checkpoint_folder(self, output: str, run_id: str) -> str:
        """Return the URI, with a slash at its end, of the run's checkpoints. output: of an attempt."""

    def sync(self, handle: Mapping[str, Any]) -> SyncResult:
        """Bring what the attempt uploaded since the last time."""
        return s3_sync.sync(
            self.aws,
            self.home,
            region=handle["region"],
            output=handle["output"],
            token=handle["token"],
            run_ids=handle.get("run_ids", ()),
            num_nodes=handle.get("num_nodes", 1),
            known=self.known_segments,
        )

    def sync_reports(self, handle: Mapping[str, Any]) -> SyncResult:
        """Bring what the attempt's nodes reported, and nothing of what its runs wrote."""
        return s3_sync.sync_reports(
            self.aws,
            self.home,
            region=handle["region"],
            output=handle["output"],
            token=handle["token"],
            num_nodes=handle.get("num_nodes", 1),
        )

    def console_log(self, handle: Mapping[str, Any]) -> Path:
        """Store what silent machines printed, beside the first run's records; return the file."""
        path = s3_sync.console_path(self.home, handle["token"])
        s3_sync.write_whole(path, self._console_text(handle).encode())
        return path

    @abstractmethod
    def _console_text(self, handle: Mapping[str, Any]) -> str:
        """Return what the machines' consoles, or the containers' logs, hold."""

    def _is_old(self, handle: Mapping[str, Any]) -> bool:
        return self.now() - datetime.fromisoformat(handle["launched_at"]) > FORGOTTEN_AFTER
