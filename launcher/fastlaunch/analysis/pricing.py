"""Convert seconds to rates and rates to dollars; choose a row's price.

Every function keeps the interval, if there is one.
"""

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from fastlaunch.analysis.pooling import Group
from fastlaunch.catalog.hardware import Accelerator, check_positive
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Interval, Setup

SECONDS_PER_HOUR = 3600.0
#: What to do about runs on a CPU, or on GPUs that no instance has: no share of an instance does their work.
_NO_INSTANCE = "choose other runs, or give their machine a rate of your own: --usd-per-hour USD"


def scaled(quantity: Interval, factor: float) -> Interval:
    """Return `quantity` x `factor`; `factor` is above 0."""
    return Interval(
        value=quantity.value * factor,
        low=None if quantity.low is None else quantity.low * factor,
        high=None if quantity.high is None else quantity.high * factor,
    )


def reciprocal(quantity: Interval, numerator: float = 1.0) -> Interval:
    """Return `numerator` / `quantity`, both above 0: the longest time is the lowest rate."""
    return Interval(
        value=_divided(numerator, quantity.value),
        low=None if quantity.high is None else _divided(numerator, quantity.high),
        high=None if quantity.low is None else _divided(numerator, quantity.low),
    )


def _divided(numerator: float, denominator: float) -> float:
    """Divide; return infinity if an absurd record made the denominator 0, which reports show as unknown."""
    return numerator / denominator if denominator else math.inf


def samples_per_usd(rate_per_s: Interval, price: Price, num_nodes: int) -> Interval:
    """Return how many samples (or tokens) a dollar buys. price: of one node."""
    return scaled(rate_per_s, SECONDS_PER_HOUR / (price.usd_per_hour * num_nodes))


@dataclass(frozen=True, kw_only=True)
class ChargedAs:
    """An instance type whose price to charge a run."""

    instance: str
    share: Fraction | None = None  # the fraction of the instance to charge: a hypothetical price

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(
                f"{self.share} of {self.instance} is no share", "give more than 0 and at most 1, such as 1/8"
            )

    def __str__(self) -> str:
        return self.instance if self.share is None else f"{self.instance}:{self.share}"

    @classmethod
    def parse(cls, text: str) -> "ChargedAs":
        """Read `p5.4xlarge`, or `p5en.48xlarge:1/8` with a share. Raises UserError for an invalid share."""
        instance, colon, share = text.partition(":")
        return cls(instance=instance, share=parse_share(share) if colon else None)


def parse_share(text: str) -> Fraction:
    """Read a share such as `1/8` or `0.125`. Raises UserError for other text."""
    try:
        # Refuse exponents: a few digits would make a number with millions of digits.
        if len(text) <= 20 and "e" not in text.lower():
            return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        pass
    raise UserError(f"{text[:40]!r} is no share of an instance", "give one such as 1/8 or 0.125")


@dataclass(frozen=True, kw_only=True)
class PriceRequest:
    """How the user wants runs to be priced."""

    today: datetime.date  # the day of the prices unless `as_of` is given
    as_of: datetime.date | None = None  # price every row as of this day, even billed runs
    usd_per_hour: float | None = None  # of a node, for every row
    price_as: tuple[ChargedAs, ...] = ()  # charge rows as the smallest of these with their GPUs
    region: str = "us-east-1"  # of `price_as`

    def __post_init__(self) -> None:
        if self.usd_per_hour is not None:
            check_positive("--usd-per-hour", self.usd_per_hour)
        if self.usd_per_hour is not None and (self.price_as or self.as_of is not None):
            raise UserError(
                "--usd-per-hour says the price itself", "leave out --price-as and --prices-as-of, or it"
            )


def price_row(
    group: Group, request: PriceRequest, catalogue: Catalogue, *, beside: Iterable[Setup] = ()
) -> tuple[Price | None, str | None]:
    """Return the price of a row's node, or None if unknown, and a warning or None.

    beside: what all rows ran. Raises UserError for a row that cannot be charged as requested, with what would
    charge all.
    """
    service, region, purchase = group.runs[0].offer
    if request.usd_per_hour is not None:
        given = Price(
            instance=group.setup.instance or "",
            service=service,
            region=region,
            purchase=purchase,
            usd_per_hour=request.usd_per_hour,
            as_of=request.today,
            source="given",
            basis="given",
        )
        return given, None
    if request.price_as:
        return _priced_as(group, request, catalogue, [*beside] or [group.setup]), None
    stored = {c.price for c in group.runs if c.price is not None}
    if stored and request.as_of is None:
        latest = max(stored, key=lambda price: price.as_of)
        warning = None
        if len({price.usd_per_hour for price in stored}) > 1:
            warning = (
                f"{group.setup.recipe}: the runs were billed at {len(stored)} prices; the one of"
                f" {latest.as_of} is used for all (--prices-as-of DATE picks another)"
            )
        return replace(latest, basis="billed"), warning
    instance = group.setup.instance or next((price.instance for price in stored), None)
    if instance is None:
        return None, None
    try:
        price = catalogue.price(
            instance, service=service, region=region, purchase=purchase, on=request.as_of or request.today
        )
    except UserError as error:
        return None, f"{group.setup.recipe} on {instance} has no price: {error.message}"
    return price, None


def accelerator_of(setup: Setup, catalogue: Catalogue) -> Accelerator | None:
    """Return the accelerator that a run used, by its device name, else its instance; None if unknown."""
    if setup.device_name is not None:
        return catalogue.accelerator_of_device(setup.device_name)
    instance = catalogue.instances.get(setup.instance or "")
    return catalogue.accelerators[instance.accelerator] if instance else None


def cheapest_with(
    used: Accelerator | None, num_gpus: int, request: PriceRequest, catalogue: Catalogue
) -> ChargedAs | None:
    """Return the cheapest instance with `num_gpus` of the GPU, else a share of one, or None."""
    offers = []
    for instance in catalogue.instances.values():
        if used is None or catalogue.accelerator_of(instance.name) != used:
            continue
        price = catalogue.find_price(instance.name, region=request.region, on=request.as_of or request.today)
        if price is not None and instance.num_accelerators >= num_gpus:
            offers.append((instance.num_accelerators != num_gpus, price.usd_per_hour, instance))
    if not offers:
        return None
    is_part, _, instance = min(offers, key=lambda offer: offer[:2])
    return ChargedAs(
        instance=instance.name, share=Fraction(num_gpus, instance.num_accelerators) if is_part else None
    )


def instances_to_charge(
    setups: Iterable[Setup], request: PriceRequest, catalogue: Catalogue
) -> list[ChargedAs]:
    """Return instances at whose prices all `setups` can be charged; empty if some setup cannot."""
    kinds = {(one.device_name or one.instance, _gpus_per_node(one)): one for one in setups}
    charges = [
        cheapest_with(accelerator_of(setup, catalogue), number, request, catalogue)
        for (_, number), setup in kinds.items()
    ]
    known = dict.fromkeys(charge for charge in charges if charge is not None)
    return [] if None in charges else list(known)


def price_as_options(charges: Iterable[ChargedAs]) -> list[str]:
    """Return the options that charge runs at the prices of these instances."""
    return [word for charge in charges for word in ("--price-as", str(charge))]


def _gpus_per_node(setup: Setup) -> int:
    return setup.num_gpus // setup.num_nodes


def _charging(setups: Sequence[Setup], request: PriceRequest, catalogue: Catalogue) -> str:
    """Return what charges all setups, or at least the first one."""
    for some in (setups, setups[:1]):
        if charges := instances_to_charge(some, request, catalogue):
            return f"charge the GPUs that were used: {' '.join(price_as_options(charges))}"
    return _NO_INSTANCE


def _charge_of(
    group: Group,
    request: PriceRequest,
    num_gpus: int,
    used: str,
    catalogue: Catalogue,
    charging: Callable[[], str],
) -> ChargedAs:
    """Return the instance to charge a row as.

    num_gpus, used: the number of its GPUs per node, their name. charging: what would charge all rows.
    """
    charges = request.price_as
    if len(charges) == 1:
        return charges[0]
    fitting: list[tuple[Fraction, ChargedAs]] = []
    for charge in charges:
        instance = catalogue.instance(charge.instance)
        number = (charge.share or Fraction(1)) * instance.num_accelerators
        is_large_enough = number == num_gpus or (charge.share is not None and number > num_gpus)
        if catalogue.accelerators[instance.accelerator].name == used and is_large_enough:
            fitting.append((number, charge))
    if not fitting:
        raise UserError(
            f"{group.setup.recipe} ran on {num_gpus} x {used}, which none of"
            f" {', '.join(map(str, charges))} has",
            charging(),
        )
    return min(fitting, key=lambda fit: fit[0])[1]


def _priced_as(group: Group, request: PriceRequest, catalogue: Catalogue, setups: Sequence[Setup]) -> Price:
    accelerator = accelerator_of(group.setup, catalogue)
    used = accelerator.name if accelerator else group.setup.device_name or "an unknown device"
    num_gpus = _gpus_per_node(group.setup)

    def charging() -> str:
        others = [setup for setup in setups if setup is not group.setup]
        return _charging([group.setup, *others], request, catalogue)

    charge = _charge_of(group, request, num_gpus, used, catalogue, charging)
    name = charge.instance
    instance = catalogue.instance(name)
    price = catalogue.price(name, region=request.region, on=request.as_of or request.today)
    charged = catalogue.accelerators[instance.accelerator].name
    ran = f"{group.setup.recipe} ran on {num_gpus} x {used}"

    def hint() -> str:
        if used == charged and num_gpus <= instance.num_accelerators:
            share = Fraction(num_gpus, instance.num_accelerators)
            return f"choose other runs, or charge the share that they used: --price-share {share}"
        return charging()

    if charge.share is None:
        if used != charged or num_gpus != instance.num_accelerators:
            raise UserError(f"{ran}; {name} is {instance.num_accelerators} x {charged}", hint())
        return replace(price, basis="named")
    whole = charge.share * instance.num_accelerators
    if used == charged and num_gpus > whole:
        raise UserError(f"{ran}; {charge.share} of {name} is {float(whole):g}", hint())
    of = f" ({charged}), though it ran on {used}" if used != charged else ""
    return replace(
        price,
        usd_per_hour=price.usd_per_hour * float(charge.share),
        basis="named",
        hypothetical=f"{charge.share} of {name}{of}",
        other_gpu=charged if used != charged else None,
    )
