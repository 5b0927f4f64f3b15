"""What several commands share: options, quantities as people write them, questions, the next command."""

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from fastlaunch.core.errors import UserError
from fastlaunch.core.terminal import plain, printable, raw_output
from fastlaunch.core.units import (
    parse_batch_size,
    parse_bytes,
    parse_count,
    parse_date,
    parse_duration_s,
    parse_nproc,
    parse_usd,
    split_names,
)

Command = TypeVar("Command", bound=Callable[..., Any])


class Decorator(Protocol):
    """Gives a command an option, or several."""

    def __call__(self, command: Command, /) -> Command: ...


# Generic for the type checker only: the oldest click that we take cannot be subscripted.
if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


class Quantity(_ParamType):
    """An option's text, read by `parse`; the error names the option."""

    def __init__(self, name: str, parse: Callable[[str], Any], *, above_zero: bool = False) -> None:
        self.name = name
        self._parse = parse
        self._above_zero = above_zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            quantity = self._parse(value)
            if self._above_zero and quantity <= 0:
                raise UserError(f"{value!r} is not above 0", "give more than 0")
        except UserError as error:
            option = f"{param.opts[0]}: " if param else ""
            raise UserError(f"{option}{error.message}", error.hint) from None
        return quantity


def examples(*lines: tuple[str, str]) -> str:
    """Return a command's epilog with command lines to copy, each under what it does.

    lines: (what it does, the command line, which continues on a second line where it is long).
    """
    shown = "\n".join(f"  # {what}\n  {_continued(command)}" for what, command in lines)
    # Click wraps paragraphs that do not begin with \b.
    return f"\b\nExamples:\n{shown}"


_FILTERS_HELP = """
    RUN is a run's id, or the beginning or last part of it; FILTER is field=glob, such as 'recipe=te-*', on
    workload, recipe, instance, state, submission, sweep, backend, owner, commit (of the training code or
    a script) or version (of a script).
"""


def with_filters(text: str) -> str:
    """Return a help text with what RUN and FILTER are."""
    return text.rstrip() + "\n" + _FILTERS_HELP


def _continued(command: str) -> str:
    """Return the command line with breaks before options, so that it fits into 80 columns."""
    bound = re.sub(" (?!-)", "\0", command)
    lines = textwrap.wrap(bound, width=74, break_on_hyphens=False, break_long_words=False)
    return " \\\n    ".join(lines).replace("\0", " ")


def _parse_minutes(text: str) -> int:
    """Return whole minutes of `2` (hours), `1.5`, `90min` or `1h30m`."""
    try:
        seconds = float(text) * 3600
    except ValueError:
        seconds = parse_duration_s(text)
    if not math.isfinite(seconds):
        raise UserError(f"{text!r} is not a time", "give hours such as 2, or 90min")
    # 4.1 hours are 246 minutes, though not in floating point.
    return int(round(seconds, 3) // 60)


def _parse_seconds(text: str) -> float:
    """Return `90` (seconds), `10min` or `1h`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = parse_duration_s(text)
    if not math.isfinite(seconds):
        raise UserError(f"{text!r} is not a time", "give seconds such as 90, or 10min")
    return seconds


#: `10k`, 0 allowed.
COUNT = Quantity("count", parse_count)
POSITIVE_COUNT = Quantity("count", parse_count, above_zero=True)
#: `2GiB`, as bytes.
BYTES = Quantity("size", parse_bytes, above_zero=True)
#: A count, `auto` or `auto-each`.
BATCH_SIZE = Quantity("batch size", parse_batch_size)
DATE = Quantity("date", parse_date)
#: `2` hours or `90min`, as whole minutes.
MINUTES = Quantity("time", _parse_minutes, above_zero=True)
#: `90` seconds or `10min`, as seconds.
SECONDS = Quantity("time", _parse_seconds, above_zero=True)
#: A count, or `gpu`.
NPROC = Quantity("count", parse_nproc)
USD = Quantity("usd", parse_usd, above_zero=True)
#: `a,b` as a tuple.
NAMES = Quantity("names", split_names)

#: `--output table|json|csv`, as parameter `output`.
output_option = click.option(
    "--output",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="Write the rows to stdout in this form.",
)
#: `--no-account-timer`, as parameter `account_timer`.
account_timer_option = click.option(
    "--no-account-timer",
    "account_timer",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Make no schedule in the account that ends the machine. Its own timer does.",
)
#: `--yes`, as parameter `yes`.
yes_option = click.option("--yes", "-y", is_flag=True, help="Go ahead without being asked.")


def use_profile(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Make boto3, and every program that is started, use this profile, as the AWS CLI's own option does."""
    if value is not None:
        os.environ["AWS_PROFILE"] = value
        # What would count before the profile, or before its own login.
        keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        for name in ("AWS_DEFAULT_PROFILE", *keys, "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"):
            os.environ.pop(name, None)


PROFILE_HELP = "Profile of the AWS login to use, before AWS_PROFILE and keys in the environment."
#: `--profile NAME`, of every command that talks to AWS.
profile_option = click.option(
    "--profile",
    metavar="NAME",
    expose_value=False,
    is_eager=True,
    callback=use_profile,
    help=PROFILE_HELP,
)


#: `--with-shared`, of what counts runs of the ledger.
with_shared_option = click.option(
    "--with-shared", is_flag=True, help="Count runs that others shared (`runs pull`) as your own."
)


def table_or_json_option(what: str) -> Decorator:
    """`--output table|json`, as parameter `output`. what: `the rows are`, for the help text."""
    return click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help=f"How {what} written to stdout.",
    )


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that gives a command all these options, which `--help` lists in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def print_coloured(text: str, colours: Mapping[str, Mapping[str, Any]]) -> None:
    """Print tables on stdout, a cell of each line in colour on a terminal that takes it.

    colours: text of a cell -> arguments of `click.style`. Dark and light terminals must both show them.
    """
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        click.echo(text)
        return
    cell = re.compile(rf"(?<=  )({'|'.join(map(re.escape, colours))})(?=  |$)")
    lines = [
        cell.sub(lambda found: click.style(found[0], **colours[found[0]]), line, count=1)
        for line in plain(text).split("\n")
    ]
    # The colours are ours: nothing else in it steers the terminal.
    click.echo("\n".join(lines), file=raw_output(sys.stdout))


def given_command(*, without: Sequence[str] = ()) -> list[str]:
    """Return the words of the running command: selectors, and the options given except those of `without`."""
    context = click.get_current_context()
    words = ["fastlaunch", str(context.info_name), *context.params["selectors"]]
    for option in context.command.params:
        name = str(option.name)
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and is_given and name not in without:
            value = context.params[name]
            for item in value if option.multiple else (value,):
                text = ",".join(item) if isinstance(item, tuple) else str(item)
                words += option.opts[-1:] + ([] if option.is_flag else [text])
    return words


def next_command(text: str) -> None:
    """Print the next command worth typing, as the last line on stderr."""
    click.echo(f"next: {printable(text)}", err=True)


def output_width() -> int:
    """Return how wide tables of measurements are: as the terminal from 80 columns on, 120 without one."""
    from fastlaunch.report.table import WIDTH

    return max(80, shutil.get_terminal_size(fallback=(WIDTH, 1)).columns)
