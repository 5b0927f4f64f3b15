"""Parse the command line of the training entrypoint. No torch: a bad request fails at once."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fastlaunch_train.recipes.recipe import Recipe, refuse
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.recipes.rules import profile_problem
from fastlaunch_train.records.records import MAX_INTEGER
from fastlaunch_train.workloads.registry import Scalar, function_arguments


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train, how, how long and where."""

    workload: str
    recipe: Recipe
    batch_size: int | None  #: samples per rank; None for `auto`
    fit: tuple[Recipe, ...]  #: recipes that the batch of `auto` has to fit; empty: only `recipe`
    steps: int | None  #: or epochs
    epochs: int | None
    output: Path
    seed: int
    data: str
    num_workers: int | None  #: loader processes per rank; None for its share of the CPU cores
    checkpoint_every: int  #: steps; 0 for never
    resume: bool
    eval_every: int  #: steps between evaluations, and after the last; 0 for never
    step_profile: bool  #: whether to profile a few more steps after the last
    #: For a language workload, as in `ModelOptions`.
    model: str | None
    tokenizer: str | None
    sequence_length: int | None
    arguments: Mapping[str, Scalar]  #: arguments of the function that makes the user's own workload


class _Parser(argparse.ArgumentParser):
    """An argparse parser that exits with 2, an error and a hint, like every other refusal here."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n  see python -m fastlaunch_train --help\n")


def parse_options(argv: list[str]) -> Options:
    """Return the options in `argv`. Raises RecipeError or WorkloadError, or exits 2, for a bad request."""
    parser = _Parser(
        prog="fastlaunch_train", description="Train a workload with a recipe and record each step."
    )
    add = parser.add_argument
    add("--workload", required=True, help="such as vit-huge, timm:MODEL or ./file.py:function")
    add("--recipe", required=True, help="how to train; `fastlaunch recipes` lists them")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the recipe")
    add("--batch-size", required=True, type=_batch_size, help="samples per rank and step, or auto")
    add("--steps", type=_at_least(1), help="optimizer steps in all")
    add("--epochs", type=_at_least(1), help="passes over the data, in place of --steps")
    add("--output", required=True, type=Path, help="folder for records and checkpoints")
    add("--seed", type=_at_least(0), default=0, help="seed of weights and data (default 0)")
    add(
        "--data",
        type=_data,
        default="synthetic",
        help="synthetic (default), loader, folder:PATH or file:PATH",
    )
    add(
        "--num-workers",
        type=_at_least(0),
        help="loader workers per rank (default: its share of the CPU cores, 12 at most)",
    )
    add(
        "--checkpoint-every",
        type=_at_least(0),
        default=0,
        help="steps between checkpoints; 0: none (default)",
    )
    add("--resume", action="store_true", help="continue from the last complete checkpoint in --output")
    add("--eval-every", type=_at_least(0), default=0, help="steps between evaluations; 0: none (default)")
    add("--step-profile", action="store_true", help="record where the time of a few more steps goes")
    add("--model", help="for a language workload: a folder, or a name on the Hugging Face hub")
    add(
        "--tokenizer",
        help="for a language workload: a folder, or a name on the hub (default: bytes are tokens)",
    )
    add("--sequence-length", type=_at_least(2), help="tokens per sample")
    add(
        "--set-workload",
        dest="arguments",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument for the function in ./file.py:function",
    )
    add(
        "--fit",
        action="append",
        default=[],
        metavar="RECIPE",
        help="take the largest batch that fits this recipe, such as 'bf16 optimizer_impl=fused', and every"
        " other that is named so, with --batch-size auto",
    )
    fields = vars(parser.parse_args(argv))
    fields["arguments"] = function_arguments(fields["workload"], fields["arguments"])
    if (fields["steps"] is None) == (fields["epochs"] is None):
        parser.error("give either --steps or --epochs")
    fields["recipe"] = resolve_recipe(fields["recipe"], fields.pop("set"))
    if fields["step_profile"]:
        refuse(profile_problem(fields["recipe"]), f"recipe {fields['recipe'].label}")
    labels = [label.split() for label in fields["fit"]]
    fields["fit"] = tuple(resolve_recipe(name, overrides) for name, *overrides in labels)
    return Options(**fields)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if value > MAX_INTEGER:
            raise argparse.ArgumentTypeError(f"{value} is more than {MAX_INTEGER}")
        return value

    return parse


def _batch_size(text: str) -> int | None:
    return None if text == "auto" else _at_least(1)(text)


def _data(text: str) -> str:
    source, _, path = text.partition(":")
    if text in ("synthetic", "loader") or (source in ("folder", "file") and path):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not synthetic, loader, folder:PATH or file:PATH")
