"""`fastlaunch watch`: what a run's row says, what it will cost, which columns fit, when AWS is asked."""

import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from attempt_builders import attempt_with, run_with

from fastlaunch.cli.watch import printed_lines, problem_lines, screen_lines, table_lines
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.rows import Run
from fastlaunch.lifecycle.display import Progress
from fastlaunch.lifecycle.follow import Follower, LiveRun, View, in_thread, live_run, projected_usd
from fastlaunch.lifecycle.world import World
from fastlaunch_train.node.protocol import mean_gpu_use

NOW = datetime(2026, 11, 21, 10, tzinfo=UTC)
HALF = Progress(
    step=5000, num_steps=10_000, samples_per_s=1422.0, step_time_s=0.36, loss=2.5, seconds_left=1800.0
)
#: Since half an hour at $60 an hour, for an hour and at most $70.
MACHINE = attempt_with(launched_at="2026-11-21T09:30:00+00:00", usd_per_hour=60.0, max_cost_usd=70.0)


def live(run: Run | None = None, progress: Progress | None = HALF, **more: Any) -> LiveRun:
    given = {"home": Path("none"), "now": NOW, **more}
    return live_run(run or run_with(), given.pop("attempts", [MACHINE]), progress=progress, **given)


def view(*runs: LiveRun, **more: Any) -> View:
    return View(**{"now": NOW, "runs": runs, "next_look_s": 8.0, **more})


def test_a_row_names_the_attempt_and_a_machine_over_its_time() -> None:
    again = live(attempts=[replace(MACHINE, n=2)])
    assert "running (spot, attempt 2)" in table_lines([again], 200)[1]
    late = live(now=NOW + timedelta(hours=2))
    assert late.alarm is not None and late.time_left_s == 0
    assert screen_lines(view(late), 120, 24)[-1].startswith("ALARM: run-a: over its time")


def test_what_a_run_will_have_cost() -> None:
    assert projected_usd(MACHINE, 30.0, 70.0, 1800.0, ()) == pytest.approx(60.0)
    two = replace(MACHINE, num_nodes=2)
    assert projected_usd(two, 30.0, 200.0, 1800.0, ()) == pytest.approx(90.0)
    # The ceiling ends it; what is over its ceiling already costs what it costs.
    assert projected_usd(MACHINE, 30.0, 70.0, 1e6, ()) == 70.0
    assert projected_usd(MACHINE, 80.0, 70.0, 1e6, ()) == 80.0
    # Nobody knows before there is a rate or a price, nor while another run waits for the machine.
    assert projected_usd(MACHINE, 30.0, 70.0, None, ()) is None
    assert projected_usd(attempt_with(), None, None, 1.0, ()) is None
    shared = replace(MACHINE, run_ids=("run-a", "run-b"))
    assert projected_usd(shared, 30.0, 70.0, 1800.0, {"run-b"}) is None
    assert projected_usd(shared, 30.0, 70.0, 1800.0, {"run-c"}) == pytest.approx(60.0)


MANY = (
    live(run_with(id="20261121-090312-k3f9")),
    live(run_with(id="20261121-090312-qq21", recipe="fp8-delayed-compiled"), None, attempts=[]),
    live(
        run_with(
            id="20261121-090313-m0x4",
            state=RunState.FAILED,
            reason="its training failed: " + "out of memory " * 20,
        ),
        None,
    ),
)


def test_a_screen_with_more_runs_than_lines_counts_the_rest() -> None:
    lines = screen_lines(view(*itertools.repeat(MANY[0], 50)), 80, 24)
    assert len(lines) < 24
    num_shown = sum(line.startswith(MANY[0].run.id) for line in lines)
    assert num_shown > 10 and f"and {50 - num_shown} runs more" in lines, lines


class Scripted(Follower):
    """Looks that fail or not, and views, one after another; the last ones stay."""

    def __init__(self, looks: Sequence[list[str]], runs: Sequence[LiveRun]) -> None:
        self.looks, self.runs = list(looks), list(runs)
        self.looked_at: list[float] = []
        self.go_on = lambda: False
        self.now_s = 0.0
        self.world = World(
            settings=load_settings(),
            backends={},
            now=lambda: NOW + timedelta(seconds=self.now_s),
            sleep=self.sleep,
        )

    def question(self) -> Callable[[], list[str]]:
        self.looked_at.append(self.now_s)
        return lambda: self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def read(self) -> View:
        return view(self.runs.pop(0) if len(self.runs) > 1 else self.runs[0])

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


ENDED = replace(MANY[0], run=replace(MANY[0].run, state=RunState.COMPLETED))


def test_aws_is_asked_at_intervals_however_often_the_screen_is_drawn() -> None:
    source = Scripted([[]], [MANY[0]] * 25 + [ENDED])
    shown = list(source.views(interval_s=10.0, tick_s=1.0))
    assert source.looked_at == [0.0, 10.0, 20.0]
    assert len(shown) == 26 and shown[-1].has_ended
    assert [each.next_look_s for each in shown[:3]] == [10.0, 9.0, 8.0]


def test_without_a_network_rows_stay_with_their_age_and_looks_become_rare() -> None:
    source = Scripted([["no way to EC2"]] * 8 + [[]], [MANY[0]] * 200 + [ENDED])
    shown = list(source.views(interval_s=10.0, tick_s=10.0))
    waits = [after - before for before, after in itertools.pairwise(source.looked_at)]
    assert waits[:6] == [20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert waits[8:10] == [10.0, 10.0]
    assert shown[0].problems == ["no way to EC2"] and not shown[-1].problems
    old = replace(shown[0], runs=[replace(MANY[0], seen_s=125.0)])
    assert problem_lines(old) == ["the rows are 2.08 min old, next look in 20 s: no way to EC2"]
    assert problem_lines(replace(old, problems=["a", "b"])) == [
        "the rows are 2.08 min old, next look in 20 s (and 1 more): a"
    ]


def test_the_screen_is_drawn_while_aws_lets_wait() -> None:
    source = Scripted([["no answer"], []], [MANY[0]] * 5 + [ENDED])
    left = [3, 0]

    def slow(ask: Callable[[], list[str]]) -> Callable[[], list[str] | None]:
        waits = left.pop(0)
        began_s = source.now_s
        return lambda: None if source.now_s < began_s + waits else ask()

    shown = list(source.views(interval_s=1.0, tick_s=1.0, start=slow))
    assert [each.next_look_s for each in shown] == [None, None, None, 2.0, 1.0, 1.0]
    assert not shown[2].problems and shown[3].problems == ["no answer"]


def test_asking_in_a_thread_answers_or_raises_what_it_raised() -> None:
    def bug() -> list[str]:
        raise ZeroDivisionError

    answer = in_thread(lambda: ["no way"])
    while (found := answer()) is None:
        pass
    assert found == ["no way"]
    wrong = in_thread(bug)
    with pytest.raises(ZeroDivisionError):
        while wrong() is None:
            pass


def printed(output: str, *moments: View) -> list[str]:
    shown = io.StringIO()
    with redirect_stdout(shown), printed_lines(output, Path("none")) as show:
        for moment in moments:
            show(moment)
    return shown.getvalue().splitlines()


def test_off_a_terminal_there_is_a_line_per_change() -> None:
    waits = live(progress=None)
    steps = [live(progress=replace(HALF, step=step)) for step in (1, 200, 900, 1000, 1100, 2000)]
    ended = live(run_with(state=RunState.COMPLETED))
    lines = printed("table", *map(view, [waits, waits, *steps, ended]))
    assert [re.split("[;,] ", line.partition(": ")[2])[:2] for line in lines] == [
        ["running", "waiting for the machine to boot"],
        ["running", "step 1/10000"],
        ["running", "step 1000/10000"],
        ["running", "step 2000/10000"],
        ["completed", "$30.00 so far"],
    ]
    assert lines[1].endswith("attempt 1 in us-east-1; $30.00 so far, at most $70.00")


def test_json_is_an_object_per_run_and_look() -> None:
    rows = [json.loads(line) for line in printed("json", view(*MANY), view(*MANY))]
    assert [row["id"] for row in rows] == [live.run.id for live in MANY] * 2
    assert {key: rows[0][key] for key in ("at", "step", "loss", "projected_usd", "gpu_use")} == {
        "at": "2026-11-21T10:00:00+00:00",
        "step": 5000,
        "loss": 2.5,
        "projected_usd": 60.0,
        "gpu_use": None,
    }


def test_gpu_use_is_the_mean_or_unknown() -> None:
    assert mean_gpu_use("97\n100\n") == pytest.approx(0.985)
    for answer in ("", "[N/A]\n97\n", "101\n", "-1\n", "No devices were found\n"):
        assert mean_gpu_use(answer) is None
