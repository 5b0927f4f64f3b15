"""Shared by several commands: options, quantities as people write them, output, the next command to type."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from fastlaunch.core.errors import UserError
from fastlaunch.core.terminal import command_lines, filled, plain, printable, raw_output
from fastlaunch.core.units import (
    above_zero,
    parse_bytes,
    parse_count,
    parse_date,
    parse_seconds,
    parse_usd,
    split_names,
)

Command = TypeVar("Command", bound=Callable[..., Any])


class Decorator(Protocol):
    """Gives a command an option, or several."""

    def __call__(self, command: Command, /) -> Command: ...


# Generic for the type checker only, since the oldest supported click cannot be subscripted.
if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


class Quantity(_ParamType):
    """A click type that reads an option's text, or several texts, by `parse`. Errors name the option."""

    def __init__(self, name: str, parse: Callable[[Any], Any], *, of: type = str) -> None:
        self.name = name
        self._parse = parse
        self._of = of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, self._of):
            return value
        try:
            return self._parse(value)
        except UserError as error:
            option = f"{param.opts[0]}: " if param else ""
            raise UserError(f"{option}{error.message}", error.hint) from None


def examples(*lines: tuple[str, str]) -> str:
    """Return a command's epilog with example command lines, each under a comment.

    lines: (what it does, the command line, which continues on a second line where it is long).
    """
    shown = "\n".join(f"  # {what}\n  {_continued(command)}" for what, command in lines)
    # Click wraps paragraphs that do not begin with \b.
    return f"\b\nExamples:\n{shown}"


_FILTERS_HELP = """
    RUN is the id of a run, the beginning or end of it, or the id of a submission. FILTER is field=glob, such
    as 'recipe=te-*', on workload, recipe, instance, state, submission, sweep, backend, owner, commit (of the
    training code or a script) or version (of a script).
"""


def with_filters(text: str) -> str:
    """Return a help text with an explanation of RUN and FILTER."""
    return text.rstrip() + "\n" + _FILTERS_HELP


def _continued(command: str) -> str:
    """Return the command line with breaks before options, so that it fits into 80 columns."""
    bound = re.sub(" (?!-)", "\0", command)
    lines = textwrap.wrap(bound, width=74, break_on_hyphens=False, break_long_words=False)
    return " \\\n    ".join(lines).replace("\0", " ")


#: `10k`, 0 allowed.
COUNT = Quantity("count", parse_count)
POSITIVE_COUNT = Quantity("count", above_zero(parse_count))
#: `2GiB`, as bytes.
BYTES = Quantity("size", above_zero(parse_bytes))
DATE = Quantity("date", parse_date)
#: `90` seconds or `10min`, as seconds.
SECONDS = Quantity("time", above_zero(parse_seconds))
USD = Quantity("usd", above_zero(parse_usd))
#: `a,b` as a tuple.
NAMES = Quantity("names", split_names)


def _output_option(*forms: str) -> Decorator:
    return click.option(
        "--output",
        type=click.Choice(forms),
        default="table",
        show_default=True,
        help="Write to stdout in this form.",
    )


#: `--output`, as parameter `output`.
output_option = _output_option("table", "json", "csv")
table_or_json_option = _output_option("table", "json")
#: `--yes`, as parameter `yes`.
yes_option = click.option("--yes", "-y", is_flag=True, help="Go ahead without being asked.")


def use_profile(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Make boto3 and all started programs use this profile, as the AWS CLI's --profile does."""
    if value is not None:
        os.environ["AWS_PROFILE"] = value
        # These would take precedence over the profile or its login.
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


#: Options of commands that price a training, as parameters of the same names.
price_file_option = click.option(
    "--prices",
    type=click.Path(),
    metavar="FILE",
    help="Put the prices in this file over those that ship.",
)
prices_as_of_option = click.option(
    "--prices-as-of", type=DATE, metavar="DATE", help="Use the prices of this day.  [default: today]"
)
sequence_length_option = click.option(
    "--sequence-length",
    type=POSITIVE_COUNT,
    metavar="TOKENS",
    help="Train on samples of this many tokens.  [default: as in the runs, or the workload's own]",
)
steps_only_option = click.option(
    "--steps-only", is_flag=True, help="Count the steps alone, without waiting, boot and other fixed parts."
)
assume_option = click.option(
    "--assume",
    metavar="NAME=VALUE",
    multiple=True,
    help="Assume this instead of the measured or default value, such as boot=5min; may be repeated. "
    "`fastlaunch estimate --assume help` lists the names.",
)
#: `--with-shared`, for commands that read runs from the ledger.
with_shared_option = click.option(
    "--with-shared", is_flag=True, help="Count runs that others shared (`runs pull`) as your own."
)


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that gives a command all these options, which `--help` lists in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def print_json(data: object) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(data, indent=2))


def wrapped(text: str) -> str:
    """Return sentences wrapped to the width of tables of measurements."""
    return filled(text, output_width())


def print_coloured(text: str, colours: Mapping[str, Mapping[str, Any]]) -> None:
    """Print tables on stdout; on a terminal with colours, colour one cell of each line.

    colours: text of a cell -> arguments of `click.style`. Dark and light terminals must both show them.
    """
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        click.echo(text)
        return
    cell = re.compile(rf"(?<=  )({'|'.join(map(re.escape, colours))})(?=  |$)")
    lines = [
        cell.sub(lambda match: click.style(match[0], **colours[match[0]]), line, count=1)
        for line in plain(text).split("\n")
    ]
    # Raw, since the only control sequences left are our colours.
    click.echo("\n".join(lines), file=raw_output(sys.stdout))


def given_command() -> list[str]:
    """Return the running command's words: its selectors and typed options."""
    context = click.get_current_context()
    words = ["fastlaunch", str(context.info_name), *context.params["selectors"]]
    for option in context.command.params:
        name = str(option.name)
        is_given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and is_given:
            value = context.params[name]
            for item in value if option.multiple else (value,):
                text = ",".join(item) if isinstance(item, tuple) else str(item)
                words += option.opts[-1:] + ([] if option.is_flag else [text])
    return words


#: A short screen's rest.
all_option = click.option("--all", "in_full", is_flag=True, help="Show every row, column and note.")


def next_command(text: str) -> None:
    """Print the next command worth typing, as the last line on stderr."""
    width = shutil.get_terminal_size().columns if sys.stderr and sys.stderr.isatty() else sys.maxsize
    click.echo(command_lines(printable(text), width, "next"), err=True)


def output_width() -> int:
    """Return how wide tables of measurements are: as the terminal from 80 columns on, 120 without one."""
    from fastlaunch.core.tables import WIDTH

    return max(80, shutil.get_terminal_size(fallback=(WIDTH, 1)).columns)


def terminal_width() -> int | None:
    """Return the terminal's width; None without a terminal."""
    return shutil.get_terminal_size(fallback=(0, 1)).columns or None
