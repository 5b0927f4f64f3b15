"""Output of commands: rows as tables, JSON or CSV; and runs with the answer."""

import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.cli.options import next_command, print_coloured
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import LOG, telling_lines
from fastlaunch.core.plan import RunState
from fastlaunch.core.tables import GAP, KEPT, SPARE, Column, keyed, table
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import counted, in_ms, rounded
from fastlaunch.jobs.job import Job, names_apart
from fastlaunch.measure.summary import RunSummary, StepProfile

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.lifecycle.world import World

_NUM_LOG_LINES = 20
#: The end of a script's log in a Python without torch, which comes with an extra.
_NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
#: The start of the training's own error lines in a log.
_OUR_ERROR = "error: "

RUN_HEADERS: Mapping[str, str] = {
    "run": "run",
    "recipe": "recipe",
    "state": "state",
    "step_time": "step time",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "note": "note",
}

STATE_COLOURS: Mapping[str, Mapping[str, Any]] = {
    RunState.COMPLETED: {"fg": "green"},
    RunState.RUNNING: {"fg": "magenta"},
    RunState.FAILED: {"fg": "red"},
    RunState.LOST: {"fg": "red"},
}
#: The end of a recipe that is cut, the least that is left of it, and the room for notes beside it.
_CUT, _LEAST_RECIPE, _NOTE_WIDTH = "...", 16, 24
#: Indentation before a text, or the name of a value.
_NAME = re.compile(r"^ *(?:\S+ {2,})?")


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    output: str,
    headers: Mapping[str, str] | None = None,
    spare: Sequence[str] = (),
    optional: Sequence[str] = (),
    columns: Iterable[str] = (),
) -> None:
    """Print rows of equal keys on stdout. output: `table`, `json` (a list of objects) or `csv`.

    headers: key -> heading; the table has only these columns, JSON and CSV have every key. None is an empty
    cell, and null in JSON. spare, optional: see `plain_table`. columns: the header of a CSV without rows.
    """
    if output == "json":
        click.echo(json.dumps(rows, indent=2, default=str))
    elif output == "csv":
        from fastlaunch.report.data import csv_text

        click.echo(csv_text(rows, rows[0] if rows else columns), nl=False)
    else:
        headers = headers or {key: key for key in (rows[0] if rows else {})}
        print_table(plain_table(rows, headers, spare=spare, optional=optional))


def print_table(text: str) -> None:
    """Print a table on stdout, with coloured run states on a terminal that supports them."""
    print_coloured(text, STATE_COLOURS)


def print_text(text: str) -> None:
    """Print sentences or `name  value` lines on stdout, wrapped between words to the terminal's width.

    A wrapped value is indented to where it begins.
    """
    width = shutil.get_terminal_size(fallback=(0, 1)).columns
    if width:
        text = "\n".join(
            textwrap.fill(
                line,
                width,
                subsequent_indent=" " * len(_NAME.findall(line)[0]),
                break_long_words=False,
                break_on_hyphens=False,
            )
            for line in text.splitlines()
        )
    click.echo(text)


def plain_table(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    *,
    spare: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> str:
    """Return a table of rows with equal keys, as wide as the terminal; see `core.tables`.

    headers: key -> heading. spare, optional: columns to drop before and after words wrap, in this order.
    """
    width = shutil.get_terminal_size(fallback=(0, 1)).columns
    importance = {key: SPARE - left for left, key in enumerate(reversed(spare))}
    importance |= {key: SPARE + number for number, key in enumerate(optional, start=1)}
    return table(rows, keyed(headers, importance), width or None)


def run_row(run: "Run", *, note: str | None = None) -> dict[str, Any]:
    """Return a run's cells under RUN_HEADERS, with times where they count.

    note: by default the reason for its state.
    """
    summary = run.summary
    step_time_s = summary.step_time_s if summary else None
    in_tokens = bool(summary and summary.setup.is_of_sequences and summary.timing.tokens_per_step)
    timing = summary.timing if summary else None
    per_step = timing and (timing.tokens_per_step if in_tokens else timing.samples_per_step)
    per_s = per_step / step_time_s if per_step and step_time_s else None
    whole_s = summary.figures.total_time_s if summary and not summary.timing.step_time_s else None
    return {
        "run": run.id,
        "recipe": run.recipe,
        "state": str(run.state),
        "step_time": in_ms(step_time_s) if step_time_s else None,
        "samples_per_s": None if in_tokens or per_s is None else rounded(per_s),
        "tokens_per_s": rounded(per_s) if in_tokens and per_s is not None else None,
        "note": note or run.reason or _problem(summary) or (whole_s and f"{rounded(whole_s)} s in all"),
    }


def runs_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column[Mapping[str, Any]]], width: int | None
) -> str:
    """Return a table of runs, each on one line of `width` but for its note, and the legend of their recipes.

    rows: with `run` and `recipe`. Where lines are short, ids are shortened to their ends, then recipes.
    """
    from fastlaunch.report.text import Letters
    from fastlaunch_train.recipes.recipes import recipe_of

    recipes = [recipe_of(row["recipe"]) or row["recipe"] for row in rows]
    letters = Letters(recipes)
    short = [{**row, "recipe": letters(recipe)} for row, recipe in zip(rows, recipes, strict=True)]
    if width:
        _shorten(short, columns, width)
    legend = letters.legend(width)
    return "\n\n".join([table(short, columns, width), *([legend] if legend else [])])


def _shorten(
    rows: Sequence[dict[str, Any]], columns: Sequence[Column[Mapping[str, Any]]], width: int
) -> None:
    """Shorten ids, then recipes, until the columns that are never dropped fit into a line of `width`."""
    kept = [column for column in columns if column.importance == KEPT and any(map(column.text, rows))]

    def excess() -> int:
        # A note, which has no heading, wraps.
        widest = (
            max(map(len, (column.name, *map(column.text, rows)))) if column.name else _NOTE_WIDTH
            for column in kept
        )
        return sum(size + GAP for size in widest) - GAP - width

    # The end of an id, from one of its dashes on, is as good as the whole; the longest first.
    ends = [
        [run_id[at + 1 :] for at, character in enumerate(run_id) if character == "-"]
        for run_id in (row["run"] for row in rows)
    ]
    counts = Counter(chain.from_iterable(ends))
    longest = max(len(row["run"]) for row in rows)
    while excess() > 0 and longest > 1:
        longest -= 1
        for row, of_run in zip(rows, ends, strict=True):
            if len(row["run"]) > longest:
                fitting = (end for end in of_run if len(end) <= longest and counts[end] == 1)
                row["run"] = next(fitting, row["run"])
    if (too_wide := excess()) > 0:
        room = max(_LEAST_RECIPE, max(len(row["recipe"]) for row in rows) - too_wide)
        for row in rows:
            if len(row["recipe"]) > room:
                row["recipe"] = f"{row['recipe'][: room - len(_CUT)]}{_CUT}"


def print_run_rows(
    rows: Sequence[Mapping[str, Any]], *, num_unneeded: int = 0, num_unstarted: int = 0
) -> None:
    """Print rows as `run_row` makes them, how many planned runs have none, and an empty line."""
    # Both follow from the step time.
    columns = keyed(RUN_HEADERS, {"samples_per_s": SPARE, "tokens_per_s": SPARE})
    width = shutil.get_terminal_size(fallback=(0, 1)).columns
    lines = [runs_table(rows, columns, width or None)] if rows else []
    for number, what in ((num_unneeded, "needed"), (num_unstarted, "started")):
        if number:
            verb = "was" if number == 1 else "were"
            lines.append(f"{counted(number, 'planned run')} {verb} not {what}.")
    print_table("\n".join([*lines, ""]))


def answer_of(context: "World", runs: Sequence["Run"]) -> str | None:
    """Return the current answer of `compare` for the runs' submission; None if nothing can be compared."""
    from fastlaunch.api.comparison import compare_at_own_prices
    from fastlaunch.ledger.ledger import open_ledger

    with context.advice.guard("the comparison"):
        with open_ledger(context.settings, clock=context.now) as ledger:
            submitted = ledger.fetch_comparable(submission=runs[0].submission_id)
        # Without measurements, the runs themselves say why.
        with suppress(UserError):
            return compare_at_own_prices(context, submitted).answer
    return None


def runs_sentence(runs: Sequence["Run"], answer: str | None) -> str:
    """Return the answer of `compare` with what it leaves out, or else why no run has a step time."""
    measured = [(run.recipe, run.summary) for run in runs if run.summary and run.summary.is_measured]
    if not answer or not measured:
        at = _why_not(runs)
        why = "no run has ended" if at is None else runs[at].reason or _problem(runs[at].summary)
        return f"No step time: {why}."
    num_started = sum(not run.is_unstarted for run in runs)
    missing = num_started - len(measured)
    note = f"; {missing} of {counted(num_started, 'run')} gave no step time" if missing else ""
    profiled = {recipe: summary.profile for recipe, summary in measured if summary.profile}
    parts = [f"\n{_parts_of(recipe, profile)}." for recipe, profile in profiled.items()]
    return f"{answer.removesuffix('.')}{note}.{''.join(parts)}"


def _parts_of(recipe: str, profile: StepProfile) -> str:
    """`A step of bf16 is 61% backward, 30% forward, 9% optimizer, by its profile`, the largest part first."""
    shares = {name: seconds / profile.step_time_s for name, seconds in profile.parts_s.items()}
    largest = sorted((name for name in shares if shares[name] >= 0.005), key=lambda name: -shares[name])
    named = ", ".join(f"{shares[name]:.0%} {name}" for name in largest)
    return f"A step of {recipe} is {named}, by its profile"


def _problem(summary: RunSummary | None) -> str | None:
    """Return the reason why the run cannot be compared; None if it can."""
    return summary.problems[0] if summary and summary.problems else None


def _why_not(runs: Sequence["Run"]) -> int | None:
    """Return the index of a run that says why nothing was measured; None if none does."""
    with_reason = (at for at, run in enumerate(runs) if run.reason)
    with_problem = (at for at, run in enumerate(runs) if _problem(run.summary))
    return next(chain(with_reason, with_problem), None)


def _uncounted(runs: Sequence["Run"]) -> Mapping[str, Mapping[str, None]]:
    """Return, by recipe, notes on what its runs' figures do not count."""
    texts: dict[str, dict[str, None]] = {}
    for run in runs:
        for text in run.summary.uncounted if run.summary else ():
            texts.setdefault(run.recipe, {})[text] = None
    return texts


def print_runs(runs: "Sequence[Run]", *, output: str, answer: str | None = None) -> None:
    """Print the runs and the answer; on stderr the end of a failed run's log and the next command.

    answer: see `runs_sentence`.
    """
    if output == "json":
        from fastlaunch.lifecycle.describe import measured_to_dict

        rows = [measured_to_dict(run) for run in runs]
        document = {"submission": runs[0].submission_id, "answer": answer, "runs": rows}
        click.echo(json.dumps(document, indent=2))
    else:
        rows = [{**run_row(run), "recipe": name} for run, name in zip(runs, _names(runs), strict=True)]
        is_measured = any(run.summary and run.summary.is_measured for run in runs)
        at = None if is_measured else _why_not(runs)
        # The sentence below gives the reason, which several runs may share.
        if at is not None and sum(row["note"] == rows[at]["note"] for row in rows) == 1:
            rows[at]["note"] = None
        started = [row for row, run in zip(rows, runs, strict=True) if not run.is_unstarted]
        num_unneeded = sum(run.is_unneeded for run in runs)
        num_unstarted = len(runs) - len(started) - num_unneeded
        print_run_rows(started, num_unneeded=num_unneeded, num_unstarted=num_unstarted)
        print_text(runs_sentence(runs, answer))
        print_models(runs)
        for name, texts in _uncounted(runs).items():
            print_text(as_warning(f"{name}: {'; '.join(texts)}"))
    failures = (run for run in runs if run.state in (RunState.FAILED, RunState.LOST))
    failed = next((run for run in failures if run.directory), None)
    if failed is not None and failed.directory is not None:
        lines = telling_lines(failed.directory, num_lines=_NUM_LOG_LINES)
        # The training's own error is the run's reason, which is printed above; show only its hint.
        after = [number for number, line in enumerate(lines, start=1) if line.startswith(_OUR_ERROR)]
        lines = lines[after[-1] :] if after else lines and [f"the end of {failed.directory / LOG}:", *lines]
        if lines:
            click.echo("\n".join(lines), err=True)
        if any(line.endswith(_NO_TORCH) for line in lines):
            click.echo("  pip install 'fastlaunch[train]'", err=True)
    next_command(_next(runs, failed))


def print_models(runs: "Sequence[Run]") -> None:
    """Print where the models lie that the runs trained."""
    from fastlaunch.lifecycle.describe import model_folder

    for run in runs:
        if folder := model_folder(run):
            print_text(f"model of {run.id}: {folder}")


def _names(runs: "Sequence[Run]") -> list[str]:
    """Return the runs' recipes, with what distinguishes runs of the same recipe."""
    specs = [Job.from_json(run.spec) for run in runs if run.spec]
    return names_apart(specs) if len(specs) == len(runs) else [run.recipe for run in runs]


def _next(runs: "Sequence[Run]", failed: "Run | None") -> str:
    from fastlaunch.lifecycle.resume import is_worth_resuming

    for run in runs:
        if not run.state.is_final:
            return f"fastlaunch logs -f {run.id}"
    if stopped := next(filter(is_worth_resuming, runs), None):
        return f"fastlaunch resume {stopped.id}"
    ended_well = (run.summary for run in runs if run.state not in (RunState.FAILED, RunState.LOST))
    if any(summary and summary.is_measured for summary in ended_well):
        return "fastlaunch compare"
    shown = failed or runs[0]
    has_log = shown.directory is not None and (shown.directory / LOG).is_file()
    return f"fastlaunch logs {shown.id}" if has_log else f"fastlaunch runs show {shown.id}"
