"""`fastlaunch compare`: what a dollar bought, by the runs in the ledger."""

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.analysis.pricing import ChargedAs, parse_share
from fastlaunch.api import comparison as api
from fastlaunch.cli.context import answer_first
from fastlaunch.cli.options import (
    DATE,
    NAMES,
    POSITIVE_COUNT,
    Quantity,
    all_option,
    examples,
    given_command,
    next_command,
    output_option,
    output_width,
    price_file_option,
    print_coloured,
    profile_option,
    with_filters,
    with_options,
    with_shared_option,
    wrapped,
)
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, EXIT_JOB_FAILED, UserError
from fastlaunch.core.terminal import as_warning, report_line

if TYPE_CHECKING:
    from fastlaunch.api.comparison import Comparison


def _parse_percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not (math.isfinite(percent) and percent >= 0):
        raise UserError(f"{text!r} is no percentage that a gate could hold", "give 0 or more, such as 3")
    return percent


#: How `compare` and `report` compare and price runs.
comparison_options = with_options(
    click.option(
        "--baseline",
        metavar="RUN|RECIPE|NAME=A",
        help="Compare with this.  [default: bf16, else the first row]",
    ),
    click.option(
        "--prices-as-of",
        type=DATE,
        metavar="DATE",
        help="Price every run as of this day.  [default: as it was billed, else today]",
    ),
    click.option(
        "--price-as",
        type=Quantity("instance", ChargedAs.parse),
        metavar="INSTANCE[:SHARE]",
        multiple=True,
        help="Charge every run at this instance type's price; if repeated, that of the type with its GPUs.",
    ),
    click.option(
        "--price-share",
        type=Quantity("share", parse_share),
        metavar="SHARE",
        help="Charge this share of that price, such as 1/8.",
    ),
    click.option(
        "--usd-per-hour", type=float, metavar="X", help="Charge every run at this price of a machine."
    ),
    price_file_option,
    click.option(
        "--allow-unverified",
        is_flag=True,
        help="Rank recipes even if their numerics or convergence are known to be wrong.",
    ),
    click.option("--any-version", is_flag=True, help="Pool runs of a script that was edited between them."),
    with_shared_option,
)


@click.command(
    help=with_filters("""Compare what a dollar bought: runs side by side, with intervals and verdicts.

    Without arguments it compares the runs of the last submit, sweep or import. Repeats of a run become one
    row. Runs of an edited script are another row; so are runs that others shared, which change no verdict on
    yours. A run is priced as it was billed, else by the price of its instance today. A row that fails a check
    of its numerics, or trains to a worse held-out loss than its reference, is shown and not ranked."""),
    epilog=examples(
        ("your finished runs against bf16", "fastlaunch compare"),
        (
            "at the prices of another day, charged as an eighth of a p5en.48xlarge",
            "fastlaunch compare --prices-as-of 2026-11-21 --price-as p5en.48xlarge:1/8",
        ),
    ),
)
@click.argument("selectors", nargs=-1, metavar="[RUN|FILTER]...")
@comparison_options
@click.option("--every-run", is_flag=True, help="Compare every run in the ledger.")
@click.option(
    "--finish",
    type=POSITIVE_COUNT,
    metavar="STEPS",
    help="Also show the time and cost of a job of this many steps.",
)
@click.option(
    "--target", metavar="METRIC=VALUE", help="Also show what it cost to reach this on held-out data."
)
@all_option
@click.option("--why", metavar="ROW", help="Show only what is known of this row: give its recipe, or a run.")
@click.option("--notes", is_flag=True, help="Show only the notes, all of them.")
@click.option(
    "--fail-if-worse",
    type=Quantity("percent", _parse_percent),
    metavar="PERCENT",
    help="Exit with 1 if a row is proven worse than the baseline by more than this, or cannot be judged.",
)
@click.option(
    "--columns",
    type=NAMES,
    default="",
    metavar="NAMES",
    help="Show only the columns with these headings, such as 'step ms,verdict'.",
)
@click.option(
    "--brief",
    is_flag=True,
    help="Show less: of the notes only those on prices, on unranked rows and on commits far apart; with --all"
    " neither the times before the measured steps nor the kernels.",
)
@output_option
@profile_option
def compare(
    selectors: tuple[str, ...],
    every_run: bool,
    finish: int | None,
    target: str | None,
    in_full: bool,
    why: str | None,
    notes: bool,
    fail_if_worse: float | None,
    columns: tuple[str, ...],
    brief: bool,
    output: str,
    **options: Any,
) -> int:
    with answer_first() as context:
        with activity("comparing the runs"):
            comparison = api.compare(*selectors, every_run=every_run, context=context, **options)
        if why is not None or notes:
            if output != "table":
                hint = f"leave out --output {output}: JSON has each row's reason"
                raise UserError("--why and --notes are texts", hint)
            from fastlaunch.report.table import why as all_of_row
            from fastlaunch.report.text import all_notes

            width = output_width()
            click.echo(
                all_notes(comparison, width=width)
                if why is None
                else all_of_row(comparison, why, width=width)
            )
            print_warnings(comparison.warnings)
            return EXIT_DONE
        in_full = in_full or bool(columns)
        print_comparison(
            comparison, output, finish=finish, target=target, columns=columns, brief=brief, in_full=in_full
        )
        print_warnings(comparison.warnings)
    if command := _next(comparison):
        next_command(command)
    return EXIT_JOB_FAILED if _fails(comparison, fail_if_worse) else EXIT_DONE


def _fails(comparison: "Comparison", percent: float | None) -> bool:
    """Return whether a row is proven worse than its baseline by more than `percent`, cannot be judged or has
    no measurement. Print which.
    """
    from fastlaunch.analysis.statistics import WORSE
    from fastlaunch.analysis.verdicts import NO_INTERVAL, NOT_RANKED, OTHER_BATCH
    from fastlaunch.report.text import name_of

    if percent is None:
        return False
    worse, unjudged = [], []
    # Runs that others shared are judged only if there are no others.
    for row in [row for row in comparison.rows if row.side is None] or comparison.rows:
        verdict = row.verdict.in_own_batch
        ratio = verdict.ratio or verdict.speed_ratio
        name = f"{name_of(row, comparison.by_workload[row.setup.workload])} on {row.setup.workload}"
        if verdict.kind == WORSE and ratio and ratio.high and ratio.high < 1 - percent / 100:
            worse.append(name)
        elif verdict.kind in (NOT_RANKED, NO_INTERVAL, OTHER_BATCH):
            why = verdict.reasons[0] if verdict.reasons else "it stands alone"
            unjudged.append(f"{name} ({verdict.kind}: {why})")
    if worse:
        click.echo(f"worse than the baseline by more than {percent:g}%: {', '.join(worse)}", err=True)
    if unjudged:
        click.echo(f"not judged, so it may be worse than the baseline: {'; '.join(unjudged)}", err=True)
    if missing := comparison.unmeasured:
        click.echo(f"not measured, so it may be worse than the baseline: {', '.join(missing)}", err=True)
    return bool(worse or unjudged or missing)


def print_comparison(
    comparison: "Comparison",
    output: str,
    *,
    finish: float | None = None,
    target: str | None = None,
    columns: Sequence[str] = (),
    brief: bool = False,
    in_full: bool = False,
    below: Sequence[str] = (),
    **beside: object,
) -> None:
    """Print the comparison, the answer first, and before it the cost to finish or to reach a target.

    below: lines under the table. beside: further objects of the JSON. Raises UserError for an unreadable
    target, an unknown column, and an option that does not apply to this output format.
    """
    from fastlaunch.report.cost import finish_json, finish_table
    from fastlaunch.report.data import as_csv, as_json
    from fastlaunch.report.table import VERDICT_COLOURS, as_overview, as_table
    from fastlaunch.report.target import target_json, target_table
    from fastlaunch.report.text import answer

    if output != "table" and (columns or brief):
        raise UserError("--columns and --brief are of the table", f"leave them out with --output {output}")
    if output == "csv":
        if finish is not None or target is not None:
            raise UserError("--finish and --target have no place in a CSV of rows", "give --output json")
        click.echo(as_csv(comparison))
        return
    if output == "json":
        further = {
            **beside,
            **({} if finish is None else {"finish": finish_json(comparison, finish, comparison.catalogue)}),
            **({} if target is None else {"target": target_json(comparison, target, comparison.catalogue)}),
        }
        click.echo(as_json(comparison, further))
        return
    width = output_width()
    parts = []
    # What was asked for beside the comparison stands first.
    if finish is not None:
        parts.append(finish_table(comparison, finish, comparison.catalogue, width=width))
    if target is not None:
        parts.append(target_table(comparison, target, comparison.catalogue, width=width))
    lines = answer(comparison, lettered=not in_full, with_second=True).splitlines()
    parts.append("\n".join(map(wrapped, lines)))
    if in_full:
        parts.append(as_table(comparison, only=columns, brief=brief, width=width))
    else:
        parts.append(as_overview(comparison, brief=brief, width=width))
    hints = []
    if not any(row.price for row in comparison.rows):
        price = shlex.join(prices_to_add(comparison)) or "--usd-per-hour USD"
        hints.append(wrapped(f"cost: no price is known; to see it, compare with {price}"))
    if not in_full and not brief:
        hints.append("more: --all (every row, column and note), --why ROW, --notes")
    parts += ["\n".join(hints)] if hints else []
    print_coloured("\n".join(["\n\n".join(parts), *([""] if below else []), *below]), VERDICT_COLOURS)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings on stderr, the first few of many."""
    for warning in api.first_of(warnings):
        report_line(as_warning(warning))


def _next(comparison: "Comparison") -> str | None:
    """Return the command to type next: more runs if a verdict needs them, else prices; None if neither."""
    from fastlaunch.analysis.best import more_runs_command
    from fastlaunch.ledger.ledger import IMPORT

    # Rounds cannot be added to runs that others shared.
    rows, request = [row for row in comparison.rows if row.side is None], comparison.request
    # Imported runs belong to no session to which runs could be added.
    made_here = [run.submission_id for run in comparison.runs if run.backend != IMPORT]
    submission = made_here[-1] if made_here else None
    if command := more_runs_command(rows, own_region=request.region, submission=submission):
        return command
    if words := prices_to_add(comparison):
        return shlex.join([*given_command(), *words])
    priced = next((row for row in rows if row.setup.instance and row.price), None)
    if priced:
        # Without a service, the command covers the prices of both.
        of_service = " --service sagemaker" if priced.offer.service == "sagemaker" else ""
        where = "" if priced.offer.region == request.region else f" --region {priced.offer.region}"
        return f"fastlaunch prices --instance {priced.setup.instance}{of_service}{where} --all"
    return None


def prices_to_add(comparison: "Comparison") -> list[str]:
    """Return the options that give runs a price if none has one; empty if they need none."""
    from fastlaunch.analysis.pricing import instances_to_charge, price_as_options

    if any(row.price for row in comparison.rows):
        return []
    setups = [row.setup for row in comparison.rows]
    return price_as_options(instances_to_charge(setups, comparison.request, comparison.catalogue))
