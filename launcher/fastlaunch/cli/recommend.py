"""`fastlaunch recommend`: what to train on, how, and bought how."""

import shlex
from collections.abc import Mapping
from typing import Any

import click

from fastlaunch.cli.context import answer_first
from fastlaunch.cli.options import (
    NAMES,
    POSITIVE_COUNT,
    USD,
    Quantity,
    all_option,
    assume_option,
    examples,
    next_command,
    output_option,
    output_width,
    price_file_option,
    prices_as_of_option,
    print_json,
    sequence_length_option,
    steps_only_option,
    with_shared_option,
    wrapped,
)
from fastlaunch.cli.render import print_rows
from fastlaunch.core.activity import activity
from fastlaunch.core.errors import EXIT_DONE, EXIT_JOB_FAILED, UserError
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import above_zero, parse_duration_s
from fastlaunch.lifecycle.handover import ENGINES, check_purchase


def _hours(text: str) -> float:
    return float(above_zero(parse_duration_s)(text)) / 3600


@click.command(
    epilog=examples(
        (
            "the cheapest way to train 100 million samples within two days",
            "fastlaunch recommend --workload vit-huge --samples 100M --deadline 48h",
        ),
        (
            "spot too, for at most $99",
            "fastlaunch recommend --workload vit-huge --samples 10M --purchase on-demand,spot --max-cost 99",
        ),
        (
            "the pick as a batch script of Slurm's",
            "fastlaunch recommend --workload vit-huge --samples 100M --emit sbatch --image URI",
        ),
        ("by measurements alone", "fastlaunch recommend --workload vit-huge --samples 100M --measured-only"),
    )
)
@click.option(
    "--workload", required=True, metavar="NAME", help="Train this workload, or script by its name in `runs`."
)
@click.option("--samples", type=POSITIVE_COUNT, metavar="N", help="Train on this many samples, such as 100M.")
@click.option("--tokens", type=POSITIVE_COUNT, metavar="N", help="Instead of --samples: tokens.")
@sequence_length_option
@click.option(
    "--deadline",
    type=Quantity("time", _hours),
    metavar="TIME",
    help="Take only what is done within this time, such as 48h.",
)
@click.option("--max-cost", "max_cost_usd", type=USD, metavar="USD", help="Take only what costs no more.")
@click.option(
    "--purchase",
    "purchases",
    type=NAMES,
    default="on-demand",
    show_default=True,
    metavar="OPTION,...",
    help="Buy in these ways: on-demand, spot, capacity-block, training-plan.",
)
@click.option(
    "--regions",
    type=NAMES,
    default="",
    metavar="R,...",
    help="Buy in these regions.  [default: yours, or us-east-1]",
)
@click.option(
    "--max-nodes",
    type=POSITIVE_COUNT,
    default=1,
    show_default=True,
    metavar="K",
    help="Train on up to this many machines at once.",
)
@prices_as_of_option
@steps_only_option
@click.option("--measured-only", is_flag=True, help="Take only what was measured on the instance type.")
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
    help="Allow other global batches than the reference's, as if a sample trained as much at any.",
)
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Allow recipes whose numerics or convergence are known to be wrong.",
)
@assume_option
@price_file_option
@with_shared_option
@click.option(
    "--emit",
    type=click.Choice(list(ENGINES)),
    metavar="ENGINE",
    help="Print the pick as a task file for `skypilot`, `dstack`, `sbatch` or AWS `batch`.",
)
@click.option("--image", metavar="URI", help="With --emit: the image with the training code, by its digest.")
@click.option("--bucket", metavar="NAME", help="With --emit: the bucket for the records.")
@all_option
@output_option
def recommend(
    workload: str,
    emit: str | None,
    image: str | None,
    bucket: str | None,
    in_full: bool,
    output: str,
    **options: Any,
) -> int:
    """Recommend an instance, a recipe and how to buy, by cost, time and evidence.

    It goes by your own runs of the workload or, if none is on a GPU, by the figures that come with
    fastlaunch. It predicts what was not measured, with a range that holds nine runs in ten and a class of
    evidence: A (measured on this generation of GPU), B (on another one), B0 (only the model's size is known),
    C (nothing is measured on this generation, or nothing in FP8), D (several GPUs without NVLink). A deadline
    and a budget hold for the upper end of the range. The break-even is the hourly price up to which the
    pick's instance stays the cheapest.
    """
    from fastlaunch.api import recommend as api
    from fastlaunch.report.recommendation import as_rows, as_text

    given = {"--image": image, "--bucket": bucket}
    for option in (name for name, value in given.items() if value and not emit):
        raise UserError(f"{option} is for --emit", f"leave out {option}")
    if emit and output != "table":
        raise UserError("--emit prints a task file", "leave out --output")
    with answer_first() as context:
        with activity("weighing what could be bought"):
            recommendation = api.recommend(
                workload, image=image, with_data=not emit, context=context, **options
            )
        if output == "json":
            print_json(recommendation.to_json())
        elif output == "csv":
            print_rows(as_rows(recommendation), output=output)
        else:
            # With --emit only the task file goes to stdout.
            click.echo(as_text(recommendation, width=output_width(), in_full=in_full), err=bool(emit))
    for warning in recommendation.warnings:
        click.echo(wrapped(as_warning(warning)), err=True)
    if emit and recommendation.pick:
        check_purchase(emit, recommendation.pick.purchase.price.purchase)
        return _emit(recommendation.command, emit, given)
    proposed = recommendation.proposed
    command = (proposed and proposed.command) or recommendation.command
    # The text ends with the commands of a pick.
    if command and (output != "table" or recommendation.pick is None):
        next_command(command)
    return EXIT_DONE if recommendation.pick else EXIT_JOB_FAILED


def _emit(command: str | None, engine: str, given: Mapping[str, str | None]) -> int:
    """Print what the command would submit as a task file. given: options of `submit`, by their names."""
    from fastlaunch.api.recommend import IMAGE_TO_BUILD
    from fastlaunch.cli.submit import submit

    if command is None:
        raise UserError(
            "the command of this script is not known", "type it: fastlaunch submit ... --dry-run --emit"
        )
    options = ["--dry-run", "--emit", engine]
    options += [word for option, value in given.items() if value for word in (option, value)]
    # Options end where a script begins.
    words = [*options, *shlex.split(command.removesuffix(f" {IMAGE_TO_BUILD}"))[2:]]
    with submit.make_context("submit", words, parent=click.get_current_context()) as context:
        code: int = submit.invoke(context)
        return code
