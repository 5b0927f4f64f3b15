"""Which recipes contradict themselves: choices that do not exist, exclude each other, or have no effect.

An option without effect is refused too: by its label it would set apart runs that did the same.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlaunch_train.recipes.recipes import Recipe

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
BLOCKS = ("native", "te", "te-article")
#: By whose blocks compute in FP8: Transformer Engine's, or the model's own through torchao.
TE_SCALINGS = ("delayed", "current", "block", "mxfp8")
TORCHAO_SCALINGS = ("tensorwise", "rowwise")
FP8_SCALINGS = ("none", *TE_SCALINGS, *TORCHAO_SCALINGS)
FP8_FORMATS = ("hybrid", "e4m3")
POINTWISE = ("written", "scripted", "library")
ENGINES = ("torch", "ort")
COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune")
COMPILE_SCOPES = ("block", "model", "wrapped")
ZERO_STAGES = ("zero1", "zero2", "zero3")
PARALLELISMS = ("ddp", "fsdp2", *ZERO_STAGES)
WIRE_DTYPES = ("fp32", "bf16")
ACTIVATION_CHECKPOINTING = ("none", "block")
OPTIMIZERS = ("workload", "sgd", "adamw", "adafactor")
OPTIMIZER_IMPLS = ("auto", "for-loop", "foreach", "fused")
PARAMETER_DTYPES = ("fp32", "bf16", "bf16-master")
LOOPS = ("ours", "lightning", "transformers")

#: Transformer Engine's documented default, pinned: DelayedScaling(amax_history_len=1024), release 2.15.
AMAX_HISTORY = 1024

#: Of the fields that are one of several words.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "blocks": BLOCKS,
    "fp8_scaling": FP8_SCALINGS,
    "fp8_format": FP8_FORMATS,
    "pointwise": POINTWISE,
    "engine": ENGINES,
    "compile_mode": COMPILE_MODES,
    "compile_scope": COMPILE_SCOPES,
    "parallelism": PARALLELISMS,
    "wire_dtype": WIRE_DTYPES,
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
    "optimizer": OPTIMIZERS,
    "optimizer_impl": OPTIMIZER_IMPLS,
    "parameter_dtype": PARAMETER_DTYPES,
    "loop": LOOPS,
}

#: Fields that say how a step trains. parameter_dtype is what the model computes with, too.
_OF_TRAINING = (
    *("optimizer", "learning_rate", "optimizer_impl", "set_to_none", "grad_accumulation"),
    *("activation_checkpointing", "parallelism", "wire_dtype", "ddp_bucket_mb", "overlap_comm"),
)

#: What is wrong, and what would do.
Problem = tuple[str, str]

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


def recipe_problem(recipe: "Recipe") -> Problem | None:
    """The first thing that is wrong with `recipe`, and what would do; None if nothing is."""
    for rules in (_choices, _numbers, _fp8, _blocks, _compile, _parallelism, _engine, _parameters):
        for problem in rules(recipe):
            return problem
    return None


def optimizer_problem(recipe: "Recipe", optimizer: str) -> Problem | None:
    """What `recipe` asks in vain of `optimizer`, its own or the workload's, and what would do; or None."""
    if recipe.optimizer_impl != "fused":
        return None
    if optimizer == "adafactor":
        return "there is no fused adafactor", "add --set optimizer_impl=auto, or --set optimizer=adamw"
    # Up to 2.13, which shards fused Adam and AdamW alone (torch.distributed.tensor._ops).
    if (optimizer, recipe.parallelism) == ("sgd", "fsdp2"):
        return (
            "torch has no fused SGD for the sharded parameters of fsdp2",
            "add --set optimizer_impl=foreach, or --set optimizer=adamw",
        )
    return None


def steps_problem(recipe: "Recipe") -> Problem | None:
    """What `recipe` asks in vain of those who make its steps, and what would do; None if nothing."""
    if recipe.parallelism in ZERO_STAGES and not recipe.set_to_none:
        return "DeepSpeed frees gradients by itself", "leave out set_to_none"
    if recipe.loop != "ours" and recipe.precision == "fp8":
        return (
            f"with loop={recipe.loop} precision is fp32, tf32, bf16 or fp16 here",
            "add --set loop=ours, or --set precision=bf16 --set fp8_scaling=none",
        )
    if recipe.loop == "transformers" and not recipe.set_to_none:
        return (
            "the Transformers Trainer frees gradients, it does not zero them",
            "leave out set_to_none, or add --set loop=ours",
        )
    return None


def forward_only_problem(recipe: "Recipe") -> Problem | None:
    """What `recipe` asks in vain of a workload that trains nothing, and what would do; None if nothing.

    The recipes with other blocks name an implementation of the optimizer by themselves, which does no harm.
    """
    overrides = dict(recipe.overrides)
    for field in _OF_TRAINING:
        if getattr(recipe, field) == getattr(type(recipe), field):
            continue
        if field in overrides:
            told = f"{field}={overrides[field]}"
            return f"it trains nothing, and {told} says how to train", f"leave out {field}"
        if field != "optimizer_impl":
            told = f"{field} {getattr(recipe, field)}"
            return f"it trains nothing, and {told} is of training", "give bf16, or one that compiles"
    return None


def _choices(recipe: "Recipe") -> Iterator[Problem]:
    for field, allowed in CHOICES.items():
        value = getattr(recipe, field)
        if value not in allowed:
            yield f"{field} is {value!r}", f"it is one of {', '.join(allowed)}"


def _numbers(recipe: "Recipe") -> Iterator[Problem]:
    for field, least, most in (
        ("ddp_bucket_mb", 1, 4096),
        ("amax_history", 1, 65536),
        ("grad_accumulation", 1, 65536),
    ):
        value = getattr(recipe, field)
        if not least <= value <= most:
            yield f"{field} is {value}", f"give {least} to {most}"
    if recipe.learning_rate is not None and not 0 < recipe.learning_rate < float("inf"):
        yield f"learning_rate is {recipe.learning_rate}", "give a number > 0"


def _fp8(recipe: "Recipe") -> Iterator[Problem]:
    if (recipe.precision == "fp8") != (recipe.fp8_scaling != "none"):
        yield (
            f"precision is {recipe.precision!r} with fp8_scaling {recipe.fp8_scaling!r}",
            "fp8 needs a scaling (delayed or current), and other precisions take none",
        )
    if recipe.precision != "fp8":
        if (recipe.fp8_format, recipe.fp8_blocks) != ("hybrid", "all"):
            yield "nothing computes in FP8, yet it has a format or blocks", "add --set precision=fp8"
    elif recipe.blocks == "native" and recipe.fp8_scaling in TE_SCALINGS:
        yield (
            f"fp8_scaling {recipe.fp8_scaling} is Transformer Engine's",
            "add --set blocks=te, or --set fp8_scaling=tensorwise",
        )
    elif recipe.blocks != "native" and recipe.fp8_scaling in TORCHAO_SCALINGS:
        yield f"fp8_scaling {recipe.fp8_scaling} is torchao's", "add --set blocks=native"
    elif recipe.fp8_scaling in TORCHAO_SCALINGS and recipe.fp8_format != "hybrid":
        yield "torchao's FP8 has no other format than hybrid", "leave out fp8_format"
    if recipe.fp8_scaling != "delayed" and recipe.amax_history != AMAX_HISTORY:
        yield "amax_history is of delayed scaling", "add --set fp8_scaling=delayed, or leave it out"
    if recipe.fp8_blocks != "all" and not _SLICE.fullmatch(recipe.fp8_blocks):
        yield f"fp8_blocks is {recipe.fp8_blocks!r}", "give all, or a slice of the blocks such as 1:-1"
    if recipe.fp8_blocks in (":", "0:"):
        yield f"fp8_blocks is {recipe.fp8_blocks!r}, which is all of them", "give all"


def _blocks(recipe: "Recipe") -> Iterator[Problem]:
    if recipe.blocks == "native":
        return
    if recipe.precision not in ("bf16", "fp8"):
        yield (
            f"Transformer Engine blocks run in bf16 or fp8, not {recipe.precision}",
            "add --set precision=bf16",
        )
    if recipe.compile_mode != "none":
        yield "Transformer Engine's modules break torch.compile's graph", "use compile_mode=none with them"


def _compile(recipe: "Recipe") -> Iterator[Problem]:
    # No spaces: labels are read back word by word.
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", recipe.compile_backend):
        yield f"compile_backend is {recipe.compile_backend!r}", "give the name of one, such as inductor"
    if recipe.compile_mode == "none":
        if (recipe.compile_backend, recipe.compile_scope) != ("inductor", "block"):
            yield (
                f"nothing is compiled, yet compile_backend is {recipe.compile_backend!r} "
                f"and compile_scope {recipe.compile_scope!r}",
                "add --set compile_mode=default, or use compile_backend=inductor and compile_scope=block",
            )
        return
    if recipe.compile_mode in ("reduce-overhead", "max-autotune") and recipe.compile_backend != "inductor":
        yield (
            f"compile_mode {recipe.compile_mode} is Inductor's, not {recipe.compile_backend}'s",
            "use compile_mode=default with another backend",
        )
    if recipe.pointwise == "scripted":
        yield (
            "torch.compile does not compile scripted functions",
            "use compile_mode=none, or pointwise=written",
        )


def _parallelism(recipe: "Recipe") -> Iterator[Problem]:
    if recipe.parallelism != "ddp" and recipe.ddp_bucket_mb != 160:
        yield "ddp_bucket_mb is of DDP", "add --set parallelism=ddp, or leave it out"
    if recipe.parallelism not in ZERO_STAGES and not recipe.overlap_comm:
        yield "overlap_comm is of DeepSpeed, DDP and FSDP2 overlap", "use parallelism=zero1, or leave it out"
    if recipe.parallelism == "ddp":
        return
    if recipe.blocks != "native":
        yield "Transformer Engine's blocks are trained with DDP here", "add --set parallelism=ddp"
    if recipe.parallelism in ZERO_STAGES:
        if recipe.compile_mode in ("reduce-overhead", "max-autotune"):
            yield (
                f"compile_mode {recipe.compile_mode} needs gradients that stay where they are",
                "use compile_mode=default with DeepSpeed",
            )
        if recipe.parameter_dtype == "bf16":
            yield "DeepSpeed keeps fp32 masters of bf16 parameters", "add --set parameter_dtype=bf16-master"


def _engine(recipe: "Recipe") -> Iterator[Problem]:
    if recipe.engine == "ort":
        if recipe.compile_mode != "none" or recipe.pointwise == "scripted":
            yield "ORTModule runs the model; torch compiles none of it", "use compile_mode=none"
        if recipe.blocks != "native" or recipe.precision == "fp8":
            yield "ORTModule runs a model's own blocks", "add --set blocks=native precision=fp16"
        if recipe.parallelism == "fsdp2" or recipe.loop != "ours":
            yield "ORTModule trains with DDP or DeepSpeed in our own loop", "leave out parallelism and loop"
        if recipe.activation_checkpointing != "none":
            yield "ORTModule plans its memory by itself", "leave out activation_checkpointing"
    if recipe.loop != "ours":
        if recipe.parallelism != "ddp":
            yield (
                f"with loop={recipe.loop} ranks are joined by DDP here",
                "add --set parallelism=ddp, or --set loop=ours",
            )
        if recipe.compile_scope == "wrapped" and recipe.compile_mode != "none":
            yield f"loop={recipe.loop} wraps the model itself", "use compile_scope=model"


def _parameters(recipe: "Recipe") -> Iterator[Problem]:
    if recipe.parameter_dtype != "fp32":
        if recipe.precision in ("fp32", "tf32", "fp16"):
            yield f"bf16 parameters with precision {recipe.precision}", "add --set precision=bf16"
        if recipe.engine == "ort":
            yield "ORTModule is given fp32 parameters here", "leave out parameter_dtype"
    if recipe.parameter_dtype == "bf16-master" and recipe.loop != "ours":
        yield "fp32 masters are kept by our own loop", "add --set loop=ours"
    problem = optimizer_problem(recipe, recipe.optimizer)
    if problem:
        yield problem
