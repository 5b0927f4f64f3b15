"""`fastlaunch experiments`: the published experiments, and the runs that each of them is."""

from typing import Any

import click

from fastlaunch.catalog.experiments import EXPERIMENTS, Experiment, ExperimentVariant
from fastlaunch.cli.options import next_command, output_option
from fastlaunch.cli.render import print_rows
from fastlaunch.jobs.data_sources import MADE_UP
from fastlaunch.jobs.variants import DEFAULT_STEPS, experiment_named
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.registry import workload_info

_HEADERS = {"name": "experiment", "runs": "runs", "length": "of", "description": "description"}
_ARM_HEADERS = {
    "workload": "workload",
    "recipe": "recipe",
    "batch_size": "batch/GPU",
    "num_gpus": "GPUs",
    "length": "for",
    "eval_every": "evaluated every",
}


@click.command(short_help="The published experiments: lists of runs to repeat.")
@click.argument("name", required=False)
@output_option
def experiments(name: str | None, output: str) -> None:
    """The published experiments: lists of runs to repeat. With NAME: the runs of one.

    `fastlaunch submit --experiment NAME` makes them, on this machine with --local, or on AWS with --instance.
    """
    if name is None:
        rows = [_row(experiment) for experiment in EXPERIMENTS.values()]
        print_rows(rows, output=output, headers=_HEADERS)
        sentence, command = f"{len(rows)} experiments", "fastlaunch experiments fp8"
    else:
        experiment = experiment_named(name)
        rows = [_variant_row(experiment, variant) for variant in experiment.variants]
        print_rows(rows, output=output, headers=_ARM_HEADERS)
        sentence = f"{name}, {experiment.description}. By the {experiment.source}"
        if experiment.epochs is not None and experiment.data in MADE_UP:
            sentence += f". Epochs are of your own --data; of made-up data it is {DEFAULT_STEPS} steps"
        command = f"fastlaunch submit --local --experiment {name} --dry-run"
    if output == "table":
        click.echo(f"{sentence}.")
        next_command(command)


def _row(experiment: Experiment) -> dict[str, Any]:
    return {
        "name": experiment.name,
        "runs": len(experiment.variants),
        "length": experiment.length,
        "description": experiment.description,
        "data": experiment.data,
        "source": experiment.source,
    }


def _variant_row(experiment: Experiment, variant: ExperimentVariant) -> dict[str, Any]:
    return {
        "workload": variant.workload,
        "recipe": resolve_recipe(variant.recipe, variant.overrides).label,
        "batch_size": variant.batch_size or workload_info(variant.workload).batch_size,
        "num_gpus": variant.num_gpus or "all",
        "length": experiment.length,
        "eval_every": f"{variant.eval_every:,} steps" if variant.eval_every else None,
    }
