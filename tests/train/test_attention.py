"""Which attention ran, as the record's header names it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastlaunch_train.models.attention import attention_backend, name_kernels, transformer_engine_backend
from fastlaunch_train.models.precision import Precision, setup_precision
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.workloads.contract import Batch

CPU = torch.device("cpu")


class Attention(nn.Module):
    """Attends by torch's function, by hand, not at all, or by hand where gradients are computed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        if self.kind == "sdpa":
            heads = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        elif self.kind == "by hand" or (self.kind == "by grad mode" and torch.is_grad_enabled()):
            heads = (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
        return heads.transpose(1, 2).flatten(2)


@pytest.fixture
def bf16() -> Precision:
    return setup_precision(RECIPES["bf16"], CPU)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    output: torch.Tensor = model(batch[0]).mean()
    return output


def batch() -> Batch:
    return torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(0)), torch.zeros(8)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sdpa", "flash_cpu"), ("by hand", "math"), ("by grad mode", "math"), ("without", "none")],
)
def test_the_kernel_that_ran_is_named(bf16: Precision, kind: str, name: str) -> None:
    model = nn.Sequential(Attention(kind), nn.Dropout(0.5)).train()
    drawn = torch.get_rng_state()
    assert attention_backend(model, batch(), bf16, loss) == name
    assert torch.equal(torch.get_rng_state(), drawn), "a trial changes nothing of the training"


def test_torchs_math_kernel_is_named(bf16: Precision) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert attention_backend(Attention("sdpa"), batch(), bf16, loss) == "math"


def test_several_kernels_are_all_named() -> None:
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    assert name_kernels(["mm", flash, efficient, "_softmax"]) == "efficient+flash"
    assert name_kernels(["_scaled_dot_product_cudnn_attention"] * 2) == "cudnn"
    assert name_kernels(["mm", "_safe_softmax"]) == "math"


def test_what_transformer_engine_chose() -> None:
    def chosen(where: str, choice: Any) -> str:
        def load(module: str) -> Any:
            if module.endswith(where):
                return SimpleNamespace(_attention_backends=choice)
            raise ImportError(module)

        return transformer_engine_backend(load)

    new, old = "dot_product_attention.dot_product_attention", "pytorch.attention"
    unfused = {"use_flash_attention": False, "use_fused_attention": False, "use_unfused_attention": True}
    assert chosen(new, unfused) == "te:unfused"
    assert chosen(new, unfused | {"use_fused_attention": True}) == "te:fused"
    assert chosen(old, {"use_flash_attention": True}) == "te:flash"
    assert chosen(old, None) == "te:unknown"
    assert chosen("nowhere", unfused) == "te:unknown"
