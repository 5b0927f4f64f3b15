"""`fastlaunch recipes`, `workloads` and `experiments`: what can be trained, and how."""

from dataclasses import asdict
from typing import Any

import click

from fastlaunch.catalog.experiments import published_experiments
from fastlaunch.cli.options import examples, next_command, output_option
from fastlaunch.cli.render import print_rows, print_text
from fastlaunch.jobs.data_sources import MADE_UP
from fastlaunch.jobs.variants import DEFAULT_STEPS, experiment_named, known_recipe, known_workload
from fastlaunch_train.recipes.recipe import CHOICES, Recipe
from fastlaunch_train.recipes.recipes import OVERRIDABLE, RECIPES, resolve_recipe
from fastlaunch_train.workloads.registry import WORKLOADS, workload_info

_RECIPE_HEADERS = {
    "name": "recipe",
    "kind": "kind",
    "precision": "precision",
    "equivalent": "equivalent",
    "description": "description",
}
#: Fields of a recipe in order, with the usual value and the name for a recipe that differs.
_KINDS = (
    ("loop", "ours", "another loop"),
    ("engine", "torch", "ORTModule"),
    ("blocks", "native", "Transformer Engine"),
    ("parallelism", "ddp", "sharded"),
    ("frozen_weights", "native", "language model"),
    ("kernels", "torch", "language model"),
    ("fp8_scaling", "none", "torchao"),
    ("pointwise", "written", "pointwise"),
    ("compile_mode", "none", "compiled"),
    ("step_graph", False, "CUDA graph"),
)
_WORKLOAD_HEADERS = {
    "name": "workload",
    "num_parameters": "parameters",
    "batch_size": "batch",
    "description": "description",
}
_EXPERIMENT_HEADERS = {"name": "experiment", "runs": "runs", "length": "length", "description": "description"}
_VARIANT_HEADERS = {
    "workload": "workload",
    "recipe": "recipe",
    "batch_size": "batch/GPU",
    "num_gpus": "GPUs",
    "length": "length",
    "eval_every": "evaluated every",
}


@click.command(
    epilog=examples(
        ("list them", "fastlaunch recipes"),
        ("every field of one, and what --set can change", "fastlaunch recipes te-fp8"),
    )
)
@click.argument("name", required=False)
@output_option
def recipes(name: str | None, output: str) -> None:
    """List the recipes: how a workload can be trained. With NAME: its fields, and which can be changed.

    A recipe that is not equivalent trains another model than the workload's. It shows what that costs, and
    `compare` does not rank it.
    """
    if name is None:
        rows = [_recipe_row(recipe) for recipe in RECIPES.values()]
        print_rows(rows, output=output, headers=_RECIPE_HEADERS, optional=("kind", "equivalent"))
        _conclude(output, f"{len(rows)} recipes", "fastlaunch recipes te-fp8")
        return
    row = _recipe_row(known_recipe(name))
    if output != "table":
        print_rows([row], output=output)
        return
    fields = [
        {"field": field, "value": value, "change": _change(field)}
        for field, value in row.items()
        if field not in ("description", "kind", "equivalent")
    ]
    print_rows(fields, output=output, headers={"field": "field", "value": "value", "change": "--set"})
    sentence = f"{name}: {row['description']}"
    _conclude(output, sentence.removesuffix("."), f"fastlaunch submit --local --recipe {name}")


@click.command(
    epilog=examples(
        ("list them", "fastlaunch workloads"),
        ("what is known of an image model of timm", "fastlaunch workloads timm:vit_base_patch16_224"),
    )
)
@click.argument("name", required=False)
@output_option
def workloads(name: str | None, output: str) -> None:
    """List the workloads: what can be trained. With NAME: everything known of it.

    Six kinds are not listed: `timm:MODEL` is any image model of timm, `hf-clm:MODEL` any causal language
    model, by its folder or its name on the Hugging Face hub, `hf-lora:MODEL` and `hf-sft:MODEL` fine-tuning
    of one, `gelu:ROWSxCOLUMNS` one operation, and `./file.py:function` a workload of your own.
    """
    if name is None:
        rows = [asdict(info) for info in WORKLOADS.values()]
        print_rows(rows, output=output, headers=_WORKLOAD_HEADERS)
        _conclude(
            output,
            f"{len(rows)} workloads, and timm:, hf-clm:, hf-lora: and hf-sft:MODEL, gelu:ROWSxCOLUMNS or your"
            " own ./file.py:function",
            "fastlaunch submit --local --workload vit-tiny",
        )
        return
    info = known_workload(name)
    rows = [asdict(info)]
    if output == "table":
        rows = [{"field": field, "value": value} for field, value in rows[0].items()]
    print_rows(rows, output=output)
    _conclude(output, f"{name}: {info.description}", f"fastlaunch submit --local --workload {name}")


@click.command(
    epilog=examples(
        ("list them", "fastlaunch experiments"), ("the runs of one", "fastlaunch experiments fp8")
    )
)
@click.argument("name", required=False)
@output_option
def experiments(name: str | None, output: str) -> None:
    """List the published experiments: sets of runs to repeat. With NAME: its runs.

    `fastlaunch submit --experiment NAME` repeats one: here with --local, or on AWS with --instance.
    """
    if name is None:
        rows = [
            {
                "name": experiment.name,
                "runs": len(experiment.variants),
                "length": experiment.length,
                "description": experiment.description,
                "data": experiment.data,
                "source": experiment.source,
            }
            for experiment in published_experiments().values()
        ]
        print_rows(rows, output=output, headers=_EXPERIMENT_HEADERS)
        sentence, command = f"{len(rows)} experiments", "fastlaunch experiments fp8"
    else:
        experiment = experiment_named(name)
        rows = [
            {
                "workload": variant.workload,
                "recipe": resolve_recipe(variant.recipe, variant.overrides).label,
                "batch_size": variant.batch_size or workload_info(variant.workload).batch_size,
                "num_gpus": variant.num_gpus or "all",
                "length": experiment.length,
                "eval_every": f"{variant.eval_every:,} steps" if variant.eval_every else None,
            }
            for variant in experiment.variants
        ]
        print_rows(rows, output=output, headers=_VARIANT_HEADERS)
        sentence = f"{name}, {experiment.description}. By the {experiment.source}"
        if experiment.epochs is not None and experiment.data in MADE_UP:
            sentence += f". Epochs are of your own --data; of made-up data it is {DEFAULT_STEPS} steps"
        command = f"fastlaunch submit --local --experiment {name} --dry-run"
    _conclude(output, sentence, command)


def _recipe_row(recipe: Recipe) -> dict[str, Any]:
    fields = {field: value for field, value in asdict(recipe).items() if field != "overrides"}
    return {**fields, "kind": _kind(recipe), "equivalent": "yes" if recipe.is_equivalent else "NO"}


def _kind(recipe: Recipe) -> str:
    """Return what sets the recipe apart from plain eager training, in a word or two."""
    if recipe.blocks == "fused":
        return "fused blocks"
    kinds = (kind for field, usual, kind in _KINDS if getattr(recipe, field) != usual)
    return next(kinds, "eager")


def _change(field: str) -> str:
    """Return what `--set` takes for the field."""
    if field not in OVERRIDABLE:
        return ""
    choices = CHOICES.get(field) or (("true", "false") if isinstance(getattr(Recipe, field), bool) else ())
    return f"{field}={' | '.join(choices) or '...'}"


def _conclude(output: str, sentence: str, command: str) -> None:
    if output == "table":
        print_text(f"{sentence}.")
        next_command(command)
