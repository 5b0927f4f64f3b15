"""Which recipes a machine can run, as far as its GPUs and what is installed tell; and what would run instead.

The training half looks again, with the libraries themselves, before it trains.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastlaunch.catalog.hardware import Accelerator
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.jobs.machine import Machine
from fastlaunch_train.recipes.recipes import (
    OVERRIDABLE,
    RECIPES,
    Recipe,
    RecipeError,
    optimizer_problem,
    resolve_recipe,
)

#: torchao's scalings of FP8; the others are Transformer Engine's.
TORCHAO_SCALINGS = ("tensorwise", "rowwise")
#: Major compute capabilities that take a scaling: Transformer Engine 2.20, quantization.py
#: (check_mxfp8_support, check_fp8_block_scaling_support); rows, torch's scaled products. MXFP8 is not for
#: 12.0, Blackwell of workstations. Blackwell computes what is scaled in blocks of 128 by way of MXFP8 (2.9).
SCALING_CAPABILITIES = {"mxfp8": range(10, 12), "block": range(9, 100), "rowwise": range(9, 100)}
_IN_WORDS = {"block": "FP8 with a scale for each block", "rowwise": "FP8 with a scale for each row"}
#: Field and value -> what has to be installed for it, by the name it is imported by, and the extra with it.
_SOFTWARE: Mapping[tuple[str, str], tuple[str, str, str]] = {
    ("blocks", "te"): ("transformer_engine", "Transformer Engine", "te"),
    ("blocks", "te-article"): ("transformer_engine", "Transformer Engine", "te"),
    ("fp8_scaling", "tensorwise"): ("torchao", "torchao", "float8"),
    ("fp8_scaling", "rowwise"): ("torchao", "torchao", "float8"),
    ("parallelism", "zero1"): ("deepspeed", "DeepSpeed", "deepspeed"),
    ("parallelism", "zero2"): ("deepspeed", "DeepSpeed", "deepspeed"),
    ("parallelism", "zero3"): ("deepspeed", "DeepSpeed", "deepspeed"),
    ("loop", "lightning"): ("lightning", "Lightning", "lightning"),
    ("loop", "transformers"): ("transformers", "Transformers", "train"),
    ("engine", "ort"): ("torch_ort", "ORTModule", "ort"),
}
_NOT_FP8 = {
    field: getattr(Recipe, field)
    for field in ("precision", "fp8_scaling", "fp8_format", "fp8_blocks", "amax_history")
}


@dataclass(frozen=True, kw_only=True)
class Lack:
    """What a recipe needs and a machine has not. without: values of fields with which it does without."""

    why: str
    without: Mapping[str, Any]


def why_not(recipe: Recipe, machine: Machine, catalogue: Catalogue | None) -> str | None:
    """Why `machine` cannot run `recipe`, or None. A GPU not in the catalogue is believed."""
    lack = next(_lacks(recipe, machine, catalogue), None)
    return lack.why if lack else None


def nearest_that_runs(
    recipe: Recipe, machine: Machine, catalogue: Catalogue | None, *, optimizer: str
) -> Recipe:
    """`recipe` if `machine` can run it, else the one that differs in as little as what is lacking allows.

    optimizer: of the workload, which the recipe may replace.
    """
    values = {field: getattr(recipe, field) for field in OVERRIDABLE}
    found = recipe
    # Every lack takes another field back to what needs less, so that this ends.
    while (lack := next(_lacks(found, machine, catalogue), None)) is not None:
        values |= lack.without
        allowed = _allowed(values, optimizer)
        if allowed is None:
            # What was asked for beside it needs what is lacking.
            return RECIPES["bf16"]
        found = allowed
    return found


def module_of(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """(module, its name in words, the extra that installs it) of what `recipe` needs beside torch."""
    for (field, value), needed in _SOFTWARE.items():
        if getattr(recipe, field) == value:
            yield needed


def needed_format(recipe: Recipe) -> str | None:
    """What not all matrix units have and `recipe` needs: a format, or a scaling of FP8; None if nothing."""
    if recipe.precision == "fp8" and recipe.fp8_scaling in SCALING_CAPABILITIES:
        return recipe.fp8_scaling
    return recipe.precision if recipe.precision in ("fp8", "tf32") else None


def takes(accelerator: Accelerator, wanted: str) -> bool:
    """Whether the accelerator's matrix units take what `needed_format` names."""
    if wanted not in SCALING_CAPABILITIES:
        return wanted in accelerator.formats
    if accelerator.compute_capability is None:
        return False
    return int(accelerator.compute_capability.partition(".")[0]) in SCALING_CAPABILITIES[wanted]


def format_in_words(wanted: str) -> str:
    """`FP8 with a scale for each block`, `MXFP8`, `TF32`."""
    return _IN_WORDS.get(wanted, wanted.upper())


def command_words(recipe: Recipe) -> str:
    """`--recipe bf16 --set optimizer_impl=fused`: how the recipe is asked for."""
    return " ".join(
        [f"--recipe {recipe.name}", *(f"--set {field}={value}" for field, value in recipe.overrides)]
    )


def _lacks(recipe: Recipe, machine: Machine, catalogue: Catalogue | None) -> Iterator[Lack]:
    not_fp8 = _NOT_FP8 if recipe.precision == "fp8" else {}
    if not machine.devices:
        if recipe.blocks != "native":
            yield Lack(why="Transformer Engine needs an NVIDIA GPU", without={"blocks": "native", **not_fp8})
        if recipe.precision == "tf32":
            yield Lack(why="TF32 needs an NVIDIA GPU", without={"precision": "fp32"})
    for accelerator in _known(machine, catalogue):
        yield from _format_lacks(recipe, accelerator)
    for module, name, extra in module_of(recipe):
        if module not in machine.modules:
            why = f"{name} is not installed"
            if module != "transformer_engine":
                why += f" (pip install 'fastlaunch[{extra}]')"
            yield Lack(why=why, without=_without(module, recipe))


def _known(machine: Machine, catalogue: Catalogue | None) -> Iterator[Accelerator]:
    for name in dict.fromkeys(machine.devices) if catalogue else ():
        assert catalogue is not None
        if accelerator := catalogue.accelerator_of_device(name):
            yield accelerator


def _format_lacks(recipe: Recipe, accelerator: Accelerator) -> Iterator[Lack]:
    if recipe.precision in ("fp8", "tf32") and recipe.precision not in accelerator.formats:
        without = _NOT_FP8 if recipe.precision == "fp8" else {"precision": "fp32"}
        yield Lack(why=f"{accelerator.name} has no {recipe.precision.upper()}", without=without)
    wanted = needed_format(recipe)
    if wanted in SCALING_CAPABILITIES and not takes(accelerator, wanted):
        plainer = "tensorwise" if wanted == "rowwise" else "current"
        yield Lack(
            why=f"{accelerator.name} has no {format_in_words(wanted)}",
            without={"fp8_scaling": plainer, "fp8_format": "hybrid"},
        )


def _without(module: str, recipe: Recipe) -> Mapping[str, Any]:
    """Values of the fields with which `recipe` does without what is imported as `module`."""
    if module == "transformer_engine":
        return {"blocks": "native", **(_NOT_FP8 if recipe.precision == "fp8" else {})}
    if module == "deepspeed":
        return {"parallelism": "ddp" if recipe.engine == "ort" else "fsdp2", "overlap_comm": True}
    return {
        "torchao": _NOT_FP8,
        "lightning": {"loop": "ours"},
        "transformers": {"loop": "ours"},
        "torch_ort": {"engine": "torch"},
    }[module]


def _allowed(values: Mapping[str, Any], optimizer: str) -> Recipe | None:
    """The recipe with these values; where its optimizer cannot be had so, as torch chooses; None if no rule
    lets it through.
    """
    for plainer in ({}, {"optimizer_impl": "auto"}):
        try:
            found = _named({**values, **plainer})
        except RecipeError:
            continue
        if not optimizer_problem(found, optimizer if found.optimizer == "workload" else found.optimizer):
            return found
    return None


def _named(values: Mapping[str, Any]) -> Recipe:
    """The recipe with these values of its fields, as the named one with the fewest overrides."""
    overrides = [
        f"{field}={'none' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for field, value in values.items()
    ]
    return min((resolve_recipe(name, overrides) for name in RECIPES), key=lambda found: len(found.overrides))
