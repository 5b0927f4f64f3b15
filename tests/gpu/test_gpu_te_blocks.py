"""Transformer Engine's block against timm's in float64, on a GPU.

The bounds are twice the relative errors measured on an H200 with Transformer Engine 2.20.2 (1.6 times in
bf16): output, gradient of the input, and the worst of the weights' gradients. The weights are as wide as a
vision transformer's, 0.02. An FP8 product is off by some 4%; with narrower weights, such as an nn.Linear's
first ones, more of the output is the residual stream and less of it that error.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import timm_weights_from_te
from running_here import runnable
from torch import nn

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.batch_size import probe_request
from fastlaunch_train.models.attention import (
    attention_backend,
    guard_cudnn_attention,
    transformer_engine_backend,
)
from fastlaunch_train.models.model_state import load_model_state, model_state
from fastlaunch_train.models.precision import Precision, setup_precision
from fastlaunch_train.models.te_fp8 import fp8_recipe
from fastlaunch_train.workloads.contract import load_workload

# Transformer Engine's own, of no concern here.
pytestmark = pytest.mark.filterwarnings("ignore")

# FP8 products take no batch that is not a multiple of 16, MXFP8's of 32.
WIDTH, NUM_TOKENS, BATCH = 1280, 197, 32
DEVICE = torch.device("cuda")
PROCESS = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=DEVICE)

#: Recipe and overrides: bounds on the errors of output, input gradient, worst weight gradient.
BOUNDS = {
    "te-bf16": (6.0e-3, 6.0e-3, 1.2e-2),
    "te-fp8": (5.8e-2, 9.6e-2, 2.1e-1),
    "te-fp8-current": (5.8e-2, 9.6e-2, 2.1e-1),
    # Not measured at this width of weights: as current scaling, which was as exact with others.
    "te-fp8-block": (5.8e-2, 9.6e-2, 2.1e-1),
    "te-mxfp8": (5.8e-2, 9.6e-2, 2.1e-1),
}


def precision_of(label: str) -> Precision:
    return setup_precision(runnable(label), DEVICE)


@pytest.fixture(scope="module")
def timm_block() -> nn.Module:
    prepare_torchvision()
    from timm.models.vision_transformer import Block

    torch.manual_seed(0)
    block: nn.Module = Block(WIDTH, num_heads=16, qkv_bias=True)
    for parameter in block.parameters():
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=0.02)
        else:  # biases of 0 and scales of 1 would hide a mix-up
            parameter.data += 0.02 * torch.randn_like(parameter)
    return block.to(DEVICE)


@pytest.fixture(scope="module")
def te_block(timm_block: nn.Module) -> nn.Module:
    precision_of("te-bf16")
    from fastlaunch_train.models.te_blocks import te_block_from_timm

    return te_block_from_timm(timm_block)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    x, upstream = torch.randn(2, BATCH, NUM_TOKENS, WIDTH, generator=generator, device=DEVICE)
    return x, upstream


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("label", BOUNDS)
def test_outputs_and_gradients_against_float64(
    timm_block: nn.Module, te_block: nn.Module, label: str
) -> None:
    precision = precision_of(label)
    x, upstream = inputs()
    exact_block = copy.deepcopy(timm_block).double()
    exact_x = x.double().requires_grad_()
    exact = exact_block(exact_x)
    exact.backward(upstream.double())

    block = copy.deepcopy(te_block)
    for _ in range(2):  # delayed scaling knows its scales from the second step on
        block.zero_grad()
        te_x = x.clone().requires_grad_()
        with precision.autocast():
            output = block(te_x)
        output.backward(upstream.to(output.dtype))
    assert output.dtype == torch.bfloat16
    assert te_x.grad is not None
    gradients = timm_weights_from_te({n: p.grad for n, p in block.layer.named_parameters()})
    worst = max(error(gradients[name], p.grad) for name, p in exact_block.named_parameters())
    errors = (error(output, exact), error(te_x.grad, exact_x.grad), worst)
    print(label, errors)
    assert all(found < bound for found, bound in zip(errors, BOUNDS[label], strict=True)), errors
    # Lower precision cannot be this exact: the block really ran in it.
    assert errors[0] > (5e-3 if "fp8" in label else 5e-4)


@pytest.mark.parametrize("label", BOUNDS)
def test_an_image_changes_its_own_output_alone(te_block: nn.Module, label: str) -> None:
    precision = precision_of(label)
    block = copy.deepcopy(te_block).eval()
    x, other = inputs()
    changed = x.clone()
    changed[3] = other[3]
    permutation = torch.randperm(BATCH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad(), precision.autocast():
        block(x)
        before, after, permuted = block(x), block(changed), block(x[permutation])
    differs = (before != after).flatten(1).any(1)
    if "current" in label:
        # One scale for the whole batch: the others may be rounded otherwise, and no more.
        distance = ((before - after).float().norm(dim=(1, 2)) / before.float().norm(dim=(1, 2))).tolist()
        assert distance[3] > 0.5
        assert all(d < 0.05 for index, d in enumerate(distance) if index != 3), distance
    else:
        assert differs.nonzero().flatten().tolist() == [3]
    assert error(permuted, before[permutation].double()) < 1e-2


def probe(label: str) -> str:
    workload = load_workload("vit-tiny")
    precision = precision_of(label)
    model = workload.build_model().to(DEVICE)
    if label.startswith("te"):
        from fastlaunch_train.models.te_blocks import replace_blocks

        assert workload.blocks is not None
        replace_blocks(model, workload.blocks(model))
    request = probe_request(PROCESS, seed=0, batch_size=32)
    return attention_backend(model, next(workload.batches(request)), precision, workload.loss)


def test_torchs_attention_that_runs_is_named() -> None:
    assert probe("bf16") in ("flash", "cudnn", "efficient")
    assert probe("fp32") in ("efficient", "math")


@pytest.mark.parametrize("label", BOUNDS)
def test_the_attention_that_runs_is_named(label: str) -> None:
    assert probe(label) in ("te:fused", "te:flash", "te:unfused")


def test_unfused_attention_is_noticed(te_block: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    precision = precision_of("te-bf16")
    # Another shape than before: the choice is remembered for each.
    with torch.no_grad(), precision.autocast():
        copy.deepcopy(te_block)(torch.randn(3, 50, WIDTH, device=DEVICE))
    assert transformer_engine_backend() == "te:unfused"


def test_the_loaded_cudnn_is_known() -> None:
    version, _ = guard_cudnn_attention()
    assert version is not None
    assert version >= (8,)
    if version < (9, 15, 1):
        assert not torch.backends.cuda.cudnn_sdp_enabled()


# A checkpoint: scales, if any, come back through the file.


def scales(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every scale and history in `state`, by module and name."""
    return {
        f"{name} {key}": value
        for name, extra in state.items()
        if isinstance(extra, dict)
        for key, value in extra.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", ["te-fp8", "te-fp8-current", "te-fp8-block", "te-mxfp8"])
def test_scales_come_back_and_the_next_output_is_the_same(
    te_block: nn.Module, tmp_path: Path, name: str
) -> None:
    recipe = runnable(name)
    precision = setup_precision(recipe, DEVICE)
    saved = copy.deepcopy(te_block)
    restored = copy.deepcopy(saved)
    for size in (1.0, 30.0, 3.0):  # the largest is in the history alone by the end
        x = size * torch.randn(32, 20, WIDTH, device=DEVICE)
        with precision.autocast():
            output = saved(x)
        output.float().square().mean().backward()
    torch.save(model_state(saved), tmp_path / "state.pt")

    with torch.no_grad(), precision.autocast():  # as the probe of the attention does before a run resumes
        restored(x)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    expected = scales(state)
    assert bool(expected) == (name == "te-fp8")  # the others keep nothing between passes
    load_model_state(restored, state, fp8_recipe=fp8_recipe(recipe))
    found = scales(model_state(restored))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    with torch.no_grad(), precision.autocast():
        assert torch.equal(restored(x), saved(x))
