"""The memory of fine-tuning as reckoned, against measured peaks."""

from typing import Any

import pytest

from fastlaunch.analysis.memory import ModelSize, memory_of

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
#: Peaks of allocated memory in GiB, on an H100 on 26 November 2026: torch 2.11, PEFT 0.21, Liger 0.8.5,
#: torchao 0.17; LLAMA2-7B, 4,096 tokens a sample, adapters of rank 16 on all linear layers.
PEAKS: tuple[tuple[dict[str, Any], int, float], ...] = (
    ({}, 1, 39.4),
    ({"is_fused": True}, 1, 33.6),
    ({"is_fused": True, "compiles": True}, 1, 31.3),
    ({"compiles": True}, 1, 31.7),
    # FP8 products whose frozen weights are held in bf16.
    ({"compiles": True}, 1, 31.7),
    ({"compiles": True}, 2, 50.0),
)


@pytest.mark.parametrize(("how", "batch", "peak_gib"), PEAKS)
def test_the_reckoned_memory_is_near_the_measured_peak(
    how: dict[str, Any], batch: int, peak_gib: float
) -> None:
    fixed, per_sample = memory_of(LORA, **how).line(4096, 1)
    assert fixed + batch * per_sample == pytest.approx(peak_gib, rel=0.15)
