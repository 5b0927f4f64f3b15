"""`fastlaunch watch`: runs under way, live."""

import glob
import json
import shutil
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from fastlaunch.cli.context import app_context
from fastlaunch.cli.follow import go_on, states_text
from fastlaunch.cli.options import SECONDS, examples, next_command, profile_option
from fastlaunch.cli.render import STATE_COLOURS, print_table
from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED, UserError
from fastlaunch.core.tables import Column, table
from fastlaunch.core.terminal import as_warning, printable, raw_output, report_line
from fastlaunch.core.units import counted, duration_text, in_ms, rounded

if TYPE_CHECKING:
    from fastlaunch.backends.protocol import CloudBackend
    from fastlaunch.lifecycle.follow import LiveRun, View

#: Characters of what a run waits for, or of how it ended.
_LONGEST_NOTE = 80
#: What ended on AWS is shown for so long beside what is under way.
_LATELY = timedelta(hours=1)
#: How often local files are read on a terminal.
_TICK_S = 1.0


@click.command(
    epilog=examples(
        ("all that is under way", "fastlaunch watch"),
        ("the runs of a sweep, asking AWS every minute", "fastlaunch watch --sweep NAME --interval 1min"),
        ("as a stream for a program", "fastlaunch watch --output json"),
    )
)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--sweep", metavar="SWEEP", help="Watch the runs of this sweep.")
@click.option(
    "--interval",
    type=SECONDS,
    default="10",
    show_default=True,
    help="Ask AWS so often: seconds, or such as 1min.",
)
@click.option(
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="json: an object per run and look, each on a line of its own.",
)
@profile_option
def watch(runs: tuple[str, ...], sweep: str | None, interval: float, output: str) -> int:
    """Watch runs live: steps, loss, GPU use, cost, time left, what they wait for.

    RUN is a run's id, the beginning or end of it, or `field=glob`. Without RUN: the runs under way, and those
    on AWS that ended within an hour. It goes on with interrupted runs as `status` does. It ends when all have
    ended, with 0 if all completed and 1 if not; Ctrl-C ends only the watch. Where stdout is not a terminal it
    prints a line per change.
    """
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.lifecycle.follow import (
        Follower,
        at_once,
        fetch_unfollowed,
        gpu_use_here,
        in_thread,
        under_way,
    )

    if runs and sweep:
        raise UserError("RUN and --sweep are given", "give one of them")
    if interval < 1:
        raise UserError(f"--interval: {interval:g} s is too often", "give 1 or more")
    context = app_context()
    home = context.settings.home
    is_screen = output == "table" and sys.stdout.isatty()

    # Short time-outs, since the next look comes soon.
    looking = replace(context, connect=lambda: cast("CloudBackend", context.backends["ec2"]).aws)
    with open_ledger(context.settings, clock=context.now) as ledger:
        selectors = (f"sweep={glob.escape(ledger.sweep(sweep).id)}",) if sweep else runs
        moments = Follower(
            world=context,
            ledger=ledger,
            choose=lambda: (
                ledger.select(selectors) if selectors else under_way(ledger, since=context.now() - _LATELY)
            ),
            fetch=partial(fetch_unfollowed, looking),
            go_on=lambda: go_on(context, ledger),
            local_gpu_use=gpu_use_here,
        ).views(
            interval_s=interval,
            tick_s=_TICK_S if is_screen else interval,
            start=in_thread if is_screen else at_once,
        )
        view = next(moments)
        if not view.runs:
            for problem in view.problems:
                report_line(as_warning(problem))
            click.echo("No run is under way.", err=output == "json")
            next_command("fastlaunch status" if ledger.last_submission() else "fastlaunch submit --local")
            return EXIT_DONE
        is_stopped = False
        with _screen() if is_screen else printed_lines(output, home) as show:
            try:
                show(view)
                for view in moments:
                    show(view)
            except KeyboardInterrupt:
                is_stopped = True
    return _finish(view, output=output, is_screen=is_screen, is_stopped=is_stopped)


def _finish(view: "View", *, output: str, is_screen: bool, is_stopped: bool) -> int:
    """Print the runs' states and the next command; return the exit code."""
    if is_screen:
        width = shutil.get_terminal_size().columns
        print_table("\n".join(table_lines(view.runs, width)))
    if output == "table":
        click.echo(summary_line(view))
    if view.problems:
        report_line(as_warning(f"the last look failed: {view.problems[0]}"))
    unfinished = [live.run for live in view.runs if not live.run.state.is_final]
    if is_stopped:
        if unfinished:
            goes = "goes" if len(unfinished) == 1 else "go"
            click.echo(f"{counted(len(unfinished), 'run')} {goes} on", err=True)
        next_command(f"fastlaunch cancel {unfinished[0].id}" if unfinished else "fastlaunch status")
        return EXIT_INTERRUPTED
    failed = [live.run for live in view.runs if live.has_failed]
    after = f"fastlaunch logs {failed[0].id}" if failed else "fastlaunch compare"
    next_command("fastlaunch status" if view.num_interrupted else after)
    return EXIT_JOB_FAILED if failed or any(live.alarm for live in view.runs) else EXIT_DONE


@contextmanager
def _screen() -> "Iterator[Callable[[View], None]]":
    """Yield a function that draws a view on the whole terminal. The terminal is restored at the end."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=raw_output(sys.stdout), highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show(view: "View") -> None:
            width, height = console.size
            text = Text(no_wrap=True, overflow="crop")
            for line in screen_lines(view, width, height):
                text.append(_coloured(line)).append("\n")
            live.update(text, refresh=True)

        yield show


def _coloured(line: str) -> Any:
    from rich.text import Text

    text = Text(line)
    for state, style in STATE_COLOURS.items():
        text.highlight_regex(rf"(?<=  ){state}\b", style["fg"])
    text.highlight_regex(r"^ALARM.*", "red")
    return text


@contextmanager
def printed_lines(output: str, home: Path) -> "Iterator[Callable[[View], None]]":
    """Yield a function that prints a line per change of a run, or a JSON object per run and look."""
    shown: dict[str, tuple[object, ...]] = {}
    problems: Sequence[str] = ()

    def show(view: "View") -> None:
        nonlocal problems
        if view.problems != problems:
            problems = view.problems
            for line in problem_lines(view):
                report_line(as_warning(line))
        for live in view.runs:
            if output == "json":
                at = view.now.isoformat(timespec="seconds")
                click.echo(json.dumps({"at": at, **live.to_dict(home=home, now=view.now)}))
            elif shown.get(live.run.id) != (change := _change(live)):
                shown[live.run.id] = change
                words = "; ".join(filter(None, [str(live.run.state), live.in_words()]))
                click.echo(f"{view.now:%H:%M:%S} {live.run.id} {live.run.recipe}: {words}")

    yield show


def _change(live: "LiveRun") -> tuple[object, ...]:
    """Return a key whose change prints a new line. It changes with every tenth of the steps."""
    step, num_steps = live.step, live.progress and live.progress.num_steps
    tenth = step * 10 // num_steps if step and num_steps else step
    return live.run.state, len(live.attempts), live.note, live.alarm, tenth


def screen_lines(view: "View", width: int, height: int) -> list[str]:
    """Return the whole screen: a heading, problems, the table and a summary."""
    head = f"{view.now:%H:%M:%S} UTC, {_next_look(view)}; Ctrl-C leaves the runs alone"
    above = [head, *problem_lines(view), ""]
    alarms = [f"ALARM: {live.run.id}: {live.alarm}" for live in view.runs if live.alarm]
    below = ["", summary_line(view), *alarms]
    lines = table_lines(view.runs, width, max(2, height - len(above) - len(below) - 1))
    return [_cut(line, width) for line in [*above, *lines, *below]]


def problem_lines(view: "View") -> list[str]:
    """Return lines on the age of the rows, the next look and the failures of the last one."""
    if not view.problems:
        return []
    ages = [live.seen_s for live in view.runs if live.seen_s is not None]
    age = f"the rows are {duration_text(max(ages))} old, " if ages else ""
    first, *others = view.problems
    more = f" (and {len(others)} more)" if others else ""
    return [f"{age}{_next_look(view)}{more}: {first}"]


def _next_look(view: "View") -> str:
    return "looking" if view.next_look_s is None else f"next look in {view.next_look_s:.0f} s"


def summary_line(view: "View") -> str:
    """`3 runs: 1 running, 2 completed. $3.10 so far.`"""
    states = states_text([live.run for live in view.runs])
    so_far = "" if view.has_ended else " so far"
    cost = "" if view.cost_usd is None else f" {_usd(view.cost_usd)}{so_far}."
    more = f" {counted(view.num_interrupted, 'interrupted run')} to go on: fastlaunch status."
    return f"{counted(len(view.runs), 'run')}: {states}.{cost}{more if view.num_interrupted else ''}"


def table_lines(runs: "Sequence[LiveRun]", width: int, height: int | None = None) -> list[str]:
    """Return a table of as many runs as `height` lines have room for, and how many more there are."""

    def lines_of(num_runs: int) -> list[str]:
        lines = table(runs[:num_runs], COLUMNS, width, missing="n/a").splitlines()
        num_more = len(runs) - num_runs
        return [*lines, f"and {counted(num_more, 'run')} more"] if num_more else lines

    if height is None:
        return lines_of(len(runs))
    return lines_of(max(1, bisect_right(range(1, len(runs) + 1), height, key=lambda num: len(lines_of(num)))))


def _state(live: "LiveRun") -> str:
    run, attempt = live.run, live.attempts[-1].n if live.attempts else 1
    details = ["spot" if run.purchase == "spot" else "", f"attempt {attempt}" if attempt > 1 else ""]
    detail = ", ".join(filter(None, details))
    return f"{run.state} ({detail})" if detail else str(run.state)


def _step(live: "LiveRun") -> str | None:
    """Return the step; before the first one what the run waits for, or how it ended."""
    if live.step is None:
        return live.note and _cut(printable(live.note), _LONGEST_NOTE)
    num_steps = live.progress and live.progress.num_steps
    return f"{live.step:,}/{num_steps:,}" if num_steps else f"{live.step:,}"


def _usd(value: float) -> str:
    return f"${value:,.2f}"


#: The columns of the screen. The least important leave first where there is no room.
COLUMNS: "Sequence[Column[LiveRun]]" = (
    Column("run", lambda live: live.run.id),
    Column("recipe", lambda live: live.run.recipe, importance=80),
    Column("instance", lambda live: live.run.instance or "local", importance=50),
    Column("state", _state),
    Column("step", _step, align="left"),
    Column("step time", lambda live: live.step_time_s, format=in_ms, align="right", importance=90),
    Column("samples/s", lambda live: live.samples_per_s, format=rounded, align="right", importance=20),
    Column("loss", lambda live: live.loss, format="{:.3f}".format, align="right", importance=60),
    Column("GPU use", lambda live: live.gpu_use, format="{:.0%}".format, align="right", importance=30),
    Column("cost", lambda live: live.cost_usd, format=_usd, align="right"),
    Column("projected", lambda live: live.projected_usd, format=_usd, align="right", importance=40),
    Column("ceiling", lambda live: live.max_cost_usd, format=_usd, align="right", importance=10),
    Column(
        "time left",
        lambda live: None if live.run.state.is_final else live.time_left_s,
        format=duration_text,
        align="right",
        importance=70,
    ),
)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"
