"""The job that the checks before it are made for, and what they are made with."""

import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.candidates import has_several_interfaces
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.placement.check import Told

if TYPE_CHECKING:
    from fastlaunch.base_image_file import BaseImage


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The job that the checks are made for. instances: none to check the account alone.

    checkpoint_every: steps, 0 for none; None if it was not said. base: AWS's container image; image: the
    user's, by digest, instead. max_cost_usd: the budget, with max_minutes to compare it with. reservation:
    of a capacity block; block_fee_usd: what it cost. keep_alive_minutes: of a warm pool. has_plan: whether
    SageMaker's machines are those of a training plan. is_unfollowed: whether a timer in the account is to end
    its machines.
    """

    instances: tuple[InstanceType, ...]
    regions: tuple[str, ...]
    backend: str = "ec2"
    purchase: str = "on-demand"
    max_price_usd: float | None = None
    num_nodes: int = 1
    checkpoint_every: int | None = None
    base: "BaseImage | None" = None
    image: str | None = None
    max_minutes: int | None = None
    max_cost_usd: float | None = None
    reservation: str | None = None
    block_fee_usd: float | None = None
    keep_alive_minutes: int = 0
    has_plan: bool = False
    is_unfollowed: bool = False

    @property
    def has_several_interfaces(self) -> bool:
        """Whether any of its machines would have several network interfaces."""
        return self.backend == "ec2" and any(
            has_several_interfaces(one, self.num_nodes) for one in self.instances
        )

    def name_of(self, instance: InstanceType) -> str:
        """The type as the service calls it."""
        return f"ml.{instance.name}" if self.backend == "sagemaker" else instance.name


@dataclass(frozen=True, kw_only=True)
class Looking:
    """What is wanted, and what checks look it up with."""

    wanted: Wanted
    aws: Aws
    settings: Settings
    catalogue: Catalogue
    now: datetime.datetime
    ask: AskOnce

    @property
    def today(self) -> datetime.date:
        """The day of `now`."""
        return self.now.date()

    def here(self, region: str) -> RegionSettings:
        """What the config file says of the region."""
        return self.settings.aws.get(region, RegionSettings())


#: What a check is called and is about (`name`, `instance`, `zone`), and the check itself.
ToMake = tuple[Mapping[str, str], Callable[[], str | Told]]
ToMakeAll = Iterator[ToMake]
