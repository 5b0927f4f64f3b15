"""Rows of runs that others shared: what they say, and that they change no verdict of anybody else."""

from dataclasses import replace

import pytest
from fake_summaries import changed, compared, runs

from fastlaunch.analysis.compare import Comparison, MeasuredRun
from fastlaunch.report.data import rows_to_json, to_json
from fastlaunch.report.table import as_markdown, as_overview, as_table
from fastlaunch.report.text import answer_to_json

OWN = [
    *runs("bf16", 0.1, 0.101, 0.0995),
    *runs("te-fp8", 0.08, 0.0803, 0.0797),
    *runs("compile", 0.095, 0.0951, 0.0953),
    *runs("fp32", 0.2, 0.201, 0.199, batch_size_per_gpu=32),
]


def shared(owner: str, *of: MeasuredRun, joined: bool = False) -> list[MeasuredRun]:
    return [replace(run, run_id=f"shared-{owner}-{run.run_id}", owner=owner, is_joined=joined) for run in of]


#: The same machine and the same seeds as those of the runs above, and figures far off.
HOSTILE = [
    *runs("bf16", 0.3, 0.01, 0.0001),
    *runs("te-fp8", 1e-6, 2e-6, 1.5e-6),
    *runs("fp32", 1e-5, 1e-5, 1e-5, batch_size_per_gpu=32),
    *runs("fp32", 1e-5, 1.1e-5, batch_size_per_gpu=16),
    *(
        replace(run, summary=changed(run.summary, problems=("nothing fits",), status="nan_loss"))
        for run in runs("compile", 0.01, 0.01)
    ),
]


def own_rows(comparison: Comparison) -> list[object]:
    return rows_to_json([row for row in comparison.rows if not row.shared_by])


@pytest.mark.parametrize("owners", [("eve",), ("eve", "ann")])
@pytest.mark.parametrize("first", [True, False])
def test_they_change_no_verdict_on_ones_own(owners: tuple[str, ...], first: bool) -> None:
    others = [run for owner in owners for run in shared(owner, *HOSTILE)]
    before = compared(OWN, usd_per_hour=2.0)
    after = compared(*((others, OWN) if first else (OWN, others)), usd_per_hour=2.0)
    assert own_rows(after) == own_rows(before) and after.baselines == before.baselines
    said = answer_to_json(before), answer_to_json(after)
    for name in ("best", "runner_up", "ratio", "settled", "may_be_best"):
        assert said[0][name] == said[1][name]
    assert said[1]["sentence"] == said[0]["sentence"]
    assert any(f"te-fp8 of {owner}" in said[1]["asides"][0] for owner in owners)


def test_nor_do_they_change_those_of_each_other() -> None:
    of_ann = shared("ann", *runs("te-fp8", 0.07, 0.0701, 0.0702))
    alone = compared(OWN, of_ann)
    beside = compared(OWN, of_ann, shared("eve", *HOSTILE))
    (row,) = (row for row in alone.rows if row.shared_by)
    (again,) = (row for row in beside.rows if row.shared_by == ("ann",))
    assert rows_to_json([row]) == rows_to_json([again])
    assert row.verdict.kind == "better"


def test_a_baseline_of_others_is_named_or_the_only_one() -> None:
    of_ann = shared("ann", *runs("tf32", 0.15, 0.1501, 0.1502))
    assert compared(OWN, of_ann, baseline="tf32").baselines == {"vit-huge": "tf32"}
    assert compared(OWN, shared("ann", *OWN), baseline="te-fp8").rows[1].is_baseline
    only = compared(of_ann, shared("eve", *HOSTILE))
    assert [row.shared_by for row in only.rows if row.is_baseline] == [("ann",)]


def test_a_row_says_whose_it_is() -> None:
    apart = compared(OWN, shared("ann", *runs("bf16", 0.1, 0.1, 0.1)))
    assert [row.num_runs for row in apart.rows] == [3, 3, 3, 3, 3]
    joined = compared(
        [replace(run, is_joined=True) for run in OWN],
        shared("ann", *runs("bf16", 0.1, 0.1, 0.1), joined=True),
    )
    assert [row.num_runs for row in joined.rows] == [6, 3, 3, 3]
    for comparison in (apart, joined):
        (row,) = (row for row in to_json(comparison)["rows"] if row["shared_by"])
        assert (row["shared_by"], row["num_shared_runs"]) == (["ann"], 3)
        for text in (as_overview(comparison), as_table(comparison), as_markdown(comparison)):
            assert "ann" in text
    assert not any("whose" in as_table(of) for of in (compared(OWN),))
