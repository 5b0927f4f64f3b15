"""A checkpoint of a Transformer Engine block in FP8, on a GPU: scales, if any, come back through the file."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from running_here import runnable
from torch import nn

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.models.model_state import load_model_state, model_state
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.models.te_fp8 import fp8_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

DEVICE = torch.device("cuda")
WIDTH = 256


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
def test_scales_come_back_and_the_next_output_is_the_same(tmp_path: Path, name: str) -> None:
    recipe = runnable(name)
    precision = setup_precision(recipe, DEVICE)
    prepare_torchvision()
    from timm.models.vision_transformer import Block

    from fastlaunch_train.models.te_blocks import te_block_from_timm

    torch.manual_seed(0)
    saved: nn.Module = te_block_from_timm(Block(WIDTH, num_heads=4, qkv_bias=True).to(DEVICE))
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
