"""What commands print: tables, JSON and CSV of any rows; runs with an answer."""

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.cli.options import next_command, print_coloured
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import LOG, telling_lines
from fastlaunch.core.plan import RunState
from fastlaunch.core.terminal import printable
from fastlaunch.core.units import in_ms, rounded
from fastlaunch.jobs.spec import JobSpec, names_apart
from fastlaunch.measure.summary import RunSummary, StepProfile

if TYPE_CHECKING:
    from fastlaunch.api.context import AppContext
    from fastlaunch.ledger.ledger import Run

_NUM_LOG_LINES = 20
#: So begins, in a log, what the training says of an error.
_OUR_ERROR = "error: "

RUN_HEADERS: Mapping[str, str] = {
    "run": "run",
    "recipe": "recipe",
    "state": "state",
    "step_time": "step time",
    "samples_per_s": "samples/s",
    "note": "",
}

_GAP = 2
#: What the last column is not made narrower than, and what others are not cut to less than.
_LEAST_WORDS = 30
_LEAST_CUT = 8
#: In a narrower column a note on a run would be a pile of short lines.
_ROOM_FOR_NOTES = 50
STATE_COLOURS: Mapping[str, Mapping[str, Any]] = {
    RunState.COMPLETED: {"fg": "green"},
    RunState.RUNNING: {"fg": "magenta"},
    RunState.FAILED: {"fg": "red"},
    RunState.LOST: {"fg": "red"},
}
#: The space before a text, and the name of a value.
_NAME = re.compile(r"^ *(?:\S+ {2,})?")
#: A number, with a unit or without; ~ says that it is inferred.
_NUMBER = re.compile(r"[-~]?[0-9][0-9.,]*(e[+-]?[0-9]+)?( ?[a-zA-Z%]{1,3})?")


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    output: str,
    headers: Mapping[str, str] | None = None,
    shrinkable: Sequence[str] = (),
    droppable: Sequence[str] = (),
    columns: Iterable[str] = (),
) -> None:
    """Print rows of equal keys on stdout. output: `table`, `json` (a list of objects) or `csv`.

    headers: key -> heading; the table has only these columns, JSON and CSV have every key. None is an empty
    cell, and null in JSON. shrinkable, droppable: see `table`. columns: the header of a CSV without rows.
    """
    if output == "json":
        click.echo(json.dumps(rows, indent=2, default=str))
    elif output == "csv":
        from fastlaunch.report.data import csv_text

        click.echo(csv_text(rows, rows[0] if rows else columns), nl=False)
    else:
        headers = headers or {key: key for key in (rows[0] if rows else {})}
        print_table(table(rows, headers, shrinkable=shrinkable, droppable=droppable))


def print_table(text: str) -> None:
    """Print a table on stdout, the states of runs in colour on a terminal that takes it."""
    print_coloured(text, STATE_COLOURS)


def print_text(text: str) -> None:
    """Print sentences, or `name  value` lines, on stdout, broken between words where the terminal ends.

    A value goes on below where it begins.
    """
    width = shutil.get_terminal_size(fallback=(0, 1)).columns
    if width:
        text = "\n".join(_filled(line, width, then=len(_NAME.findall(line)[0])) for line in text.splitlines())
    click.echo(text)


def _filled(text: str, width: int, *, first: int = 0, then: int) -> str:
    """Return the text in lines of `width`, the first indented by `first` and the others by `then`."""
    return textwrap.fill(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    *,
    terminal: int | None = None,
    shrinkable: Sequence[str] = (),
    droppable: Sequence[str] = (),
    room: int | None = None,
) -> str:
    """Return a plain table with a row per line; columns of numbers are right-aligned.

    If it is wider than the terminal, the `droppable` columns are left out one by one, then the `shrinkable`
    ones cut (…), then all but the first of these left out, from the last on; the last column's words wrap,
    and stand under their row where there is no room beside it.
    terminal: its width, 0 without one; looked up if None. room: how many characters there must be for these
    words beside the others, which then do not give way to them.
    """
    from tabulate import tabulate

    if not headers:
        return ""
    width = shutil.get_terminal_size(fallback=(0, 1)).columns if terminal is None else terminal
    widths, last = _widths(rows, headers), [*headers][-1]
    values = [row[last] for row in rows]
    wraps = len(headers) > 1 and not _is_numeric(values) and any(" " in _text(value) for value in values)
    # The last column's words beside the rest, else below it.
    needs = [min(widths[last], room or _LEAST_WORDS), -_GAP] if wraps else [widths[last]]
    kept = widths
    for need in needs if width else ():
        give_way = (shrinkable, droppable) if room is None or need == needs[-1] else ((), ())
        kept = _narrowed({**widths, last: need}, headers, width, *give_way)
        if _excess(kept, width) <= 0:
            break
    is_below = kept.get(last) == -_GAP
    if last in kept:
        kept[last] = widths[last]
    cells = [[_cut(_text(row[key]), kept[key]) for key in kept] for row in rows]
    lines = [[headers[key] for key in kept], *cells]
    is_right = [_is_numeric([row[key] for row in rows]) for key in kept]
    details = [""] * len(lines)
    if is_below:
        details = ["", *(_filled(line[-1], width, first=_GAP, then=_GAP) for line in cells)]
        lines, is_right = [line[:-1] for line in lines], is_right[:-1]
    elif width and wraps and (excess := _excess(kept, width)) > 0:
        lines = [[*line[:-1], _filled(line[-1], kept[last] - excess, then=0)] for line in lines]
    # The headings go in as a row: tabulate would make each column two characters wider than its heading.
    alignment = ["right" if right else "left" for right in is_right]
    text = tabulate(lines, tablefmt="plain", disable_numparse=True, colalign=alignment)
    if not is_below:
        return text
    return "\n".join(
        line for pair in zip(text.splitlines(), details, strict=True) for line in pair if line.strip()
    )


def _excess(widths: Mapping[str, int], width: int) -> int:
    """Return how many characters columns so wide are too many."""
    return sum(widths.values()) + _GAP * (len(widths) - 1) - width


def _narrowed(
    widths: Mapping[str, int],
    headers: Mapping[str, str],
    width: int,
    shrinkable: Sequence[str],
    droppable: Sequence[str],
) -> dict[str, int]:
    """Return the widths of the columns that are kept, as far as need be."""
    kept = dict(widths)
    for key in droppable:
        if _excess(kept, width) > 0:
            kept.pop(key, None)
    cut = _shrunk(kept, headers, width, shrinkable)
    for key in reversed(shrinkable[1:]):
        if _excess(cut, width) > 0:
            kept.pop(key, None)
            cut = _shrunk(kept, headers, width, shrinkable)
    return cut


def _shrunk(
    widths: Mapping[str, int], headers: Mapping[str, str], width: int, shrinkable: Sequence[str]
) -> dict[str, int]:
    """Return the widths with the widest of the `shrinkable` columns cut, as far as need be and one may."""
    cut = dict(widths)
    while _excess(cut, width) > 0:
        keys = [key for key in shrinkable if key in cut and cut[key] > max(len(headers[key]), _LEAST_CUT)]
        if not keys:
            break
        cut[max(keys, key=lambda key: cut[key])] -= 1
    return cut


def _widths(rows: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> dict[str, int]:
    return {
        key: max(len(heading), *(len(_text(row[key])) for row in rows), 0) for key, heading in headers.items()
    }


def _is_numeric(values: Sequence[object]) -> bool:
    known = [_text(value) for value in values if value is not None]
    return bool(known) and all(_NUMBER.fullmatch(text) for text in known)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return printable(", ".join(map(str, value)))
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else printable(str(value))


def run_row(run: "Run", *, note: str | None = None) -> dict[str, Any]:
    """Return a run under RUN_HEADERS; its times if `compare` takes them too.

    note: what to say of it; by default why it is as it is.
    """
    summary = run.summary
    step_time = summary.timing.step_time_s if summary and _is_measured(run) else None
    per_step = summary.timing.samples_per_step if summary and step_time else None
    whole_s = summary.figures.total_time_s if summary and not summary.timing.step_time_s else None
    return {
        "run": run.id,
        "recipe": run.recipe,
        "state": str(run.state),
        "step_time": in_ms(step_time.value) if step_time else None,
        "samples_per_s": rounded(per_step / step_time.value) if per_step and step_time else None,
        "note": note or run.reason or _problem(summary) or (whole_s and f"{rounded(whole_s)} s in all"),
    }


def print_run_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as `run_row` makes them, and an empty line."""
    # What was imported has long ids; samples/s follow from the step time.
    droppable = ("samples_per_s",)
    # A script need not say how many samples a step has.
    empty = {key for key in droppable if all(row[key] is None for row in rows)}
    headers = {key: text for key, text in RUN_HEADERS.items() if key not in empty}
    text = table(rows, headers, shrinkable=("recipe",), droppable=droppable, room=_ROOM_FOR_NOTES)
    print_table(f"{text}\n")


def answer_of(context: "AppContext", runs: Sequence["Run"]) -> str | None:
    """Return what `compare` answers about the runs' submission by now; None if nothing can be compared."""
    from fastlaunch.api.comparison import compare_at_own_prices
    from fastlaunch.ledger.ledger import open_ledger

    with context.advice.guard("the comparison"):
        with open_ledger(context.settings, clock=context.now) as ledger:
            submitted = ledger.fetch_comparable(submission=runs[0].submission_id)
        # Where nothing was measured the runs themselves say why.
        with suppress(UserError):
            return compare_at_own_prices(context, submitted).answer
    return None


def runs_sentence(runs: Sequence["Run"], answer: str | None) -> str:
    """Return `answer`, which is that of `compare`, with what it leaves out; else why no run has a time."""
    measured = [(run.recipe, run.summary) for run in runs if run.summary and _is_measured(run)]
    if not answer or not measured:
        return f"No step time: {_why_not(runs)}."
    missing = sum(not run.is_unneeded for run in runs) - len(measured)
    note = f"; {missing} of {len(runs)} runs gave no step time" if missing else ""
    profiled = {recipe: summary.profile for recipe, summary in measured if summary.profile}
    parts = [f"\n{_parts_of(recipe, profile)}." for recipe, profile in profiled.items()]
    return f"{answer.removesuffix('.')}{note}.{''.join(parts)}"


def _parts_of(recipe: str, profile: StepProfile) -> str:
    """`A step of bf16 is 61% backward, 30% forward, 9% optimizer, by its profile`, the largest part first."""
    shares = {name: seconds / profile.step_time_s for name, seconds in profile.parts_s.items()}
    largest = sorted((name for name in shares if shares[name] >= 0.005), key=lambda name: -shares[name])
    named = ", ".join(f"{shares[name]:.0%} {name}" for name in largest)
    return f"A step of {recipe} is {named}, by its profile"


def _is_measured(run: "Run") -> bool:
    # A run that was stopped half-way was measured up to there.
    stood = run.state in (RunState.COMPLETED, RunState.INTERRUPTED)
    return bool(stood and run.summary and _has_time(run.summary) and not run.summary.problems)


def _has_time(summary: RunSummary) -> bool:
    """Whether its steps were timed; of a script without steps, the whole."""
    return summary.timing.step_time_s is not None or summary.figures.total_time_s is not None


def _problem(summary: RunSummary | None) -> str | None:
    """Return what makes the run unfit to compare; None if nothing does."""
    return summary.problems[0] if summary and summary.problems else None


def _why_not(runs: Sequence["Run"]) -> str:
    reasons = [run.reason for run in runs]
    reasons += [_problem(run.summary) for run in runs]
    return next(filter(None, reasons), "no run has ended" if runs else "there are no runs")


def _uncounted(runs: Sequence["Run"]) -> Mapping[str, Mapping[str, None]]:
    """Return by recipe what is in none of the figures of its runs."""
    texts: dict[str, dict[str, None]] = {}
    for run in runs:
        for text in run.summary.uncounted if run.summary else ():
            texts.setdefault(run.recipe, {})[text] = None
    return texts


def print_runs(runs: "Sequence[Run]", *, output: str, answer: str | None = None) -> None:
    """Print the runs and what they say; on stderr the end of a failed run's log and the next command.

    answer: see `runs_sentence`.
    """
    if output == "json":
        from fastlaunch.lifecycle.describe import measured_to_dict

        rows = [measured_to_dict(run) for run in runs]
        document = {"submission": runs[0].submission_id, "answer": answer, "runs": rows}
        click.echo(json.dumps(document, indent=2))
    else:
        rows = [{**run_row(run), "recipe": name} for run, name in zip(runs, _names(runs), strict=True)]
        if len(rows) == 1 and not any(map(_is_measured, runs)):
            # The sentence says it.
            rows[0]["note"] = None
        print_run_rows(rows)
        print_text(runs_sentence(runs, answer))
        for name, texts in _uncounted(runs).items():
            print_text(f"warning: {name}: {'; '.join(texts)}")
    failures = (run for run in runs if run.state in (RunState.FAILED, RunState.LOST))
    failed = next((run for run in failures if run.directory), None)
    if failed is not None and failed.directory is not None:
        lines = _untold(telling_lines(failed.directory, num_lines=_NUM_LOG_LINES), failed.reason or "")
        if lines:
            click.echo("\n".join([f"the end of {failed.directory / LOG}:", *lines]), err=True)
    next_command(_next(runs, failed))


def _untold(lines: list[str], reason: str) -> list[str]:
    """Return the lines of a log after the error in our words that `reason` repeats, such as a hint; else all.

    The last line of a traceback says little without the others.
    """
    told = [
        number
        for number, line in enumerate(lines, start=1)
        if line.startswith(_OUR_ERROR) and (text := line.removeprefix(_OUR_ERROR).strip()) and text in reason
    ]
    return lines[told[-1] :] if told else lines


def _names(runs: "Sequence[Run]") -> list[str]:
    """Return the runs' recipes, with what sets apart the runs that share one."""
    specs = [JobSpec.from_json(run.spec) for run in runs if run.spec]
    return names_apart(specs) if len(specs) == len(runs) else [run.recipe for run in runs]


def _next(runs: "Sequence[Run]", failed: "Run | None") -> str:
    from fastlaunch.lifecycle.local import is_worth_resuming

    for run in runs:
        if not run.state.is_final:
            return f"fastlaunch logs -f {run.id}"
    if stopped := next(filter(is_worth_resuming, runs), None):
        return f"fastlaunch resume {stopped.id}"
    ended_well = (run.summary for run in runs if run.state not in (RunState.FAILED, RunState.LOST))
    if any(summary and _has_time(summary) for summary in ended_well):
        return "fastlaunch compare"
    shown = failed or runs[0]
    has_log = shown.directory is not None and (shown.directory / LOG).is_file()
    return f"fastlaunch logs {shown.id}" if has_log else f"fastlaunch runs show {shown.id}"
