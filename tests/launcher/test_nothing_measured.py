"""Runs that measured nothing, as one interruption leaves them: what compare and an export say of them."""

from pathlib import Path

import pytest
from fake_records import write_run

from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.runs.importer import find_runs

CANCELLED = "cancelled before it started"


@pytest.fixture(autouse=True)
def interrupted(tmp_path: Path) -> None:
    """Two runs that measured, one that failed, and three that were cancelled before they started."""
    for recipe, time_s in (("bf16", 0.1), ("compile", 0.08)):
        write_run(tmp_path / "records" / recipe, recipe=recipe, step_time_s=time_s, run_id=recipe)
    assert run(["runs", "import", str(tmp_path / "records")]) == 0
    states = {"failed-1": ("fp32", RunState.FAILED, "out of memory")}
    states |= {f"never-{i}": (recipe, RunState.CANCELLED, CANCELLED) for i, recipe in enumerate(["bf16"] * 2)}
    states["never-2"] = ("compile", RunState.CANCELLED, CANCELLED)
    with open_ledger(load_settings()) as ledger:
        for run_id, (recipe, state, reason) in states.items():
            ledger.add_run(
                ledger.add_submission("x"),
                run_id,
                spec={},
                plan={},
                workload="vit-huge",
                recipe=recipe,
                backend="local",
            )
            ledger.set_state(run_id, state, reason)


def test_compare_says_once_what_holds_for_many(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["compare", "--all"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert told == [
        "warning: failed-1 (fp32) is left out: it is failed and has measured nothing: out of memory",
        "warning: 3 runs (bf16, compile) are left out: they are cancelled and have measured nothing: "
        + CANCELLED,
    ]


def test_an_export_says_which_runs_an_import_will_not_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["runs", "export", "recipe=bf16", "--to", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert told.out == f"Exported 3 runs to {tmp_path / 'out'}.\n"
    for run_id in ("never-0", "never-1"):
        assert f"{run_id}: it is cancelled and recorded nothing; `runs import` will pass over it" in told.err
    (found,) = find_runs([tmp_path / "out"]).runs
    assert found.startswith("bf16-")
