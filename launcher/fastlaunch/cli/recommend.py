"""`fastlaunch recommend`: what to train on, how, and bought how."""

import datetime
import json
import textwrap
from pathlib import Path

import click

from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    DATE,
    NAMES,
    POSITIVE_COUNT,
    USD,
    Quantity,
    examples,
    next_command,
    output_option,
    output_width,
    with_shared_option,
)
from fastlaunch.cli.render import print_rows
from fastlaunch.core.errors import EXIT_DONE, EXIT_JOB_FAILED
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import above_zero, parse_duration_s


@click.command(
    short_help="What to train on, how, and bought how: by cost, time, and what is known.",
    epilog=examples(
        (
            "the cheapest way to train 100 million samples within two days",
            "fastlaunch recommend --workload vit-huge --samples 100M --deadline 48h",
        ),
        (
            "spot too, for at most $2,000",
            "fastlaunch recommend --workload vit-huge --samples 100M --purchase on-demand,spot --budget 2000",
        ),
        ("by measurements alone", "fastlaunch recommend --workload vit-huge --samples 100M --measured-only"),
    ),
)
@click.option(
    "--workload", required=True, metavar="NAME", help="What is trained; of a script its name in `runs`."
)
@click.option(
    "--samples", type=POSITIVE_COUNT, required=True, metavar="N", help="How many samples, such as 100M."
)
@click.option(
    "--deadline",
    type=Quantity("time", above_zero(parse_duration_s)),
    metavar="TIME",
    help="Only what is done by then, such as 48h.",
)
@click.option("--budget", type=USD, metavar="USD", help="Only what costs no more.")
@click.option(
    "--purchase",
    "purchases",
    type=NAMES,
    default="on-demand",
    show_default=True,
    metavar="OPTION,...",
    help="Ways to buy: on-demand, spot, capacity-block.",
)
@click.option(
    "--regions", type=NAMES, metavar="R,...", help="Regions to buy in.  [default: yours, or us-east-1]"
)
@click.option(
    "--max-nodes", type=POSITIVE_COUNT, default=1, show_default=True, metavar="K", help="Nodes of one job."
)
@click.option("--prices-as-of", type=DATE, metavar="DATE", help="The prices in force on this day.")
@click.option(
    "--steps-only", is_flag=True, help="Count the steps alone: no waiting, boot or other fixed part."
)
@click.option("--measured-only", is_flag=True, help="Only what was measured on an instance type.")
@click.option(
    "--exclude-recipe",
    "exclude_recipes",
    multiple=True,
    metavar="NAME",
    help="Leave this recipe out; may be repeated.",
)
@click.option(
    "--batch-equivalent",
    is_flag=True,
    help="Also other global batches than the reference's, as if a sample trained as much at any.",
)
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Also recipes whose numerics or convergence are known to be wrong.",
)
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="Such as boot=300s; `fastlaunch estimate --assume help` lists the names.",
)
@click.option(
    "--prices",
    "price_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read prices from this file too.",
)
@with_shared_option
@output_option
def recommend(
    workload: str,
    samples: int,
    deadline: float | None,
    budget: float | None,
    purchases: tuple[str, ...],
    regions: tuple[str, ...] | None,
    max_nodes: int,
    prices_as_of: datetime.date | None,
    steps_only: bool,
    measured_only: bool,
    exclude_recipes: tuple[str, ...],
    batch_equivalent: bool,
    allow_unverified: bool,
    assume: tuple[str, ...],
    price_file: Path | None,
    with_shared: bool,
    output: str,
) -> int:
    """What to train on, how, and bought how: by cost, time, and what is known.

    By your own runs of the workload; without any on a GPU, by the figures that come with fastlaunch. What was
    not measured is predicted, with a range that holds one run in 90% and its class of evidence: A (measured
    on this generation of GPU), B (on another one), B0 (only its size is known), C (nothing is measured on
    this generation). A deadline and a budget hold for the upper end of the range. The break-even is the
    hourly price up to which the pick's instance stays the cheapest.
    """
    from fastlaunch.api import recommend as api

    recommendation = api.recommend(
        workload,
        samples,
        deadline=None if deadline is None else deadline / 3600,
        budget_usd=budget,
        purchases=purchases,
        regions=regions or (),
        max_nodes=max_nodes,
        prices_as_of=prices_as_of,
        steps_only=steps_only,
        measured_only=measured_only,
        exclude_recipes=exclude_recipes,
        batch_equivalent=batch_equivalent,
        allow_unverified=allow_unverified,
        assume=assume,
        prices=price_file,
        with_shared=with_shared,
        context=app_context(),
    )
    for warning in recommendation.warnings:
        click.echo(textwrap.fill(as_warning(warning), output_width(), break_on_hyphens=False), err=True)
    if output == "json":
        click.echo(json.dumps(recommendation.to_json(), indent=2))
    elif output == "csv":
        from fastlaunch.report.recommendation import as_rows

        print_rows(as_rows(recommendation), output=output)
    else:
        from fastlaunch.report.recommendation import as_text

        click.echo(as_text(recommendation, width=output_width()))
    if recommendation.experiment is not None and recommendation.experiment.command:
        next_command(recommendation.experiment.command)
    elif recommendation.command:
        next_command(recommendation.command)
    return EXIT_DONE if recommendation.pick else EXIT_JOB_FAILED
