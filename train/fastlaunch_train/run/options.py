"""The command line of the training entrypoint, as one value. No torch: a bad request fails at once."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fastlaunch_train.recipes.recipes import Recipe, resolve_recipe
from fastlaunch_train.record_lines import MAX_INTEGER
from fastlaunch_train.workloads import workload_info

#: What `--batch-size auto` may use on a machine without a GPU, unless --memory-budget says otherwise.
DEFAULT_MEMORY_BUDGET = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """One training run, as asked for. batch_size is per rank, None for `auto`; memory_budget is in bytes.

    steps: None where epochs are given instead. model, tokenizer, sequence_length: as in `workload.Asked`.
    eval_every: steps between evaluations on held-out data, 0 for none; with it there is one at the end.
    num_workers: that load data for a rank; None for its share of the CPU cores.
    """

    workload: str
    recipe: Recipe
    batch_size: int | None
    steps: int | None
    output: Path
    seed: int
    data: str
    num_workers: int | None
    checkpoint_every: int
    resume: bool
    memory_budget: int
    epochs: int | None = None
    eval_every: int = 0
    model: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None


class _Parser(argparse.ArgumentParser):
    """argparse that exits 2 with one line and no usage text, as every other refusal here does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n  see python -m fastlaunch_train --help\n")


def parse_options(argv: list[str]) -> Options:
    """Options from `argv`. Raises RecipeError or WorkloadError, or exits with 2, for a bad request."""
    parser = _Parser(
        prog="fastlaunch_train", description="Train a workload with a recipe and record each step."
    )
    add = parser.add_argument
    add("--workload", required=True, help="such as vit-huge, timm:MODEL or ./file.py:function")
    add("--recipe", required=True, help="how to train; `fastlaunch recipes` lists them")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field of the recipe")
    add("--batch-size", required=True, type=_batch_size, help="samples per rank and step, or auto")
    add("--steps", type=_at_least(1), help="optimizer steps in all")
    add("--epochs", type=_at_least(1), help="instead: passes over the data")
    add("--output", required=True, type=Path, help="folder for records and checkpoints")
    add("--seed", type=_at_least(0), default=0, help="of weights and data (default 0)")
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
    add("--checkpoint-every", type=_at_least(0), default=0, help="steps; 0 for never (default)")
    add("--resume", action="store_true", help="go on from the last complete checkpoint in --output")
    add("--eval-every", type=_at_least(0), default=0, help="steps; 0 for never (default)")
    add("--model", help="of a language workload: a folder, or a name on the Hugging Face hub")
    add("--tokenizer", help="likewise; without one, bytes are tokens")
    add("--sequence-length", type=_at_least(2), help="tokens of a sample")
    add("--memory-budget", type=_bytes, default=DEFAULT_MEMORY_BUDGET, help="for --batch-size auto on a CPU")
    asked = parser.parse_args(argv)
    workload_info(asked.workload)
    if (asked.steps is None) == (asked.epochs is None):
        parser.error("give --steps or --epochs, one of them")
    return Options(
        workload=asked.workload,
        recipe=resolve_recipe(asked.recipe, asked.set),
        batch_size=asked.batch_size,
        steps=asked.steps,
        output=asked.output,
        seed=asked.seed,
        data=asked.data,
        num_workers=asked.num_workers,
        checkpoint_every=asked.checkpoint_every,
        resume=asked.resume,
        memory_budget=asked.memory_budget,
        epochs=asked.epochs,
        eval_every=asked.eval_every,
        model=asked.model,
        tokenizer=asked.tokenizer,
        sequence_length=asked.sequence_length,
    )


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


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GiB")
    unit = (match[2] or "b").lower()
    power = "bkmgt".index(unit[0])
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** power)
