"""The GPU memory that fine-tuning a language model takes, before anything ran: of Llama-type blocks.

What a block keeps for its backward pass is counted tensor by tensor, as by Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4, with three differences: FlashAttention keeps
no matrix of scores; a frozen weight has no gradient, so its input is kept only if an adapter reads it; and
keys and values may have fewer features than queries.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fastlaunch.catalog.hardware import Accelerator
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import RECIPES, recipe_of, resolve_recipe
from fastlaunch_train.recipes.requirements import Capabilities, missing_part, parse_version

_GIB = 2**30
#: What a block keeps of a token, in bf16 numbers: multiples of the width, of the features of keys and values,
#: and of the width of the MLP. By whether linear weights are frozen, whether the kernels of norms and MLP are
#: fused, and whether blocks are compiled, which recomputes casts and pointwise functions.
#:
#: Eager, with adapters: both norms' inputs in fp32 (4), their outputs, which the adapters read (2), queries
#: and attention (2); in the MLP gate, its SiLU, up, and their product. With fp32 weights the norms keep more,
#: and the residual stream is in fp32.
_KEPT = {
    (True, False, False): (8, 1, 4),
    (True, True, False): (8, 1, 3),
    (True, False, True): (6, 1, 3),
    (True, True, True): (8, 1, 3),
    (False, False, False): (11, 1, 4),
    (False, True, False): (11, 1, 3),
    (False, False, True): (6, 1, 3),
    (False, True, True): (8, 1, 3),
}
#: Bytes of a logit: in bf16, in fp32, its log softmax, and the gradients in fp32 and bf16. Compiled, the loss
#: holds logits and gradients in bf16 alone; Liger's holds neither.
_BYTES_PER_LOGIT, _COMPILED_BYTES_PER_LOGIT = 2 + 4 + 4 + 4 + 2, 2 + 2
#: Bytes of a trained parameter with its gradient and AdamW's two moments. The cast of fp32 weights to bf16,
#: which autocast keeps for the step, comes on top.
_BYTES_PER_TRAINED = {"fp32": 4 + 4 + 8, "bf16-master": 2 + 2 + 4 + 8, "bf16": 2 + 2 + 4}
#: Bytes of a frozen weight of a block's linear layer. NF4 has 4 bits, and for 64 weights a scale of 8 bits,
#: and for 16,384 one of 32: Dettmers et al. 2023, "QLoRA", section 3.
_BYTES_PER_FROZEN = {"fp8": 1.0, "nf4": 0.52}
#: The rank of adapters as counted, which is the workload's default.
_RANK = 16
#: The recipes of fine-tuning, by the workload's prefix, whose memory is shown and of which those that fit are
#: proposed.
FINE_TUNING = {
    "hf-lora:": ("bf16", "compile", "liger", "fp8-frozen", "nf4"),
    "hf-sft:": ("bf16", "compile", "liger", "fsdp2"),
}
#: The share of the GPU's memory that a step may take; CUDA's context and fragments take the rest.
USABLE_MEMORY = 0.92
#: The GPUs that share a sharded training, for the memory that is shown of it.
_SHARDED_GPUS = 8
#: The least tokens of a sample to propose.
_SHORTEST = 512


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a model that no table knows and nobody ran; None where it is unknown."""

    num_parameters: int
    flops_per_sample: int | None = None
    tokens_per_sample: int | None = None
    num_trained: int | None = None  # parameters
    num_layers: int | None = None
    width: int | None = None
    mlp_width: int | None = None
    num_kv_features: int | None = None  # of keys and values together, in a layer
    vocabulary: int | None = None

    @property
    def has_layers(self) -> bool:
        """Return whether it is of known layers, so that `memory_of` knows its memory."""
        layers = (self.num_layers, self.width, self.mlp_width, self.num_kv_features, self.vocabulary)
        return None not in (self.num_trained, *layers)

    @property
    def has_adapters(self) -> bool:
        return self.num_trained is not None and self.num_trained < self.num_parameters

    def of_rank(self, rank: int) -> "ModelSize":
        """Return the size with adapters of another rank; unchanged without adapters."""
        if not self.has_adapters:
            return self
        num_trained = round((self.num_trained or 0) * rank / _RANK)
        return replace(
            self,
            num_parameters=self.num_parameters - (self.num_trained or 0) + num_trained,
            num_trained=num_trained,
        )

    def of_length(self, tokens: int) -> "ModelSize":
        """Return the size with samples of this many tokens: attention's FLOPs grow with the square."""
        flops, usual = self.flops_per_sample, self.tokens_per_sample
        if flops and usual:
            # Four products of tokens x tokens x width a layer, and twice as many backward: two FLOPs each.
            squares = 12 * (self.num_layers or 0) * (self.width or 0)
            linear = (flops - squares * usual**2) / usual
            flops = round(linear * tokens + squares * tokens**2)
        return replace(self, flops_per_sample=flops, tokens_per_sample=tokens)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a GPU: held ones, which several GPUs may share, and those that a step needs."""

    weights: float  # frozen
    states: float  # trained parameters, their gradients, and the optimizer's moments
    working: float  # casts, and what is unpacked or gathered for one layer
    activations: float  # of a token in all layers
    recomputed: float  # of a token in one block that is computed again
    logits: float  # of a token
    is_sharded: bool

    def line(self, tokens: int, num_gpus: int) -> tuple[float, float]:
        """Return the fixed GiB on each of the GPUs, and the GiB per sample of so many tokens."""
        held = (self.weights + self.states) / (num_gpus if self.is_sharded else 1)
        # A block is computed again when the logits are gone.
        per_token = self.activations + max(self.recomputed, self.logits)
        return (held + self.working) / _GIB, per_token * tokens / _GIB


def memory_of(size: ModelSize, recipe: Recipe) -> Memory:
    """Return the memory of a training of the model, which has layers, with AdamW."""
    width, mlp_width, num_layers = size.width or 0, size.mlp_width or 0, size.num_layers or 0
    kv_features, num_trained = size.num_kv_features or 0, size.num_trained or 0
    is_fused, compiles = recipe.kernels == "liger", recipe.compile_mode != "none"
    number = 4.0 if recipe.precision in ("fp32", "tf32") else 2.0
    features = zip(_KEPT[size.has_adapters, is_fused, compiles], (width, kv_features, mlp_width), strict=True)
    block = number * sum(map(math.prod, features))
    layer = width * (2 * width + kv_features) + 3 * width * mlp_width
    num_frozen = size.num_parameters - num_trained
    num_packed = min(num_frozen, num_layers * layer) if recipe.frozen_weights != "native" else 0
    is_sharded = recipe.parallelism == "fsdp2"
    working = 0.0
    if is_sharded:
        # FSDP2 gathers the next block beside the current one.
        working = 2 * number * layer
    elif recipe.frozen_weights == "nf4" and compiles and recipe.activation_checkpointing == "none":
        # The compiler keeps what it has unpacked for the backward pass.
        working = number * num_packed
    elif recipe.frozen_weights == "nf4":
        working = number * (layer if compiles else width * mlp_width)
    elif not size.has_adapters and recipe.parameter_dtype == "fp32":
        working = number * num_trained
    checkpoints = recipe.activation_checkpointing == "block"
    stream = number if size.has_adapters or recipe.parameter_dtype != "fp32" else 4.0
    per_logit = _COMPILED_BYTES_PER_LOGIT if compiles else _BYTES_PER_LOGIT
    return Memory(
        weights=num_packed * _BYTES_PER_FROZEN.get(recipe.frozen_weights, number)
        + number * (num_frozen - num_packed),
        states=num_trained * _BYTES_PER_TRAINED[recipe.parameter_dtype],
        working=working,
        activations=num_layers * (width * stream if checkpoints else block),
        recomputed=block if checkpoints else 0.0,
        logits=0.0 if is_fused else float(per_logit * (size.vocabulary or 0)),
        is_sharded=is_sharded,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """The memory of a recipe with one sample on a GPU, in GiB, as reckoned."""

    recipe: str
    num_gpus: int  # that share what is held
    weights_gib: float  # frozen
    trained_gib: float  # parameters, gradients, and the optimizer's moments
    activations_gib: float
    logits_gib: float
    total_gib: float
    too_small: tuple[str, ...]  # GPUs


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Fine-tuning of a model with known layers."""

    size: ModelSize
    tokens: int  # of a sample
    #: To weigh, each followed by itself with activation checkpointing, which some have anyway.
    recipes: tuple[Recipe, ...]

    def memory_of(self, recipe: Recipe) -> Memory:
        return memory_of(self.size, recipe)

    def needs(self, gpus: Iterable[Accelerator]) -> Iterator[MemoryNeed]:
        """Yield the memory of each recipe. gpus: those to say of whether they are too small."""
        gpus = sorted(gpus, key=lambda gpu: gpu.name)
        for recipe in self.recipes:
            memory = self.memory_of(recipe)
            num_gpus = _SHARDED_GPUS if memory.is_sharded else 1
            total = sum(memory.line(self.tokens, num_gpus))
            yield MemoryNeed(
                recipe=recipe.label,
                num_gpus=num_gpus,
                weights_gib=memory.weights / num_gpus / _GIB,
                trained_gib=memory.states / num_gpus / _GIB,
                activations_gib=memory.activations * self.tokens / _GIB,
                logits_gib=memory.logits * self.tokens / _GIB,
                total_gib=total,
                too_small=tuple(
                    gpu.name
                    for gpu in gpus
                    if total > USABLE_MEMORY * gpu.memory_gib and what_lacks(recipe, gpu) is None
                ),
            )

    def what_fits(self, label: str, accelerator: Accelerator, num_gpus: int) -> tuple[str, ...]:
        """Return options of `submit` with which one sample fits on each of the GPUs.

        They are activation checkpointing or a shorter sequence with the recipe of this label itself, then
        other recipes, the plainest first.
        """
        original = recipe_of(label)

        def fits(recipe: Recipe, tokens: int) -> bool:
            need_gib = sum(self.memory_of(recipe).line(tokens, num_gpus))
            return need_gib <= USABLE_MEMORY * accelerator.memory_gib and not what_lacks(recipe, accelerator)

        options: dict[str, str] = {}
        for recipe in self.recipes:
            if recipe.name not in options and fits(recipe, self.tokens):
                overrides = "".join(f" --set {field}={text}" for field, text in recipe.overrides)
                options[recipe.name] = f"--recipe {recipe.name}{overrides}"
        first = [options.pop(original.name)] if original and original.name in options else []
        lengths = (self.tokens >> halvings for halvings in range(1, self.tokens.bit_length()))
        shorter = next((n for n in lengths if n >= _SHORTEST and original and fits(original, n)), None)
        others = sorted(options.values(), key=lambda option: " --set " in option)
        return (*first, *([f"--sequence-length {shorter}"] if shorter else []), *others)


def fine_tuning(workload: str, size: ModelSize | None) -> FineTuning | None:
    """Return the fine-tuning that the workload is; None for another, or if its memory is unknown."""
    names = next((names for prefix, names in FINE_TUNING.items() if workload.startswith(prefix)), ())
    if not names or size is None or not size.has_layers or size.tokens_per_sample is None:
        return None
    recipes = (
        recipe
        for name in names
        for recipe in (RECIPES[name], resolve_recipe(name, ["activation_checkpointing=block"]))
    )
    return FineTuning(size=size, tokens=size.tokens_per_sample, recipes=tuple(recipes))


def what_lacks(recipe: Recipe, accelerator: Accelerator) -> str | None:
    """Return what the GPU lacks for the recipe."""
    if accelerator.compute_capability is None:
        return f"{accelerator.name} is not an NVIDIA GPU"
    capability = parse_version(accelerator.compute_capability)
    return missing_part(recipe, Capabilities(compute_capability=capability, gpu=accelerator.name))


#: Weights, gradients and an optimizer's momentum in fp32.
_BYTES_PER_WEIGHT = 12


def peaks_by_batch(runs: Iterable[tuple[int | None, float | None]]) -> dict[int, float]:
    """Return the largest peak in GiB by batch size per GPU, where a run has both."""
    peaks: dict[int, float] = {}
    for batch, peak_gib in runs:
        if batch and peak_gib is not None:
            peaks[batch] = max(peak_gib, peaks.get(batch, 0.0))
    return peaks


def memory_line(
    peaks_gib: Mapping[int, float], num_parameters: float | None, memory: Memory | None = None
) -> tuple[float, float]:
    """Return the fixed GiB, and the GiB per sample of a GPU's batch.

    peaks_gib: by batch size per GPU. Two batches give a line. With one, the fixed part is `memory`'s, or else
    that of parameters, gradients and momentum; num_parameters: None if unknown.
    """
    least, most = min(peaks_gib), max(peaks_gib)
    if most > least and peaks_gib[most] > peaks_gib[least]:
        slope = (peaks_gib[most] - peaks_gib[least]) / (most - least)
        return max(0.0, peaks_gib[least] - slope * least), slope
    fixed_gib = _BYTES_PER_WEIGHT * (num_parameters or 0.0) / _GIB if memory is None else memory.line(1, 1)[0]
    fixed_gib = min(fixed_gib, 0.9 * peaks_gib[most])
    return fixed_gib, (peaks_gib[most] - fixed_gib) / most
