"""The columns of a comparison: one list for data, tables, Markdown and the page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Any

from fastlaunch.analysis.best import all_priced
from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.convergence import REFERENCE, LossDifference, ratio_to_same_loss
from fastlaunch.analysis.statistics import mean_of
from fastlaunch.analysis.validity import signed_percent
from fastlaunch.analysis.verdicts import OTHER_BATCH, TRAINING
from fastlaunch.core.tables import KEPT, Column
from fastlaunch.measure.summary import Interval
from fastlaunch.report.text import (
    NO_LETTERS,
    NOTHING,
    Distinctions,
    Letters,
    bought,
    dollars,
    limits,
    name_of,
    number,
    rate_of,
    rate_text,
    shown_per_usd,
    shown_unit,
    times,
    what_counts,
    with_range,
)
from fastlaunch_train.records.records import STEP_PARTS

#: The heading of the ratio to the baseline, before which the overview draws its bar.
RATIO = "x base"
_PRECISIONS_WITH_OWN_PEAK = ("fp32", "tf32", "fp16")


class Part(StrEnum):
    """The table that a column is in."""

    IDENTITY = "identity"  # in every table, to tell rows apart
    SPEED = "speed"
    COST = "cost"
    START = "start"  # before the measured steps
    STEP = "step"  # where a step's time goes
    LOSS = "loss"  # on held-out data


@dataclass(frozen=True, kw_only=True)
class RowColumn(Column[Row]):
    """A column of a comparison."""

    key: str | None = None  # its name in JSON and CSV; None: it is for people
    part: Part | None = None  # None: in no table of `compare --all`
    in_overview: bool = False  # on the screen of plain `compare`
    is_summary: bool = False  # in Markdown and on the page, where a row has its name in a cell
    # The key in report.js's `AT_PRICE` of what the cell shows at a price typed on the page; `n/a` if there is
    # no such key. None: the cell does not depend on the price.
    at_price: str | None = None


def columns_of(
    rows: Sequence[Row], only: Sequence[str] = (), letters: Letters = NO_LETTERS
) -> list[RowColumn]:
    """Return the columns of `rows`, in the order of JSON. Headings need rows of one workload.

    only: the headings to show; empty for all. letters: of the recipes in the overview.
    """
    unit = rows[0].setup.sample_unit if rows else "samples"
    rate = rate_of(rows[0])[1] if rows else f"{unit}/s"
    prices = [row.price for row in rows if row.price]
    # The heading says `prorated` if all prices are prorated, else the cells do.
    prorated = bool(prices) and all(price.hypothetical for price in prices)
    in_dollars = any(row.verdict.ratio for row in rows) and (not only or "x per $" in only)
    is_priced = all_priced(rows)
    # The overview shows, as the answer does, what a dollar buys if all rows have a price, else the rate.
    amount = RowColumn(rate, lambda row: rate_of(row)[0], format=number, align="right", in_overview=True)
    if is_priced and any(map(shown_per_usd, rows)):
        name = what_counts(rows[0], priced=True, short=True)
        amount = RowColumn(name, shown_per_usd, format=bought, align="right", in_overview=True)
    speed: dict[str, Any] = {"align": "right", "part": Part.SPEED}
    cost: dict[str, Any] = {"align": "right", "part": Part.COST}
    start: dict[str, Any] = {"align": "right", "part": Part.START, "format": "{:.1f}".format}
    quantity: dict[str, Any] = {**speed, "format": _without_range}
    in_tokens = bool(rows) and shown_unit(rows[0]).name == "tokens"
    summary: dict[str, Any] = {"is_summary": True, "at_price": "usd"}
    money: dict[str, Any] = {**cost, "format": partial(with_range, format_value=dollars)}
    return [
        RowColumn("row", lambda row: name_of(row, rows, letters=letters), is_summary=True),
        RowColumn("recipe", lambda row: name_of(row, rows, letters=letters), in_overview=True),
        RowColumn("instance", lambda row: row.place, part=Part.IDENTITY),
        *map(
            _data,
            ("setup.workload", "setup.instance", "setup.device_name", "setup.num_nodes", "setup.num_gpus"),
        ),
        _data("setup.recipe", "recipe", part=Part.IDENTITY),
        RowColumn("whose", lambda row: whose(row, rows), part=Part.IDENTITY),
        RowColumn("GPUs", _gpus, align="right", part=Part.IDENTITY, is_summary=True),
        *map(_data, ("setup.variant", "setup.version", "setup.precision")),
        _data("setup.batch_size_per_gpu", "batch", format=str, part=Part.IDENTITY, is_summary=True),
        _data("setup.data"),
        _data("setup.sequence_length", "tokens each", format=str, part=Part.IDENTITY),
        # `synthetic`, or `file 0123456789abcdef` if the record has the digest.
        RowColumn(
            "data",
            lambda row: f"{row.setup.data} {row.setup.fingerprint.get('data', '')}".strip(),
            part=Part.IDENTITY,
        ),
        RowColumn("which", Distinctions(rows).text, part=Part.IDENTITY),
        *map(_data, ("overhead.padding_fraction", "setup.kind", "derived")),
        _data("num_runs", "runs", importance=30, part=Part.SPEED, is_summary=True),
        *map(_data, ("run_ids", "shared_by")),
        _data("num_shared", key="num_shared_runs"),
        _data(
            "speed.step_time_s", "step ms", **speed, format=partial(with_range, factor=1000), is_summary=True
        ),
        _data("speed.total_time_s", "total s", **speed, format=with_range),
        # Their intervals all follow from that of the step time.
        _data("speed.samples_per_s", f"{unit}/s", importance=40, **quantity),
        RowColumn(rate, rate_text, align="right", is_summary=True),
        amount,
        _data("speed.tokens_per_s", "" if unit == "tokens" else "tokens/s", importance=20, **quantity),
        RowColumn(
            "padding",
            lambda row: row.overhead.padding_fraction or None,
            **speed,
            format="{:.0%}".format,
            importance=10,
        ),
        _data("speed.tflops_per_gpu", "TFLOP/s", importance=5, **quantity),
        *map(_data, ("speed.percent_of_peak", "speed.percent_of_bf16_peak")),
        RowColumn("% peak", _percent_of_peak, importance=15, **speed),
        _data("speed.percent_of_fp8_peak", "% fp8 peak", importance=4, **quantity),
        _data("overhead.build_s", "build s", **start),
        _data("overhead.compile_s", "compile s", **start),
        _data("overhead.warmup_s", "warm-up s", **start),
        _data("overhead.peak_memory_gib", "peak GiB", **speed, format="{:.1f}".format, importance=3),
        *map(_data, ("overhead.data_wait_fraction", "overhead.utilization")),
        *map(_step_part, STEP_PARTS),
        *map(_data, ("kernels", "offer.service", "offer.region", "offer.purchase")),
        RowColumn(
            "prorated $/h" if prorated else "$/h",
            lambda row: _usd_per_hour(row, mark=not prorated),
            **cost,
            importance=20,
            is_summary=True,
            at_price="usd_per_hour",
        ),
        _of_price("usd_per_hour", lambda price: price.usd_per_hour),
        _of_price("price_as_of", lambda price: None if price.basis == "given" else price.as_of.isoformat()),
        _of_price("price_source", lambda price: price.source),
        _of_price("price_inferred", lambda price: price.inferred),
        _of_price("price_charged_as", lambda price: price.instance if price.basis == "named" else None),
        _of_price("price_hypothetical", lambda price: price.hypothetical),
        _data("cost.usd_per_million_samples", f"$/M {unit}", **money, **({} if in_tokens else summary)),
        _data(
            "cost.usd_per_million_tokens",
            "$/M tokens",
            importance=10,
            **money,
            **(summary if in_tokens else {}),
        ),
        _data("cost.samples_per_usd"),
        _data("verdict.ratio", key="ratio_to_baseline"),
        _data("verdict.speed_ratio", key="speed_ratio_to_baseline"),
        RowColumn("x per $", lambda row: row.verdict.in_own_batch.ratio, **cost, format=_ratio_text),
        # Show the interval if it decides.
        RowColumn(
            "x speed",
            lambda row: row.verdict.in_own_batch.speed_ratio,
            importance=15 if in_dollars else KEPT,
            **cost,
            format=partial(_ratio_text, bounds=not in_dollars),
        ),
        RowColumn(
            "same loss",
            lambda row: _same_loss(row, rows),
            key="ratio_to_same_loss",
            **cost,
            format=_ratio_text,
            importance=12,
        ),
        RowColumn(
            RATIO,
            lambda row: _shown_ratio(row, is_priced=True) or _shown_ratio(row, is_priced=False),
            format=_ratio_text,
            align="right",
            is_summary=True,
            at_price="ratio",
        ),
        RowColumn(
            RATIO,
            lambda row: _shown_ratio(row, is_priced=is_priced),
            format=lambda ratio: f"{ratio.value:.3f}",
            align="right",
            in_overview=True,
        ),
        RowColumn(
            "95% interval",
            lambda row: _shown_ratio(row, is_priced=is_priced),
            format=interval_text,
            align="right",
            in_overview=True,
        ),
        _data("verdict.comparable_as"),
        _data("verdict.kind", key="verdict"),
        RowColumn("verdict", lambda row: row.verdict.words, part=Part.COST, is_summary=True),
        RowColumn("verdict", _verdict_in_batch, in_overview=True),
        _of_batch("verdict_in_batch", lambda verdict: verdict.kind),
        _of_batch("ratio_in_batch", lambda verdict: verdict.ratio or verdict.speed_ratio),
        RowColumn("", lambda row: "; ".join(row.verdict.reasons) or None, key="reason"),
        RowColumn("", lambda row: not row.is_barred, key="ranked"),
        _data("validity.failures", key="guard_failures"),
        *map(_data, ("validity.numerics", "validity.held_out", "validity.convergence")),
        *_loss_columns(rows),
        _data("sources"),
        RowColumn("", lambda row: dict(sorted(row.setup.fingerprint.items())), key="fingerprint"),
    ]


def _data(path: str, name: str = "", *, key: str | None = None, **options: Any) -> RowColumn:
    """Return a column for the attribute path of a row. name: its heading, if tables show it."""
    return RowColumn(name, attrgetter(path), key=key or path.rpartition(".")[2], **options)


def _step_part(part: str) -> RowColumn:
    def seconds(row: Row) -> float | None:
        return step_parts_s(row).get(part)

    return RowColumn(f"{part} ms", seconds, format=lambda s: f"{1000 * s:.3g}", align="right", part=Part.STEP)


def _of_price(key: str, value: Callable[[Any], object]) -> RowColumn:
    return RowColumn("", lambda row: value(row.price) if row.price else None, key=key)


def _of_batch(key: str, value: Callable[[Any], object]) -> RowColumn:
    """Return a column of the row's verdict beside the baseline of its own batch."""
    return RowColumn("", lambda row: value(row.verdict.in_batch) if row.verdict.in_batch else None, key=key)


def _loss_columns(rows: Sequence[Row]) -> list[RowColumn]:
    """Return the columns of held-out losses.

    `test` is the metric on test data with the last weights, `test, best` with the best weights on validation
    data.
    """
    figures = [row.validity.held_out for row in rows if row.validity.held_out]
    metric = next((held_out.metric for held_out in figures if held_out.metric), None)
    metrics = {metric: "metric_value", "test": "test_metric_value", "test, best": "best_test_metric_value"}
    options: dict[str, Any] = {"align": "right", "part": Part.LOSS}

    def figure(name: str, attribute: str, importance: int = KEPT) -> RowColumn:
        def value(row: Row) -> float | None:
            return getattr(row.validity.held_out, attribute, None)

        return RowColumn(name, value, format="{:.4g}".format, importance=importance, **options)

    return [
        RowColumn(
            "pairs", lambda row: _beside_reference(row, str(row.validity.convergence.num_pairs)), **options
        ),
        figure("loss", "loss"),
        RowColumn("of learnt", lambda row: _beside_reference(row, _difference(row)), **options),
        RowColumn(
            "more steps", lambda row: _beside_reference(row, _more_steps(row)), importance=20, **options
        ),
        *(figure(name, attribute, 10) for name, attribute in metrics.items() if metric and name),
        RowColumn("convergence", lambda row: row.validity.convergence.verdict, part=Part.LOSS),
    ]


def whose(row: Row, rows: Sequence[Row]) -> str | None:
    """Return the owners of the row's runs, `yours` or `yours, ann`; None if no run of `rows` was shared."""
    if not any(other.shared_by for other in rows):
        return None
    mine = "yours" if any(run.owner is None for run in row.runs) else None
    return ", ".join(filter(None, [mine, *row.shared_by]))


def _gpus(row: Row) -> str:
    per_node = row.setup.num_gpus // row.setup.num_nodes
    return f"{row.setup.num_nodes} x {per_node}" if row.setup.num_nodes > 1 else str(row.setup.num_gpus)


def _without_range(quantity: Interval | None) -> str | None:
    return with_range(quantity and Interval(value=quantity.value))


def _percent_of_peak(row: Row) -> str | None:
    """Return the percentage of the bf16 peak; for fp32, tf32 and fp16, of their own peak."""
    if row.setup.precision in _PRECISIONS_WITH_OWN_PEAK:
        percent_text = _without_range(row.speed.percent_of_peak)
        return percent_text and f"{percent_text} ({row.setup.precision})"
    return _without_range(row.speed.percent_of_bf16_peak)


def step_parts_s(row: Row) -> dict[str, float]:
    """Return the seconds of a step by part, as means over the row's profiled runs; empty without any."""
    profiles = [run.summary.profile.parts_s for run in row.runs if run.summary.profile]
    means = {part: mean_of([parts.get(part) for parts in profiles]) for part in STEP_PARTS}
    return {part: seconds for part, seconds in means.items() if seconds is not None}


def _usd_per_hour(row: Row, *, mark: bool) -> str | None:
    """Return the hourly price of all nodes. mark: whether to mark a prorated price."""
    if row.price is None:
        return None
    hypothetical = "prorated " if mark and row.price.hypothetical else ""
    inferred = "~" if row.price.inferred else ""
    return f"{hypothetical}{inferred}{dollars(row.price.usd_per_hour * row.setup.num_nodes)}"


def _verdict_in_batch(row: Row) -> str | None:
    """Return the verdict within the row's batch; the title above rows of other batches says that."""
    kind = row.verdict.in_own_batch.kind
    return None if kind == OTHER_BATCH else kind


def _shown_ratio(row: Row, *, is_priced: bool) -> Interval | None:
    """Return the ratio to the baseline of the row's batch; None if its batch has none."""
    verdict = row.verdict.in_own_batch
    return None if verdict.kind == OTHER_BATCH else verdict.ratio if is_priced else verdict.speed_ratio


def _ratio_text(ratio: Interval, *, bounds: bool = True) -> str:
    # The baseline's ratio to itself is exactly 1.
    has_limits = bounds and ratio.low != ratio.high
    return times(ratio.value) + (limits(ratio, 1.0, times) if has_limits else "")


def interval_text(ratio: Interval) -> str | None:
    """Return `1.650 to 1.696`; None without an interval, or for the baseline beside itself."""
    return None if ratio.low == ratio.high else ratio.range_text(times) or None


def _beside_reference(row: Row, text: str | None) -> str | None:
    return NOTHING if row.validity.convergence.verdict == REFERENCE else text


def _difference(row: Row) -> str | None:
    """Return the difference to the reference's loss: `+0.4% (-0.1 to +0.9)` of what the reference learnt."""
    end: LossDifference | None = row.validity.convergence.end
    return None if end is None else _percents(*map(end.relative, (end.mean, end.low, end.high)))


def _more_steps(row: Row) -> str | None:
    """Return the steps that make up for the difference: `+2.4% (+1.9 to +2.9)` of the row's steps."""
    end: LossDifference | None = row.validity.convergence.end
    return None if end is None else _percents(*map(end.more_steps, (end.mean, end.low, end.high)))


def _percents(value: float | None, low: float | None, high: float | None) -> str | None:
    text, *ends = map(signed_percent, (value, low, high))
    lower, higher = (end and end.removesuffix("%") for end in ends)
    return text if text is None or lower is None else f"{text} ({lower} to {higher})"


def _same_loss(row: Row, rows: Sequence[Row]) -> Interval | None:
    """Return the ratio to the baseline where both train to one loss, if the baseline is the reference."""
    ratio, reference = row.verdict.ratio or row.verdict.speed_ratio, row.validity.convergence.reference
    is_reference = any(other.is_baseline and other.setup.recipe == reference for other in rows)
    if not ratio or not is_reference or row.verdict.comparable_as != TRAINING:
        return None
    return ratio_to_same_loss(ratio, row.validity.convergence)
