"""What a recipe makes of a native model: its blocks, the layers that compute in FP8, pointwise functions."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fastlaunch_train.models.conversion import convert_model, fp8_blocks, takes_float8
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.workloads.contract import Workload, load_workload

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload("vit-tiny")


def vit(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build_model()


def test_a_recipe_of_native_blocks_changes_nothing(workload: Workload) -> None:
    model = vit(workload)
    modules = list(model.modules())
    for name in ("fp32", "bf16", "compile", "fsdp2"):
        convert_model(model, workload, RECIPES[name])
    assert list(model.modules()) == modules


def test_blocks_outside_the_slice_leave_fp8(workload: Workload) -> None:
    left: list[str] = []

    @contextlib.contextmanager
    def without_fp8() -> Iterator[None]:
        left.append("left")
        yield
        left.append("back")

    model = vit(workload)
    recipe = resolve_recipe("te-article-fp8", ["fp8_blocks=1:-1"])
    convert_model(
        model, workload, recipe, layer_factory=lambda **sizes: nn.Identity(), outside_fp8=without_fp8
    )
    for block, expected in zip(model.blocks, ([1], [], [], [1]), strict=True):
        left.clear()
        block(torch.randn(2, 5, 64))
        assert left == ["left", "back"] * len(expected)


def test_the_slice_of_blocks() -> None:
    for text, blocks in (("all", range(4)), ("1:-1", range(1, 3)), ("-1:", range(3, 4)), (":2", range(2))):
        assert fp8_blocks(resolve_recipe("te-fp8", [f"fp8_blocks={text}"]), 4) == blocks
    with pytest.raises(RecipeError, match="none of the model's 2 blocks"):
        fp8_blocks(resolve_recipe("te-fp8", ["fp8_blocks=1:-1"]), 2)


@pytest.mark.parametrize("name", ["te-bf16", "ao-fp8"])
def test_a_model_without_blocks_is_refused(workload: Workload, name: str) -> None:
    with pytest.raises(RecipeError, match="no transformer blocks"):
        convert_model(nn.Linear(1, 1), dataclasses.replace(workload, blocks=None), RECIPES[name])


def test_pointwise_functions_are_the_workloads_business(workload: Workload) -> None:
    with pytest.raises(RecipeError, match="writes out no pointwise functions"):
        convert_model(nn.Linear(1, 1), workload, RECIPES["library"])
    kinds: list[str] = []
    having = dataclasses.replace(workload, pointwise=lambda model, how: kinds.append(how))
    for name in ("bf16", "library", "jit-script"):
        convert_model(nn.Linear(1, 1), having, RECIPES[name])
    assert kinds == ["library", "scripted"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "tensorwise", "rowwise"),
    [
        (1280, 5120, True, True),  # of a ViT-Huge block: fc1,
        (1280, 3840, True, False),  # qkv,
        (5120, 1280, True, False),  # fc2,
        (1280, 1280, True, False),  # proj
        (1280, 1000, False, False),  # and the head
        (4096, 4096, True, True),
    ],
)
def test_layers_that_float8_is_for(inputs: int, outputs: int, tensorwise: bool, rowwise: bool) -> None:
    layer = nn.Linear(inputs, outputs, device="meta")
    assert takes_float8(layer, "tensorwise") == tensorwise
    assert takes_float8(layer, "rowwise") == rowwise


def float8_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # torchao's own, at import
def test_torchao_converts_the_linear_layers_of_the_chosen_blocks(workload: Workload) -> None:
    model = vit(workload).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(IMAGES)
    convert_model(model, workload, resolve_recipe("ao-fp8", ["fp8_blocks=2:"]))
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert float8_layers(model) == [f"blocks.{block}.{layer}" for block in (2, 3) for layer in layers]
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        error = (model(IMAGES) - before).norm() / before.norm()
    assert 1e-2 < error < 0.2  # emulated, and in FP8 it is


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_rowwise_float8_is_refused_where_no_layer_gains_by_it(workload: Workload) -> None:
    with pytest.raises(RecipeError, match="no Linear layer"):
        convert_model(vit(workload), workload, RECIPES["ao-fp8-rowwise"])
