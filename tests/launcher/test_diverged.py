"""What compare says of losses that are no number, and of those from which no margin follows."""

import csv
import datetime
import io
import json
from collections.abc import Sequence

import pytest
from fake_summaries import evaluated

from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, Row, compare
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.report.data import as_csv, as_json
from fastlaunch.report.table import as_table

SOUND = (2.0, 2.1, 2.2, 2.3)
LOST = (None,) * 4
LARGEST = 1.7e308


def compared(**losses: Sequence[float | None]) -> Comparison:
    """Rows by recipe, with the held-out losses at the end of runs of seeds 0, 1, ...."""
    candidates = [
        MeasuredRun(run_id=f"{recipe}-{seed}", summary=evaluated(recipe, seed, loss))
        for recipe, of in losses.items()
        for seed, loss in enumerate(of)
    ]
    prices = PriceRequest(today=datetime.date(2026, 11, 21))
    return compare(candidates, catalogue=load_catalogue(), prices=prices)


def row(found: Comparison, recipe: str) -> Row:
    (one,) = (row for row in found.rows if row.setup.recipe == recipe)
    return one


def told(of: Row) -> str:
    return "; ".join(of.verdict.reasons)


def test_nothing_is_made_of_limits_that_there_are_not() -> None:
    """Two seeds lost, one pair left, and a reference that itself is lost once."""
    found = row(compared(bf16=(*SOUND[:3], None), compile=(None, None, 2.2, 2.3)), "compile")
    assert found.validity.convergence.verdict == "unknown"
    assert (
        "convergence unknown: held-out loss +0.0% against bf16, 1 pair;"
        " seed 3 has no bf16 run whose loss stays a number; its loss is no number at seeds 0 and 1"
    ) in told(found)
    assert "None" not in told(found)
    assert "would be needed" not in told(found)


def test_a_reference_that_always_diverges_is_one_where_there_is_no_other() -> None:
    found = compared(bf16=LOST, compile=SOUND, fp32=SOUND)
    assert {one.setup.recipe: (one.validity.convergence.verdict, one.verdict.kind) for one in found.rows} == {
        "bf16": ("worse", "not ranked"),
        "compile": ("within", "baseline"),
        "fp32": ("reference", "tie"),
    }
    assert "the loss is no number at seeds 0, 1, 2 and 3, where that of fp32 is" in told(row(found, "bf16"))
    # One run whose loss stays a number is enough to be it.
    found = compared(bf16=(*LOST[:3], 2.3), compile=SOUND, fp32=SOUND)
    assert row(found, "bf16").validity.convergence.verdict == "reference"


@pytest.mark.parametrize(
    ("bf16", "other"),
    [(0.5, LARGEST), (LARGEST, -LARGEST), (5e-324, 3e38), (1e-300, 3e38), (LARGEST, LARGEST), (2.0, 3e38)],
)
def test_an_absurd_loss_of_a_foreign_record_is_no_bug_of_ours(bf16: float, other: float) -> None:
    found = compared(bf16=(bf16,) * 3, compile=(other,) * 3)
    data = json.loads(as_json(found, {}), parse_constant=pytest.fail)
    assert data["rows"][1]["convergence"]["verdict"] in ("worse", "unknown")
    assert max(map(len, as_table(found).splitlines())) <= 120
    assert not {"inf", "nan"} & {cell for line in csv.reader(io.StringIO(as_csv(found))) for cell in line}
