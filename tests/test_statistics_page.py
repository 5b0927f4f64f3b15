"""The numbers of docs/statistics.md are those of its simulation, which can be repeated cell by cell."""

import json
from typing import Any

import pytest

from benchmarks.statistics_page import FIGURES, FOLDER, PAGE, STORED, simulated, with_simulated


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def test_the_page_has_what_was_simulated() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_simulated(text, stored()), "make statistics, and look at what has changed"
    assert sorted(path.stem for path in FOLDER.glob("*.svg")) == [
        *("errors", "intervals", "looks", "pairing", "power", "rows")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "number"),
    [
        *(("intervals", 0), ("coverage", 0), ("pairing", 0), ("rows", 0), ("power", 0), ("looks", 0)),
        *(("errors", 0), ("stopping", 0)),
    ],
)
def test_a_cell_simulated_again_is_the_same(figure: str, number: int) -> None:
    again = simulated(figure, FIGURES[figure][1][number], stored()["draws"])
    assert again == stored()[figure][number]
