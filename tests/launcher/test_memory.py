"""The memory of fine-tuning as reckoned, against measured peaks."""

from dataclasses import replace

import pytest

from fastlaunch.analysis.memory import ModelSize, memory_of
from fastlaunch_train.recipes.recipes import recipe_of

LLAMA_7B = {
    "num_layers": 32, "width": 4096, "mlp_width": 11008, "num_kv_features": 8192, "vocabulary": 32_000,
    "tokens_per_sample": 4096,
}  # fmt: skip
#: 32 x (4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096) and embeddings, head and last norm.
NUM_LLAMA_7B = 6_738_415_616
#: Of rank 16, on the seven linear layers of each block.
NUM_ADAPTERS = 32 * 16 * (4 * 8192 + 3 * 15104)
LORA = ModelSize(
    num_parameters=NUM_LLAMA_7B + NUM_ADAPTERS,
    num_trained=NUM_ADAPTERS,
    flops_per_sample=4 * NUM_LLAMA_7B * 4096,
    **LLAMA_7B,
)
LLAMA_8B = ModelSize(
    num_parameters=8_030_261_248 + 41_943_040,
    num_trained=41_943_040,
    num_layers=32,
    width=4096,
    mlp_width=14_336,
    num_kv_features=2048,
    vocabulary=128_256,
    tokens_per_sample=4096,
)
LLAMA_3B = ModelSize(
    num_parameters=3_212_749_824,
    num_trained=3_212_749_824,
    num_layers=28,
    width=3072,
    mlp_width=8192,
    num_kv_features=2048,
    vocabulary=128_256,
    tokens_per_sample=4096,
)
LLAMA_1B = replace(
    LLAMA_3B, num_parameters=1_235_814_400, num_trained=1_235_814_400, num_layers=16, width=2048,
    num_kv_features=1024,
)  # fmt: skip
IN_BF16 = "compile parameter_dtype=bf16-master"
NF4 = "nf4 activation_checkpointing=none"
#: Peaks of allocated memory in GiB by recipe and batch, of our entrypoint on an H100 on 28 November 2026:
#: torch 2.11, Transformers 5.17, PEFT 0.21, Liger 0.8.5, torchao 0.17; 4,096 tokens a sample, and in LoRA
#: adapters of rank 16 on all linear layers.
PEAKS = (
    ("bf16", 1, LORA, 35.4),
    ("liger", 1, LORA, 30.3),
    ("compile", 1, LORA, 29.7),
    ("compile", 2, LORA, 46.2),
    ("ao-fp8", 1, LORA, 29.6),
    ("fp8-frozen", 1, LORA, 24.9),
    ("fp8-frozen", 2, LORA, 41.4),
    (NF4, 1, LORA, 32.6),
    ("bf16", 1, LLAMA_8B, 44.0),
    ("liger", 1, LLAMA_8B, 33.7),
    ("compile", 1, LLAMA_8B, 33.7),
    ("compile", 2, LLAMA_8B, 51.7),
    ("fp8-frozen", 1, LLAMA_8B, 28.9),
    ("fp8-frozen", 2, LLAMA_8B, 47.0),
    (NF4, 1, LLAMA_8B, 37.0),
    (IN_BF16, 2, LLAMA_3B, 71.9),
    (IN_BF16, 4, LLAMA_1B, 39.4),
)


def reckoned_gib(recipe: str, batch: int = 1, size: ModelSize = LORA, num_gpus: int = 1) -> float:
    known = recipe_of(recipe)
    assert known is not None
    fixed, per_sample = memory_of(size, known).line(4096, num_gpus)
    return fixed + batch * per_sample


@pytest.mark.parametrize(("recipe", "batch", "size", "peak_gib"), PEAKS)
def test_the_reckoned_memory_is_near_the_measured_peak(
    recipe: str, batch: int, size: ModelSize, peak_gib: float
) -> None:
    assert reckoned_gib(recipe, batch, size) == pytest.approx(peak_gib, rel=0.15)


def test_fewer_bits_and_fewer_activations_take_less_memory() -> None:
    order = ("bf16", "liger", "fp8-frozen", "fp8-frozen activation_checkpointing=block", "nf4")
    assert [*order] == sorted(order, key=reckoned_gib, reverse=True)
    # Of 6.6 billion weights in linear layers one byte each.
    saved_gib = reckoned_gib("ao-fp8") - reckoned_gib("fp8-frozen")
    assert saved_gib == pytest.approx(32 * (4 * 4096**2 + 3 * 4096 * 11008) / 2**30)


def test_full_fine_tuning_is_sharded() -> None:
    full = replace(LORA, num_parameters=NUM_LLAMA_7B, num_trained=NUM_LLAMA_7B)
    alone = reckoned_gib("fsdp2", size=full, num_gpus=1)
    assert alone > 16 * NUM_LLAMA_7B / 2**30
    shared = reckoned_gib("fsdp2", size=full, num_gpus=8)
    assert alone - shared == pytest.approx(16 * NUM_LLAMA_7B / 2**30 * 7 / 8)


def test_attention_grows_with_the_square_of_the_length() -> None:
    linear, squares = 4 * NUM_LLAMA_7B, 12 * 32 * 4096
    size = replace(LORA, flops_per_sample=linear * 4096 + squares * 4096**2)
    assert size.of_length(1024).flops_per_sample == linear * 1024 + squares * 1024**2
