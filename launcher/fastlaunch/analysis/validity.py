"""What bars a row from being ranked: arithmetic other than the model's, or a loss worse than its reference's.

A fast wrong recipe is shown with all its figures, and gets no verdict on them. What was not checked, as in
older records and published figures, bars nothing, and is said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.convergence import (
    FEWEST_PAIRS,
    MOST_PAIRS_PROPOSED,
    PAIRS_WANTED,
    REFERENCE,
    UNKNOWN,
    WORSE,
    Convergence,
    Difference,
    converges,
)
from fastlaunch.analysis.held_out import HeldOut, at_end, diverged, held_out
from fastlaunch.analysis.loss_pairs import named_seeds
from fastlaunch.analysis.pooling import Candidate, Pool, pooling_key
from fastlaunch.analysis.references import Reference, evaluated_rows, reference_of, rules_of
from fastlaunch.analysis.suggest import Place, next_seed, place_of, seeds, submit_command
from fastlaunch.measure.summarize import RunSummary
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.records.records import Check

#: The sample unit of workloads whose steps are no optimizer steps.
FORWARD_ONLY = "tensors"
PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
#: What the value of a check is, which is relative to the outputs that it changed or missed.
_CHECKED = {
    "equivalence": "the outputs differ from the model's by",
    "without-fp8": "computed in bf16, the outputs differ from the model's by",
    "isolation": "replacing one sample changed the output of another by",
    "permutation": "the outputs of a permuted batch differ by",
    "as-trained": "once compiled, sharded and wrapped, the outputs differ from those before by",
}
#: Blocks that are known to compute something else than the model's, checked or not.
_NOT_EQUIVALENT = "te-article"


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What is known of a row besides its speed.

    numerics: `passed`, `failed` or `not checked`. failures: what bars it from being ranked, with the
    numbers. notes: what else to say. held_out: its figures at the end, None without evaluations.
    """

    numerics: str
    convergence: Convergence
    held_out: HeldOut | None = None
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def guards(pools: Sequence[Pool], unfit: Sequence[Candidate], *, own_region: str) -> list[Guard]:
    """A guard for each of `pools`, which are of one workload.

    unfit: runs in no row; those whose loss stopped being a number still count against theirs. own_region: the
    user's, which the commands that are proposed need not name.
    """
    arms = [_runs_of(pool, unfit) for pool in pools]
    references = evaluated_rows([runs for runs in arms if not list(_wrong_numerics(runs))])
    return [
        _guard(runs, reference_of(runs, references), place=place_of(pool.all_runs[0], own_region=own_region))
        for pool, runs in zip(pools, arms, strict=True)
    ]


def _runs_of(pool: Pool, unfit: Sequence[Candidate]) -> list[RunSummary]:
    key = pooling_key(pool.all_runs[0], None)
    lost = [other for other in unfit if diverged(other.summary) and pooling_key(other, None) == key]
    return [candidate.summary for candidate in (*pool.candidates, *pool.unsteady, *lost)]


def _guard(runs: Sequence[RunSummary], reference: Reference, *, place: Place) -> Guard:
    wrong = tuple(_wrong_numerics(runs))
    checked = any(run.checks for run in runs)
    if reference.runs and runs[0].recipe == reference.recipe:
        convergence = Convergence(verdict=REFERENCE, reference=reference.recipe)
    else:
        convergence = converges(runs, reference.runs)
    worse = (f"convergence: {_evidence(convergence)}",) if convergence.verdict == WORSE else ()
    notes = [] if checked else ["numerics not checked"]
    why = ""
    # A forward pass alone trains nothing, and can be held to nothing.
    if convergence.verdict == UNKNOWN and runs[0].sample_unit != FORWARD_ONLY:
        why = _unknown(convergence, runs, reference, place)
        notes.append(f"convergence unknown: {why}")
    notes += [caveat for caveat in convergence.caveats if caveat != why]
    return Guard(
        numerics=FAILED if wrong else PASSED if checked else NOT_CHECKED,
        convergence=convergence,
        held_out=held_out(runs),
        failures=(*wrong, *worse),
        notes=tuple(notes),
    )


def _wrong_numerics(runs: Sequence[RunSummary]) -> Iterator[str]:
    """The checks that failed in any run, by name, with the numbers of the first such run."""
    failed: dict[str, list[str]] = {}
    for run in runs:
        for check in run.checks:
            if not check.passed:
                failed.setdefault(check.name, []).append(_what_failed(check))
    for name, told in failed.items():
        share = f" (in {len(told)} of {len(runs)} runs)" if len(told) < len(runs) else ""
        yield f"{name}: {told[0]}{share}"
    if not failed and _blocks_of(runs[0].recipe) == _NOT_EQUIVALENT:
        yield "known not to be equivalent: its blocks attend across the batch, and train another model"


def _what_failed(check: Check) -> str:
    if check.detail or check.value is None:
        return check.detail or "failed"
    limit = "" if check.limit is None else f", at most {_per_hundred(check.limit)} is allowed"
    return f"{_CHECKED.get(check.name, 'off by')} {_per_hundred(check.value)}{limit}"


def _per_hundred(part: float) -> str:
    """`137%`, `5.2%`, `0.0013%`: to two digits, and without an exponent where it is large."""
    return f"{100 * part:.0f}%" if 0.1 <= part < 1e6 else f"{100 * part:.2g}%"


def _blocks_of(label: str) -> str | None:
    """The blocks of a recipe by its label; None for one that is not ours, as of published figures."""
    name, *overrides = label.split()
    given = dict(override.partition("=")[::2] for override in overrides)
    return given.get("blocks") or (RECIPES[name].blocks if name in RECIPES else None)


def _evidence(found: Convergence) -> str:
    """`held-out loss +3.1% against bf16 (at least +2.2%, 95%), 5 pairs`."""
    if found.diverged:
        return f"the loss is no number at {named_seeds(found.diverged)}, where that of {found.reference} is"
    end = found.end
    assert end is not None
    return (
        f"held-out loss {percent(end, end.mean)} against {found.reference}"
        f" (at least {percent(end, end.low)}, 95%), {_pairs(found.num_pairs)}"
    )


def _unknown(found: Convergence, runs: Sequence[RunSummary], reference: Reference, place: Place) -> str:
    """Why, and about how many more pairs would tell, or which runs of a reference."""
    evaluated = any(at_end(run) or diverged(run) for run in runs)
    if not evaluated or reference.recipe is None:
        return found.missing[0]
    if not reference.runs:
        return f"there is no reference with {_rules(runs)}; {_run(reference.recipe, runs, place)}"
    num_pairs = found.num_pairs + len(found.diverged)
    if num_pairs < FEWEST_PAIRS:
        why = ", ".join(found.missing) or "both need runs of more seeds (--repeats)"
        if not reference.is_alike:
            return f"{num_pairs} of {FEWEST_PAIRS} pairs: {why}; {_run(reference.recipe, runs, place)}"
        told = f"{num_pairs} of {FEWEST_PAIRS} pairs: {why}"
        if found.more_pairs is None:
            return told
        return f"{told}; {_seeds(found.more_pairs, runs, reference)} would make {PAIRS_WANTED}"
    parts = []
    if (end := found.end) is not None and end.reference_loss > 0:
        limits = f"{percent(end, end.low)} to {percent(end, end.high)}"
        against = f"held-out loss {percent(end, end.mean)} against {found.reference}"
        against += "" if end.low is None else f" ({limits}, 95% each)"
        parts.append(f"{against}, {_pairs(found.num_pairs)}")
        if found.more_pairs is not None:
            parts.append(f"about {_seeds(found.more_pairs, runs, reference)} would tell")
        elif end.verdict == UNKNOWN and not found.diverged:
            parts.append(f"more than {MOST_PAIRS_PROPOSED} more would be needed to tell")
    return "; ".join([*parts, *found.missing, *found.caveats[: not parts]])


def _seeds(number: int, runs: Sequence[RunSummary], reference: Reference) -> str:
    """`3 more (of both: --seed 5 --repeats 3)`: of new seeds, since others make no new pair."""
    return f"{number} more (of both: {seeds(next_seed((*runs, *reference.runs)), number)})"


def _rules(runs: Sequence[RunSummary]) -> str:
    """`learning_rate=0.01`, or what a row without such an override has."""
    return " and ".join(rules_of(runs[0].recipe)) or "the workload's own optimizer and learning rate"


def _run(recipe: str, runs: Sequence[RunSummary], place: Place) -> str:
    """The command that makes runs of the reference for the row's seeds."""
    known = sorted({run.seed for run in runs if run.seed is not None}) or [0]
    repeats = max(known[-1] - known[0] + 1, FEWEST_PAIRS)
    # Between seeds far apart lie more runs than anybody would pay for.
    one_by_one = repeats > 2 * max(len(known), FEWEST_PAIRS)
    command = submit_command(
        runs, [recipe], place=place, first_seed=known[0], repeats=1 if one_by_one else repeats
    )
    return (
        f"for {named_seeds(known)} one by one, as for the first; run {command}"
        if one_by_one
        else f"run {command}"
    )


def _pairs(number: int) -> str:
    return f"{number} pair{'' if number == 1 else 's'}"


def percent(of: Difference, value: float | None) -> str | None:
    """`+1.2%`: a difference as a part of the reference's loss; None if it is not known."""
    part = of.relative(value)
    if part is None:
        return None
    return f"{part:+.1%}" if abs(part) < 1e6 else f"{100 * part:+.2g}%"
