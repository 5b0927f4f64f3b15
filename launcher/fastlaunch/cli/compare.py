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
    from fastlaunch.analysis.compare import Candidate, Comparison, PriceRequest, Row
    from fastlaunch.analysis.pricing import ChargedAs
    from fastlaunch.catalog.prices import Catalogue
    from fastlaunch.core.settings import Settings
    from fastlaunch.ledger.ledger import Run

MOST_WARNINGS = 8
#: A terminal narrower than this gets tables of this width.
_MIN_WIDTH = 80


@click.command(short_help="What a dollar bought: runs side by side, with intervals and verdicts.")
@click.argument("selectors", nargs=-1, metavar="[RUN|FILTER]...")
@click.option(
    "--baseline", metavar="RUN|RECIPE", help="What to compare with.  [default: bf16, else the first row]"
)
@click.option("--prices-as-of", type=DATE, metavar="DATE", help="Price every run as of this day.")
@click.option(
    "--price-as",
    metavar="INSTANCE[:SHARE]",
    multiple=True,
    help="Charge every run as an instance of this type; of several, as the one with its GPUs.",
)
@click.option("--price-share", metavar="SHARE", help="Of that instance, such as 1/8: a hypothetical price.")
@click.option("--usd-per-hour", type=float, metavar="X", help="What an hour of a machine costs you.")
@click.option(
    "--prices", "price_file", type=click.Path(path_type=Path), metavar="FILE", help="Your own prices."
)
@click.option("--all", "all_runs", is_flag=True, help="Every run there is.")
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Rank also recipes whose numerics or convergence are known to be wrong.",
)
@click.option(
    "--finish", type=POSITIVE_COUNT, metavar="STEPS", help="Also: time and money of a job of STEPS steps."
)
@click.option("--target", metavar="METRIC=VALUE", help="Also: what it cost to reach this on held-out data.")
@click.option(
    "--columns",
    metavar="NAMES",
    help="Of the table's columns, those of these headings, with commas: 'step ms,verdict'.",
)
@click.option(
    "--brief",
    is_flag=True,
    help="Without the times before the steps, the kernels, and the notes but for those of prices, of rows"
    " that are not ranked and of commits far apart.",
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
    from fastlaunch.catalog.prices import load_catalogue
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
    tell_warnings(comparison.warnings)
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
    """The request that the options make. Raises UserError where they contradict each other."""
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
    """`p5.4xlarge`, or with a share `p5en.48xlarge:1/8`. Raises UserError for what is no share."""
    from fastlaunch.analysis.pricing import ChargedAs

    instance, colon, share = text.partition(":")
    return ChargedAs(instance=instance, share=_share(share) if colon else None)


def _share(text: str) -> Fraction:
    """`1/8` or `0.125`. Raises UserError for other text."""
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
    """The comparison of the runs that have measured something; what is left out is among the warnings.

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
        tell_warnings(warnings)
        raise UserError(
            "there is nothing to compare: no run has a step time", "`fastlaunch runs list` shows why"
        )
    return replace(comparison, warnings=warnings)


def split_columns(text: str | None) -> tuple[str, ...]:
    """`step ms, verdict` -> the headings; none for None."""
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
        told = textwrap.fill(answer(comparison), width, break_on_hyphens=False)
        text = "\n\n".join([*parts, told])
    click.echo(text)


def tell_warnings(warnings: Sequence[str]) -> None:
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


def _candidate(run: "Run", region: str) -> "Candidate | None":
    from fastlaunch.analysis.compare import Candidate
    from fastlaunch.catalog.prices import SERVICES

    if run.summary is None:
        return None
    # Where nothing was noted that it was billed at, what its own service lists for what was asked for counts.
    if run.backend in SERVICES:
        service, region, purchase = run.backend, run.region or region, run.purchase or "on-demand"
    else:
        service, purchase = run.summary.service or "ec2", "on-demand"
    return Candidate(
        run_id=run.id,
        summary=run.summary,
        price=run.price,
        service=service,
        region=region,
        purchase=purchase,
    )


def _unmeasured(runs: "Sequence[Run]") -> list[str]:
    """A line for each kind of runs that are left out: one interruption cancels all that were to follow."""
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
    """The next command worth typing: more runs where a verdict waits for them, else a price."""
    rows = comparison.rows
    for row in rows:
        if row.more_runs is not None and row.instance is None and row.num_nodes == 1:
            return _more_runs(row, rows, request.region)
    if not any(row.price for row in rows) and (charged := _charges(rows, request, catalogue)):
        return shlex.join([*_typed(()), *charged])
    priced = next((row for row in rows if row.instance and row.price), None)
    if priced:
        # Without a service it is the prices of both.
        of_service = " --service sagemaker" if priced.service == "sagemaker" else ""
        where = "" if priced.region == request.region else f" --region {priced.region}"
        return f"fastlaunch prices --instance {priced.instance}{of_service}{where} --all"
    same = _typed(("output", "columns", "brief"))
    return shlex.join([*same, *(["--output", "json"] if output == "table" else [])])


def _typed(without: Sequence[str]) -> list[str]:
    """The command as it was typed, but for the options `without`: the same runs, at the same prices."""
    context = click.get_current_context()
    words = ["fastlaunch", "compare", *context.params["selectors"]]
    for option in context.command.params:
        name = str(option.name)
        is_typed = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, click.Option) and is_typed and name not in without:
            value = context.params[name]
            for one in value if option.multiple else (value,):
                words += option.opts[-1:] + ([] if option.is_flag else [str(one)])
    return words


def _more_runs(row: "Row", rows: "Sequence[Row]", own_region: str) -> str:
    """The command for more runs of an unresolved row, and of its baseline if only the recipe differs."""
    from fastlaunch.analysis.suggest import next_seed, place_of, submit_command

    def asked(of: "Row") -> tuple[object, ...]:
        overrides = of.recipe.split()[1:]
        return overrides, of.batch_size_per_gpu, of.num_gpus, of.data, of.sequence_length

    base = next(other for other in rows if other.workload == row.workload and other.is_baseline)
    both = asked(base) == asked(row) and base.recipe != row.recipe
    # Seeds that none has: those of before would make no new pair.
    seed = next_seed([run.summary for of in (base, row) for run in of.runs])
    return submit_command(
        [run.summary for run in row.runs],
        [base.recipe, row.recipe] if both else [row.recipe],
        place=place_of(row.runs[0], own_region=own_region),
        first_seed=seed,
        repeats=row.more_runs or 1,
    )


def _charges(rows: "Sequence[Row]", request: "PriceRequest", catalogue: "Catalogue") -> list[str]:
    """Options that charge each of `rows`, which have no price; none where one of them cannot be charged."""
    kinds = {(row.device_name, row.num_gpus // row.num_nodes): row for row in rows}
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
    """An unpriced row as the cheapest instance with its GPU; None if none is sold."""
    from fastlaunch.analysis.pricing import ChargedAs

    device = catalogue.accelerator_of_device(row.device_name) if row.device_name else None
    today = request.as_of or request.today
    num_gpus = row.num_gpus // row.num_nodes
    offers = []
    for instance in catalogue.instances.values():
        if device is None or catalogue.accelerator_of(instance.name) != device:
            continue
        try:
            price = catalogue.price(instance.name, region=request.region, on=today)
        except UserError:
            continue
        if instance.num_accelerators >= num_gpus:
            offers.append((instance.num_accelerators != num_gpus, price.usd_per_hour, instance))
    if not offers:
        return None
    is_part, _, instance = min(offers, key=lambda offer: offer[:2])
    share = Fraction(num_gpus, instance.num_accelerators) if is_part else None
    return ChargedAs(instance=instance.name, share=share)
