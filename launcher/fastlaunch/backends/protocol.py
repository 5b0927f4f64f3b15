"""What the backends on AWS have in common: what is seen of an attempt's machines, the calls its life takes.

An attempt is one request, which starts one machine or several that do its runs together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, Self

from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends import Plan
from fastlaunch.backends.s3_sync import Synced
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import CloudRefused
from fastlaunch.jobs.spec import JobSpec

#: The backends whose plans cost money, by name.
CLOUD_BACKENDS = ("ec2", "sagemaker")
#: AWS's services as the user knows them, by the backend that uses them.
SERVICES = {"ec2": "EC2", "sagemaker": "SageMaker"}

#: How billed seconds are known: from AWS's own times; from the node's last object; not at all, so that they
#: are the limit; or free, because EC2 took a spot instance back within its first hour.
BILLINGS = ("times", "node", "limit", "free")


class Place(Protocol):
    """Where an attempt can be carried out; `ec2_site.Site` and `sagemaker_site.TrainingSite` are such.

    backend: its name. name: in words, such as `p5.48xlarge in us-east-1a`. usd_per_hour: of one machine, at
    most. idle_minutes: after the job, for which machines may be kept and billed. own_names: what is of this
    place alone, so that an error which names it says nothing against the next place.
    """

    @property
    def backend(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def instance(self) -> InstanceType: ...
    @property
    def region(self) -> str: ...
    @property
    def zone(self) -> str | None: ...
    @property
    def bucket(self) -> str: ...
    @property
    def prefix(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def usd_per_hour(self) -> float: ...
    @property
    def price_as_of(self) -> str: ...
    @property
    def max_price_usd(self) -> float | None: ...
    @property
    def idle_minutes(self) -> int: ...
    @property
    def own_names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What AWS shows of an attempt's machines now.

    has_ended: all are gone for good, under every name. is_seen: whether AWS shows any. is_live: one costs,
    or soon will. is_up: all run, so that their programs should be heard of. num_ended: machines that have
    ended, or are about to, of those that AWS shows. is_spot: bought so. is_taken:
    AWS took one back. instance_type: without `ml.`; zone: of the first machine. launched_at: when the first
    was started, with its time zone; ended_at: when the last one ended. billable_s: of one machine, where AWS
    itself counts them, with any spot discount in them; training_s: of the same time, without the discount.
    problem: what AWS says went wrong. told: AWS's own words for what they do, or why they ended.
    """

    has_ended: bool
    is_seen: bool = True
    is_live: bool = False
    is_up: bool = False
    num_ended: int = 0
    is_spot: bool = False
    is_taken: bool = False
    instance_type: str | None = None
    zone: str | None = None
    launched_at: datetime | None = None
    ended_at: datetime | None = None
    billable_s: float | None = None
    training_s: float | None = None
    problem: CloudRefused | None = None
    told: str | None = None


@dataclass(frozen=True, kw_only=True)
class Billed:
    """How long one machine lived and how much of it is billed, in seconds; how that is known, of BILLINGS."""

    lived_s: float
    billed_s: float
    billing: str


class CloudBackend(Protocol):
    """A backend whose plans cost money. Handles are JSON-able; all have `region`, `token`, `output` (URI of
    what the attempt uploads) and `launched_at` (ISO 8601, the request's time until AWS tells its own).

    boot_limit: after which a machine that is up should have been heard of; None where AWS itself sees to it.
    service: as the user knows it, such as `EC2`.
    """

    name: str
    service: str
    boot_limit: timedelta | None
    aws: Aws
    home: Path

    # mypy takes a dataclass's callables for methods, which cannot be set.
    @property
    def sleep(self) -> Callable[[float], None]: ...
    @property
    def now(self) -> Callable[[], datetime]: ...

    def at(self, site: Place, max_minutes: int, *, root: str | None = None) -> Self:
        """This backend for plans at `site`. root: id of the run under which earlier attempts wrote."""

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan: ...
    def execute(self, plan: Plan) -> Mapping[str, Any]: ...
    def find(self, plan: Plan) -> Mapping[str, Any] | None: ...

    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        """The handles of those plans whose machines AWS shows, by token, in few requests."""

    def see(self, handles: Sequence[Mapping[str, Any]]) -> list[Sight]:
        """What AWS shows of the attempts now, in few requests."""

    def sync(self, handle: Mapping[str, Any]) -> Synced:
        """Bring what the attempt uploaded since the last time."""

    def stop(self, handle: Mapping[str, Any]) -> None: ...
    def kill(self, handle: Mapping[str, Any]) -> None: ...

    def diary(self, handle: Mapping[str, Any]) -> Path:
        """File with what a machine that never spoke printed: its console, or its container's log."""

    def billed(
        self, *, launched_at: datetime, max_minutes: int, sight: Sight, status: Mapping[str, Any] | None
    ) -> Billed:
        """What one machine of an attempt that has ended is billed. status: the node's last object."""

    def told(self, handle: Mapping[str, Any]) -> str:
        """The attempt's machines in words: `instance i-0ab in us-east-1`, `training job X in us-east-1`."""

    def checkpoint_folder(self, output: str, run_id: str) -> str:
        """URI, with a slash at its end, under which the run's checkpoints lie. output: of an attempt."""
