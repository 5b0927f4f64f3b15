"""What makes a recipe contradict itself: choices that do not exist, exclude each other, or have no effect.

A choice without effect is refused because its label would keep apart runs that did the same.
"""

import re
from collections.abc import Iterator

from fastlaunch_train.recipes.recipe import (
    AMAX_HISTORY,
    CHOICES,
    CUDA_GRAPH_MODES,
    TE_SCALINGS,
    TORCHAO_SCALINGS,
    ZERO_STAGES,
    Problem,
    Recipe,
)

#: Fields that say how a step trains, and nothing about what the model computes.
_TRAINING_FIELDS = (
    *("optimizer", "learning_rate", "optimizer_impl", "set_to_none", "grad_accumulation"),
    *("activation_checkpointing", "parallelism", "wire_dtype", "ddp_bucket_mb", "overlap_comm"),
)
#: The width of the tiles of fused blocks' kernels.
_FUSED_MULTIPLE = 256
#: The largest multiple that products in FP8 ask for.
_SUITABLE_LENGTH = 32
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?")


def recipe_problem(recipe: Recipe) -> Problem | None:
    """Return the first thing that is wrong with `recipe`; None if nothing is."""
    for rules in (
        _choices,
        _numbers,
        _fp8,
        _blocks,
        _fused,
        _frozen,
        _step_graph,
        _compile,
        _parallelism,
        _engine,
        _parameters,
    ):
        for problem in rules(recipe):
            return problem
    return None


def optimizer_problem(recipe: Recipe, optimizer: str) -> Problem | None:
    """Return what `recipe` requires and `optimizer`, its own or the workload's, lacks; None if nothing."""
    if recipe.weight_cast == "optimizer" and (
        optimizer not in ("sgd", "workload") or recipe.optimizer_impl != "fused"
    ):
        return (
            "weights are rounded in the pass of fused SGD; "
            f"this is {optimizer}, optimizer_impl {recipe.optimizer_impl}",
            "leave out weight_cast",
        )
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


def steps_problem(recipe: Recipe) -> Problem | None:
    """Return what `recipe` requires that the library making its steps cannot do; None if nothing."""
    if recipe.parallelism in ZERO_STAGES and not recipe.set_to_none:
        return "DeepSpeed frees gradients itself", "leave out set_to_none"
    if recipe.loop != "ours" and recipe.precision == "fp8":
        return (
            f"loop={recipe.loop} trains in fp32, tf32, bf16 or fp16 only",
            "add --set loop=ours, or --set precision=bf16 --set fp8_scaling=none",
        )
    if recipe.loop == "transformers" and not recipe.set_to_none:
        return (
            "the Transformers Trainer frees gradients, it does not zero them",
            "leave out set_to_none, or add --set loop=ours",
        )
    return None


def profile_problem(recipe: Recipe) -> Problem | None:
    """Return why the phases of the recipe's steps cannot be told apart; None if they can."""
    if recipe.step_graph:
        return (
            "the phases of a captured step cannot be told apart",
            "leave out --step-profile, or add --set step_graph=false",
        )
    if recipe.loop == "ours":
        return None
    return (
        f"loop={recipe.loop} makes the steps, and --step-profile knows the phases of our own loop alone",
        "leave out --step-profile, or add --set loop=ours",
    )


def forward_only_problem(recipe: Recipe) -> Problem | None:
    """Return what `recipe` says about training, for a workload that trains nothing; None if nothing.

    An `optimizer_impl` that the named recipe itself sets, as those with other blocks do, does no harm.
    """
    overrides = dict(recipe.overrides)
    for field in _TRAINING_FIELDS:
        if getattr(recipe, field) == getattr(type(recipe), field):
            continue
        if field in overrides:
            return (
                f"it trains nothing, and {field}={overrides[field]} says how to train",
                f"leave out {field}",
            )
        if field != "optimizer_impl":
            return (
                f"it trains nothing, and {field} {getattr(recipe, field)} says how to train",
                "give bf16, or a recipe that compiles",
            )
    return None


def batch_multiple(recipe: Recipe, length: int | None = None) -> int:
    """Return what a batch size has to be a multiple of for `recipe` to run, and to run well.

    length: tokens of a sample, if known: with a multiple of 32 any batch is suitable. Every dimension of FP8
    products is a multiple of 16, and of 32 for MXFP8. In the weight gradients' products one is the number of
    tokens, batch x 197 in a ViT. (Release 2.20.2 refuses a batch of 8 in the backward pass.) Fused blocks
    take multiples of 16 in bf16, too.
    """
    if length and length % _SUITABLE_LENGTH == 0:
        return 1
    if not _needs_multiple(recipe):
        return 8
    return 32 if recipe.fp8_scaling == "mxfp8" else 16


def _needs_multiple(recipe: Recipe) -> bool:
    return recipe.precision == "fp8" or recipe.blocks == "fused"


def batch_problem(recipe: Recipe, batch_size: int, length: int | None = None) -> Problem | None:
    """Return why `recipe` cannot train with `batch_size` samples on a rank; None if it can.

    length: tokens of a sample, if known.
    """
    parts = recipe.grad_accumulation
    multiple = parts * (batch_multiple(recipe, length) if _needs_multiple(recipe) else 1)
    if batch_size % multiple == 0:
        return None
    if parts > 1:
        who = f"{parts} micro-batches need"
    else:
        who = "FP8 needs" if recipe.precision == "fp8" else "fused blocks need"
    return (
        f"batch size {batch_size} is not a multiple of {multiple}, which {who}",
        f"give --batch-size {-(-batch_size // multiple) * multiple}",
    )


def width_problem(recipe: Recipe, width: int | None) -> Problem | None:
    """Return why `recipe` cannot train a vision transformer with `width` features; None if it can, or may.

    The kernels of fused blocks go over a row in tiles, and that of LayerNorm's backward pass holds it in two
    parts, each a power of 2 wide.
    """
    if width is None or recipe.blocks != "fused" or (width % _FUSED_MULTIPLE == 0 and width.bit_count() <= 2):
        return None
    return (
        f"fused blocks need a width such as 256, 512, 768, 1024, 1280, 1536, 2048 or 2560, and it is {width}",
        f"use {'te-fp8' if recipe.precision == 'fp8' else 'te-bf16'}, or another model",
    )


def ranks_problem(recipe: Recipe, num_ranks: int) -> Problem | None:
    """Return why `recipe` cannot train with `num_ranks` ranks; None if it can."""
    if num_ranks > 1 and recipe.step_graph and recipe.blocks == "native":
        return (
            "a step is one CUDA graph on one GPU only",
            "add --nproc 1, or use a recipe with step_graph=false",
        )
    return None


def _choices(recipe: Recipe) -> Iterator[Problem]:
    for field, allowed in CHOICES.items():
        value = getattr(recipe, field)
        if value not in allowed:
            yield f"{field} is {value!r}", f"give one of {', '.join(allowed)}"


def _numbers(recipe: Recipe) -> Iterator[Problem]:
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


def _fp8(recipe: Recipe) -> Iterator[Problem]:
    if (recipe.precision == "fp8") != (recipe.fp8_scaling != "none"):
        yield (
            f"precision is {recipe.precision!r} with fp8_scaling {recipe.fp8_scaling!r}",
            "fp8 needs a scaling (delayed or current), and other precisions take none",
        )
    if recipe.precision != "fp8":
        if (recipe.fp8_format, recipe.fp8_blocks) != ("hybrid", "all"):
            yield "it has an FP8 format or FP8 blocks, and computes nothing in FP8", "add --set precision=fp8"
    elif recipe.blocks == "native" and recipe.fp8_scaling in TE_SCALINGS:
        yield (
            f"fp8_scaling {recipe.fp8_scaling} is Transformer Engine's",
            "add --set blocks=te, or --set fp8_scaling=tensorwise",
        )
    elif recipe.blocks != "native" and recipe.fp8_scaling in TORCHAO_SCALINGS:
        yield f"fp8_scaling {recipe.fp8_scaling} is torchao's", "add --set blocks=native"
    elif recipe.fp8_scaling in TORCHAO_SCALINGS and recipe.fp8_format != "hybrid":
        yield "torchao has no FP8 format but hybrid", "leave out fp8_format"
    if recipe.fp8_scaling != "delayed" and recipe.amax_history != AMAX_HISTORY:
        yield "only delayed scaling has an amax_history", "add --set fp8_scaling=delayed, or leave it out"
    if recipe.fp8_blocks != "all" and not _SLICE.fullmatch(recipe.fp8_blocks):
        yield f"fp8_blocks is {recipe.fp8_blocks!r}", "give all, or a slice of the blocks such as 1:-1"
    if recipe.fp8_blocks in (":", "0:"):
        yield f"fp8_blocks is {recipe.fp8_blocks!r}, which is all of them", "give all"


def _blocks(recipe: Recipe) -> Iterator[Problem]:
    if recipe.blocks in ("native", "fused"):
        return
    if recipe.precision not in ("bf16", "fp8"):
        yield (
            f"Transformer Engine blocks run in bf16 or fp8, not {recipe.precision}",
            "add --set precision=bf16",
        )
    if recipe.compile_mode != "none":
        yield "Transformer Engine's modules break torch.compile's graph", "use compile_mode=none with them"


def _fused(recipe: Recipe) -> Iterator[Problem]:
    if recipe.blocks != "fused":
        if (recipe.last_block, recipe.weight_cast) != ("all", "forward"):
            yield "last_block and weight_cast are of fused blocks", "add --set blocks=fused"
        if recipe.dgrad_accumulation != "split" and recipe.fp8_scaling not in TORCHAO_SCALINGS:
            yield (
                "dgrad_accumulation is of fused blocks and of torchao's products in FP8",
                "use fp8-fused or ao-fp8, or leave it out",
            )
        return
    if recipe.precision not in ("bf16", "fp8"):
        yield f"fused blocks compute in bf16 or fp8, not {recipe.precision}", "add --set precision=bf16"
    in_fp8 = recipe.precision == "fp8"
    if in_fp8 and (recipe.fp8_scaling, recipe.fp8_format, recipe.fp8_blocks) != ("delayed", "hybrid", "all"):
        yield (
            "fused blocks compute in FP8 with delayed scaling, hybrid format, and all of them",
            "leave out fp8_scaling, fp8_format and fp8_blocks, or use te-fp8",
        )
    if not in_fp8 and (recipe.dgrad_accumulation, recipe.weight_cast) != ("split", "forward"):
        yield "dgrad_accumulation and weight_cast are of products in FP8", "use fp8-fused"
    if recipe.compile_mode != "none" or recipe.activation_checkpointing != "none":
        yield (
            "fused blocks are neither compiled nor recomputed",
            "use compile_mode=none and activation_checkpointing=none",
        )
    if recipe.parameter_dtype != "fp32":
        yield "fused blocks hold fp32 parameters", "leave out parameter_dtype"
    if recipe.weight_cast == "optimizer" and recipe.parallelism != "ddp":
        yield "the optimizer's pass rounds whole weights, not shards", "leave out weight_cast"


def _frozen(recipe: Recipe) -> Iterator[Problem]:
    if recipe.frozen_weights == "fp8" and recipe.fp8_scaling != "tensorwise":
        yield (
            "frozen weights in FP8 are torchao's, with one scale a tensor",
            "add --set fp8_scaling=tensorwise",
        )
    if recipe.frozen_weights == "nf4" and recipe.precision != "bf16":
        yield (
            f"frozen weights in 4 bits are computed with in bf16, not {recipe.precision}",
            "add --set precision=bf16",
        )
    if recipe.frozen_weights == "native" and recipe.kernels == "torch":
        return
    if recipe.blocks != "native" or recipe.engine != "torch":
        yield "frozen_weights and kernels are of a model's own blocks", "add --set blocks=native"
    if recipe.frozen_weights != "native" and recipe.parallelism != "ddp":
        yield "frozen weights are rounded whole, not in shards", "add --set parallelism=ddp"


def _step_graph(recipe: Recipe) -> Iterator[Problem]:
    if not recipe.step_graph:
        return
    if recipe.precision == "fp16":
        yield "a captured step cannot skip an update, as loss scaling does", "add --set precision=bf16"
    if recipe.blocks in ("te", "te-article"):
        yield "Transformer Engine's steps are not captured here", "use step_graph=false"
    if recipe.compile_mode != "none" or recipe.engine == "ort":
        yield "a captured step is neither compiled nor ONNX Runtime's", "use step_graph=false"
    if recipe.parallelism != "ddp" or recipe.loop != "ours":
        yield "only steps of our own loop are captured, on one GPU", "leave out parallelism and loop"
    if recipe.parameter_dtype == "bf16-master" or not recipe.set_to_none:
        yield "a captured step frees its gradients and has no masters", "use step_graph=false"


def _compile(recipe: Recipe) -> Iterator[Problem]:
    # Spaces are refused, because labels are split at them.
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", recipe.compile_backend):
        yield f"compile_backend is {recipe.compile_backend!r}", "give the name of a backend, such as inductor"
    if recipe.compile_mode == "none":
        if (recipe.compile_backend, recipe.compile_scope) != ("inductor", "block"):
            yield (
                f"nothing is compiled, and compile_backend is {recipe.compile_backend!r}, "
                f"compile_scope {recipe.compile_scope!r}",
                "add --set compile_mode=default, or use compile_backend=inductor and compile_scope=block",
            )
        return
    if recipe.compile_mode in CUDA_GRAPH_MODES and recipe.compile_backend != "inductor":
        yield (
            f"compile_mode {recipe.compile_mode} is Inductor's, not {recipe.compile_backend}'s",
            "use compile_mode=default with another backend",
        )
    if recipe.pointwise == "scripted":
        yield (
            "torch.compile does not compile scripted functions",
            "use compile_mode=none, or pointwise=written",
        )


def _parallelism(recipe: Recipe) -> Iterator[Problem]:
    if recipe.parallelism != "ddp" and recipe.ddp_bucket_mb != 160:
        yield "only DDP has ddp_bucket_mb", "add --set parallelism=ddp, or leave it out"
    if recipe.parallelism not in ZERO_STAGES and not recipe.overlap_comm:
        yield ("overlap_comm is DeepSpeed's; DDP and FSDP2 overlap", "use parallelism=zero1, or leave it out")
    if recipe.parallelism == "ddp":
        return
    if recipe.blocks != "native":
        yield "other blocks than the model's own train with DDP only", "add --set parallelism=ddp"
    if recipe.parallelism in ZERO_STAGES:
        if recipe.compile_mode in CUDA_GRAPH_MODES:
            yield (
                f"compile_mode {recipe.compile_mode} needs gradients that stay in place",
                "use compile_mode=default with DeepSpeed",
            )
        if recipe.parameter_dtype == "bf16":
            yield "DeepSpeed keeps fp32 masters of bf16 parameters", "add --set parameter_dtype=bf16-master"


def _engine(recipe: Recipe) -> Iterator[Problem]:
    if recipe.engine == "ort":
        if recipe.compile_mode != "none" or recipe.pointwise == "scripted":
            yield "ORTModule runs the model; torch compiles none of it", "use compile_mode=none"
        if recipe.blocks != "native" or recipe.precision == "fp8":
            yield "ORTModule runs a model's own blocks", "add --set blocks=native --set precision=fp16"
        if recipe.parallelism == "fsdp2" or recipe.loop != "ours":
            yield "ORTModule trains with DDP or DeepSpeed, in our own loop", "leave out parallelism and loop"
        if recipe.activation_checkpointing != "none":
            yield "ORTModule plans its memory itself", "leave out activation_checkpointing"
    if recipe.loop != "ours":
        if recipe.parallelism != "ddp":
            yield (
                f"loop={recipe.loop} trains with DDP only",
                "add --set parallelism=ddp, or --set loop=ours",
            )
        if recipe.compile_scope == "wrapped" and recipe.compile_mode != "none":
            yield f"loop={recipe.loop} wraps the model itself", "use compile_scope=model"


def _parameters(recipe: Recipe) -> Iterator[Problem]:
    if recipe.parameter_dtype != "fp32":
        if recipe.precision in ("fp32", "tf32", "fp16"):
            yield f"bf16 parameters with precision {recipe.precision}", "add --set precision=bf16"
        if recipe.engine == "ort":
            yield "ORTModule takes fp32 parameters only", "leave out parameter_dtype"
    if recipe.parameter_dtype == "bf16-master" and recipe.loop != "ours":
        yield "only our own loop keeps fp32 masters", "add --set loop=ours"
    problem = optimizer_problem(recipe, recipe.optimizer)
    if problem:
        yield problem
