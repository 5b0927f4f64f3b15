"""`fastlaunch estimate`: what a training will take and cost, before anything runs."""

from pathlib import Path
from typing import Any

import click

from fastlaunch.api import estimation as api
from fastlaunch.catalog.hardware import PURCHASE_OPTIONS
from fastlaunch.cli.context import answer_first
from fastlaunch.cli.options import (
    POSITIVE_COUNT,
    USD,
    all_option,
    assume_option,
    examples,
    output_option,
    output_width,
    prices_as_of_option,
    print_json,
    sequence_length_option,
    steps_only_option,
    with_shared_option,
    wrapped,
)
from fastlaunch.cli.render import print_rows
from fastlaunch.core.activity import activity


@click.command(
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
    )
)
@click.option(
    "--workload",
    default="vit-huge",
    show_default=True,
    metavar="NAME",
    help="Train this workload, or script by its name in `runs`.",
)
@click.option(
    "--recipe",
    metavar="RECIPE|NAME=A",
    help="Train with this recipe, or variant of a script.  [default: bf16, or the only one measured]",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change this field of the recipe; may be repeated.",
)
@click.option("--instance", metavar="TYPE", help="Such as p5.48xlarge, or ml.p5.48xlarge on SageMaker.")
@click.option(
    "--num-nodes",
    type=POSITIVE_COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Train on this many machines.",
)
@click.option(
    "--batch-size",
    type=POSITIVE_COUNT,
    metavar="N",
    help="Samples per GPU and step.  [default: the one most often measured]",
)
@sequence_length_option
@click.option("--samples", type=POSITIVE_COUNT, metavar="N", help="Train on this many samples, such as 100M.")
@click.option("--epochs", type=float, metavar="N", help="Instead of --samples: passes over the data.")
@click.option("--tokens", type=POSITIVE_COUNT, metavar="N", help="Instead of --samples: tokens.")
@click.option(
    "--target",
    metavar="METRIC=VALUE",
    help="Instead of --samples: as long as runs took to reach this on held-out data.",
)
@click.option(
    "--purchase",
    type=click.Choice(PURCHASE_OPTIONS),
    default="on-demand",
    show_default=True,
    help="Buy the machines this way.",
)
@click.option("--region", metavar="R", help="Buy them in this region.  [default: yours, or us-east-1]")
@click.option("--usd-per-hour", type=USD, metavar="X", help="Price of a machine.  [default: as listed]")
@assume_option
@click.option(
    "--spot-trace",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="When spot was to be had, as columns time and state (up, down).  [default: by your runs on spot]",
)
@prices_as_of_option
@steps_only_option
@with_shared_option
@all_option
@output_option
def estimate(
    workload: str,
    instance: str | None,
    overrides: tuple[str, ...],
    in_full: bool,
    output: str,
    **options: Any,
) -> None:
    """Estimate what a training will take and cost, before anything runs.

    It goes by the most similar runs in the ledger, or those that come with fastlaunch: the same workload,
    recipe and GPU. Every part says whether it was measured, predicted, listed or assumed. Nothing is started,
    and AWS is not asked.
    """
    from fastlaunch.report.cost import cells, notes, part_rows
    from fastlaunch.report.text import bulleted, more_text

    if overrides:
        options["recipe"] = " ".join([options["recipe"] or "bf16", *overrides])
    if "help" in options["assume"]:
        print_rows(_assumptions(), output=output)
        return
    with answer_first() as context:
        with activity("adding up the training"):
            estimate = api.estimate(workload, instance, context=context, **options)
        if output == "json":
            print_json(estimate.to_json())
        elif output == "csv":
            print_rows(part_rows(estimate.cost), output="csv")
        else:
            click.echo(f"{wrapped(estimate.answer)}\n\n{wrapped(estimate.subject)}\n")
            print_rows(cells(estimate.cost, with_source=in_full), output="table")
            click.echo("" if in_full else f"{more_text(0)}\n")
            click.echo(bulleted([*estimate.notes, *notes(estimate.cost)], output_width()))


def _assumptions() -> list[dict[str, str]]:
    """Return a row for each name that --assume takes, with its default and where that is from."""
    from fastlaunch.analysis.cost import ASSUMED, Assumptions

    rows = []
    for name, (what, source) in ASSUMED.items():
        value, unit = getattr(Assumptions(), name), " s" if name.endswith("_s") else ""
        default = "" if value is None else f"{value:g}{unit}"
        rows.append({"name": name.removesuffix("_s"), "default": default, "what": what, "from": source})
    return rows
