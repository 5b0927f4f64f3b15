"""Whose held-out loss a row's is compared with: of one that trains by its rules and computes otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.analysis.held_out import at_end, curve, diverged
from fastlaunch.analysis.loss_pairs import asked_alike
from fastlaunch.measure.summarize import RunSummary

#: Recipes that others' loss is compared with, the first that has any, as they are or with overrides; else,
#: where none of these was evaluated, the first row that was and that nothing bars. One whose loss is a number
#: in none of its runs comes after the others.
REFERENCES = ("bf16", "fp32", "tf32")
#: Fields of a recipe that decide what it trains to. The others are how it computes, which is compared.
RULES = ("optimizer", "learning_rate")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the loss of a row is compared with.

    recipe: the label of the reference, or of what would be one; None where nothing was evaluated. runs: those
    of the reference that train by the row's rules. is_alike: whether some are also on its data, from its
    weights, of its lengths, global batch and number of GPUs: others make no pair with the row.
    """

    recipe: str | None
    runs: tuple[RunSummary, ...] = ()
    is_alike: bool = False


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A row with held-out losses, nothing being wrong with its numerics. rank: the lowest is taken first."""

    runs: tuple[RunSummary, ...]
    rules: tuple[str, ...]
    stem: str
    rank: int
    ends: frozenset[int]

    @property
    def recipe(self) -> str:
        return self.runs[0].recipe


def evaluated_rows(rows: Sequence[Sequence[RunSummary]]) -> list[Evaluated]:
    """Those of the rows of one workload that may be a reference, the best first."""
    of = [runs for runs in rows if any(at_end(run) or diverged(run) for run in runs)]
    labels = [_split(runs[0].recipe) for runs in of]
    known = any(_name(stem) in REFERENCES for stem, _ in labels)
    found = [
        Evaluated(runs=tuple(runs), rules=rules, stem=stem, rank=rank, ends=_ends(runs))
        for runs, (stem, rules) in zip(of, labels, strict=True)
        if (rank := _rank(stem) if known else 0 if stem == labels[0][0] else None) is not None
    ]
    return sorted(found, key=lambda row: (all(diverged(run) for run in row.runs), row.rank))


def reference_of(runs: Sequence[RunSummary], rows: Sequence[Evaluated]) -> Reference:
    """The reference of a row among `rows`, which `evaluated_rows` found: the first that makes pairs."""
    if not rows:
        return Reference(recipe=None)
    rules = rules_of(runs[0].recipe)
    by_rules = [row for row in rows if row.rules == rules]
    if not by_rules:
        return Reference(recipe=" ".join([rows[0].stem, *rules]))
    ends = _ends(runs)
    alike = [row for row in by_rules if _trains_alike(runs[0], ends, row)]
    best = (alike or by_rules)[0]
    return Reference(
        recipe=best.recipe,
        runs=tuple(run for row in by_rules if row.recipe == best.recipe for run in row.runs),
        is_alike=bool(alike),
    )


def rules_of(label: str) -> tuple[str, ...]:
    """The overrides of a recipe's label that decide what it trains to."""
    return _split(label)[1]


def _split(label: str) -> tuple[str, tuple[str, ...]]:
    """A recipe's label without the overrides that are rules, and those."""
    name, *overrides = label.split()
    rules = tuple(override for override in overrides if override.partition("=")[0] in RULES)
    return " ".join([name, *(override for override in overrides if override not in rules)]), rules


def _name(stem: str) -> str:
    return stem.partition(" ")[0]


def _rank(stem: str) -> int | None:
    if stem in REFERENCES:
        return REFERENCES.index(stem)
    return len(REFERENCES) + REFERENCES.index(_name(stem)) if _name(stem) in REFERENCES else None


def _ends(runs: Sequence[RunSummary]) -> frozenset[int]:
    return frozenset(max(curve(run)) for run in runs if at_end(run))


def _trains_alike(run: RunSummary, ends: frozenset[int], row: Evaluated) -> bool:
    """Whether `run` of a row that ends at `ends` was asked for as `row` was, in all but recipe and seed.

    Runs of one row share what a pair does, except for the seed and the end.
    """
    return asked_alike(run, row.runs[0]) and (not ends or not row.ends or bool(ends & row.ends))
