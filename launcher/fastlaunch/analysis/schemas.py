"""Records and recipes of different versions in one comparison: said: a field may have changed meaning."""

from collections.abc import Iterator, Sequence

from fastlaunch.analysis.loss_pairs import listed
from fastlaunch.analysis.pooling import Pool

_VERSIONED = ("record", "recipe")


def schema_warnings(pools: Sequence[Pool]) -> Iterator[str]:
    """What is mixed within the rows of one workload, and between them. Published figures have no version."""
    for what in _VERSIONED:
        recipes: dict[str, list[str]] = {}
        for row in pools:
            found = _schemas(row, what)
            if len(found) > 1:
                yield f"{row.first.recipe}: runs of {what} schema {listed(found)} make one row"
            for schema in found:
                recipes.setdefault(schema, []).append(row.first.recipe)
        if len(recipes) > 1:
            sides = [f"{schema} ({', '.join(dict.fromkeys(names))})" for schema, names in recipes.items()]
            yield f"{pools[0].first.workload}: rows of {what} schema {listed(sides)} are compared"


def _schemas(row: Pool, what: str) -> list[str]:
    """The versions of the row's runs, in order; `unknown` for summaries from before they were kept."""
    runs = [candidate.summary for candidate in (*row.candidates, *row.unsteady)]
    found = {getattr(run, f"{what}_schema") for run in runs if run.kind == "records"}
    return [*map(str, sorted(schema for schema in found if schema is not None))] + ["unknown"] * (
        None in found
    )
