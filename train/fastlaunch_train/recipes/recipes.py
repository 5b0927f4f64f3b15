"""The recipes by name, their overrides, and which one trains in place of another. No torch.

A recipe is reproducible from its name and its overrides.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe, RecipeError, refuse
from fastlaunch_train.recipes.rules import recipe_problem


def _te_fp8(name: str, scaling: str, description: str, fp8_format: str = "hybrid") -> Recipe:
    return Recipe(
        name=name,
        description=f"Transformer Engine blocks in {description}",
        precision="fp8",
        fp8_scaling=scaling,
        fp8_format=fp8_format,
        blocks="te",
        optimizer_impl="fused",
    )


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp32", description="full fp32 matrix products, no autocast", precision="fp32"),
        Recipe(name="tf32", description="fp32 with TF32 matrix products (Ampere or newer)", precision="tf32"),
        Recipe(name="bf16", description="bf16 autocast, eager: the reference of the published experiments"),
        Recipe(name="fp16", description="fp16 autocast with dynamic loss scaling", precision="fp16"),
        Recipe(
            name="compile", description="bf16 autocast, torch.compile of each block", compile_mode="default"
        ),
        Recipe(
            name="compile-model",
            description="bf16 autocast, torch.compile of the whole model",
            compile_mode="default",
            compile_scope="model",
        ),
        # One CUDA graph needs one compiled region, so these two compile the whole model.
        Recipe(
            name="compile-reduce-overhead",
            description="bf16 autocast, torch.compile with CUDA graphs",
            compile_mode="reduce-overhead",
            compile_scope="model",
        ),
        Recipe(
            name="compile-max-autotune",
            description="bf16 autocast, torch.compile that times its kernels (long to compile)",
            compile_mode="max-autotune",
            compile_scope="model",
        ),
        Recipe(
            name="te-bf16",
            description="Transformer Engine blocks in bf16, equivalent to timm's",
            blocks="te",
            optimizer_impl="fused",
        ),
        _te_fp8("te-fp8", "delayed", "FP8, delayed scaling (Ada, Hopper, Blackwell)"),
        _te_fp8("te-fp8-current", "current", "FP8, scaled by each tensor's own maximum"),
        _te_fp8(
            "te-fp8-block",
            "block",
            "FP8, a scale for each 128 values (Hopper; emulated on Blackwell)",
            "e4m3",
        ),
        _te_fp8("te-mxfp8", "mxfp8", "MXFP8, a scale for each 32 values (Blackwell)", "e4m3"),
        Recipe(
            name="te-article",
            description="NOT equivalent: Transformer Engine's defaults, which attend across the batch",
            blocks="te-article",
        ),
        Recipe(
            name="te-article-fp8",
            description="NOT equivalent: the same in FP8, delayed scaling",
            blocks="te-article",
            precision="fp8",
            fp8_scaling="delayed",
        ),
        Recipe(
            name="fp8-fused",
            description="our own blocks in FP8 with fused passes, delayed scaling, one CUDA graph a step",
            precision="fp8",
            fp8_scaling="delayed",
            blocks="fused",
            step_graph=True,
            optimizer_impl="fused",
        ),
        Recipe(
            name="bf16-fused",
            description="the same blocks in bf16, with fused passes, one CUDA graph a step",
            blocks="fused",
            step_graph=True,
            optimizer_impl="fused",
        ),
        Recipe(
            name="graph",
            description="bf16 autocast, a whole step in one CUDA graph (one GPU)",
            step_graph=True,
        ),
        Recipe(
            name="ao-fp8",
            description="torchao float8, one scale a tensor, compiled block by block",
            fp8_scaling="tensorwise",
            precision="fp8",
            compile_mode="default",
        ),
        Recipe(
            name="ao-fp8-rowwise",
            description="torchao float8, a scale for each row, compiled block by block",
            fp8_scaling="rowwise",
            precision="fp8",
            compile_mode="default",
        ),
        Recipe(
            name="liger",
            description="bf16 autocast, Liger's kernels for a language model, compiled block by block",
            kernels="liger",
            compile_mode="default",
        ),
        Recipe(
            name="fp8-frozen",
            description="frozen weights held in FP8, inputs scaled as they come, compiled block by block",
            precision="fp8",
            fp8_scaling="tensorwise",
            frozen_weights="fp8",
            compile_mode="default",
        ),
        Recipe(
            name="nf4",
            # Compiled, a block would keep its unpacked weights for the backward pass.
            description="NOT equivalent: frozen weights in 4 bits (QLoRA), blocks compiled and recomputed",
            frozen_weights="nf4",
            compile_mode="default",
            activation_checkpointing="block",
        ),
        Recipe(
            name="jit-script",
            description="bf16 autocast, pointwise functions fused by torch.jit.script",
            pointwise="scripted",
        ),
        Recipe(
            name="library",
            description="bf16 autocast, pointwise functions by torch's own single operators",
            pointwise="library",
        ),
        Recipe(
            name="fsdp2",
            description="bf16 autocast, parameters sharded over the ranks by torch's fully_shard",
            parallelism="fsdp2",
        ),
        *(
            Recipe(
                name=stage,
                description=f"bf16 autocast, DeepSpeed ZeRO-{stage[-1]}: {what} sharded over the ranks",
                parallelism=stage,
            )
            for stage, what in zip(
                ZERO_STAGES, ("optimizer state", "optimizer state and gradients"), strict=True
            )
        ),
        Recipe(
            name="ort",
            description="fp16 autocast, the model run by ONNX Runtime's ORTModule",
            engine="ort",
            precision="fp16",
        ),
        Recipe(
            name="ort-zero1",
            description="ORTModule with DeepSpeed ZeRO-1, fp16",
            engine="ort",
            precision="fp16",
            parallelism="zero1",
        ),
        Recipe(name="lightning", description="bf16 autocast, steps by Lightning's Trainer", loop="lightning"),
        Recipe(
            name="transformers",
            description="bf16 autocast, steps by the Transformers Trainer",
            loop="transformers",
        ),
    )
}

#: Fields a user may override; the others are the recipe's identity.
OVERRIDABLE = tuple(f.name for f in fields(Recipe) if f.name not in ("name", "description", "overrides"))


def resolve_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe `name` with `field=value` overrides, applied in order.

    Overrides that change nothing are dropped and the rest sorted, so that equal recipes have equal labels.
    Raises RecipeError for an unknown recipe, field or value, naming the nearest, and for a recipe that breaks
    a rule.
    """
    if name not in RECIPES:
        raise RecipeError(f"unknown recipe {name!r}", _suggest(name, RECIPES))
    base = RECIPES[name]
    values: dict[str, Any] = {}
    for override in overrides:
        field, separator, text = override.partition("=")
        field = field.strip().replace("-", "_")
        if not separator:
            raise RecipeError(
                f"override {override!r} is not FIELD=VALUE", "as in --set compile_mode=max-autotune"
            )
        if field not in OVERRIDABLE:
            raise RecipeError(f"a recipe has no field {field!r}", _suggest(field, OVERRIDABLE))
        values[field] = _parse(field, text.strip())
    changed = {field: value for field, value in sorted(values.items()) if value != getattr(base, field)}
    recipe = replace(
        base, **changed, overrides=tuple((field, _text(value)) for field, value in changed.items())
    )
    refuse(recipe_problem(recipe), f"recipe {recipe.name}")
    return recipe


@cache
def recipe_of(label: str) -> Recipe | None:
    """Return the recipe whose label this is; None for another label, such as that of a script's variant."""
    try:
        return resolve_recipe(label.split(" ")[0], label.split()[1:])
    except RecipeError:
        return None


def in_parts(recipe: Recipe, num_parts: int) -> Recipe | None:
    """Return the recipe with `num_parts` micro-batches to a batch; None if it cannot have them."""
    overrides = {**dict(recipe.overrides), "grad_accumulation": str(num_parts)}
    try:
        return resolve_recipe(recipe.name, (f"{field}={text}" for field, text in overrides.items()))
    except RecipeError:
        return None


def _parse(field: str, text: str) -> str | int | float | bool | None:
    default = getattr(Recipe, field)
    try:
        if field == "learning_rate":
            return None if text == "none" else float(text)
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, int):
            return int(text)
    except KeyError:
        raise RecipeError(f"{field} is {text!r}", "it is true or false") from None
    except ValueError:
        number = "a number" if field == "learning_rate" else "a whole number"
        raise RecipeError(f"{field} is {text!r}", f"it is {number}") from None
    return text


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"known: {', '.join(names)}"


#: What trains in place of a recipe that cannot run; anything else gives way to bf16, and that to fp32.
_INSTEAD = {
    "te-mxfp8": "te-fp8-block",
    "te-fp8-block": "te-fp8",
    "te-fp8-current": "te-fp8",
    "te-fp8": "fp8-fused",
    "fp8-fused": "te-bf16",
    "te-article-fp8": "te-article",
    "ao-fp8-rowwise": "ao-fp8",
    "ao-fp8": "compile",
    "compile-max-autotune": "compile",
    "compile-reduce-overhead": "compile",
    "compile-model": "compile",
    "zero1": "fsdp2",
    "zero2": "fsdp2",
    "ort-zero1": "ort",
    "ort": "fp16",
    "fp16": "fp32",
    "tf32": "fp32",
    "bf16": "fp32",
    "fp32": "fp32",
}


def stand_in(recipe: Recipe, can_run: Callable[[Recipe], bool]) -> Recipe:
    """Return the first recipe along `_INSTEAD` that can run, with the overrides that it takes and runs with.

    The first candidate is `recipe` itself with fewer overrides. Return fp32 if none can run.
    """
    name = recipe.name
    while not can_run(RECIPES[name]) and name != "fp32":
        name = _INSTEAD.get(name, "bf16")
    kept: list[str] = []
    for field, value in recipe.overrides:
        with suppress(RecipeError):
            if can_run(resolve_recipe(name, [*kept, f"{field}={value}"])):
                kept.append(f"{field}={value}")
    return resolve_recipe(name, kept)
