"""`fastlaunch estimate`: what a training will take and cost, before anything runs."""

import datetime
import json
import textwrap
from pathlib import Path

import click

from fastlaunch.api.estimation import Estimate
from fastlaunch.api.estimation import estimate as api_estimate
from fastlaunch.catalog.hardware import PURCHASE_OPTIONS
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    DATE,
    POSITIVE_COUNT,
    USD,
    examples,
    output_option,
    output_width,
    with_shared_option,
)
from fastlaunch.cli.render import print_rows
from fastlaunch.core.errors import UserError


@click.command(
    short_help="What a training will take and cost, before anything runs.",
    epilog=examples(
        (
            "one training, part by part",
            "fastlaunch estimate --workload vit-huge --recipe te-fp8 --instance p5.48xlarge --samples 100M",
        ),
        (
            "on spot, with boots of five minutes",
            "fastlaunch estimate --instance p5.48xlarge --samples 100M --purchase spot --assume boot=5min",
        ),
        ("the names that --assume takes", "fastlaunch estimate --assume help"),
    ),
)
@click.option("--workload", metavar="NAME", help="A workload, or the name of a script.  [default: vit-huge]")
@click.option(
    "--recipe",
    metavar="RECIPE|NAME=A",
    help="Its recipe, or a script's variant.  [default: bf16, or the only one measured]",
)
@click.option("--instance", metavar="TYPE", help="Such as p5.48xlarge, or ml.p5.48xlarge on SageMaker.")
@click.option(
    "--num-nodes", type=POSITIVE_COUNT, default=1, show_default=True, metavar="N", help="So many of it."
)
@click.option(
    "--batch-size", type=POSITIVE_COUNT, metavar="N", help="Per GPU.  [default: the one most often measured]"
)
@click.option("--samples", type=POSITIVE_COUNT, metavar="N", help="How much to train, such as 100M.")
@click.option("--epochs", type=float, metavar="N", help="Instead: passes over the data.")
@click.option("--tokens", type=POSITIVE_COUNT, metavar="N", help="Instead: tokens.")
@click.option(
    "--target", metavar="METRIC=VALUE", help="Instead: as long as runs took to reach this on held-out data."
)
@click.option(
    "--purchase",
    type=click.Choice(PURCHASE_OPTIONS),
    default="on-demand",
    show_default=True,
    help="How it is bought.",
)
@click.option("--region", metavar="R", help="Whose prices count.  [default: yours, or us-east-1]")
@click.option("--usd-per-hour", type=USD, metavar="X", help="Price of a machine.  [default: as listed]")
@click.option(
    "--assume",
    metavar="NAME=VALUE",
    multiple=True,
    help="Count this before what was measured or is assumed: boot=5min. `--assume help` lists the names.",
)
@click.option(
    "--spot-trace",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="When spot could be had: time,state (up, down).  [default: by your own runs on spot]",
)
@click.option("--prices-as-of", type=DATE, metavar="DATE", help="The prices of this day.  [default: today]")
@click.option("--steps-only", is_flag=True, help="No waiting, boot or other part but the steps.")
@with_shared_option
@output_option
def estimate(
    workload: str | None,
    recipe: str | None,
    instance: str | None,
    num_nodes: int,
    batch_size: int | None,
    samples: int | None,
    epochs: float | None,
    tokens: int | None,
    target: str | None,
    purchase: str,
    region: str | None,
    usd_per_hour: float | None,
    assume: tuple[str, ...],
    spot_trace: Path | None,
    prices_as_of: datetime.date | None,
    steps_only: bool,
    with_shared: bool,
    output: str,
) -> None:
    """What a training will take and cost, before anything runs.

    By the runs in the ledger that are most like it, or those that come with fastlaunch: same workload, recipe
    and GPU. Every part says whether it was measured, predicted, listed or assumed. Nothing is started, and
    AWS is not asked.
    """
    if "help" in assume:
        _print_assumptions(output)
        return
    if instance is None:
        raise UserError("no instance type is named", "give --instance, such as p5.48xlarge")
    estimate = api_estimate(
        workload or "vit-huge",
        instance,
        recipe=recipe,
        num_nodes=num_nodes,
        batch_size=batch_size,
        samples=samples,
        epochs=epochs,
        tokens=tokens,
        target=target,
        purchase=purchase,
        region=region,
        usd_per_hour=usd_per_hour,
        assume=assume,
        spot_trace=spot_trace,
        prices_as_of=prices_as_of,
        steps_only=steps_only,
        with_shared=with_shared,
        context=app_context(),
    )
    _print(estimate, output)


def _print(estimate: Estimate, output: str) -> None:
    from fastlaunch.report.cost import cells, notes, part_rows
    from fastlaunch.report.notes import bulleted

    if output == "json":
        click.echo(json.dumps(estimate.to_json(), indent=2))
    elif output == "csv":
        print_rows(part_rows(estimate.cost), output="csv")
    else:
        width = output_width()
        click.echo(textwrap.fill(estimate.answer, width, break_on_hyphens=False))
        click.echo()
        print_rows(cells(estimate.cost), output="table")
        click.echo()
        click.echo(bulleted([*estimate.notes, *notes(estimate.cost)], width))


def _default(name: str) -> str:
    """Return an assumption's default with its unit; empty if it has none."""
    from fastlaunch.analysis.cost import Assumptions

    value = getattr(Assumptions(), name)
    return "" if value is None else f"{value:g}{' s' if name.endswith('_s') else ''}"


def _print_assumptions(output: str) -> None:
    """Print what --assume can set, with defaults and their sources."""
    from fastlaunch.analysis.cost import ASSUMED

    rows = [
        {
            "name": name.removesuffix("_s"),
            "default": _default(name),
            "what": what,
            "from": source,
        }
        for name, (what, source) in ASSUMED.items()
    ]
    print_rows(rows, output=output)
