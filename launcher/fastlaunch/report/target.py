"""The cost of training to a target, as a text table and plain data."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastlaunch.analysis.account import WORDS
from fastlaunch.analysis.compare import Comparison
from fastlaunch.analysis.rate import rate_of_row
from fastlaunch.analysis.target import (
    LOSS,
    MIN_SEEDS,
    Margin,
    RowToTarget,
    Target,
    are_on_other_data,
    margins,
    parse_target,
    to_target,
)
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.tables import KEPT, WIDTH, Column, table
from fastlaunch.core.terminal import filled
from fastlaunch.measure.summary import Interval
from fastlaunch.report.cost import assumed_note, beside_assumed, evidence_text, volume_prices
from fastlaunch.report.data import fields_to_json, place_to_json, quantity_to_json
from fastlaunch.report.text import (
    NO_LETTERS,
    UNKNOWN,
    Labels,
    about,
    at_a_glance,
    between,
    bulleted,
    dollars,
    letters_of,
    name_of,
    number,
    span,
    times,
    where_of,
    with_range,
)


def target_table(comparison: Comparison, target: str, catalogue: Catalogue, *, width: int = WIDTH) -> str:
    """Return a table of the seeds that reached `target`, such as `loss=2.5`, with times and costs.

    Raises UserError for an invalid target, an unknown metric, or if no run was evaluated.
    """
    goal = parse_target(target)
    results = _by_workload(comparison, goal, catalogue)
    return "\n\n".join(_section(of_workload, goal, width) for of_workload in results.values())


def target_json(comparison: Comparison, target: str, catalogue: Catalogue) -> dict[str, Any]:
    """Return the content of the table as plain data; docs/reference.md describes its shape."""
    goal = parse_target(target)
    results = _by_workload(comparison, goal, catalogue)
    return {
        "metric": goal.metric,
        "value": goal.value,
        "workloads": [_to_json(workload, of_workload, goal) for workload, of_workload in results.items()],
    }


def _by_workload(
    comparison: Comparison, target: Target, catalogue: Catalogue
) -> dict[str, list[RowToTarget]]:
    """Return the rows by workload: ranked ones by the mean, then the others by the seeds that reached it."""
    workloads: dict[str, list[RowToTarget]] = {}
    for result in to_target(comparison, target, volume_prices(comparison, catalogue)):
        workloads.setdefault(result.row.setup.workload, []).append(result)
    return workloads


def _ordered(results: Sequence[RowToTarget], target: Target) -> list[RowToTarget]:
    """Return ranked rows first, the best first, then the others by the share of seeds that reached it."""
    behind = margins(results, target)
    place = {id(margin.other): number for number, margin in enumerate(behind, start=1)}

    def key(result: RowToTarget) -> tuple[bool, int, tuple[float, float]]:
        return not result.is_ranked, place.get(id(result), 0), _distance(result, target)

    return sorted(results, key=key)


def _distance(result: RowToTarget, target: Target) -> tuple[float, float]:
    """Return numbers that are lower the closer the row came: seeds that failed, and its best score."""
    scores = [run.best if target.metric == LOSS else -run.best for run in result.runs if run.best is not None]
    return -result.num_reached / result.num_seeds, min(scores, default=math.inf)


def _section(results: Sequence[RowToTarget], target: Target, width: int) -> str:
    rows = [result.row for result in results]
    letters = letters_of(rows)
    sentence = _sentence(results, target, letters.in_words)
    known = {_evidence(result) for result in results if result.time_s}
    evidence = f", {known.pop()}" if len(known) == 1 else ""
    parts = [
        filled(f"{sentence}.", width),
        f"{rows[0].setup.workload}{where_of(rows)}: to {target.text} on held-out data{evidence}",
        table(_ordered(results, target), _columns(results, letters), width, rule=True, missing=UNKNOWN),
        letters.legend(width),
        bulleted(list(notes(results, target, letters)), width),
    ]
    return "\n\n".join(filter(None, parts))


def _columns(results: Sequence[RowToTarget], letters: Labels) -> list[Column[RowToTarget]]:
    rows = [result.row for result in results]

    def right(name: str, value: Callable[[RowToTarget], str | None], importance: int = KEPT) -> Any:
        return Column(name, value, align="right", importance=importance)

    def steps(result: RowToTarget) -> list[float]:
        return [run.step or 0 for run in result.runs if run.step is not None]

    def best(result: RowToTarget) -> list[float]:
        return [run.best for run in result.runs if run.best is not None]

    is_one_batch = len({row.setup.global_batch for row in rows}) == 1
    is_one_evidence = len({_evidence(result) for result in results if result.time_s}) == 1
    return [
        Column("row", lambda result: name_of(result.row, rows, letters=letters)),
        right("batch", lambda result: None if is_one_batch else str(result.row.setup.global_batch)),
        right("reached", lambda result: f"{result.num_reached} of {result.num_seeds}"),
        right("best", lambda result: span(best(result), "{:.4g}".format), 20),
        right("steps", lambda result: span(steps(result), about), 15),
        right("seconds", lambda result: span(list(result.times_s.values()), number), 10),
        right("mean s", lambda result: with_range(_beside_assumed(result.time_s, result))),
        right("$", lambda result: with_range(_beside_assumed(result.usd, result), format_value=dollars)),
        # If it is the same in all rows, the heading has it.
        Column("evidence", lambda result: None if is_one_evidence else _evidence(result), importance=30),
    ]


def _evidence(result: RowToTarget) -> str | None:
    """Return how the time is known; None without a mean."""
    rate = rate_of_row(result.row) if result.time_s else None
    return evidence_text(rate.evidence, result.assumed_s) if rate else None


def _beside_assumed(quantity: Interval | None, result: RowToTarget) -> Interval | None:
    """Return the mean time or its dollars, without the range if more than that is assumed."""
    if quantity is None or result.time_s is None:
        return None
    share = sum(result.assumed_s.values()) / result.time_s.value
    return beside_assumed(quantity, share * quantity.value)


def _sentence(results: Sequence[RowToTarget], target: Target, letters: Labels = NO_LETTERS) -> str:
    """Return which row reaches the target first, or for least, and how certain that is; else the closest."""
    rows = [result.row for result in results]
    ranked = [result for result in results if result.is_ranked]
    if not ranked:
        return _closest(results, target, letters)
    if are_on_other_data(ranked, target):
        return "the rows were evaluated on different data or tokens, so they are not compared"
    behind = margins(ranked, target)
    best = behind[0].best if behind else ranked[0]
    in_dollars = all(result.usd_per_s for result in ranked)

    def took(result: RowToTarget) -> str:
        assert result.time_s is not None
        if in_dollars and result.usd:
            return f"reaches {target.text} for ${dollars(result.usd.value)}"
        return f"reaches {target.text} after {number(result.time_s.value)} s"

    name = name_of(best.row, rows, letters=letters)
    if not behind:
        return f"{name} {took(best)}, the mean of {best.num_seeds} seeds"
    second = behind[0]
    other = name_of(second.other.row, rows, beside=best.row, letters=letters)
    unsure = "" if second.is_settled else "not settled: "
    return at_a_glance(
        f"{unsure}{name} {took(best)}; {other} {_margin_text(second, in_dollars=in_dollars)}",
        f"{unsure}{name} {took(best)}, {other} {times(second.ratio.value)}x{between(second.ratio)}",
    )


def _margin_text(margin: Margin, *, in_dollars: bool) -> str:
    verb, much = ("costs", "much") if in_dollars else ("takes", "long")
    return f"{verb} {times(margin.ratio.value)}x as {much}{between(margin.ratio)}"


def _closest(results: Sequence[RowToTarget], target: Target, letters: Labels = NO_LETTERS) -> str:
    """Return that no row reached the target with enough seeds, and which came closest."""
    rows = [result.row for result in results]
    closest = min(results, key=lambda result: _distance(result, target))
    name, seeds = name_of(closest.row, rows, letters=letters), f"{closest.num_reached} of {closest.num_seeds}"
    noun = "rounds" if closest.row.setup.is_script else "seeds"
    if closest.num_reached == closest.num_seeds:
        answer = f"no row that reached {target.text} can be ranked"
        if closest.reason is None:
            return f"{answer}: {name} is {closest.row.verdict.kind}"
        # The notes say what it takes.
        has_few = closest.num_seeds < MIN_SEEDS
        reasons = (closest.reason, *([f"{closest.num_seeds} of {MIN_SEEDS} {noun}"] if has_few else []))
        return at_a_glance(*(f"{answer}: {name}, {reason}" for reason in reasons))
    counts = {result.num_seeds for result in results}
    all_seeds = f"all {counts.pop()} {noun}" if len(counts) == 1 else f"all its {noun}"
    best = [run.best for run in closest.runs if run.best is not None]
    if closest.num_reached:
        how = seeds
    else:
        how = f"best {(min if target.metric == LOSS else max)(best):.4g}" if best else "no score"
    with_seeds = (f" with {all_seeds}", "")
    return at_a_glance(
        *(f"no row reached {target.text}{seeds}; closest: {name}, {how}" for seeds in with_seeds)
    )


def notes(results: Sequence[RowToTarget], target: Target, letters: Labels = NO_LETTERS) -> Iterator[str]:
    """Yield the margins after the first, why rows have no mean, and what the times assume and leave out."""
    rows = [result.row for result in results]
    ranked = [result for result in results if result.is_ranked]
    in_dollars = all(result.usd_per_s for result in ranked)
    for margin in margins(results, target)[1:]:
        open_end = "" if margin.is_settled else ": not settled"
        name = name_of(margin.other.row, rows, letters=letters)
        yield f"{name} {_margin_text(margin, in_dollars=in_dollars)}{open_end}"
    for result in results:
        name = name_of(result.row, rows, letters=letters)
        # The runs that stopped before both their last step and the target.
        ends = dict.fromkeys(run.status for run in result.runs if run.step is None)
        if others := [status for status in ends if status != "completed"]:
            yield f"{name}: the other runs ended as {', '.join(others)}"
        # The table already says how many seeds reached it.
        elif result.reason is not None and result.num_reached in (0, result.num_seeds):
            if result.num_reached or all(run.best is None for run in result.runs):
                yield f"{name}: n/a, {result.reason}"
        elif result.time_s and result.row.is_barred:
            yield f"{name} is {result.row.verdict.kind}, so it is not compared"
    if not any(result.time_s for result in results):
        return
    waits = [run.waited_steps for result in results for run in result.runs if run.waited_steps is not None]
    late = f"up to {about(max(waits))} steps late"
    yield f"a target counts as reached at the first evaluation that shows it, {late}"
    unknown = dict.fromkeys(
        part
        for result in results
        for run in result.runs
        for part in run.unknown
        if part not in result.assumed_s
    )
    if unknown:
        yield f"not included in seconds where unknown: {', '.join(WORDS.get(p, p) for p in unknown)}"
    if any(time.low is not None for result in results if (time := _beside_assumed(result.time_s, result))):
        yield "± is a 90% range over the seeds"
    yield from assumed_note({part: s for result in results for part, s in result.assumed_s.items()})


def _to_json(workload: str, results: Sequence[RowToTarget], target: Target) -> dict[str, Any]:
    return {
        "workload": workload,
        "sentence": _sentence(results, target),
        "rows": [_row_to_json(result) for result in results],
        "margins": [
            {
                "best": place_to_json(margin.best.row),
                "other": place_to_json(margin.other.row),
                "ratio": quantity_to_json(margin.ratio),
                "settled": margin.is_settled,
            }
            for margin in margins(results, target)
        ],
        "notes": list(notes(results, target)),
    }


def _row_to_json(result: RowToTarget) -> dict[str, Any]:
    row, usd = result.row, result.usd
    rate = rate_of_row(row) if usd else None
    return {
        **place_to_json(row),
        "global_batch": row.setup.global_batch,
        **fields_to_json(result, "num_seeds", "num_reached"),
        "time_to_target_s": quantity_to_json(result.time_s),
        "samples_to_target": quantity_to_json(result.samples),
        "usd_to_target": quantity_to_json(usd),
        "evidence": _evidence(result) if rate else None,
        "source": rate.source if rate else None,
        "usd_per_hour": row.price.usd_per_hour if row.price else None,
        "reason": result.reason,
        "ranked": result.is_ranked,
        "runs": [
            {
                **fields_to_json(run, "run_id", "seed", "status", "best"),
                "last_evaluated_step": run.last_step,
                **fields_to_json(run, "step", "time_s", "unknown"),
            }
            for run in result.runs
        ],
    }
