"""`fastlaunch recipes` and `fastlaunch workloads`: what can be asked for."""

from dataclasses import asdict
from typing import Any

import click

from fastlaunch.cli.options import next_command, output_option, recipe_named, workload_named
from fastlaunch.cli.render import print_rows
from fastlaunch_train.recipes.recipe import CHOICES, Recipe
from fastlaunch_train.recipes.recipes import OVERRIDABLE, RECIPES
from fastlaunch_train.workloads.registry import WORKLOADS

_RECIPE_HEADERS = {
    "name": "recipe",
    "kind": "kind",
    "precision": "precision",
    "equivalent": "equivalent",
    "description": "description",
}
#: Fields of a recipe, the value that most have, and what one of another kind is called, in this order.
_KINDS = (
    ("loop", "ours", "another loop"),
    ("engine", "torch", "ORTModule"),
    ("blocks", "native", "Transformer Engine"),
    ("parallelism", "ddp", "sharded"),
    ("fp8_scaling", "none", "torchao"),
    ("pointwise", "written", "pointwise"),
    ("compile_mode", "none", "compiled"),
)
_WORKLOAD_HEADERS = {
    "name": "workload",
    "num_parameters": "parameters",
    "batch_size": "batch",
    "description": "description",
}


@click.command(short_help="The recipes: how a workload can be trained.")
@click.argument("name", required=False)
@output_option
def recipes(name: str | None, output: str) -> None:
    """The recipes: how a workload can be trained. With NAME: every field of one, and what can be changed.

    A recipe that is not equivalent trains another model than the one it is given; it is there to show what
    that costs, and `compare` does not rank it.
    """
    if name is None:
        rows = [_recipe_row(recipe) for recipe in RECIPES.values()]
        print_rows(rows, output=output, headers=_RECIPE_HEADERS)
        _conclude(output, f"{len(rows)} recipes", "fastlaunch recipes te-fp8")
        return
    row = _recipe_row(recipe_named(name))
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


@click.command(short_help="The workloads: what can be trained.")
@click.argument("name", required=False)
@output_option
def workloads(name: str | None, output: str) -> None:
    """The workloads: what can be trained. With NAME: everything known of one.

    Besides those listed: `timm:MODEL`, any image model of timm; `hf-clm:MODEL`, any causal language model, by
    its folder or its name on the Hugging Face hub; `gelu:ROWSxCOLUMNS`; and `./file.py:function`, your own.
    """
    if name is None:
        rows = [asdict(info) for info in WORKLOADS.values()]
        print_rows(rows, output=output, headers=_WORKLOAD_HEADERS)
        _conclude(
            output,
            f"{len(rows)} workloads, and timm:MODEL, hf-clm:MODEL, gelu:ROWSxCOLUMNS or your own "
            "./file.py:function",
            "fastlaunch submit --local --workload vit-tiny",
        )
        return
    info = workload_named(name)
    rows = [asdict(info)]
    if output == "table":
        rows = [{"field": field, "value": value} for field, value in rows[0].items()]
    print_rows(rows, output=output)
    _conclude(output, f"{name}: {info.description}", f"fastlaunch submit --local --workload {name}")


def _recipe_row(recipe: Recipe) -> dict[str, Any]:
    fields = {field: value for field, value in asdict(recipe).items() if field != "overrides"}
    # By the article's own words those blocks attend across the batch; every other choice computes the same.
    is_equivalent = recipe.blocks != "te-article"
    return {**fields, "kind": _kind(recipe), "equivalent": "yes" if is_equivalent else "NO"}


def _kind(recipe: Recipe) -> str:
    """Return what sets the recipe apart from plain eager training, in a word or two."""
    kinds = (kind for field, usual, kind in _KINDS if getattr(recipe, field) != usual)
    return next(kinds, "eager")


def _change(field: str) -> str:
    """Return what `--set` takes for the field."""
    if field not in OVERRIDABLE:
        return ""
    choices = CHOICES.get(field) or (("true", "false") if isinstance(getattr(Recipe, field), bool) else ())
    return f"{field}={'|'.join(choices) or '...'}"


def _conclude(output: str, sentence: str, command: str) -> None:
    if output == "table":
        click.echo(f"{sentence}.")
        next_command(command)
