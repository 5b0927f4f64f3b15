"""`fastlaunch compare`: what a dollar bought, by the runs in the ledger."""

import datetime
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastlaunch.cli.context import reconcile_here
from fastlaunch.cli.options import DATE, POSITIVE_COUNT, next_command, output_option
from fastlaunch.core.errors import UserError

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, Row
    from fastlaunch.analysis.cost import ChargedAs
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.core.settings import Settings
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.measure.summary import Setup

MOST_WARNINGS = 8
#: A terminal narrower than this gets tables of this width.
_MIN_WIDTH = 80


@click.command(short_help="What a dollar bought: runs side by side, with intervals and verdicts.")
@click.argument("selectors", nargs=-1, metavar="[RUN|FILTER]...")
@click.option(
    "--baseline", metavar="RUN|RECIPE", help="Compare with this.  [default: bf16, else the first row]"
)
@click.option("--prices-as-of", type=DATE, metavar="DATE", help="Price every run as of this day.")
@click.option(
    "--price-as",
    metavar="INSTANCE[:SHARE]",
    multiple=True,
    help="Charge every run at this instance type's price; with several, at that of the one with its GPUs.",
)
@click.option(
    "--price-share",
    metavar="SHARE",
    help="Charge this share of that instance, such as 1/8: a prorated price.",
)
@click.option(
    "--usd-per-hour", type=float, metavar="X", help="Charge every run at this price for an hour of a machine."
)
@click.option(
    "--prices",
    "price_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read prices from this file too.",
)
@click.option("--all", "all_runs", is_flag=True, help="Compare every run in the ledger.")
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Rank recipes even if their numerics or convergence are known to be wrong.",
)
@click.option(
    "--finish",
    type=POSITIVE_COUNT,
    metavar="STEPS",
    help="Also show the time and cost of a job of STEPS steps.",
)
@click.option(
    "--target", metavar="METRIC=VALUE", help="Also show what it cost to reach this on held-out data."
)
@click.option(
    "--columns",
    metavar="NAMES",
    help="Show only the columns with these headings, separated by commas: 'step ms,verdict'.",
)
@click.option(
    "--brief",
    is_flag=True,
    help="Leave out the times before the measured steps, the kernels, and all notes but those on prices, on"
    " unranked rows and on commits far apart.",
)
@output_option
def compare(
    selectors: tuple[str, ...],
    baseline: str | None,
    prices_as_of: datetime.date | None,
    price_as: tuple[str, ...],
    price_share: str | None,
    usd_per_hour: float | None,
    price_file: Path | None,
    all_runs: bool,
    allow_unverified: bool,
    finish: int | None,
    target: str | None,
    columns: str | None,
    brief: bool,
    output: str,
) -> None:
    """What a dollar bought: runs side by side, with intervals and verdicts.

    Without arguments: the runs of the last submit, sweep or import. RUN is a run's id, or the beginning or
    last part of it; FILTER is field=glob, such as 'recipe=te-*', on workload, recipe, instance, state,
    submission, backend or commit (of the training code). Runs that are repeats of each other become one row.
    A run is priced as it was billed, else by the price of its instance today. A row that fails a check of its
    numerics, or trains to a worse held-out loss than its reference, is shown and not ranked.
    """
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.core.settings import load_settings

    settings = load_settings()
    request = price_request(
        settings,
        prices_as_of=prices_as_of,
        price_as=price_as,
        price_share=price_share,
        usd_per_hour=usd_per_hour,
    )
    runs = _stored_runs(settings, selectors, all_runs=all_runs)
    catalogue = load_catalogue(price_file or settings.prices)
    comparison = compared(runs, request, catalogue, baseline=baseline, allow_unverified=allow_unverified)
    print_warnings(comparison.warnings)
    show(comparison, output, finish=finish, target=target, only=split_columns(columns), brief=brief)
    next_command(_next(comparison, request, catalogue, output))


def price_request(
    settings: "Settings",
    *,
    prices_as_of: datetime.date | None,
    price_as: Sequence[str],
    price_share: str | None,
    usd_per_hour: float | None,
) -> "PriceRequest":
    """Return the request that the options make. Raises UserError if they contradict each other."""
    from fastlaunch.analysis.compare import PriceRequest

    if price_share is not None and (len(price_as) != 1 or ":" in price_as[0]):
        raise UserError(
            "--price-share is a share of one instance",
            "name it: --price-as INSTANCE; of several each has its own: --price-as INSTANCE:1/8",
        )
    texts = price_as if price_share is None else [f"{price_as[0]}:{price_share}"]
    return PriceRequest(
        today=datetime.date.today(),
        as_of=prices_as_of,
        price_as=tuple(map(parse_charged_as, texts)),
        usd_per_hour=usd_per_hour,
        region=settings.region,
    )


def parse_charged_as(text: str) -> "ChargedAs":
    """Return `p5.4xlarge`, or `p5en.48xlarge:1/8` with its share. Raises UserError for no share."""
    from fastlaunch.analysis.cost import ChargedAs

    instance, colon, share = text.partition(":")
    return ChargedAs(instance=instance, share=_share(share) if colon else None)


def _share(text: str) -> Fraction:
    """Return `1/8` or `0.125`. Raises UserError for other text."""
    try:
        # An exponent of a few digits makes a number of as many million.
        if len(text) <= 20 and "e" not in text.lower():
            return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        pass
    raise UserError(f"{text[:40]!r} is no share of an instance", "give one such as 1/8 or 0.125")


def compared(
    runs: Sequence["Run"],
    request: "PriceRequest",
    catalogue: "Catalogue",
    *,
    baseline: str | None,
    allow_unverified: bool = False,
) -> "Comparison":
    """Return the comparison of the runs that measured something; its warnings name the others.

    Raises UserError if there is nothing to compare.
    """
    from dataclasses import replace

    from fastlaunch.analysis.compare import compare as compare_candidates

    if not runs:
        raise UserError("there are no runs to compare", "make some: fastlaunch submit --local --repeats 3")
    candidates = [candidate for run in runs if (candidate := _candidate(run, request.region))]
    comparison = compare_candidates(
        candidates,
        catalogue=catalogue,
        prices=request,
        baseline=baseline,
        allow_unverified=allow_unverified,
    )
    warnings = (*_unmeasured([run for run in runs if run.summary is None]), *comparison.warnings)
    if not comparison.rows:
        print_warnings(warnings)
        raise UserError(
            "there is nothing to compare: no run has a step time", "`fastlaunch runs list` shows why"
        )
    return replace(comparison, warnings=warnings)


def split_columns(text: str | None) -> tuple[str, ...]:
    """Return the headings of `step ms, verdict`; none for None."""
    return tuple(name for part in (text or "").split(",") if (name := part.strip()))


def show(
    comparison: "Comparison",
    output: str,
    *,
    finish: float | None = None,
    target: str | None = None,
    only: Sequence[str] = (),
    brief: bool = False,
) -> None:
    """Print the comparison on stdout, and what jobs cost to their end or to a target, where asked for.

    A table ends with the answer in a sentence. only, brief: of a table, see `as_table`. Raises UserError for
    a target that cannot be read, and for a column that there is not.
    """
    from fastlaunch.report.data import as_csv, as_json
    from fastlaunch.report.finish import finish_json, finish_table
    from fastlaunch.report.table import WIDTH, as_table
    from fastlaunch.report.target import target_json, target_table
    from fastlaunch.report.text import answer

    if output != "table" and (only or brief):
        raise UserError("--columns and --brief are of the table", f"leave them out with --output {output}")
    if output == "csv":
        if finish is not None or target is not None:
            raise UserError("--finish and --target have no place in a CSV of rows", "give --output json")
        text = as_csv(comparison)
    elif output == "json":
        further = {
            **({} if finish is None else {"finish": finish_json(comparison, finish)}),
            **({} if target is None else {"target": target_json(comparison, target)}),
        }
        text = as_json(comparison, further)
    else:
        width = min(WIDTH, max(_MIN_WIDTH, shutil.get_terminal_size(fallback=(WIDTH, 1)).columns))
        parts = [as_table(comparison, only=only, brief=brief, width=width)]
        parts += [] if finish is None else [finish_table(comparison, finish, width=width)]
        parts += [] if target is None else [target_table(comparison, target, width=width)]
        sentence = textwrap.fill(answer(comparison), width, break_on_hyphens=False)
        text = "\n\n".join([*parts, sentence])
    click.echo(text)


def print_warnings(warnings: Sequence[str]) -> None:
    """Print warnings on stderr, the first few of many."""
    for warning in warnings[:MOST_WARNINGS]:
        click.echo(f"warning: {warning}", err=True)
    if len(warnings) > MOST_WARNINGS:
        click.echo(f"warning: and {len(warnings) - MOST_WARNINGS} more of these", err=True)


def _stored_runs(settings: "Settings", selectors: Sequence[str], *, all_runs: bool) -> list["Run"]:
    from fastlaunch.ledger.ledger import open_ledger

    if all_runs and selectors:
        raise UserError("--all is every run, and some are named", "leave out --all, or the names")
    with open_ledger(settings) as ledger:
        reconcile_here(ledger)
        runs = ledger.fetch_comparable(selectors, all_runs=all_runs)
    if selectors and not runs:
        raise UserError("no run is like that", "`fastlaunch runs list` shows what there is")
    return runs


def _candidate(run: "Run", region: str) -> "MeasuredRun | None":
    from fastlaunch.analysis.compare import MeasuredRun
    from fastlaunch.catalog.prices import SERVICES

    if run.summary is None:
        return None
    # Where nothing was noted that it was billed at, what its own service lists for what was asked for counts.
    if run.backend in SERVICES:
        service, region, purchase = run.backend, run.region or region, run.purchase or "on-demand"
    else:
        service, purchase = run.summary.environment.service or "ec2", "on-demand"
    return MeasuredRun(
        run_id=run.id,
        summary=run.summary,
        price=run.price,
        service=service,
        region=region,
        purchase=purchase,
    )


def _unmeasured(runs: "Sequence[Run]") -> list[str]:
    """Return a line for each kind of runs that measured nothing, as one interruption cancels many."""
    alike: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        alike.setdefault((str(run.state), run.reason), []).append(run)
    return [
        f"{_named(of)} left out: {'it is' if len(of) == 1 else 'they are'} {state} and "
        f"{'has' if len(of) == 1 else 'have'} measured nothing{f': {reason}' if reason else ''}"
        for (state, reason), of in alike.items()
    ]


def _named(runs: "Sequence[Run]") -> str:
    if len(runs) == 1:
        return f"{runs[0].id} ({runs[0].recipe}) is"
    return f"{len(runs)} runs ({', '.join(dict.fromkeys(run.recipe for run in runs))}) are"


def _next(comparison: "Comparison", request: "PriceRequest", catalogue: "Catalogue", output: str) -> str:
    """Return the next command worth typing: more runs if a verdict waits for them, else prices."""
    rows = comparison.rows
    for row in rows:
        if row.verdict.more_runs is not None and row.setup.instance is None and row.setup.num_nodes == 1:
            return _more_runs(row, rows, request.region)
    if not any(row.price for row in rows) and (charged := _charges(rows, request, catalogue)):
        return shlex.join([*_command_line(()), *charged])
    priced = next((row for row in rows if row.setup.instance and row.price), None)
    if priced:
        # Without a service it is the prices of both.
        of_service = " --service sagemaker" if priced.offer.service == "sagemaker" else ""
        where = "" if priced.offer.region == request.region else f" --region {priced.offer.region}"
        return f"fastlaunch prices --instance {priced.setup.instance}{of_service}{where} --all"
    same = _command_line(("output", "columns", "brief"))
    return shlex.join([*same, *(["--output", "json"] if output == "table" else [])])


def _command_line(without: Sequence[str]) -> list[str]:
    """Return the command as it was typed, without the options `without`."""
    context = click.get_current_context()
    words = ["fastlaunch", "compare", *context.params["selectors"]]
    for option in context.command.params:
        name = str(option.name)
        is_typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and is_typed and name not in without:
            value = context.params[name]
            for item in value if option.multiple else (value,):
                words += option.opts[-1:] + ([] if option.is_flag else [str(item)])
    return words


def _more_runs(row: "Row", rows: "Sequence[Row]", own_region: str) -> str:
    """Return the command for more runs of an unresolved row, and of its baseline if only recipes differ."""
    from fastlaunch.analysis.suggest import next_seed, place_of, submit_command

    def options(of: "Setup") -> tuple[object, ...]:
        overrides = of.recipe.split()[1:]
        return overrides, of.batch_size_per_gpu, of.num_gpus, of.data, of.sequence_length

    base = next(other for other in rows if other.setup.workload == row.setup.workload and other.is_baseline)
    both = options(base.setup) == options(row.setup) and base.setup.recipe != row.setup.recipe
    # Seeds that none has: those of before would make no new pair.
    seed = next_seed([run.summary for of in (base, row) for run in of.runs])
    return submit_command(
        [run.summary for run in row.runs],
        [base.setup.recipe, row.setup.recipe] if both else [row.setup.recipe],
        place=place_of(row.runs[0], own_region=own_region),
        first_seed=seed,
        repeats=row.verdict.more_runs or 1,
    )


def _charges(rows: "Sequence[Row]", request: "PriceRequest", catalogue: "Catalogue") -> list[str]:
    """Return options that charge each of `rows`, which have no price; none if one cannot be charged."""
    kinds = {(row.setup.device_name, row.setup.num_gpus // row.setup.num_nodes): row for row in rows}
    charges = [_charged_as(row, request, catalogue) for row in kinds.values()]
    known = dict.fromkeys(charge for charge in charges if charge is not None)
    if None in charges:
        return []
    if len(known) == 1:
        (charge,) = known
        return [
            *("--price-as", charge.instance),
            *(("--price-share", str(charge.share)) if charge.share is not None else ()),
        ]
    return [word for charge in known for word in ("--price-as", str(charge))]


def _charged_as(row: "Row", request: "PriceRequest", catalogue: "Catalogue") -> "ChargedAs | None":
    """Return the cheapest instance with an unpriced row's GPU; None if none is sold."""
    from fastlaunch.analysis.cost import ChargedAs

    device = catalogue.accelerator_of_device(row.setup.device_name) if row.setup.device_name else None
    today = request.as_of or request.today
    num_gpus = row.setup.num_gpus // row.setup.num_nodes
    offers = []
    for instance in catalogue.instances.values():
        if device is None or catalogue.accelerator_of(instance.name) != device:
            continue
        price = catalogue.find_price(instance.name, region=request.region, on=today)
        if price is not None and instance.num_accelerators >= num_gpus:
            offers.append((instance.num_accelerators != num_gpus, price.usd_per_hour, instance))
    if not offers:
        return None
    is_part, _, instance = min(offers, key=lambda offer: offer[:2])
    share = Fraction(num_gpus, instance.num_accelerators) if is_part else None
    return ChargedAs(instance=instance.name, share=share)
