"""Compare runs: step time, samples per dollar, and whether a difference is real.

Rows are compared within a workload, and each workload has its own baseline. docs/method.md gives the rules.
Unknown values are None, never guessed.
"""

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import stdev

from fastlaunch.analysis.differences import FLOOR, MACHINE, MACHINE_DOF, SCATTER, SCATTER_DOF, Differences
from fastlaunch.analysis.notes import schema_warnings, script_warnings
from fastlaunch.analysis.pooling import (
    BARE_STEP,
    SAMPLE,
    STEP,
    TOTAL,
    Group,
    MeasuredRun,
    Offer,
    first_runs,
    newest_version,
    pool,
    run_times,
    without_version,
)
from fastlaunch.analysis.pricing import (
    PriceRequest,
    accelerator_of,
    price_row,
    reciprocal,
    samples_per_usd,
    scaled,
)
from fastlaunch.analysis.statistics import LEVEL, Variance, half_width, mean_of, summed
from fastlaunch.analysis.validity import Validity, judge_validity
from fastlaunch.analysis.verdicts import (
    BASELINE,
    NO_INTERVAL,
    OTHER_BATCH,
    UNJUDGED,
    PricedGroup,
    Verdict,
    exp,
    judge,
)
from fastlaunch.catalog.hardware import identify
from fastlaunch.catalog.prices import Catalogue, Price, age_note
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.measure.summary import Interval, Setup

__all__ = ["Comparison", "MeasuredRun", "PriceRequest", "Row", "compare"]

DEFAULT_BASELINE = "bf16"
_Priced = Sequence[tuple[Group, Price | None]]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast a row trained on the machines it ran on; all with 95% intervals."""

    step_time_s: Interval | None = None
    total_time_s: Interval | None = None  # of a whole run whose steps and samples are unknown
    samples_per_s: Interval | None = None
    tokens_per_s: Interval | None = None
    tflops_per_gpu: Interval | None = None
    percent_of_peak: Interval | None = None  # of the recipe's own precision
    percent_of_bf16_peak: Interval | None = None
    percent_of_fp8_peak: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """What a row's training costs on any machine of its type; all with 95% intervals."""

    usd_per_million_samples: Interval | None = None
    usd_per_million_tokens: Interval | None = None
    samples_per_usd: Interval | None = None


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Time outside the steps, and how busy the machines were: means over the runs."""

    build_s: float | None
    compile_s: float | None  # over the runs that compiled without a cache, if there are any
    warmup_s: float | None
    data_wait_fraction: float | None  # of the steps' time, spent fetching batches
    utilization: float | None  # of the steps' time, with a GPU running kernels
    padding_fraction: float | None  # of the tokens
    peak_memory_gib: float | None  # the largest


@dataclass(frozen=True, kw_only=True)
class Row:
    """Repeats of one run, and how they compare with their workload's baseline.

    Unknown quantities are None.
    """

    group: Group
    price: Price | None  # of one node
    speed: Speed
    cost: UnitCost
    overhead: Overhead
    verdict: Verdict  # beside the baseline
    validity: Validity
    is_barred: bool  # by its validity; its verdict is then `not ranked`

    # A row's name compares these two with those of every other row.
    @cached_property
    def setup(self) -> Setup:
        """What was trained, how and on what."""
        return self.group.setup

    @property
    def runs(self) -> list[MeasuredRun]:
        return self.group.runs

    @property
    def num_shared(self) -> int:
        """The number of its runs that others shared."""
        return sum(run.owner is not None for run in self.runs)

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.run_id for run in self.runs)

    @property
    def num_runs(self) -> int:
        return len(self.runs)

    @property
    def side(self) -> str | None:
        """The owner who shared its runs; None for the user's own row, joined or not."""
        return self.group.side

    @property
    def shared_by(self) -> tuple[str, ...]:
        """The other owners of its runs."""
        return tuple(dict.fromkeys(run.owner for run in self.runs if run.owner is not None))

    @property
    def offer(self) -> Offer:
        """How its machines were billed."""
        return self.group.runs[0].offer

    @property
    def derived(self) -> bool:
        """Whether a figure was derived from published percentages."""
        return any(run.summary.figures.derived for run in self.group.runs)

    @property
    def sources(self) -> tuple[str, ...]:
        """Where it was published."""
        sources = (run.summary.figures.source for run in self.group.runs)
        return tuple(dict.fromkeys(source for source in sources if source))

    @property
    def is_baseline(self) -> bool:
        return self.verdict.kind == BASELINE

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels of one forward pass; several texts if runs differ, empty if none recorded them."""
        kernels = (run.summary.kernels for run in self.runs)
        return tuple(dict.fromkeys(text for text in kernels if text))

    @cached_property
    def place(self) -> str:
        """The instance it ran on, else the device by its short name, such as `H100`."""
        if self.setup.instance:
            return self.setup.instance
        device = self.setup.device_name
        gpu = identify(device) if device else None
        return (gpu.name if gpu else device) or "unknown"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows beside their baselines, workload by workload."""

    rows: tuple[Row, ...]  # within a workload in order of their first runs
    baselines: Mapping[str, str]  # the baseline's recipe by workload
    #: The day of the prices; None if prices were as billed or given, or if there are none.
    prices_as_of: datetime.date | None
    warnings: tuple[str, ...] = ()  # what was left out, and why
    allow_unverified: bool = False  # whether rows that fail validity checks are ranked too
    unfit: tuple[MeasuredRun, ...] = ()  # runs left out for their problems

    @property
    def by_workload(self) -> dict[str, list[Row]]:
        """The rows of each workload."""
        workloads: dict[str, list[Row]] = {}
        for row in self.rows:
            workloads.setdefault(row.setup.workload, []).append(row)
        return workloads


def compare(
    candidates: Sequence[MeasuredRun],
    *,
    catalogue: Catalogue,
    prices: PriceRequest,
    baseline: str | None = None,
    allow_unverified: bool = False,
    any_version: bool = False,
    judges: bool = True,
) -> Comparison:
    """Compare `candidates`. baseline: a recipe's label, or a run's id, or a prefix or last part of it.

    allow_unverified: also rank rows that fail a numerics check or train to a worse loss. any_version: pool
    runs of all versions of a script. judges: without it no row is ranked; enough, and quicker, for speeds.

    Raises UnknownName for an unknown baseline, and UserError for a baseline that is not ranked or a price
    that cannot be charged.
    """
    groups, unfit = pool(list(map(without_version, candidates)) if any_version else candidates)
    warnings = [f"{c.run_id} ({c.summary.setup.recipe}) is left out: {c.summary.problems[0]}" for c in unfit]
    if baseline is not None and groups and not any(_is_named(group, baseline) for group in groups):
        raise UnknownName("baseline", baseline, {group.setup.recipe for group in groups})
    workloads: dict[str, list[Group]] = {}
    for group in groups:
        workloads.setdefault(group.setup.workload, []).append(group)

    rows: list[Row] = []
    baselines = {}
    setups = [group.setup for group in groups]
    for workload, of_workload in workloads.items():
        charged_at = []
        for group in of_workload:
            price, warning = price_row(group, prices, catalogue, beside=setups)
            warnings += [warning] if warning else []
            charged_at.append(price)
        priced = list(zip(of_workload, charged_at, strict=True))

        def beside(home: str | None, side: str | None, priced: _Priced = priced) -> list[PricedGroup]:
            """Return the rows to judge for `side`: its rows and the baseline owner's."""
            near = [(group, price) for group, price in priced if group.side in (home, side)]
            groups = [group for group, _ in near]
            named = [
                group for group in groups if group.setup.is_script and baseline and _is_named(group, baseline)
            ]
            validities = judge_validity(groups, unfit, references=named, own_region=prices.region)
            return [
                PricedGroup(group=group, price=price, validity=validity, unverified=allow_unverified)
                for (group, price), validity in zip(near, validities, strict=True)
            ]

        warnings += [*schema_warnings(of_workload), *script_warnings(of_workload)]
        home = _home(of_workload, baseline)
        at_home = beside(home, home)
        base = _baseline(at_home, baseline)
        baselines[workload] = base.group.setup.recipe
        judged: dict[int, Row] = {}
        for side in dict.fromkeys(group.side for group in of_workload):
            items = at_home if side == home else beside(home, side)
            (own_base,) = [item for item in items if item.group is base.group]
            verdicts = [UNJUDGED] * len(items)
            if judges:
                verdicts = _with_batches(items, judge(items, own_base, sides={side}), baseline, home=home)
            pairs = [pair for pair in zip(items, verdicts, strict=True) if pair[0].group.side == side]
            for item, verdict in pairs:
                if allow_unverified and item.validity.failures:
                    warnings.append(
                        f"{item.group.setup.recipe} is ranked as --allow-unverified asks, although"
                        f" {'; '.join(item.validity.failures)}"
                    )
                judged[id(item.group)] = _row(item, verdict, catalogue)
        rows += [judged[id(group)] for group in of_workload]
    if prices.as_of is None:
        charged = (row.price for row in rows if row.price and row.price.basis in ("listed", "named"))
        old = age_note((price.as_of for price in charged), prices.today)
        warnings += [old] if old else []
    return Comparison(
        rows=tuple(rows),
        baselines=baselines,
        prices_as_of=_prices_as_of(rows, prices),
        warnings=tuple(dict.fromkeys(warnings)),
        allow_unverified=allow_unverified,
        unfit=tuple(unfit),
    )


def _home(groups: Sequence[Group], baseline: str | None) -> str | None:
    """Return the owner of the baseline: the user (None) if one of the user's rows can be it.

    Shared rows are judged only beside the baseline owner's rows, so nobody's runs change a verdict on another
    owner's rows.
    """
    sides = [group.side for group in groups if baseline is not None and _is_named(group, baseline)]
    sides = sides or [group.side for group in groups]
    return None if None in sides else sides[0]


def _with_batches(
    items: Sequence[PricedGroup], verdicts: Sequence[Verdict], baseline: str | None, *, home: str | None
) -> list[Verdict]:
    """Return the verdicts; rows of another batch also get a verdict beside a baseline of that batch.

    home: the owner whose rows are baselines.
    """
    batches: dict[tuple[int | None, int | None], list[int]] = {}
    for at, verdict in enumerate(verdicts):
        if verdict.kind == OTHER_BATCH:
            batches.setdefault(_batch(items[at]), []).append(at)
    after = list(verdicts)
    for numbers in batches.values():
        alike = [items[at] for at in numbers]
        at_home = [item for item in alike if item.group.side == home]
        if not at_home:
            continue
        in_batch = judge(alike, _baseline(at_home, baseline), sides={item.group.side for item in alike})
        # Without an interval, a comparison says no more than the table.
        if any(verdict.kind not in (BASELINE, NO_INTERVAL) for verdict in in_batch):
            for at, verdict in zip(numbers, in_batch, strict=True):
                after[at] = replace(after[at], in_batch=verdict)
    return after


def batches_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return rows by batch, for other batches with a baseline, with their verdicts beside it."""
    batches: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict.in_batch:
            tokens = f" of {row.setup.sequence_length} tokens" if row.setup.sequence_length else ""
            in_batch = replace(row, verdict=row.verdict.in_batch)
            batches.setdefault(f"{row.setup.global_batch}{tokens}", []).append(in_batch)
    return batches


def _is_named(group: Group, name: str) -> bool:
    return group.setup.is_named(name) or any(
        run.run_id.startswith(name) or run.run_id.endswith(f"-{name}") for run in group.runs
    )


def _baseline(items: Sequence[PricedGroup], name: str | None) -> PricedGroup:
    """Return the named row, else a bf16 row, plain or with overrides, else the first row.

    Prefer a row with a speed, then the batch with the most rows, then the row with the most runs. A script's
    baseline is its first row, since `submit` puts the baseline first; if several of its rows were repeated,
    it is of the newest version. A barred row is the baseline only if all rows are barred. Raises UserError
    if the named row is barred.
    """
    num_rows_at = Counter(_batch(item) for item in items)
    newest = newest_version([run for item in items for run in item.group.runs])
    of_newest = [item.group for item in items if item.group.setup.version == newest]
    # One round of a new version does not replace rows that have a verdict.
    is_varied = sum(len(group.runs) > 1 for group in of_newest) > 1

    def preference(item: PricedGroup) -> tuple[int, ...]:
        recipe = item.group.setup.known_recipe
        is_named = name is not None and _is_named(item.group, name)
        return (
            is_named and not item.is_barred,
            is_named,
            not item.is_barred,
            item.group.measure is not None,
            is_varied and item.group.setup.version == newest,
            item.group.setup.recipe == DEFAULT_BASELINE,
            recipe is not None and recipe.name == DEFAULT_BASELINE,
            *(() if item.group.setup.is_script else (num_rows_at[_batch(item)], len(item.group.runs))),
        )

    base = max(items, key=preference)
    if name is not None and base.is_barred and _is_named(base.group, name):
        raise UserError(
            f"{base.group.setup.recipe} is not ranked, so it is no baseline: {base.validity.failures[0]}",
            "choose another, or rank it all the same: --allow-unverified",
        )
    return base


def baseline_of(rows: Sequence[Row]) -> Row | None:
    """Return the row to compare a workload's other rows with; prefer a measured one, on an instance type."""
    measured = [row for row in rows if row.setup.kind == "records"] or rows
    kept = [row for row in measured if row.setup.instance] or measured
    items = [
        PricedGroup(group=row.group, price=row.price, validity=row.validity, unverified=not row.is_barred)
        for row in kept
    ]
    base = _baseline(items, None) if items else None
    return next((row for row in kept if base and row.group is base.group), None)


def _batch(item: PricedGroup) -> tuple[int | None, int | None]:
    """Return what rows must share so that their training can be compared."""
    return item.group.setup.global_batch, item.group.setup.sequence_length


def _prices_as_of(rows: Sequence[Row], prices: PriceRequest) -> datetime.date | None:
    if prices.as_of is not None:
        return prices.as_of
    charged = [row.price for row in rows if row.price is not None]
    as_listed = bool(charged) and not any(price.basis in ("billed", "given") for price in charged)
    return prices.today if as_listed else None


def _row(item: PricedGroup, verdict: Verdict, catalogue: Catalogue) -> Row:
    return Row(
        group=item.group,
        price=item.price,
        speed=_speed(item.group, catalogue),
        cost=_cost(item.group, item.price),
        overhead=_overhead(item.group),
        verdict=verdict,
        validity=item.validity,
        is_barred=item.is_barred,
    )


def _overhead(group: Group) -> Overhead:
    runs = group.summaries
    memory_gib = [run.peak_memory_gib for run in runs if run.peak_memory_gib is not None]
    return Overhead(
        build_s=mean_of([run.startup.build_s for run in runs]),
        compile_s=mean_of([run.startup.compile_s for run in first_runs(runs)]),
        warmup_s=mean_of([run.timing.warmup_s for run in runs]),
        data_wait_fraction=mean_of([run.timing.data_wait_fraction for run in runs]),
        utilization=mean_of([run.timing.utilization for run in runs]),
        padding_fraction=mean_of([run.padding_fraction for run in runs]),
        peak_memory_gib=max(memory_gib, default=None),
    )


def _speed(group: Group, catalogue: Catalogue) -> Speed:
    """Return the speeds that follow from the row's time."""
    time_s = _mean_of_logs(group.log_times)
    if time_s is None or group.measure not in (STEP, SAMPLE):
        return Speed(
            step_time_s=time_s if group.measure == BARE_STEP else None,
            total_time_s=time_s if group.measure == TOTAL else None,
        )
    setup = group.setup
    sample_time_s = _mean_of_logs(group.log_sample_times)
    assert sample_time_s is not None
    rate = reciprocal(sample_time_s)
    tflops = None
    if setup.flops_per_sample:
        tflops = scaled(rate, setup.flops_per_sample / setup.num_gpus / 1e12)
    accelerator = accelerator_of(setup, catalogue)
    peaks = accelerator.peak_tflops if accelerator else {}

    def percent(precision: str | None) -> Interval | None:
        peak = peaks.get(precision or "")
        return scaled(tflops, 100.0 / peak) if tflops and peak else None

    return Speed(
        step_time_s=time_s if group.measure == STEP else None,
        samples_per_s=rate,
        tokens_per_s=_tokens_per_s(group, time_s, rate),
        tflops_per_gpu=tflops,
        percent_of_peak=percent(setup.precision),
        percent_of_bf16_peak=percent("bf16"),
        percent_of_fp8_peak=percent("fp8") if setup.precision == "fp8" else None,
    )


def _cost(group: Group, price: Price | None) -> UnitCost:
    rate, num_nodes = rate_on_type(group), group.setup.num_nodes
    if price is None or rate is None or group.measure == BARE_STEP:
        return UnitCost()
    tokens = _tokens_per_s(group, time_on_type_s(group), rate)
    samples = samples_per_usd(rate, price, num_nodes)
    return UnitCost(
        samples_per_usd=samples,
        usd_per_million_samples=reciprocal(samples, 1e6),
        usd_per_million_tokens=tokens and reciprocal(samples_per_usd(tokens, price, num_nodes), 1e6),
    )


def _mean_of_logs(times: Sequence[float]) -> Interval | None:
    """Return the geometric mean of the runs' log times; None without times.

    Its interval covers only the row's own runs, on the machines that they ran on.
    """
    return _interval(times, [_of_runs(times)])


def time_on_type_s(group: Group) -> Interval | None:
    """Return the row's time with an interval for any machine of its type, as costs and estimates use it."""
    return _interval(group.log_times, _variances_on_type(group, group.log_times))


def rate_on_type(
    group: Group, level: float = LEVEL, *, of_other_type: bool = False, is_expected: bool = False
) -> Interval | None:
    """Return samples per second on any machine of the row's type; steps per second if samples are unknown.

    level: how often the range misses. of_other_type: for another type with the same GPU, which adds the same
    variance again. is_expected: a single run has a range, too, as runs and machines usually vary, so that
    what is known less does not seem surer; else it has none, like a published figure. None for a row with
    neither samples nor steps.
    """
    times, machine = group.log_sample_times, Variance(value=MACHINE**2, dof=MACHINE_DOF)
    variances = _variances_on_type(group, times)
    if is_expected and len(times) == 1 and group.setup.kind != "published":
        variances = [summed([Variance(value=SCATTER**2, dof=SCATTER_DOF), machine])]
    if of_other_type:
        variances = [variance and summed([variance, machine]) for variance in variances]
    time_s = _interval(times, variances, level)
    if time_s is None or group.measure not in (STEP, SAMPLE, BARE_STEP):
        return None
    return reciprocal(time_s)


def _variances_on_type(group: Group, times: Sequence[float]) -> list[Variance | None]:
    # Two sessions on one machine count as one machine.
    runs = [replace(run, host=run.machine, block=None) for run in run_times(group, 0)]
    return [_of_runs(times), Differences(runs).on_type(0) if runs else None]


def _of_runs(times: Sequence[float]) -> Variance | None:
    """Return the variance of the mean log time from the runs' scatter; None for fewer than two runs."""
    if len(times) < 2:
        return None
    return Variance(value=max(FLOOR, stdev(times)) ** 2 / len(times), dof=len(times) - 1)


def _interval(
    times: Sequence[float], variances: Sequence[Variance | None], level: float = LEVEL
) -> Interval | None:
    if not times:
        return None
    mean, known = sum(times) / len(times), [variance for variance in variances if variance]
    if len(known) < len(variances):
        return Interval(value=exp(mean))
    half = half_width(known, level)
    return Interval(value=exp(mean), low=exp(mean - half), high=exp(mean + half))


def _tokens_per_s(group: Group, time_s: Interval | None, rate: Interval) -> Interval | None:
    tokens = mean_of([candidate.summary.timing.tokens_per_step for candidate in group.runs])
    if tokens and time_s and group.measure == STEP:
        return reciprocal(time_s, tokens)
    return rate if group.setup.sample_unit == "tokens" else None
