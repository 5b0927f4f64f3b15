"""What the first commands show on screens of 80, 120 and 200 columns: golden texts, and their limits.

To write the texts anew after a change that is meant: python tests/launcher/test_screens.py
"""

import datetime
import io
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from test_watch import MANY, view

from fastlaunch.cli.demo import of_one_gpu
from fastlaunch.cli.main import run
from fastlaunch.cli.watch import screen_lines
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.lifecycle.world import default_context
from fastlaunch.measure.published import shipped_summaries

GOLDEN = Path(__file__).parents[1] / "screens"
WIDTHS = (80, 120, 200)
COMMANDS = {
    "compare": "compare --price-as p5en.48xlarge:1/8 --prices-as-of 2026-11-21",
    "demo": "demo",
    "recommend": "recommend --workload vit-huge --samples 100M --prices-as-of 2026-07-20 --steps-only"
    " --measured-only --batch-equivalent --allow-unverified --exclude-recipe fp8-fused",
    "dry-run": "submit --instance p5.48xlarge --dry-run",
    "submit-help": "submit --help",
}
#: A moment of `watch`, which on a terminal has no end: a run that trains, one that waits, one that failed.
MOMENT = "watch"
#: Prose: on a wider screen it is the same.
UP_TO_120 = ("dry-run", "submit-help")
MAX_LINES = 40
#: Which decides how old prices are.
NOW = datetime.datetime(2026, 11, 21, 12, tzinfo=datetime.UTC)


def golden(name: str, width: int) -> Path:
    return GOLDEN / f"{name}-{min(width, 120) if name in UP_TO_120 else width}.txt"


def screen(name: str, width: int) -> str:
    """Return stdout and stderr of the command at `width` columns; its ledger has the shipped H200 set."""
    os.environ["COLUMNS"] = str(width)
    if name == MOMENT:
        return "".join(f"{line}\n" for line in screen_lines(view(*MANY, cost_usd=33.1), width, 24))
    if name == "compare":
        with open_ledger(load_settings()) as ledger:
            runs = of_one_gpu(shipped_summaries())
            ledger.add_imported(
                [(summary, Path("records")) for summary in runs.values()],
                submission_id=ledger.add_submission("fastlaunch runs import"),
                run_ids=list(runs),
            )
    shown = io.StringIO()
    with redirect_stdout(shown), redirect_stderr(shown):
        argv = tuple(COMMANDS[name].split())
        assert run([*argv], replace(default_context(argv), now=lambda: NOW)) == 0
    return shown.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", (*COMMANDS, MOMENT))
def test_a_screen_is_the_golden_one(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "")
    shown = screen(name, width)
    assert shown == golden(name, width).read_text(encoding="utf-8")
    lines = shown.splitlines()
    # A command is left whole, to be copied.
    assert (
        max(len(line) for line in lines if not line.startswith(("next: ", "train: ", "measure: "))) <= width
    )
    assert len(lines) <= MAX_LINES or name == "submit-help"


def test_no_golden_screen_is_left_over() -> None:
    assert {*GOLDEN.iterdir()} == {golden(name, width) for name in (*COMMANDS, MOMENT) for width in WIDTHS}


if __name__ == "__main__":
    for at in WIDTHS:
        for each in (*COMMANDS, MOMENT):
            with tempfile.TemporaryDirectory() as home:
                os.environ |= {"FASTLAUNCH_HOME": home, "FASTLAUNCH_CONFIG": os.devnull}
                golden(each, at).write_text(screen(each, at), encoding="utf-8")
