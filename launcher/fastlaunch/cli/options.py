"""What several commands share: options, quantities as people write them, the last line on stderr."""

import datetime
import math
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastlaunch.core.errors import UserError
from fastlaunch.core.units import parse_bytes, parse_count, parse_duration_s
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.registry import WorkloadError, WorkloadInfo, workload_info

Command = TypeVar("Command", bound=Callable[..., Any])

# Generic for the type checker only: the oldest click that we take cannot be subscripted.
if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


class _Quantity(_ParamType):
    """An option's text, read by `parse`; the error names the option."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except UserError as error:
            option = f"{param.opts[0]}: " if param else ""
            raise UserError(f"{option}{error.message}", error.hint) from None


def _positive(parse: Callable[[str], int | float]) -> Callable[[str], int | float]:
    def parse_positive(text: str) -> int | float:
        value = parse(text)
        if value <= 0:
            raise UserError(f"{text!r} is not above 0", "give more than 0")
        return value

    return parse_positive


def _parse_date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise UserError(f"{text!r} is not a date", "give one such as 2023-11-15") from None


def _parse_minutes(text: str) -> int:
    """Return whole minutes of `2` (hours), `1.5`, `90min` or `1h30m`."""
    try:
        seconds = float(text) * 3600
    except ValueError:
        seconds = parse_duration_s(text)
    if not math.isfinite(seconds):
        raise UserError(f"{text!r} is not a time", "give hours such as 2, or 90min")
    return int(seconds // 60)


def _parse_usd(text: str) -> float:
    try:
        value = float(text.strip().removeprefix("$"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{text!r} is not an amount of USD", "give a number such as 25.50")
    return value


#: `10k` steps, 0 allowed; the same above 0; seconds of `48h`; bytes of `2GiB`; a date; minutes of `2`
#: hours or `90min`; minutes of `30` or `90min`; USD.
COUNT = _Quantity("count", parse_count)
POSITIVE_COUNT = _Quantity("count", _positive(parse_count))
DURATION = _Quantity("duration", _positive(parse_duration_s))
SIZE = _Quantity("size", _positive(parse_bytes))
DATE = _Quantity("date", _parse_date)
MINUTES = _Quantity("time", _positive(_parse_minutes))
USD = _Quantity("usd", _positive(_parse_usd))

#: `--output table|json|csv`, as parameter `output`.
output_option = click.option(
    "--output",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="Write the rows to stdout in this form.",
)
#: `--yes`, as parameter `yes`.
yes_option = click.option("--yes", "-y", is_flag=True, help="Go ahead without being asked.")


def table_or_json_option(what: str) -> Callable[[Command], Command]:
    """`--output table|json`, as parameter `output`. what: `the rows are`, for the help text."""
    return click.option(
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help=f"How {what} written to stdout.",
    )


def workload_option(*, default: str | None = None) -> Callable[[Command], Command]:
    """`--workload NAME`, as parameter `workload`; see `workload_named`."""
    return click.option(
        "--workload",
        default=default,
        show_default=default is not None,
        metavar="NAME",
        help="Train this workload; `fastlaunch workloads` lists them.",
    )


def recipe_named(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe with its overrides. Raises UserError, with the nearest names, if there is none."""
    try:
        return resolve_recipe(name, overrides)
    except RecipeError as error:
        raise UserError(error.message, error.hint) from None


def workload_named(name: str) -> WorkloadInfo:
    """Return what is known of the workload. Raises UserError, with the nearest names, if there is none."""
    try:
        return workload_info(name)
    except WorkloadError as error:
        raise UserError(error.message, error.hint) from None


def next_command(text: str) -> None:
    """Print the next command worth typing, as the last line on stderr."""
    click.echo(f"next: {text}", err=True)


def confirm(question: str, *, yes: bool) -> None:
    """Return if the user agrees. Raises UserError if not, and if there is nobody to ask."""
    check_can_ask(yes=yes)
    if yes:
        return
    if not click.confirm(question, err=True):
        raise UserError("nothing was done")


def check_can_ask(*, yes: bool) -> None:
    """Raise UserError if there is a question and nobody to ask."""
    if not yes and not sys.stdin.isatty():
        raise UserError("there is no terminal to ask on", "add --yes to go ahead without being asked")
