"""How to train, as data: a `Recipe` is complete and reproducible from its name and its overrides.

No torch here: the launcher imports this module to list, check and label recipes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from fastlaunch_train.recipes.rules import AMAX_HISTORY, CHOICES, ZERO_STAGES, Problem, recipe_problem

# The launcher reads these here.
from fastlaunch_train.recipes.rules import forward_only_problem as forward_only_problem
from fastlaunch_train.recipes.rules import optimizer_problem as optimizer_problem
from fastlaunch_train.recipes.rules import steps_problem as steps_problem

#: Counts changes to the meaning of a recipe's fields; it is written to every record. 2: `blocks=native` was
#: called `timm`, and the fields from `fp8_format` to `loop` that 1 had not. 3: `overlap_comm`; before it
#: zero1 and zero2 did not overlap, and DeepSpeed's buckets had 500 million gradients.
RECIPE_SCHEMA = 3


class RecipeError(ValueError):
    """A recipe that does not exist or contradicts itself; `hint` says what would do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def refuse(problem: Problem | None, of: str) -> None:
    """Raises RecipeError for what a rule found wrong, if it did. of: what is refused, in words."""
    if problem is not None:
        message, hint = problem
        raise RecipeError(f"{of}: {message}", hint)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train a model; which model, on which data, is the workload's business.

    precision: of matrix products. `fp32` keeps full fp32, `tf32` allows TF32, `bf16` and `fp16` autocast
        (fp16 with loss scaling), `fp8` is bf16 autocast with products of the blocks in FP8.
    blocks: `native` as the model was built, `te` with its transformer blocks replaced by Transformer Engine's
        that compute the same, `te-article` by Transformer Engine's with its own defaults, as an article of
        November 2023 had them: they attend across the batch, and train another model.
    fp8_scaling: how FP8 scale factors are found; `none` unless precision is `fp8`. `tensorwise` and `rowwise`
        are torchao's, in native blocks; the others are Transformer Engine's.
    fp8_format: `hybrid` is E4M3 forward and E5M2 for gradients. fp8_blocks: which of the model's blocks
        compute in FP8: `all`, or a Python slice such as `1:-1`. amax_history: steps whose largest value gives
        the scale, of delayed scaling.
    pointwise: how the model computes pointwise functions that it writes out in several operations: as
        `written`, `scripted` by torch.jit.script, or by torch's own single operator (`library`).
    engine: what runs the model: `torch`, or `ort` for ONNX Runtime's ORTModule.
    compile_scope: `block` compiles each transformer block, `model` the whole model, `wrapped` the model with
        its data-parallel wrapper.
    parallelism: `ddp`, `fsdp2` (torch's fully_shard), `zero1` to `zero3` (DeepSpeed).
    ddp_bucket_mb: size of DDP's gradient buckets. 160 MB holds two ViT-Huge blocks' fp32 gradients.
    overlap_comm: whether DeepSpeed exchanges gradients while it computes others, as DDP and FSDP2 always do.
    wire_dtype: of gradients on their way between ranks.
    grad_accumulation: micro-batches per optimizer step; the batch of a rank is split into as many.
    activation_checkpointing: `block` keeps a block's input alone and computes the rest again in backward.
    optimizer, learning_rate: `workload` and None take the workload's own.
    optimizer_impl: `auto` leaves the choice to torch. set_to_none: gradients are freed, not zeroed.
    parameter_dtype: `bf16` holds and updates weights in bf16, `bf16-master` computes with bf16 weights and
        updates fp32 masters.
    deterministic: torch's deterministic algorithms.
    loop: who calls the steps: `ours`, or the Trainer of `lightning` or of `transformers`.
    """

    name: str
    description: str
    precision: str = "bf16"
    blocks: str = "native"
    fp8_scaling: str = "none"
    fp8_format: str = "hybrid"
    fp8_blocks: str = "all"
    amax_history: int = AMAX_HISTORY
    pointwise: str = "written"
    engine: str = "torch"
    compile_mode: str = "none"
    compile_backend: str = "inductor"
    compile_scope: str = "block"
    parallelism: str = "ddp"
    ddp_bucket_mb: int = 160
    overlap_comm: bool = True
    wire_dtype: str = "fp32"
    grad_accumulation: int = 1
    activation_checkpointing: str = "none"
    optimizer: str = "workload"
    optimizer_impl: str = "auto"
    set_to_none: bool = True
    parameter_dtype: str = "fp32"
    deterministic: bool = False
    loop: str = "ours"
    learning_rate: float | None = None
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        refuse(recipe_problem(self), f"recipe {self.name}")

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> "Recipe":
        """The recipe that `to_record` wrote, in this version or in one before it."""
        values = {key: value for key, value in data.items() if key not in ("label", "schema")}
        if data.get("schema", 1) < 2 and values.get("blocks") == "timm":
            values["blocks"] = "native"
        if data.get("schema", 1) < 3:
            values["overlap_comm"] = data.get("parallelism") not in ("zero1", "zero2")
        values["overrides"] = tuple(dict(values["overrides"]).items())
        return cls(**values)

    @property
    def label(self) -> str:
        """Name and overrides, as tables show them and as runs are pooled: `bf16 optimizer_impl=fused`."""
        return " ".join([self.name, *(f"{field}={value}" for field, value in self.overrides)])

    def to_record(self) -> dict[str, Any]:
        """Every resolved field, as the record header holds it."""
        resolved = asdict(self)
        resolved["overrides"] = dict(self.overrides)
        resolved["label"] = self.label
        resolved["schema"] = RECIPE_SCHEMA
        return resolved


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp32", description="full fp32 matrix products, no autocast", precision="fp32"),
        Recipe(name="tf32", description="fp32 with TF32 matrix products (Ampere or newer)", precision="tf32"),
        Recipe(name="bf16", description="bf16 autocast, eager: the reference of the published experiments"),
        Recipe(name="fp16", description="fp16 autocast with dynamic loss scaling", precision="fp16"),
        Recipe(
            name="compile",
            description="bf16 autocast, torch.compile of each block",
            compile_mode="default",
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
        Recipe(
            name="te-fp8",
            description="Transformer Engine blocks in FP8, delayed scaling (Ada, Hopper, Blackwell)",
            precision="fp8",
            fp8_scaling="delayed",
            blocks="te",
            optimizer_impl="fused",
        ),
        Recipe(
            name="te-fp8-current",
            description="Transformer Engine blocks in FP8, scaled by each tensor's own maximum",
            precision="fp8",
            fp8_scaling="current",
            blocks="te",
            optimizer_impl="fused",
        ),
        Recipe(
            name="te-fp8-block",
            description="Transformer Engine blocks in FP8, a scale for each 128 values (Hopper; emulated on "
            "Blackwell)",
            precision="fp8",
            fp8_scaling="block",
            fp8_format="e4m3",
            blocks="te",
            optimizer_impl="fused",
        ),
        Recipe(
            name="te-mxfp8",
            description="Transformer Engine blocks in MXFP8, a scale for each 32 values (Blackwell)",
            precision="fp8",
            fp8_scaling="mxfp8",
            fp8_format="e4m3",
            blocks="te",
            optimizer_impl="fused",
        ),
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
                ZERO_STAGES,
                ("optimizer state", "optimizer state and gradients", "also parameters"),
                strict=True,
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


def choices_of(field: str) -> tuple[str, ...]:
    """The values that a recipe's field may have; empty where it is a number or free text."""
    return CHOICES.get(field, ())


def resolve_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `name` with `field=value` overrides applied in order.

    An override that changes nothing is dropped, so that equal recipes carry equal labels; the rest are
    sorted. Raises RecipeError for an unknown recipe, field or value, naming the nearest ones.
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
    return replace(
        base, **changed, overrides=tuple((field, _text(value)) for field, value in changed.items())
    )


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
