"""What is left of the budgets in the config file, before anything starts.

The ledger knows what its attempts were billed, and what those that are open may still cost. Machines of other
ledgers are known by their tags on AWS: each counts, while it is alive, with its time limit at the list price.
What they were billed before is not known here.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fastlaunch.aws.client import Aws
from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.aws.types import Instance
from fastlaunch.core.errors import CloudRefused, UserError
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.ownership import MARGIN_MINUTES, max_minutes, owner_in, token_of
from fastlaunch.core.settings import Budgets, Settings
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import utc_day
from fastlaunch.ledger.attempt_cost import usd_since
from fastlaunch.ledger.ledger import Ledger, open_ledger
from fastlaunch.lifecycle.orphans import live_instances, usual_regions
from fastlaunch.lifecycle.world import LaunchContext, World

#: How fields of `Budgets` begin that are for one owner.
_OWNER = "owner_"


@dataclass(frozen=True, kw_only=True)
class OtherMachine:
    """An instance, or the machines of a training job, of another ledger."""

    #: By its tag `Owner`.
    is_own: bool
    began_at: datetime
    #: When its time is over.
    ends_at: datetime
    #: At the list price.
    usd_per_hour: float

    def usd_since(self, since: datetime, now: datetime) -> float:
        """Return the most that it takes of a budget from `since` on."""
        return (max(self.ends_at, now) - max(self.began_at, since)).total_seconds() / 3600 * self.usd_per_hour


@dataclass(frozen=True, kw_only=True)
class BudgetUse:
    """How much of a budget is taken, in USD."""

    #: As the config file has it, such as `owner_day`.
    name: str
    limit_usd: float
    since: datetime
    until: datetime
    #: By this ledger's attempts that have ended, and by those that are open.
    billed_usd: float
    open_usd: float
    #: By machines of other ledgers; None where AWS was not asked.
    others_usd: float | None

    @property
    def taken_usd(self) -> float:
        return self.billed_usd + self.open_usd + (self.others_usd or 0.0)

    def __str__(self) -> str:
        """`$55.04 of $200.00 are taken since 2026-11-28: $15.00 billed, $40.04 for what is under way`."""
        parts = [f"${self.billed_usd:,.2f} billed", f"at most ${self.open_usd:,.2f} for what is under way"]
        if self.others_usd:
            parts.append(f"at most ${self.others_usd:,.2f} for machines of other ledgers")
        return (
            f"${self.taken_usd:,.2f} of ${self.limit_usd:,.2f} are taken since {self.since:%Y-%m-%d} UTC: "
            f"{', '.join(parts)}"
        )

    @property
    def left_usd(self) -> float:
        return max(0.0, self.limit_usd - self.taken_usd)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        times = {"since": self.since.isoformat(), "until": self.until.isoformat()}
        return {**vars(self), **times, "left_usd": self.left_usd}

    def check(self, added_usd: float) -> None:
        """Raise UserError if so much more is not left, in cents."""
        if round(added_usd, 2) <= round(self.left_usd, 2):
            return
        raise UserError(
            f"this may cost ${added_usd:,.2f}, and `budgets.{self.name}` has ${self.left_usd:,.2f} left: "
            f"{self}",
            f"give a shorter --max-hours, wait until {self.until:%Y-%m-%d %H:%M} UTC, or raise "
            f"`budgets.{self.name}` in the config file",
        )


def budget_uses(
    ledger: Ledger | None,
    settings: Settings,
    now: datetime,
    *,
    others: Iterable[OtherMachine] | None = None,
    without: int | None = None,
) -> list[BudgetUse]:
    """Return how much of each budget is taken.

    ledger: None if there is none yet. others: what AWS shows of other ledgers; None if it was not asked.
    without: the id of an attempt that does not count.
    """
    limits = {name: usd for name, usd in vars(settings.budgets).items() if usd is not None}
    since_month, _ = _period("month", now)
    attempts = ledger.attempts_since(since_month) if ledger and limits else []
    counting = [attempt for attempt in attempts if attempt.id != without]
    uses = []
    for name, limit_usd in limits.items():
        since, until = _period(name.removeprefix(_OWNER), now)
        taken = {True: 0.0, False: 0.0}
        for attempt in counting:
            taken[attempt.ended_at is None] += usd_since(attempt, since, now)
        others_usd = None
        if others is not None:
            others_usd = sum(
                other.usd_since(since, now) for other in others if other.is_own or not name.startswith(_OWNER)
            )
        uses.append(
            BudgetUse(
                name=name,
                limit_usd=limit_usd,
                since=since,
                until=until,
                billed_usd=taken[False],
                open_usd=taken[True],
                others_usd=others_usd,
            )
        )
    return uses


def uses_of(world: World, *, asks_aws: bool = False) -> list[BudgetUse]:
    """Return how much of each budget is taken, by the ledger alone unless AWS is asked. Creates no ledger."""
    settings, now = world.settings, world.now()
    if settings.budgets == Budgets():
        return []
    is_there = (settings.home / LEDGER_NAME).exists()
    with open_ledger(settings, clock=world.now) if is_there else nullcontext() as ledger:
        others = None
        if asks_aws:
            others = other_machines(world.aws, ledger, settings, now, report=world.report)
        return budget_uses(ledger, settings, now, others=others)


def check_offline(world: World, added_usd: float, *, dry_run: bool) -> None:
    """Raise UserError if by the ledger alone a budget has no room for so much more. Creates no ledger.

    A dry run reports how much of each budget is taken, and raises nothing.
    """
    for use in uses_of(world):
        try:
            use.check(added_usd)
        except UserError as error:
            if not dry_run:
                raise
            world.report(as_warning(error.message))
        else:
            if dry_run:
                world.report(f"budgets.{use.name}: {use}; this may add ${added_usd:,.2f}")


def check_budgets(
    launch: LaunchContext,
    added_usd: float,
    *,
    others: Iterable[OtherMachine] | None,
    without: int | None = None,
) -> None:
    """Raise UserError if a budget has no room for so much more. others, without: see `budget_uses`."""
    now = next(iter(launch.cloud_backends.values())).now()
    for use in budget_uses(launch.ledger, launch.settings, now, others=others, without=without):
        use.check(added_usd)


def others_of(launch: LaunchContext) -> list[OtherMachine] | None:
    """Return what AWS shows of other ledgers, if there are budgets; report what cannot be counted."""
    backend = next(iter(launch.cloud_backends.values()))
    return other_machines(backend.aws, launch.ledger, launch.settings, backend.now(), report=launch.report)


def other_machines(
    aws: Aws, ledger: Ledger | None, settings: Settings, now: datetime, *, report: Callable[[str], None]
) -> list[OtherMachine] | None:
    """Return what AWS shows of other ledgers in the regions of the config file and of the ledger.

    None without a budget, as AWS is then not asked. report: called with what cannot be counted.
    """
    from fastlaunch.catalog.load import load_catalogue

    if settings.budgets == Budgets():
        return None
    owner = owner_in(settings.tags) or aws.identity().owner
    catalogue = load_catalogue(*settings.price_files())
    others = []
    for region in usual_regions(settings, ledger):
        try:
            live = [
                *map(_of_instance, live_instances(aws, region)),
                *map(_of_job, aws.live_training_jobs(region)),
            ]
        except CloudRefused as error:
            report(as_warning(f"machines of other ledgers in {region} count in no budget: {error.message}"))
            continue
        tokens = {machine.token for machine in live if machine.token}
        known = ledger.attempts_by_token(list(tokens)) if ledger else {}
        for machine in live:
            minutes = max_minutes(machine.tags)
            if machine.token is None or machine.token in known or minutes is None:
                continue
            price = machine.instance_type and catalogue.find_price(
                machine.instance_type, service=machine.service, region=region, on=utc_day(now)
            )
            if not price:
                report(as_warning(f"{machine.name} in {region} counts in no budget: its price is unknown"))
                continue
            others.append(
                OtherMachine(
                    is_own=owner_in(machine.tags) == owner,
                    began_at=machine.began_at,
                    ends_at=machine.began_at + timedelta(minutes=minutes + MARGIN_MINUTES),
                    usd_per_hour=price.usd_per_hour * machine.number,
                )
            )
    return others


@dataclass(frozen=True, kw_only=True)
class _Live:
    name: str
    service: str
    #: The token of its attempt; None if it is not fastlaunch's.
    token: str | None
    tags: Mapping[str, str]
    instance_type: str | None
    number: int
    began_at: datetime


def _of_instance(instance: Instance) -> _Live:
    return _Live(
        name=instance.id,
        service="ec2",
        token=token_of(instance.tags, instance.token),
        tags=instance.tags,
        instance_type=instance.instance_type,
        number=1,
        began_at=instance.launch_time,
    )


def _of_job(job: TrainingJob) -> _Live:
    return _Live(
        name=job.name,
        service="sagemaker",
        token=token_of(job.tags, job.name),
        tags=job.tags,
        instance_type=job.ec2_type,
        number=job.num_instances,
        began_at=job.started_at or job.created_at,
    )


def _period(name: str, now: datetime) -> tuple[datetime, datetime]:
    """Return the first moments of the day or the month of UTC, and of the next one."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if name == "day":
        return today, today + timedelta(days=1)
    first = today.replace(day=1)
    return first, (first + timedelta(days=32)).replace(day=1)
