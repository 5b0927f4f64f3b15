"""`fastlaunch report`: a comparison to share."""

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from fastlaunch.cli.compare import comparison_options, prices_to_add
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import examples, given_command, next_command, with_filters
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, UserError
from fastlaunch.core.units import size_text

_FORMATS = ("html", "png", "md", "csv", "json")
#: The default file name.
_IN_FILES = {"html": "report.html", "png": "report.png"}
#: A mark near the start of every page that we write.
_MARK = b'<meta name="generator" content="fastlaunch">'
_START_BYTES = 1000


@click.command(
    help=with_filters(
        """Write a report to share: one page of HTML that needs no network, with the answer first.

    It covers every run, or those that RUN and FILTER pick. The page draws cost against time, dollars by
    recipe and instance, step times, where a step's time goes, losses and prices. It ranks anew for a price
    that you type there, and shows for every run what it was and the command that reproduces it.
    """
    ),
    epilog=examples(
        ("all runs as report.html, shown in the browser", "fastlaunch report --open"),
        ("one sweep, for a colleague", "fastlaunch report --sweep 20261125-101500-1a2b -o p5-or-p4d.html"),
        (
            "a table for a pull request, at the prices of another day",
            "fastlaunch report 'workload=vit-*' --format md --prices-as-of 2026-11-21",
        ),
    ),
)
@click.argument("selectors", nargs=-1, metavar="[RUN|FILTER]...")
@click.option(
    "--sweep", metavar="ID", help="Report on the runs of this sweep; the beginning of its id is enough."
)
@click.option(
    "--format",
    "given_format",
    type=click.Choice(_FORMATS),
    help="Write this; png is the chart of cost against time.  [default: by the name of FILE, else html]",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Write to this file, or - for stdout.  [default: report.html, report.png, else stdout]",
)
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@comparison_options
@click.option("--measured-only", is_flag=True, help="Draw no predictions beside the runs.")
def report(
    selectors: tuple[str, ...],
    sweep: str | None,
    given_format: str | None,
    output: Path | None,
    show: bool,
    measured_only: bool,
    **options: Any,
) -> int:
    from fastlaunch.api.report import report as report_on

    format_ = given_format or _format_of(output)
    if show and (format_ != "html" or output == Path("-")):
        raise UserError("--open shows a page in the browser", "leave out --format, and -o -")
    if format_ == "png" and output == Path("-"):
        raise UserError("a picture is no text for stdout", "name a file: -o chart.png")
    path = output or Path(_IN_FILES.get(format_, "-"))
    if output is None:
        _check_own(path)
    with activity("making the report"):
        made = report_on(
            *selectors, sweep=sweep, predictions=not measured_only, context=app_context(), **options
        )
        forms: dict[str, Callable[[], str | bytes]] = {
            **{"html": made.page, "png": made.chart},
            **{"md": made.markdown, "csv": made.csv, "json": made.json},
        }
        text = forms[format_]()
    if path == Path("-"):
        click.echo(text)
        return EXIT_DONE
    body = f"{text}\n".encode() if isinstance(text, str) else text
    _write(path, body)
    click.echo(f"Wrote {path} ({size_text(len(body))}).", err=True)
    if show:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            click.echo(f"No browser was found here: open {path} in one.", err=True)
    if format_ == "html" and (words := prices_to_add(made.comparison)):
        next_command(shlex.join([*given_command(), *words]))
    return EXIT_DONE


def _format_of(output: Path | None) -> str:
    """Return the format that the file's name ends with; html without one. Raises UserError for another."""
    ending = output.suffix.lstrip(".").lower() if output else ""
    format_ = {"": "html", "htm": "html", "markdown": "md"}.get(ending, ending)
    if format_ not in _FORMATS:
        raise UserError(f"no report is written as .{ending}", f"give --format: {', '.join(_FORMATS)}")
    return format_


def _check_own(path: Path) -> None:
    """Raise UserError if the default file exists and is not our page, as the user did not name it."""
    try:
        with path.open("rb") as file:
            is_ours = _MARK in file.read(_START_BYTES)
    except OSError:
        return
    if not is_ours:
        raise UserError(
            f"{path} is there already, and no report of fastlaunch", "give another name: -o runs.html"
        )


def _write(path: Path, body: bytes) -> None:
    """Write the file atomically; write directly to a pipe or the like. Raises UserError."""
    # Keep a link, and replace its target.
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(body)
            return
        partial.write_bytes(body)
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}", "give another place: -o FILE"
        ) from None
