"""Recommend where and how to train: the cheapest choice in time that is known best, and what would change it.

A choice is a configuration with a purchase option. Its dollars and hours are expected values over the range
of a prediction. A deadline and a budget apply to the upper end of the range. Among choices whose ranges leave
open which is cheapest, the pick has the best evidence.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlaunch.analysis.configurations import Configuration, LeftOut
from fastlaunch.analysis.cost import SPOT, Assumptions, Cost, Purchase, Training, cost_of, training_of
from fastlaunch.analysis.differences import MACHINE
from fastlaunch.analysis.memory import MemoryNeed
from fastlaunch.analysis.pricing import SECONDS_PER_HOUR
from fastlaunch.analysis.rate import RANGE_DEVIATIONS, Evidence, PublishedSpeed, Rate, times_as_fast
from fastlaunch.analysis.spot import forecast_spot, steps_between
from fastlaunch.analysis.suggest import (
    ON_DISK,
    Place,
    data_options,
    known_workload,
    rented,
    submit_command,
)
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import FEWEST_TIMED_STEPS, MAX_MINUTES
from fastlaunch.measure.summary import Checkpoints, Interval, Quality, RunSummary, Setup

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

#: Seconds of steps that an experiment measures.
PROBE_S = 120.0
_MIN_PROBE_STEPS = 30
#: On spot: the share of simulated trainings that must meet a deadline, their number, and the most choices.
_SURE, _NUM_SIMULATED, _MOST_SIMULATED = 0.95, 500, 40
_NUM_CHEAPEST = 10
#: Quantiles of a cost in place of draws.
_NUM_DRAWS = 99
#: `--max-hours` as a multiple of the upper end of a job's time.
_MARGIN = 0.1
#: What a measurement must save on average, beyond its price, to be proposed: it takes a person's time, too.
_WORTH_USD = 5.0
#: Between the checkpoints of a training that nothing interrupts.
_SAVE_EVERY_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration with a purchase option, and the time and cost of the training."""

    configuration: Configuration
    purchase: Purchase
    total: Cost  # without parts
    samples: float

    @property
    def usd(self) -> float:
        return self.total.usd.value

    @property
    def hours(self) -> float:
        return self.total.hours.value

    @property
    def usd_per_million_tokens(self) -> float | None:
        return self.configuration.rate.usd_per_million_tokens(self.usd, self.samples)

    @property
    def instance(self) -> str:
        return self.configuration.instance

    def may_cost_less_than(self, other: "Choice") -> bool:
        """Return whether it may be the cheaper of the two.

        If both were measured in the same rounds, these tell, as in a comparison, unless start-up outweighs
        the steps; else the two ranges, which contain what machines differ by.
        """
        if self._place == other._place and self.usd >= other.usd:
            faster = times_as_fast(other.configuration.rate, self.configuration.rate)
            if faster is not None and faster.low is not None and faster.low > 1:
                return False
        return self.overlaps(other)

    def overlaps(self, other: "Choice") -> bool:
        """Return whether the range of its cost begins below the end of the other's."""
        return _ends(self.total.usd)[1] < _ends(other.total.usd)[2]

    @property
    def _place(self) -> tuple[object, ...]:
        """Return what decides the price and the GPUs."""
        query, price = self.configuration.query, self.purchase.price
        return self.instance, query.num_nodes, query.num_gpus, price.purchase, price.service, price.region


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The hourly price of the pick's instance at which another instance type costs the same."""

    instance: str
    usd_per_hour: float
    other: Choice  # the cheapest on another instance type


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A choice whose range begins below the end of the pick's, and what a run costs that settles it."""

    choice: Choice
    usd: float
    hours: float


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A short run that may change the pick and saves more than it costs, on average."""

    choice: Choice  # to measure
    usd: float
    hours: float
    probability: float  # that it changes the pick
    saves_usd: float  # expected, before its own cost
    command: str | None

    @property
    def net_usd(self) -> float:
        return self.saves_usd - self.usd


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that the training may take and cost; None for no limit."""

    deadline_hours: float | None = None
    budget_usd: float | None = None

    def allow(self, choice: Choice) -> bool:
        """Return whether the upper end of the choice's range is within the limits."""
        usd, hours = _ends(choice.total.usd)[2], _ends(choice.total.hours)[2]
        return bool(self.keep(usd, hours))

    def most_usd(self, choice: Choice) -> float:
        """Return the most that the choice may cost within the limits, if its time goes with its cost."""
        budget = math.inf if self.budget_usd is None else self.budget_usd
        if self.deadline_hours is None or choice.hours <= 0:
            return budget
        return min(budget, choice.usd * self.deadline_hours / choice.hours)

    def keep(self, usd: Any, hours: Any) -> Any:
        """Return whether dollars and hours are within the limits, as a truth value or a mask."""
        most_hours = math.inf if self.deadline_hours is None else self.deadline_hours
        most_usd = math.inf if self.budget_usd is None else self.budget_usd
        # A budget equal to the shown amount is enough, so round: to cents, from a thousand on to dollars.
        return (hours <= most_hours) & (usd < most_usd + (0.5 if most_usd > 999 else 0.005))


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training to recommend for, as costs and the command need it."""

    workload: str
    samples: float
    like: RunSummary  # a run of the workload, from which a command takes data, model and arguments
    scripts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what `submit` takes, by recipe
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of a script, by recipe
    own_region: str
    assumptions: Assumptions
    steps_only: bool = False
    max_nodes: int = 1  # of one training
    with_data: bool = True  # the command trains on data, the user's if `like` had none, and keeps checkpoints


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The pick and its evidence; absent parts are None."""

    job: Task
    limits: Limits
    pick: Choice | None
    runner_up: Choice | None  # the next cheapest with another instance type, recipe or purchase option
    rival: Rival | None  # on another instance type, which may be cheaper than the pick
    chance: float | None  # that the pick is the cheapest within the limits; None without a pick or its range
    cheapest_measured: Choice | None  # within the limits
    break_even: BreakEven | None
    front: tuple[Choice, ...]  # no other choice is both cheaper and faster; the cheapest first
    by_instance: tuple[Choice, ...]  # the cheapest on each instance type, within the limits or not
    by_purchase: tuple[Choice, ...]  # the cheapest with each purchase option, within the limits or not
    cheapest: tuple[Choice, ...]  # a few, of each instance type, recipe and purchase option
    num_choices: int
    num_within: int  # choices within the limits
    left_out: tuple[LeftOut, ...]
    experiment: Experiment | None
    command: str | None  # to train the pick
    build: str | None = None  # to have an image with what AWS's images lack
    warnings: tuple[str, ...] = ()
    memory: tuple[MemoryNeed, ...] = ()  # of the workload's recipes, if it can be reckoned
    published: tuple[PublishedSpeed, ...] = ()  # of like fine-tuning, by GPU
    #: The row whose global batch the others keep; None if nothing was measured.
    reference: Setup | None = None

    @property
    def proposed(self) -> Experiment | None:
        """The measurement to make first, if there is one that is worth a person's time."""
        return self.experiment if self.experiment and self.experiment.net_usd >= _WORTH_USD else None


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices as columns, with an entry for each configuration and way to buy its instance."""

    job: Task
    configurations: Sequence[Configuration]
    purchases: Sequence[Purchase]
    # For each choice, the positions in `configurations` and `purchases`.
    configuration_ids: Ids
    purchase_ids: Ids
    # (3, choices): expected value, lower and upper end. Without a range, all three are equal.
    usd: Array
    hours: Array
    refused: tuple[LeftOut, ...] = ()  # combinations that cannot be bought, with the reason
    _made: dict[int, Choice] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.configuration_ids)

    def __getitem__(self, at: int) -> Choice:
        """Return a choice with its full cost, always as the same object."""
        if at not in self._made:
            configuration = self.configurations[self.configuration_ids[at]]
            self._made[at] = choice_of(configuration, self.purchases[self.purchase_ids[at]], self.job)
        return self._made[at]

    def labels(self, label: Callable[[Configuration, Purchase], object]) -> Ids:
        """Return a number for each choice, equal for equal labels."""
        known: dict[object, int] = {}
        return np.array(
            [
                known.setdefault(label(self.configurations[at], self.purchases[way]), len(known))
                for at, way in zip(self.configuration_ids, self.purchase_ids, strict=True)
            ],
            np.int64,
        )


def choice_of(configuration: Configuration, purchase: Purchase, job: Task) -> Choice:
    """Return the choice. Raises UserError if the configuration cannot be bought this way."""
    training = _training(configuration, job)
    return Choice(
        configuration=configuration,
        purchase=purchase,
        total=_cost(training, purchase, job),
        samples=training.samples.value,
    )


def _cost(training: Training, purchase: Purchase, job: Task, *, with_interval: bool = True) -> Cost:
    return cost_of(
        training,
        purchase,
        assumptions=job.assumptions,
        steps_only=job.steps_only,
        with_parts=False,
        with_interval=with_interval,
    )


def choices_of(configurations: Sequence[Configuration], purchases: Sequence[Purchase], job: Task) -> Choices:
    """Return every configuration with every way to buy its instance, with time and cost.

    Dollars and hours are linear in the seconds of the steps, and dollars also in the nodes. If everything
    before and between the steps is assumed, one line serves all configurations. Other configurations, and
    capacity blocks, are computed one by one.
    """
    by_instance: dict[str, list[int]] = {}
    for number, configuration in enumerate(configurations):
        by_instance.setdefault(configuration.instance, []).append(number)
    steps_s = np.array([_steps_s(configuration, job) for configuration in configurations]).reshape(-1, 3).T
    nodes = np.array([configuration.query.num_nodes for configuration in configurations], float)
    recipes = [configuration.query.recipe for configuration in configurations]
    compiles = np.array([isinstance(recipe, str) or recipe.compiles for recipe in recipes], bool)
    is_alike = np.array([configuration.rate.row is None for configuration in configurations], bool)
    columns: list[tuple[Ids, Ids, Array, Array]] = []
    refused: dict[LeftOut, None] = {}
    for number, purchase in enumerate(purchases):
        on_instance = np.array(by_instance.get(purchase.price.instance, ()), np.int64)
        is_line = is_alike[on_instance] & (purchase.price.purchase == "on-demand")
        for ids in (
            on_instance[is_line & compiles[on_instance]],
            on_instance[is_line & ~compiles[on_instance]],
        ):
            if len(ids):
                usd, hours = _on_a_line(
                    purchase, job, nodes[ids], steps_s[:, ids], compiles=bool(compiles[ids[0]])
                )
                columns.append((ids, np.full(len(ids), number), usd, hours))
        on_spot = _is_spot(purchase, job)
        for id in on_instance[~is_line]:
            try:
                training = _training(configurations[id], job)
                whole = _cost(training, purchase, job, with_interval=not on_spot)
            except UserError as error:
                price = purchase.price
                out = LeftOut(
                    instance=price.instance,
                    recipe=None,
                    reason=error.message,
                    purchase=price.purchase,
                    hint=error.hint,
                )
                refused[out] = None
                if on_spot and purchase.market is None:
                    break
                continue
            usd, hours = (np.array([_ends(quantity)]).T for quantity in (whole.usd, whole.hours))
            if on_spot:
                # Use the interval of the steps: on spot the mean's is nearly the same and takes eight times
                # as long.
                usd, hours = (end * (steps_s[:, [id]] / steps_s[0, id]) for end in (usd, hours))
            columns.append((np.array([id]), np.array([number]), usd, hours))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((3, 0)), np.zeros((3, 0)))
    ids, numbers, usd, hours = (np.concatenate(parts, axis=-1) for parts in zip(empty, *columns, strict=True))
    return Choices(
        job=job,
        configurations=configurations,
        purchases=purchases,
        configuration_ids=ids,
        purchase_ids=numbers,
        usd=usd,
        hours=hours,
        refused=tuple(refused),
    )


def _ends(quantity: Interval) -> tuple[float, float, float]:
    value, low, high = quantity.value, quantity.low, quantity.high
    return value, value if low is None else low, value if high is None else high


def _on_a_line(
    purchase: Purchase, job: Task, nodes: Array, steps_s: Array, *, compiles: bool
) -> tuple[Array, Array]:
    """Return dollars and hours, kept_usd + nodes x (once_usd + usd_per_s x T), of T seconds of steps."""

    def at(num_nodes: int, hours: float) -> Cost:
        rate = Rate(samples_per_s=Interval(value=1.0), evidence=Evidence.PREDICTED)
        samples = Interval(value=hours * SECONDS_PER_HOUR)
        return _cost(
            Training(samples=samples, rate=rate, num_nodes=num_nodes, compiles=compiles), purchase, job
        )

    hour, two_hours, two_nodes = at(1, 1.0), at(1, 2.0), at(2, 1.0)
    usd_per_hour = two_hours.usd.value - hour.usd.value
    kept_usd = 2 * hour.usd.value - two_nodes.usd.value
    hours = steps_s / SECONDS_PER_HOUR
    once_usd = hour.usd.value - kept_usd - usd_per_hour
    return kept_usd + nodes * (once_usd + usd_per_hour * hours), hour.hours.value - 1.0 + hours


def _steps_s(configuration: Configuration, job: Task) -> tuple[float, float, float]:
    """Return the seconds of the steps: expected, at the lower end, and at the upper end."""
    samples, speed = job.samples * configuration.samples_factor, configuration.rate.samples_per_s
    value = speed.value
    return samples / value, samples / (speed.high or value), samples / (speed.low or value)


def _training(configuration: Configuration, job: Task, samples: float | None = None) -> Training:
    """Return the training to compute costs of. samples: the job's by default."""
    return training_of(
        configuration.rate,
        configuration.query.recipe,
        Interval(value=job.samples * configuration.samples_factor if samples is None else samples),
        num_nodes=configuration.query.num_nodes,
        global_batch=configuration.global_batch,
    )


def recommend(
    choices: Choices, limits: Limits, *, left_out: Sequence[LeftOut] = (), warnings: Sequence[str] = ()
) -> Recommendation:
    """Return the cheapest of the choices within the limits, and what would change it."""
    order = np.lexsort((choices.hours[0], choices.usd[0]))
    within = _in_time(order[limits.keep(choices.usd[2], choices.hours[2])[order]], choices, limits)
    if len(within):
        within = np.concatenate([[best := _best_known(within, choices)], within[within != best]])
    at = int(within[0]) if len(within) else None
    kinds = choices.labels(lambda one, bought: (one.instance, one.query.undivided, bought.price.purchase))
    instances = choices.labels(lambda one, _: one.instance)
    options = choices.labels(lambda _, bought: bought.price.purchase)
    is_measured = np.array(
        [configuration.rate.evidence.is_measured for configuration in choices.configurations], bool
    )

    def first(candidates: Ids) -> Choice | None:
        return choices[int(candidates[0])] if len(candidates) else None

    pick = first(within)
    others = within[instances[within] != instances[at]] if at is not None else within[:0]
    elsewhere = first(others)
    return Recommendation(
        job=choices.job,
        limits=limits,
        pick=pick,
        runner_up=first(within[kinds[within] != kinds[at]]) if at is not None else None,
        cheapest_measured=first(within[is_measured[choices.configuration_ids[within]]]),
        rival=_rival(pick, others, choices) if pick else None,
        chance=_chance(at, order, choices, limits) if at is not None else None,
        break_even=break_even(pick, elsewhere, choices.job)
        if pick and elsewhere and pick.usd <= elsewhere.usd
        else None,
        front=tuple(choices[int(id)] for id in front(choices, within if len(within) else order)),
        by_instance=tuple(choices[int(id)] for id in _firsts(order, instances)),
        by_purchase=tuple(choices[int(id)] for id in _firsts(order, options)),
        cheapest=tuple(choices[int(id)] for id in _firsts(order, kinds)[:_NUM_CHEAPEST]),
        num_choices=len(choices),
        num_within=len(within),
        left_out=tuple(dict.fromkeys([*left_out, *choices.refused])),
        experiment=next_experiment(choices, order, limits, at) if at is not None else None,
        command=command_of(pick, choices.job) if pick else None,
        warnings=tuple(warnings),
    )


def _best_known(within: Ids, choices: Choices) -> int:
    """Return the choice with the best evidence of those that may be the cheapest; of equals the first.

    A choice cannot be the cheapest if the whole range of another lies below its own.
    """
    may_be = within[choices.usd[1][within] <= choices.usd[2][within].min()]
    return int(
        min(may_be, key=lambda id: choices.configurations[int(choices.configuration_ids[id])].rate.rank)
    )


def _rival(pick: Choice, others: Ids, choices: Choices) -> Rival | None:
    """Return the cheapest of the others whose range overlaps the pick's; None if both are measured."""
    high = _ends(pick.total.usd)[2]
    open_ids = others[choices.usd[1][others] < high]
    if not len(open_ids):
        return None
    choice = choices[int(open_ids[0])]
    if choice.configuration.rate.evidence.is_measured and pick.configuration.rate.evidence.is_measured:
        return None
    probed = pick if choice.configuration.rate.rank < pick.configuration.rate.rank else choice
    cost = probe_total(probed, choices.job)
    return Rival(choice=choice, usd=cost.usd.value, hours=cost.hours.value)


def _chance(pick: int, order: Ids, choices: Choices, limits: Limits) -> float | None:
    """Return the probability that the pick is the cheapest within the limits; None if it has no range.

    Costs are lognormal, each with its mean and range, and independent. Where predictions err alike, one
    choice stands for all; those that err like the pick's differ from it as machines do.
    """
    settled, picked = choices.labels(lambda one, _: _settled_by(one)), choices[pick]
    if picked.total.usd.low is None and picked.usd > 0:
        return None
    possible = order[limits.keep(choices.usd[1], choices.hours[1])[order]]
    like_pick = order[
        limits.keep(choices.usd[2], choices.hours[2])[order] & (settled[order] == settled[pick])
    ]
    alike = [choices[int(id)] for id in like_pick[:2] if id != pick]
    apart = [choices[int(id)] for id in _firsts(possible, settled) if settled[id] != settled[pick]]
    chance = chance_of_cheapest(
        picked.usd,
        deviation_of(picked),
        [
            (other.usd, deviation_of(other), limits.most_usd(other))
            for other in apart
            if other.may_cost_less_than(picked)
        ],
    )
    for other in alike[:1]:
        if picked.usd > 0 and other.may_cost_less_than(picked):
            chance *= _normal(math.log(other.usd / picked.usd) / (MACHINE * math.sqrt(2)))
    return chance


def chance_of_cheapest(usd: float, deviation: float, others: Sequence[tuple[float, float, float]]) -> float:
    """Return the probability that a lognormal cost is below all others, which are independent.

    It has a mean in USD and the deviation of its logarithm, above 0; another one also has the most at which
    it counts. What costs nothing is the cheapest.
    """
    if usd <= 0 or any(other <= 0 for other, _, _ in others):
        return float(usd <= 0)
    draws = (NormalDist().inv_cdf((number + 0.5) / _NUM_DRAWS) for number in range(_NUM_DRAWS))
    costs = [usd * math.exp(deviation * draw - deviation**2 / 2) for draw in draws]
    return math.fsum(
        math.prod(
            1 - expected_saving(other, of_other, cost, at_most=most)[0] for other, of_other, most in others
        )
        for cost in costs
    ) / len(costs)


def _in_time(order: Ids, choices: Choices, limits: Limits) -> Ids:
    """Drop choices on spot that miss the deadline too often or were not simulated.

    The range of a choice on spot is of the mean, so single trainings are simulated.
    """
    if limits.deadline_hours is None:
        return order
    kept, num_simulated = [], 0
    for id in order:
        purchase = choices.purchases[choices.purchase_ids[id]]
        if _is_spot(purchase, choices.job):
            if num_simulated == _MOST_SIMULATED:
                continue
            num_simulated += 1
            job = choices[int(id)].total.spot_job
            assert job is not None and purchase.market is not None
            forecast = forecast_spot(job, purchase.market, num_jobs=_NUM_SIMULATED)
            if forecast.chance(limits.deadline_hours * SECONDS_PER_HOUR) < _SURE:
                continue
        kept.append(id)
    return np.array(kept, np.int64)


def _is_spot(purchase: Purchase, job: Task) -> bool:
    return purchase.price.purchase == SPOT and not job.steps_only


def front(choices: Choices, order: Ids) -> Ids:
    """Return the Pareto front by dollars and hours. order: by dollars, then hours."""
    hours = choices.hours[0][order]
    fastest_before = np.minimum.accumulate(np.concatenate([[math.inf], hours]))[:-1]
    return np.asarray(order[hours < fastest_before])


def _firsts(order: Ids, labels: Ids) -> Ids:
    """Return the first of each label, in order."""
    return order[np.sort(np.unique(labels[order], return_index=True)[1])]


def break_even(pick: Choice, other: Choice, job: Task) -> BreakEven:
    """Return the price of the pick's instance at which `other`, the cheapest on another type, costs the same.

    The pick costs a + b x price.
    """
    paid = pick.purchase.paid_usd_per_hour
    dearer = choice_of(pick.configuration, replace(pick.purchase, usd_per_hour=paid + 1.0), job)
    usd_per_hour = paid + (other.usd - pick.usd) / (dearer.usd - pick.usd)
    return BreakEven(instance=pick.instance, usd_per_hour=usd_per_hour, other=other)


def next_experiment(choices: Choices, order: Ids, limits: Limits, pick: int) -> Experiment | None:
    """Return the measurement with the largest net saving; None if none saves more than it costs.

    Measuring the pick replaces it if it turns out dearer than the next cheapest; measuring another choice
    makes it the pick if it turns out cheaper. The measured cost is lognormal with the choice's mean and
    range; all other costs stay. order: all choices, by dollars.
    """
    settled = choices.labels(lambda one, _: _settled_by(one))
    possible = order[limits.keep(choices.usd[1], choices.hours[1])[order]]
    cheapest = [int(id) for id in _firsts(possible, settled) if settled[id] != settled[pick]]
    picked = choices[pick]
    if picked.usd <= 0:  # paid already: nothing is saved
        return None
    best: Experiment | None = None
    rivals = [choice for at in cheapest if limits.allow(choice := choices[at])]
    for choice in (picked, *(choices[at] for at in cheapest)):
        is_pick = choice is picked
        if choice.usd <= 0 or (is_pick and not rivals):
            continue
        against_usd = rivals[0].usd if is_pick else picked.usd
        at_most = math.inf if is_pick else limits.most_usd(choice)
        probability, saves_usd = expected_saving(
            choice.usd, deviation_of(choice), against_usd, dearer=is_pick, at_most=at_most
        )
        worth_usd = best.net_usd if best else 0.0
        if saves_usd <= worth_usd:
            continue
        cost = probe_total(choice, choices.job)
        if saves_usd - cost.usd.value > worth_usd:
            best = Experiment(
                choice=choice,
                usd=cost.usd.value,
                hours=cost.hours.value,
                probability=probability,
                saves_usd=saves_usd,
                command=command_of(choice, choices.job, is_probe=True),
            )
    return best


def _settled_by(configuration: Configuration) -> tuple[str, ...]:
    """Return the key of what one experiment settles: predictions for one instance family err alike."""
    if configuration.rate.evidence.is_measured:
        return configuration.instance, configuration.query.undivided
    return (configuration.instance.partition(".")[0],)


def deviation_of(choice: Choice) -> float:
    """Return the deviation of the log of the choice's cost."""
    usd = choice.total.usd
    if usd.low and usd.high and usd.high > usd.low:
        return math.log(usd.high / usd.low) / (2 * RANGE_DEVIATIONS)
    return choice.configuration.rate.deviation


def expected_saving(
    usd: float, deviation: float, against_usd: float, *, dearer: bool = False, at_most: float = math.inf
) -> tuple[float, float]:
    """Return the probability that a cost turns out below `against_usd`, and E[max(0, against_usd - cost)].

    The cost is lognormal with mean `usd`; deviation: of its logarithm, above 0. at_most: count no larger
    cost. dearer: return the probability of a cost above `against_usd`, and E[max(0, cost - against_usd)]. The
    formula is Black and Scholes' for options.
    """
    below = min(against_usd, at_most)
    if below <= 0:
        return 0.0, 0.0
    d = (math.log(below / usd) + deviation**2 / 2) / deviation
    if dearer:
        return _normal(-d), usd * _normal(deviation - d) - against_usd * _normal(-d)
    return _normal(d), against_usd * _normal(d) - usd * _normal(d - deviation)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _probe_steps(configuration: Configuration) -> int:
    steps = PROBE_S * configuration.rate.samples_per_s.value / configuration.samples_per_step
    return max(_MIN_PROBE_STEPS, math.ceil(steps))


def probe_total(choice: Choice, job: Task) -> Cost:
    """Return time and cost of the choice's experiment, always including boot and start-up."""
    samples = _probe_steps(choice.configuration) * choice.configuration.samples_per_step
    training = _training(choice.configuration, job, samples)
    return _cost(training, choice.purchase, replace(job, steps_only=False))


def _max_hours(hours: Interval) -> int:
    return max(1, math.ceil((hours.high or hours.value) * (1 + _MARGIN)))


def takes_too_long(choice: Choice) -> bool:
    """Return whether the training may last longer than a job can."""
    return _max_hours(choice.total.hours) * 60 > MAX_MINUTES


def command_of(choice: Choice, job: Task, *, is_probe: bool = False) -> str | None:
    """Return the command to train or measure the choice; None if `submit` takes none.

    It takes no script of unknown command, and nothing that may last more than MAX_MINUTES. A training reads
    data, for which the user fills in PATH or BUCKET/PREFIX, and keeps checkpoints.
    """
    configuration, price = choice.configuration, choice.purchase.price
    hours = (probe_total(choice, job) if is_probe else choice.total).hours
    max_hours = _max_hours(hours)
    region = None if price.region == job.own_region else price.region
    place = Place(service=price.service, region=region, purchase=price.purchase)
    samples = job.samples * configuration.samples_factor
    steps = _probe_steps(configuration) if is_probe else math.ceil(samples / configuration.samples_per_step)
    setup = replace(
        job.like.setup,
        instance=configuration.instance,
        num_nodes=configuration.query.num_nodes,
        num_gpus=configuration.query.num_gpus,
        batch_size_per_gpu=configuration.query.batch_size_per_gpu,
    )
    like = replace(job.like, num_steps=steps, setup=setup, quality=Quality(), checkpoints=Checkpoints())
    step_time_s = configuration.samples_per_step / configuration.rate.samples_per_s.value
    every_s = choice.total.checkpoint_every_s
    every = min(steps_between(every_s or _SAVE_EVERY_S, step_time_s), steps)
    if every_s is not None:
        like = replace(like, checkpoints=Checkpoints(number=1, last_step=every))
    if takes_too_long(choice) and not is_probe:
        return None
    if not setup.is_script:
        workload = known_workload(job.workload)
        data = data_options(workload) if workload and job.with_data and not is_probe else ()
        if workload is None or (steps < FEWEST_TIMED_STEPS and not data):
            return None
        is_on_disk = setup.data in ON_DISK
        command = submit_command(
            [like],
            [configuration.query.recipe],
            place=place,
            first_seed=0,
            repeats=1,
            data=() if is_on_disk else data,
        )
        command = f"{command.removesuffix(' --seed 0 --repeats 1')} --max-hours {max_hours}"
        if data and place.purchase != SPOT:
            command += f" --checkpoint-every {every}"
        return f"{command} --eval-every {steps}" if steps < FEWEST_TIMED_STEPS else command
    script = job.scripts.get(configuration.recipe)
    if script is None:
        return None
    words = [*rented([like], configuration.instance, place), "--max-hours", str(max_hours)]
    for name, text in job.variants.get(configuration.recipe, {}).items():
        words += ["-L", f"{name}={text}"]
    return shlex.join(["fastlaunch", "submit", *words, *script])
