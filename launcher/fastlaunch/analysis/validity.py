"""What bars a row from ranking: arithmetic unlike the model's, or a loss worse than its reference's.

A fast but wrong recipe is shown with all its figures but without a verdict. An absent check, as in older
records and published figures, does not bar a row; a note says so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.convergence import (
    FEWEST_PAIRS,
    MOST_PAIRS_PROPOSED,
    PAIRS_WANTED,
    REFERENCE,
    TOO_SHORT,
    UNKNOWN,
    WORSE,
    Convergence,
    HeldOut,
    LossDifference,
    at_end,
    converges,
    curve,
    diverged,
    held_out,
    named_seeds,
    share_setup,
)
from fastlaunch.analysis.pooling import Group, MeasuredRun, pooling_key
from fastlaunch.analysis.suggest import Place, next_seed, place_of, seeds, submit_command
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import RunSummary, Setup
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check

#: The recipes to compare losses with, the preferred first; plain recipes come before ones with overrides. If
#: none was evaluated, use the recipe of the first evaluated row.
REFERENCES = ("bf16", "fp32", "tf32")
#: Fields of a recipe that decide the loss it trains to. Only recipes that share them are compared.
RULES = ("optimizer", "learning_rate")
#: Overridden fields of a recipe, with their values.
Overrides = tuple[tuple[str, str], ...]

#: The sample unit of workloads without optimizer steps.
FORWARD_ONLY = "tensors"
#: The share of steps that fp16's loss scaler may skip.
MOST_SKIPPED = 0.2
PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
#: Phrases for the value of a failed check; all values are relative to the outputs.
_CHECKED = {
    "equivalence": "the outputs differ from the model's by",
    "without-fp8": "computed in bf16, the outputs differ from the model's by",
    "isolation": "replacing one sample changed the output of another by",
    "permutation": "the outputs of a permuted batch differ by",
    "gradients": "the gradients differ from the model's by",
    "gradients-by-tensor": "the gradient of a tensor differs from the model's by",
    "as-trained": "once compiled, sharded and wrapped, the outputs differ from those before by",
}
#: Blocks that compute something other than the model's, whatever a check says.


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The recipe and runs to compare a row's loss with."""

    recipe: Recipe | str | None  # even without runs; None if no row was evaluated
    runs: tuple[RunSummary, ...] = ()  # those with the row's rules
    is_alike: bool = False  # whether some share all that a pair must, apart from seed and last step


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A row with held-out evaluations and no failed numerics check."""

    runs: tuple[RunSummary, ...]
    stem: Recipe | str  # the recipe without its rules
    rules: Overrides
    ends: frozenset[int]  # the steps of the last evaluations

    @property
    def recipe(self) -> Recipe | str:
        return self.runs[0].setup.known_recipe or self.runs[0].setup.recipe

    @property
    def place(self) -> int:
        """The position of its recipe in REFERENCES; after the last if it is absent."""
        name = "" if isinstance(self.stem, str) else self.stem.name
        return REFERENCES.index(name) if name in REFERENCES else len(REFERENCES)

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """The sort key: the lowest row is the reference. A row that always diverges comes last."""
        is_changed = isinstance(self.stem, Recipe) and bool(self.stem.overrides)
        return all(diverged(run) for run in self.runs), is_changed, self.place


@dataclass(frozen=True, kw_only=True)
class Validity:
    """Numerics and convergence of a row."""

    numerics: str  # `passed`, `failed` or `not checked`
    convergence: Convergence
    held_out: HeldOut | None = None  # None without evaluations
    failures: tuple[str, ...] = ()  # what bars it from ranking, with the numbers
    notes: tuple[str, ...] = ()  # what is unknown


def judge_validity(
    groups: Sequence[Group],
    unfit: Sequence[MeasuredRun],
    *,
    references: Sequence[Group] = (),
    own_region: str,
) -> list[Validity]:
    """Return the validity of each of `groups`, all of one workload.

    unfit: runs without a row; a diverged run counts against the row that it would be in. references: groups
    to prefer as the reference if they were evaluated, unless a recipe of ours was. own_region: the user's,
    which proposed commands leave out.
    """
    rows = []
    for group in groups:
        key = pooling_key(group.runs[0], None)
        lost = [run for run in unfit if diverged(run.summary) and pooling_key(run, None) == key]
        rows.append([run.summary for run in (*group.runs, *lost)])
    in_order = sorted(zip(groups, rows, strict=True), key=lambda row: row[0] not in references)
    evaluated = evaluated_rows([runs for _, runs in in_order if not list(_wrong_numerics(runs))])
    places = [place_of(group.runs[0], own_region=own_region) for group in groups]
    return [
        _validity(runs, reference_of(runs, evaluated), place=place)
        for runs, place in zip(rows, places, strict=True)
    ]


def _validity(runs: Sequence[RunSummary], reference: Reference, *, place: Place) -> Validity:
    wrong = tuple(_wrong_numerics(runs))
    checked = any(run.quality.checks for run in runs)
    if reference.runs and runs[0].setup.recipe == reference.runs[0].setup.recipe:
        convergence = Convergence(verdict=REFERENCE, reference=runs[0].setup.recipe)
    else:
        convergence = converges(runs, reference.runs)
    is_script = runs[0].setup.is_script
    noun = "round" if is_script else "seed"
    worse = (f"convergence: {_evidence(convergence, noun)}",) if convergence.verdict == WORSE else ()
    notes = [] if checked or is_script else ["numerics not checked"]
    why = ""
    # A forward pass alone does not converge. `notes.script_warnings` warns once about a script without
    # evaluations.
    is_warned = is_script and not any(map(is_evaluated, runs))
    if convergence.verdict == UNKNOWN and not is_warned and runs[0].setup.sample_unit != FORWARD_ONLY:
        why = _unknown(convergence, runs, reference, place)
        notes.append(f"convergence unknown: {why}")
    if convergence.verdict == TOO_SHORT and convergence.end is not None:
        steps = counted(convergence.end.step, "step")
        what = f"{convergence.reference} learnt too little, or too unevenly, in {steps}"
        notes.append(f"convergence {TOO_SHORT}: {what}; train longer")
    notes += [caveat for caveat in convergence.caveats if caveat != why]
    return Validity(
        numerics=FAILED if wrong else PASSED if checked else NOT_CHECKED,
        convergence=convergence,
        held_out=held_out(runs),
        failures=(*wrong, *worse),
        notes=tuple(notes),
    )


def _wrong_numerics(runs: Sequence[RunSummary]) -> Iterator[str]:
    """Yield the checks that failed in any run, with the numbers of the first failure.

    For example, most steps were skipped because their fp16 gradients overflowed.
    """
    failed: dict[str, list[str]] = {}
    for run in runs:
        for check in run.quality.checks:
            if not check.passed:
                failed.setdefault(check.name, []).append(_what_failed(check))
        skipped = run.quality.skipped_fraction
        if skipped is not None and skipped > MOST_SKIPPED:
            limit = _per_hundred(MOST_SKIPPED)
            what = f"{_per_hundred(skipped)} of the steps were skipped, at most {limit} is allowed"
            failed.setdefault("loss scaling", []).append(what)
    for name, results in failed.items():
        share = f" (in {len(results)} of {len(runs)} runs)" if len(results) < len(runs) else ""
        yield f"{name}: {results[0]}{share}"
    recipe = runs[0].setup.known_recipe
    if not failed and recipe and recipe.difference:
        yield f"known not to be equivalent: {recipe.difference}"


def _what_failed(check: Check) -> str:
    if check.detail or check.value is None:
        return check.detail or "failed"
    limit = "" if check.limit is None else f", at most {_per_hundred(check.limit)} is allowed"
    return f"{_CHECKED.get(check.name, 'off by')} {_per_hundred(check.value)}{limit}"


def _per_hundred(part: float) -> str:
    """Return `137%`, `5.2%`, `0.0013%`: two digits, and no exponent if it is large."""
    return f"{100 * part:.0f}%" if 0.1 <= part < 1e6 else f"{100 * part:.2g}%"


def _evidence(convergence: Convergence, noun: str) -> str:
    """Return `held-out loss +5.1% of what bf16 learnt (at least +4.2%, 95%), 5 pairs`."""
    if convergence.diverged:
        seeds = named_seeds(convergence.diverged, noun)
        return f"the loss is no number at {seeds}, where that of {convergence.reference} is"
    end = convergence.end
    assert end is not None
    return (
        f"held-out loss {percent(end, end.mean)} of what {convergence.reference} learnt"
        f" (at least {percent(end, end.low)}, 95%), {counted(convergence.num_pairs, 'pair')}"
    )


def _unknown(convergence: Convergence, runs: Sequence[RunSummary], reference: Reference, place: Place) -> str:
    """Return why convergence is unknown, and the runs that would settle it."""
    if reference.recipe is None or not any(map(is_evaluated, runs)):
        return convergence.missing[0]
    is_script = runs[0].setup.is_script
    if not reference.runs:
        command = _reference_command(reference.recipe, runs, place)
        rules = " and ".join(f"{field}={text}" for field, text in rules_of(runs[0].setup))
        rules = rules or "the workload's own optimizer and learning rate"
        return f"there is no reference with {rules}; {command}"
    num_pairs = convergence.num_pairs + len(convergence.diverged)
    if num_pairs < FEWEST_PAIRS:
        more = "rounds" if is_script else "seeds"
        why = ", ".join(convergence.missing) or f"both recipes need more {more} (--repeats)"
        text = f"{num_pairs} of {FEWEST_PAIRS} pairs: {why}"
        if is_script and not reference.is_alike:
            return text
        if not reference.is_alike:
            return f"{text}; {_reference_command(reference.recipe, runs, place)}"
        if convergence.more_pairs is None:
            return text
        return f"{text}; {_seeds(convergence.more_pairs, runs, reference)} would make {PAIRS_WANTED}"
    parts = []
    if (end := convergence.end) is not None and percent(end, end.mean) is not None:
        limits = f"{percent(end, end.low)} to {percent(end, end.high)}"
        against = f"held-out loss {percent(end, end.mean)} of what {convergence.reference} learnt"
        against += "" if end.low is None else f" ({limits}, 95% each)"
        parts.append(f"{against}, {counted(convergence.num_pairs, 'pair')}")
        if convergence.more_pairs is not None:
            parts.append(f"about {_seeds(convergence.more_pairs, runs, reference)} would tell")
        elif end.verdict == UNKNOWN and not convergence.diverged:
            parts.append(f"more than {MOST_PAIRS_PROPOSED} more would be needed to tell")
    return "; ".join([*parts, *convergence.missing, *convergence.caveats[: not parts]])


def _seeds(number: int, runs: Sequence[RunSummary], reference: Reference) -> str:
    """Return `3 more (of both: --seed 5 --repeats 3)`, with new seeds, which make new pairs."""
    if runs[0].setup.is_script:
        return f"{number} more (of both: --repeats {number})"
    return f"{number} more (of both: {seeds(next_seed((*runs, *reference.runs)), number)})"


def _reference_command(recipe: Recipe | str, runs: Sequence[RunSummary], place: Place) -> str:
    """Return `run fastlaunch submit ...` for runs of the reference at the row's seeds."""
    known = sorted({run.seed for run in runs if run.seed is not None}) or [0]
    repeats = max(known[-1] - known[0] + 1, FEWEST_PAIRS)
    # If the seeds are far apart, one command would make too many runs.
    one_by_one = repeats > 2 * max(len(known), FEWEST_PAIRS)
    command = submit_command(
        runs, [recipe], place=place, first_seed=known[0], repeats=1 if one_by_one else repeats
    )
    return f"{f'for {named_seeds(known)} one by one, as for the first; ' if one_by_one else ''}run {command}"


def percent(of: LossDifference, value: float | None) -> str | None:
    """Return a difference as a share of what the reference learnt, `+1.2%`; None if unknown."""
    return signed_percent(of.relative(value))


def signed_percent(part: float | None) -> str | None:
    """Return `+1.2%`; None if unknown."""
    if part is None:
        return None
    return f"{part:+.1%}" if abs(part) < 1e6 else f"{100 * part:+.2g}%"


def evaluated_rows(rows: Sequence[Sequence[RunSummary]]) -> list[Evaluated]:
    """Return the rows of one workload that may be the reference, the best first."""
    evaluated = []
    for runs in rows:
        if any(map(is_evaluated, runs)):
            setup = runs[0].setup
            recipe, rules = setup.known_recipe, rules_of(setup)
            stem = _with_rules(recipe, ()) if recipe else setup.recipe
            evaluated.append(Evaluated(runs=tuple(runs), stem=stem, rules=rules, ends=_ends(runs)))
    known = [row for row in evaluated if row.place < len(REFERENCES)]
    return sorted(
        known or [row for row in evaluated if row.stem == evaluated[0].stem], key=lambda row: row.rank
    )


def is_evaluated(run: RunSummary) -> bool:
    """Return whether the run has a held-out loss at its end, or diverged."""
    return at_end(run) is not None or diverged(run)


def reference_of(runs: Sequence[RunSummary], rows: Sequence[Evaluated]) -> Reference:
    """Return a row's reference: the first of `rows` (see `evaluated_rows`) that makes pairs with it."""
    if not rows:
        return Reference(recipe=None)
    rules = rules_of(runs[0].setup)
    by_rules = [row for row in rows if row.rules == rules]
    if not by_rules:
        stem = rows[0].stem
        return Reference(recipe=stem if isinstance(stem, str) else _with_rules(stem, rules))
    ends = _ends(runs)
    alike = [
        row
        for row in by_rules
        if share_setup(runs[0], row.runs[0]) and (not ends or not row.ends or ends & row.ends)
    ]
    best = (alike or by_rules)[0]
    return Reference(
        recipe=best.recipe,
        runs=tuple(run for row in by_rules if row.recipe == best.recipe for run in row.runs),
        is_alike=bool(alike),
    )


def rules_of(setup: Setup) -> Overrides:
    """Return the overrides that decide the loss a recipe trains to; none for a script."""
    recipe = setup.known_recipe
    return tuple((field, text) for field, text in recipe.overrides if field in RULES) if recipe else ()


def _with_rules(recipe: Recipe, rules: Overrides) -> Recipe | str:
    """Return the recipe with only these rules, or its label if that is impossible."""
    kept = [(field, text) for field, text in recipe.overrides if field not in RULES]
    overrides = [f"{field}={text}" for field, text in (*kept, *rules)]
    try:
        return resolve_recipe(recipe.name, overrides)
    except RecipeError:
        return " ".join([recipe.name, *overrides])


def _ends(runs: Sequence[RunSummary]) -> frozenset[int]:
    return frozenset(max(curve(run)) for run in runs if at_end(run))
