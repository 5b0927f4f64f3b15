"""A comparison in words: the answer, the names of rows, numbers with their ranges, and notes on rows."""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from types import MappingProxyType
from typing import Any

from fastlaunch.analysis.best import Best, all_priced, at_home, best_of, ratio_of
from fastlaunch.analysis.compare import Comparison, Row, batches_of
from fastlaunch.analysis.convergence import TOO_SHORT
from fastlaunch.analysis.convergence import UNKNOWN as CONVERGENCE_UNKNOWN
from fastlaunch.analysis.notes import Note, NoteKind
from fastlaunch.analysis.pooling import BARE_STEP, TOTAL
from fastlaunch.analysis.pricing import reciprocal, scaled
from fastlaunch.analysis.statistics import BETTER, TIE, UNRESOLVED, WORSE
from fastlaunch.analysis.validity import FORWARD_ONLY
from fastlaunch.analysis.verdicts import NO_INTERVAL, NOT_RANKED, OTHER_BATCH, THROUGHPUT, TRAINING, is_single
from fastlaunch.catalog.hardware import identify
from fastlaunch.catalog.prices import Price
from fastlaunch.core.tables import WIDTH
from fastlaunch.core.units import counted, first_names
from fastlaunch.measure.summary import VERSION, Interval, Setup
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import OVERRIDABLE

NONE = "none"
UNKNOWN = "n/a"
#: The text of a cell that does not apply to its row.
NOTHING = "-"
#: The widest half-interval to show as symmetric.
_EVEN = 0.1
#: An answer of more words is said shorter: it is read at a glance.
MOST_WORDS = 20
#: A recipe's label that is longer gets letters for its overrides in a narrow table.
_LONG_LABEL = 24
#: Reasons why a row with a higher figure than the best is not the answer.
_WHY_LEFT_OUT = {
    NO_INTERVAL: "has no interval",
    NOT_RANKED: "is not ranked",
    OTHER_BATCH: "trains with another batch",
}


#: Labels a recipe in a sentence or a table.
Labels = Callable[[Recipe | str], str]


class Letters:
    """Recipes' labels for a narrow table: a letter for each override, `fp8-fused +l`, where one is long."""

    def __init__(
        self,
        recipes: Iterable[Recipe | str] = (),
        *,
        shorter: Mapping[Recipe | str, Recipe | str] = MappingProxyType({}),
    ) -> None:
        """shorter: by recipe, what to label in its place."""
        self._shorter = shorter
        known = [recipe for recipe in recipes if isinstance(recipe, Recipe)]
        is_long = any(len(recipe.label) > _LONG_LABEL for recipe in known)
        overrides = dict.fromkeys(override for recipe in known for override in recipe.overrides if is_long)
        self._letters: dict[tuple[str, str], str] = {}
        for field, value in overrides:
            turn = 1 + sum(other == field for other, _ in self._letters)
            self._letters[field, value] = f"{_LETTERS[field]}{turn if turn > 1 else ''}"
        self._alike = Counter((recipe.name, len(recipe.overrides)) for recipe in dict.fromkeys(known))

    def __call__(self, recipe: Recipe | str) -> str:
        recipe = self._shorter.get(recipe, recipe)
        if isinstance(recipe, str):
            return recipe
        if not recipe.overrides or not self._letters:
            return recipe.label
        return f"{recipe.name} +{'+'.join(self._letters[override] for override in recipe.overrides)}"

    def in_words(self, recipe: Recipe | str) -> str:
        """Return `fp8-fused (three options)`, for a sentence above the legend; one option is spelt out."""
        recipe = self._shorter.get(recipe, recipe)
        if isinstance(recipe, str):
            return recipe
        number = len(recipe.overrides)
        if not self._letters or number < 2 or self._alike[recipe.name, number] > 1:
            return recipe.label
        return f"{recipe.name} ({_NUMBERS[number] if number < len(_NUMBERS) else number} options)"

    def legend(self, width: int | None = None) -> str:
        """Return `o: optimizer_impl=fused, s: step_graph=true` in lines of `width`; empty without letters."""
        entries = [
            f"{letter}:\N{NO-BREAK SPACE}{field}={value}" for (field, value), letter in self._letters.items()
        ]
        text = ", ".join(entries)
        lines = textwrap.fill(text, width, break_on_hyphens=False) if width else text
        return lines.replace("\N{NO-BREAK SPACE}", " ")


#: Spells every override out.
NO_LETTERS = Letters()


def _letters_of_fields() -> dict[str, str]:
    """Return a letter for each field of a recipe, one of its name if any is free."""
    letters: dict[str, str] = {}
    for field in dict.fromkeys((*_OFTEN_SET, *OVERRIDABLE)):
        free = set(ascii_letters) - set(letters.values())
        letters[field] = next(letter for letter in (*field, *ascii_letters) if letter in free)
    return letters


#: The fields that choose their letters first.
_OFTEN_SET = (
    *("dgrad_accumulation", "last_block", "weight_cast", "optimizer_impl", "parameter_dtype", "step_graph"),
    *("grad_accumulation", "compile_mode", "activation_checkpointing"),
)
#: The letter of each field, the same on all screens.
_LETTERS = _letters_of_fields()
#: Numbers of options in a sentence.
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


def answer_to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the answer as plain data; for several workloads, answers by workload."""
    answers = {workload: _answer_of(rows) for workload, rows in comparison.by_workload.items()}
    return next(iter(answers.values())) if len(answers) == 1 else answers


def _answer_of(rows: Sequence[Row]) -> dict[str, Any]:
    best = best_of(rows)
    ratio = best.ratio if best else None
    return {
        "sentence": sentence_of(rows),
        "second": " ".join(second_of(rows)) or None,
        "asides": asides_of(rows),
        "best": name_of(best.row, rows) if best and best.row else None,
        "runner_up": name_of(best.runner_up, rows) if best and best.runner_up else None,
        "ratio": vars(ratio) if ratio else None,
        "settled": best.is_settled if best else False,
        "may_be_best": [name_of(row, rows) for row in best.may_be_best] if best else [],
    }


def at_a_glance(*answers: str) -> str:
    """Return the first answer, from the longest to the shortest, that is read at a glance; else the last."""
    return next((answer for answer in answers if len(answer.split()) <= MOST_WORDS), answers[-1])


def sentence_of(rows: Sequence[Row], letters: Labels = NO_LETTERS) -> str:
    """Return the answer for one workload in a sentence: what, where, how much, how sure."""
    home = at_home(rows)
    best = best_of(home)
    return at_a_glance(*(f"{_clause(home, best, letters, short=short)}." for short in (False, True)))


def second_of(rows: Sequence[Row], letters: Labels = NO_LETTERS) -> list[str]:
    """Return a sentence on the rows that may be better than the answer's, else on the second best.

    Return none if the answer itself is about that row, or has no best.
    """
    home = at_home(rows)
    best = best_of(home)
    if best is None or best.row is None:
        return []
    named, runner_up = (id(best.first), id(best.second)), best.runner_up
    rivals = [row for row in best.may_be_best if id(row) not in named]
    is_next = runner_up is (rivals[0] if rivals else runner_up)
    behind = _less(best.ratio) if best.ratio and is_next else ""
    if rivals:
        names = first_names([name_of(row, home, letters=letters) for row in rivals], _MOST_NAMES)
        if len(rivals) == 1 and rivals[0].verdict.kind == NO_INTERVAL:
            behind = f" ({rivals[0].verdict.reasons[0]})"
        return [f"Not settled against {names}{behind}."]
    if best.kind != BETTER or runner_up is None or id(runner_up) in named:
        return []
    return [f"Second: {name_of(runner_up, home, letters=letters)}{behind}; settled."]


def _less(ratio: Interval) -> str:
    """Return `, 1.6% less (95% interval 0.9 to 2.3%)`; without the interval if it is not all below."""
    value, *limits = (100 - 100 / of if of else 0.0 for of in (ratio.value, ratio.low, ratio.high))
    digits = 0 if value >= 9.95 else 1
    if value < 0.05:
        return ""
    low, high = (f"{limit:.{digits}f}" for limit in limits)
    interval = f" (95% interval {low} to {high}%)" if min(limits) > 0 and low != high else ""
    return f", {value:.{digits}f}% less{interval}"


def asides_of(rows: Sequence[Row], letters: Letters = NO_LETTERS, *, with_batches: bool = True) -> list[str]:
    """Return sentences on what stands beside the answer: unranked rows, shared rows, and other batches."""
    home = at_home(rows)
    best = best_of(home)
    return [
        *_beside(home, best, letters),
        *(_of_others(rows, letters) if len(home) < len(rows) else []),
        *(
            f"global batch {batch}: {_clause(of, best_of(of), letters)}"
            for batch, of in (batches_of(home).items() if with_batches else ())
        ),
    ]


def convergence_of(rows: Sequence[Row], letters: Labels = NO_LETTERS) -> list[str]:
    """Return a note on the best row if it is not known to train as well as the reference."""
    best = best_of(at_home(rows))
    base = next((row for row in rows if row.is_baseline), None)
    return doubt_of(best.first, base.setup, letters) if best and base else []


def doubt_of(row: Row, base: Setup, letters: Labels = NO_LETTERS) -> list[str]:
    """Return a note that the row is not known to train as well as the reference, and why; none if it is.

    base: stands for a reference that is missing.
    """
    convergence = row.validity.convergence
    reference = convergence.reference or base.recipe
    is_known = convergence.verdict not in (CONVERGENCE_UNKNOWN, TOO_SHORT)
    if is_known or row.setup.sample_unit == FORWARD_ONLY or row.setup.recipe == reference:
        return []
    why = f": {convergence.missing[0]}" if convergence.missing and not convergence.num_pairs else ""
    names = {setup.recipe: letters(setup.known_recipe or setup.recipe) for setup in (base, row.setup)}
    name = names[row.setup.recipe]
    records_none = row.setup.is_script and not row.validity.held_out
    how = "; record it with fl.evaluate(loss=...)" if records_none else ""
    return [f"whether {name} trains as well as {names.get(reference, reference)} is not known{why}{how}"]


def shared_options(rows: Sequence[Row]) -> dict[str, str]:
    """Return the options that all of several recipes or variants have, if each has a name without them."""
    options = {row.setup.recipe: _options(row) for row in rows}
    common = set.intersection(*(set(of.items()) for of in options.values()))
    # A recipe has a name without its options, a variant has not.
    is_nameless = rows[0].setup.is_script and any(len(of) == len(common) for of in options.values())
    if len(options) < 2 or is_nameless:
        return {}
    return {name: text for name, text in _options(rows[0]).items() if (name, text) in common}


def _options(row: Row) -> dict[str, str]:
    recipe = row.setup.known_recipe
    return dict(row.setup.variant if row.setup.is_script else recipe.overrides if recipe else ())


def letters_of(rows: Sequence[Row], *, under_heading: bool = False) -> Letters:
    """Return the letters for the recipes of `rows`, from the best on.

    under_heading: leave out the options that `heading` has.
    """
    priced = all_priced(rows)
    ratios = {id(row): ratio.value for row in rows if (ratio := _ratio(row, priced))}
    ordered = sorted(rows, key=lambda row: -ratios.get(id(row), 0.0))
    shared = shared_options(rows) if under_heading else {}
    shorter: dict[Recipe | str, Recipe | str] = {}
    for row in ordered:
        recipe = row.setup.known_recipe or row.setup.recipe
        others = [(name, text) for name, text in _options(row).items() if name not in shared]
        if isinstance(recipe, Recipe):
            shorter[recipe] = replace(recipe, overrides=tuple(others))
        else:
            shorter[recipe] = " ".join(map("=".join, others)) if shared else recipe
    return Letters(shorter.values(), shorter=shorter)


def answer(comparison: Comparison, *, lettered: bool = False, with_second: bool = False) -> str:
    """Return the answer, with a sentence on its own line for each workload.

    lettered: count the options of a recipe that the overview below it spells in its legend. with_second: add
    the sentence of `second_of` on a line of its own.
    """
    lines = []
    for workload, rows in comparison.by_workload.items():
        letters = letters_of(rows, under_heading=True).in_words if lettered else NO_LETTERS
        of, indent = (f"{workload}: ", "  ") if len(comparison.by_workload) > 1 else ("", "")
        lines.append(f"{of}{sentence_of(rows, letters)}")
        lines += [f"{indent}{sentence}" for sentence in second_of(rows, letters) if with_second]
    return "\n".join(lines)


def _clause(rows: Sequence[Row], best: Best | None, letters: Labels, *, short: bool = False) -> str:
    """Return which row is best, or why none is. short: `518,000 images/$, 2.101x bf16` in place of words."""
    unbarred = [row for row in rows if not row.is_barred]
    if best is None and unbarred:
        base = next(row for row in unbarred if row.is_baseline)
        return f"{name_of(base, rows, letters=letters)} gives no speed that others can be compared with"
    if best is None:
        return f"nothing is ranked: {name_of(rows[0], rows, letters=letters)}, {rows[0].validity.failures[0]}"
    first, second, priced = best.first, best.second, best.is_priced
    name, amount = f"{name_of(first, rows, letters=letters)}{where_of(rows)}", amount_of(best)
    if priced and first.price and first.price.other_gpu:
        name += f" (charged as {first.price.other_gpu})"
    counts, is_rate = what_counts(first, priced, short=short), priced or amount is not None
    if amount is not None:
        says = f"{name}{':' if short else ' gives'} {amount} {counts}"
    else:
        says = f"{name} {'gives the most' if priced else 'is the fastest'}"
    if second is None:
        if all(row is first for row in unbarred):
            return says
        if any(row.verdict.comparable_as == THROUGHPUT for row in unbarred):
            return f"{says}; the other rows train with another global batch"
        return f"{says}; nothing else here has a speed to compare"
    ratio, parts = _ratio(first, priced), _parts_beside(first, second, rows, letters)
    other = " ".join(parts.values())
    if best.kind == TIE:
        return f"{name} and {other} give the same {what_counts(second, priced)} within 2%"
    if best.kind == UNRESOLVED:
        by = f"{times(_value(first, priced))}x"
        if short:
            return f"not settled: {name} gives {by} the {counts} of {other}{between(ratio)}"
        return f"not settled whether {name} gives more {counts} than {other}: {by}{between(ratio)}"
    share = _value(first, priced) / _value(second, priced)
    more = f"{says}, {_times_that(share, parts, is_rate=is_rate, short=short)}"
    if best.kind == NO_INTERVAL:
        if not (is_single(first.group) and is_single(second.group)):
            return f"{more}, without an interval"
        return f"{more}, {'one run each' if short else 'from one run each, without an interval'}"
    unsettled = "; best not settled" if len(best.may_be_best) > 1 else ""
    if best.kind == BETTER:
        return f"{more}{between(ratio)}{unsettled}"
    of_second = _ratio(second, priced)
    assert best.kind == WORSE and of_second is not None
    return f"{more}{between(reciprocal(of_second))}{unsettled}"


def amount_of(best: Best) -> str | None:
    """Return what the best row gives of what `what_counts` names, per dollar to three digits: `518,000`.

    None if that is not known.
    """
    if not best.is_priced:
        rate, _ = rate_of(best.first)
        return None if rate is None else number(rate)
    per_usd = shown_per_usd(best.first)
    return None if per_usd is None else bought(per_usd)


def bought(amount: float) -> str:
    """Return to three digits what a dollar buys: `518,000`, `41.6`."""
    return about(amount) if amount >= 99.95 else number(amount)


def where_of(rows: Sequence[Row]) -> str:
    """Return ` on H200`, the one instance type or GPU of all rows; empty where names say it, or on a CPU."""
    places = {row.place for row in rows}
    is_named = rows[0].setup.instance is not None or identify(rows[0].place) is not None
    return f" on {places.pop()}" if len(places) == 1 and is_named else ""


def _beside(rows: Sequence[Row], best: Best | None, letters: Letters) -> list[str]:
    """Return a sentence on the best figure without a rank, if it is above the answer's."""
    if best is None:
        return []
    # If a row stands alone, the sentence itself mentions the others.
    kinds = {*_WHY_LEFT_OUT} if best.second else {NOT_RANKED}
    # A comparison by figures already includes rows without an interval.
    kinds -= {NO_INTERVAL} if best.kind == NO_INTERVAL else set()
    left_out = [row for row in rows if row.verdict.kind in kinds]
    other, aside = _shows_more(left_out, best, rows, all_priced(rows), letters)
    return [f"{aside}, but {_WHY_LEFT_OUT[other.verdict.kind]}"] if other else []


def _of_others(rows: Sequence[Row], letters: Letters) -> list[str]:
    """Return a sentence on the best figure among shared rows, if it is above the answer's."""
    best = best_of(rows)
    if best is None:
        return []
    shared = [row for row in rows if row.side != best.first.side]
    ranked = [row for row in shared if row.verdict.kind not in (NOT_RANKED, OTHER_BATCH)]
    other, aside = _shows_more(ranked, best, rows, best.is_priced, letters)
    return [aside] if other else []


def _shows_more(
    others: Sequence[Row], best: Best, rows: Sequence[Row], is_priced: bool, letters: Letters
) -> tuple[Row | None, str]:
    """Return the row with the best figure and a sentence on it; None if it is not above the best row's."""
    answer = best.row or best.first
    known = [row for row in others if _ratio(row, is_priced)]
    other = max(known, key=lambda row: _value(row, is_priced), default=None)
    if other is None or _ratio(answer, is_priced) is None:
        return None, ""
    share = _value(other, is_priced) / _value(answer, is_priced)
    than = _parts_beside(other, answer, rows, letters)
    says = f"{name_of(other, rows, letters=letters)} shows {_times_that(share, than)}"
    return (other, says) if share > 1.005 else (None, "")


def what_counts(row: Row, priced: bool, *, short: bool = False) -> str:
    """Return `images per dollar`, in short `images/$`, or `images/s` if some row has no price."""
    unit = rate_of(row)[1]
    return f"{unit.partition('/')[0]}{'/$' if short else ' per dollar'}" if priced else unit


@dataclass(frozen=True, kw_only=True)
class ShownUnit:
    """What is counted for people, and how many of it are in a sample."""

    name: str
    per_sample: float = 1.0


def shown_unit(row: Row) -> ShownUnit:
    """Return the unit of the row's samples; tokens for sequences, which are of any length."""
    tokens, samples = row.speed.tokens_per_s, row.speed.samples_per_s
    if row.setup.is_of_sequences and tokens and samples:
        return ShownUnit(name="tokens", per_sample=tokens.value / samples.value)
    return ShownUnit(name=row.setup.sample_unit)


def shown_rate(row: Row) -> Interval | None:
    """Return how many of its unit the row trains on in a second."""
    rate = row.speed.samples_per_s
    return rate and scaled(rate, shown_unit(row).per_sample)


def shown_cost(row: Row) -> Interval | None:
    """Return the USD for a million of the row's unit."""
    usd = row.cost.usd_per_million_samples
    return usd and scaled(usd, 1 / shown_unit(row).per_sample)


def shown_per_usd(row: Row) -> float | None:
    """Return how many of its unit the row trains on for a dollar."""
    per_usd = row.cost.samples_per_usd
    return None if per_usd is None else per_usd.value * shown_unit(row).per_sample


def rate_of(row: Row) -> tuple[float | None, str]:
    """Return `625, "images/s"`; `"steps/s"` if samples are unknown, `"runs/h"` without steps."""
    speed = row.speed
    if row.group.measure == BARE_STEP and speed.step_time_s:
        return 1 / speed.step_time_s.value, "steps/s"
    if row.group.measure == TOTAL and speed.total_time_s:
        return 3600 / speed.total_time_s.value, "runs/h"
    rate = shown_rate(row)
    return rate.value if rate else None, f"{shown_unit(row).name}/s"


def rate_text(row: Row) -> str | None:
    """Return the rate of `rate_of` with its range; None without a rate."""
    rate, _ = rate_of(row)
    return with_range(shown_rate(row)) or (None if rate is None else f"{rate:.3g}")


def _ratio(row: Row, priced: bool) -> Interval | None:
    return ratio_of(row, is_priced=priced)


def _value(row: Row, priced: bool) -> float:
    ratio = _ratio(row, priced)
    assert ratio is not None
    return ratio.value


def _times_that(ratio: float, other: Mapping[str, str], *, is_rate: bool = True, short: bool = False) -> str:
    """Return `1.250x that of bf16`, `1.250x that on H100`; short: `1.250x bf16`. other: a name's parts."""
    of_recipe = "" if short else "that of"
    words = "as fast as" if not is_rate else of_recipe if "recipe" in other else "that"
    return " ".join(filter(None, (f"{times(ratio)}x", words, *other.values())))


def times(ratio: float) -> str:
    """Return a ratio to a baseline as tables show it: `2.101`, `104`."""
    return f"{ratio:.3f}" if ratio < 99.5 else f"{ratio:,.0f}"


def between(ratio: Interval | None) -> str:
    """Return ` (95% interval 2.068 to 2.135)`; empty without an interval."""
    if ratio is None or ratio.low is None or ratio.high is None:
        return ""
    if ratio.is_boundless and ratio.low > 1:
        return f" (at least {times(ratio.low)}x)"
    if ratio.is_boundless:
        return " (so far anything is possible)"
    return f" (95% interval {times(ratio.low)} to {times(ratio.high)})"


def name_of(row: Row, rows: Sequence[Row], *, beside: Row | None = None, letters: Labels = NO_LETTERS) -> str:
    """Return the row's recipe, with enough detail to distinguish it from the other rows.

    beside: a row that was named just before; what the two have in common is left out.
    """
    if beside is None or beside is row:
        return " ".join(_name(row, rows, letters).values())
    return " ".join(_parts_beside(beside, row, rows, letters).values())


def _parts_beside(beside: Row, row: Row, rows: Sequence[Row], letters: Labels) -> dict[str, str]:
    """Return the parts of the row's name that are not those of `beside`, which was named just before."""
    parts, known = _name(row, rows, letters), _name(beside, rows, letters)
    if row.setup.batch_size_per_gpu == beside.setup.batch_size_per_gpu:
        parts.pop("batch", None)
    new = {what: text for what, text in parts.items() if known.get(what) != text}
    if not new and row.setup.batch_size_per_gpu != beside.setup.batch_size_per_gpu:
        new["batch"] = f"at batch {row.setup.batch_size_per_gpu}"
    # `on p4d.24xlarge` or `at batch 64` reads well alone, `x 2` does not.
    return new if new and new.keys() <= {"recipe", "place", "batch"} else {"recipe": parts["recipe"], **new}


def _name(row: Row, rows: Sequence[Row], letters: Labels) -> dict[str, str]:
    """Return the parts of the row's name, by what they say."""
    parts = {"recipe": letters(row.setup.known_recipe or row.setup.recipe)}
    if len({other.place for other in rows}) > 1:
        parts["place"] = f"on {row.place}"
    alike = [other for other in rows if (other.setup.recipe, other.place) == (row.setup.recipe, row.place)]
    if len({other.setup.device_name for other in alike if other.setup.instance is None}) > 1:
        parts["place"] = f"on {row.setup.device_name}"
    if len({other.setup.num_gpus for other in alike}) > 1:
        parts["gpus"] = f"x {row.setup.num_gpus}"
    # The heading has the batch of the rows that train like the baseline.
    trains_alike = row.verdict.comparable_as == TRAINING
    of_batch = [other for other in alike if not trains_alike or other.verdict.comparable_as == TRAINING]
    if len({other.setup.batch_size_per_gpu for other in of_batch} - {None}) > 1:
        parts["batch"] = f"at batch {row.setup.batch_size_per_gpu}"
    if len({other.setup.sequence_length for other in of_batch}) > 1:
        parts["length"] = f"of {row.setup.sequence_length} tokens"
    of_a_kind = [other for other in alike if other.setup.data == row.setup.data]
    if len({other.setup.read_data for other in of_a_kind}) > 1:
        parts["data"] = f"from {row.setup.data} {row.setup.read_data or 'not identified'}"
    elif len(of_a_kind) < len(alike):
        parts["data"] = f"from {row.setup.data}"
    same = [other for other in alike if _setup_of(other) == _setup_of(row)]
    if terms := _terms(row, same):
        parts["terms"] = f"({', '.join(terms)})"
    if versions := _versions(row, same):
        parts["versions"] = f"with {', '.join(versions)}"
    if row.side is not None:
        parts["owner"] = f"of {row.side}"
    elif row.shared_by:
        parts["owner"] = f"with runs of {', '.join(row.shared_by)}"
    return parts


class Distinctions:
    """What distinguishes each of `rows` from others with the same columns."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._alike: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            self._alike.setdefault(_columns(row), []).append(row)
        self._is_needed = any(map(self._text, rows))

    def text(self, row: Row) -> str | None:
        """Return `spot, torch 2.6.0`, NOTHING if that is nothing; None if no row needs it."""
        return (self._text(row) or NOTHING) if self._is_needed else None

    def _text(self, row: Row) -> str:
        same = self._alike[_columns(row)]
        return ", ".join([*_terms(row, same), *_versions(row, same)])


def _columns(row: Row) -> tuple[object, ...]:
    return row.setup.recipe, row.place, *_setup_of(row), row.setup.fingerprint.get("data")


def _setup_of(row: Row) -> tuple[object, ...]:
    return row.setup.num_gpus, row.setup.batch_size_per_gpu, row.setup.sequence_length, row.setup.data


def _terms(row: Row, same: Sequence[Row]) -> list[str]:
    """Return `sagemaker`, `us-west-2`, `spot`: the terms of its machine that differ."""
    offers = zip(row.offer, *(other.offer for other in same), strict=True)
    return [term for term, *others in offers if len(set(others)) > 1]


def _versions(row: Row, same: Sequence[Row]) -> list[str]:
    """Return `torch 2.6.0`: the versions in which the row differs from others of the same setup."""
    versions, others = row.setup.fingerprint, [other.setup.fingerprint for other in same]
    names = dict.fromkeys(name for of in others for name in sorted(of) if name != "data")
    differing = [name for name in names if len({of.get(name) for of in others}) > 1]
    return [f"{name} {versions.get(name, 'unknown' if name == VERSION else NONE)}" for name in differing]


def dollars(value: float) -> str:
    """Return `1,062`, `10.62`, `7.29`, `0.0123`."""
    return f"{value:,.2f}" if 0.9995 <= value < 999.5 else number(value)


def number(value: float) -> str:
    """Return three digits or more, thousands grouped: `1,249`, `156`, `41.6`, `7.29`, `0.0123`.

    A value that is not finite comes from an absurd record: `n/a`.
    """
    if not math.isfinite(value):
        return UNKNOWN
    if value >= 99.95:
        return f"{value:,.0f}" if value < 1e12 else f"{value:.3g}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:#.3g}"


def about(value: float) -> str:
    """Return a count to three digits: `12,300`, `600`, `7`."""
    if not 0 < value < 1e15:
        return number(value)
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, min(digits, 0)):,.0f}" if value >= 9.95 else f"{value:.2g}"


def with_range(
    quantity: Interval | None, *, factor: float = 1.0, format_value: Callable[[float], str] = number
) -> str | None:
    """Return `1,234 ±0.8%`, the quantity x `factor`; None if it is unknown or not finite."""
    if quantity is None or not 0 < quantity.value * factor < math.inf:
        return None
    return f"{format_value(quantity.value * factor)}{limits(quantity, factor, format_value)}"


def limits(quantity: Interval, factor: float, format_value: Callable[[float], str]) -> str:
    """Return ` ±0.8%`, half the interval in percent of the value; empty without an interval or below 0.05%.

    Show a wide, asymmetric interval by its limits: ` (1.02 to 1.89)`.
    """
    if quantity.low is None or quantity.high is None:
        return ""
    half = (quantity.high - quantity.low) / 2 / quantity.value
    if half < 0.0005:
        return ""
    if half <= _EVEN:
        return f" ±{100 * half:.1f}%"
    return f" ({quantity.range_text(lambda limit: format_value(limit * factor))})"


def span(values: Sequence[float], format_value: Callable[[float], str]) -> str | None:
    """Return `100 to 300`, the smallest and largest value, or one text if both read alike."""
    if not values:
        return None
    low, high = format_value(min(values)), format_value(max(values))
    return low if low == high else f"{low} to {high}"


#: The beginning of a command at the end of a note.
_COMMAND = re.compile(r"(?<=[;,]) run fastlaunch ")
#: The most row names in a decisive note.
_MOST_NAMES = 2
_BRIEF = (NoteKind.BAR, NoteKind.COMMITS_APART)


def all_notes(comparison: Comparison, *, width: int = WIDTH) -> str:
    """Return all notes, workload by workload."""
    notes = {workload: notes_of(rows, brief=False)[0] for workload, rows in comparison.by_workload.items()}
    return "\n\n".join(f"{workload}:\n{bulleted(texts, width)}" for workload, texts in notes.items() if texts)


def notes_of(rows: Sequence[Row], brief: bool) -> tuple[list[str], int]:
    """Return the notes on prices, then the reasons with their rows, and the number of notes left out.

    brief: keep only reasons that bar a row, or would without --allow-unverified, and notes on commits that
    differ in speed.
    """
    by_note = _by_note(rows, lambda row: row.verdict.reasons)
    by_note = {note: of for note, of in by_note.items() if note.kind != NoteKind.BATCH}
    shown = {note: of for note, of in by_note.items() if not brief or note.kind in _BRIEF}
    compared = [row for row in rows if not row.is_baseline]
    # The baseline may have these notes too. Omit row names only if it does.
    notes = [
        _named(note, of, rows, everyone=rows if note.is_of_runs and compared else compared)
        for note, of in shown.items()
    ]
    return [*price_notes(rows), *notes], len(by_note) - len(shown)


def decisive_notes(
    shown: Sequence[Row], rows: Sequence[Row], letters: Letters = NO_LETTERS, *, brief: bool = False
) -> list[str]:
    """Return the notes on prices, then the notes that matter for a decision, in order of the rows.

    A note on all rows that are ranked against the baseline names no row. brief: as for `notes_of`.
    """
    by_note = _by_note(shown, lambda row: row.verdict.decisive)
    by_note = {note: of for note, of in by_note.items() if not brief or note.kind in _BRIEF}
    ranked = [row for row in shown if row.verdict.is_ranked and not row.is_baseline]
    everyone = ranked if len(ranked) > 1 else []
    prices = "; ".join(price_notes(rows))
    return [
        *([prices] if prices else []),
        *(
            _named(note, of, rows, everyone=everyone, most=_MOST_NAMES, letters=letters)
            for note, of in by_note.items()
        ),
    ]


def _by_note(rows: Sequence[Row], notes: Callable[[Row], Iterable[Note]]) -> dict[Note, list[Row]]:
    by_note: dict[Note, list[Row]] = {}
    for row in rows:
        for note in notes(row):
            by_note.setdefault(note, []).append(row)
    return by_note


def _named(
    note: Note,
    concerned: Sequence[Row],
    rows: Sequence[Row],
    *,
    everyone: Sequence[Row],
    most: int | None = None,
    letters: Letters = NO_LETTERS,
) -> str:
    """Return the note with the names of its rows, or without names if it is about `everyone`.

    most: the largest number of names, unless one more completes the list.
    """
    is_of_all = everyone and all(row in concerned for row in everyone)
    if is_of_all and (most is None or len(concerned) == len(everyone)):
        return note
    names = [*dict.fromkeys(name_of(row, rows, letters=letters) for row in concerned)]
    return f"{first_names(names, most)}: {note}"


def price_notes(rows: Sequence[Row]) -> list[str]:
    """Return the rows' prices with dates and sources."""
    notes: dict[str, None] = {}
    for row in rows:
        price = row.price
        if price is None:
            continue
        charged = f"charged as {price.instance}" if price.basis == "named" else None
        what = price.hypothetical or charged or row.setup.instance or "each row"
        hypothetical = "prorated price, not sold separately: " if price.hypothetical else ""
        notes[f"{hypothetical}{what}: ${price.usd_per_hour:g}/h {dated(price)}"] = None
    return list(notes)


def dated(price: Price) -> str:
    """Return `as of 2026-11-21 (SOURCE)`."""
    inferred = ", inferred" if price.inferred else ""
    return "as given" if price.basis == "given" else f"as of {price.as_of} ({price.source}){inferred}"


def more_text(num_rows: int, option: str = "--all") -> str:
    """Return where the rows and all else that a short screen leaves out is: `3 more rows, and ...: --all`."""
    rows = f"{counted(num_rows, 'more row')}, and " if num_rows else ""
    return f"{rows}every column and note: {option}"


def bulleted(notes: Sequence[str], width: int) -> str:
    """Return the notes as a list. A command at the end gets its own line for copying."""
    lines = []
    for note in notes:
        text, *command = _COMMAND.split(note, maxsplit=1)
        words = f"{text} run" if command else text
        # Do not break an option at its hyphens.
        lines.append(
            textwrap.fill(words, width, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
        )
        lines += [f"    fastlaunch {words}" for words in command]
    return "\n".join(lines)
