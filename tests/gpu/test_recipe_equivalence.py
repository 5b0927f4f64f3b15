"""Every recipe on a GPU: outputs and gradients against the eager float64 model, and samples kept apart.

`pytest -m gpu tests/gpu -s` prints each recipe's errors beside their limits. The model is ViT-Huge of four
blocks. Recipes that this GPU or its software cannot run are skipped, with what they lack.
"""

import os
from pathlib import Path

import pytest
import torch
from equivalence import HUGE, alone, gelu_error, judge, measure
from running_here import runnable

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.recipes.rules import batch_multiple

# Transformer Engine, torchao and torch's compiler give warnings of no concern here.
pytestmark = pytest.mark.filterwarnings("ignore")

DEVICE = torch.device("cuda", 0)
PROCESS = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=DEVICE)
POINTWISE = [name for name, recipe in RECIPES.items() if recipe.pointwise != "written"]
#: Their own code calls the steps, which is held to that of our loop by tests/train/test_trainer_loops.py.
TRAINERS = [name for name, recipe in RECIPES.items() if recipe.loop != "ours"]
#: ORTModule runs language models, in an environment of its own: tests/train/test_ort_environment.py.
ORT = [name for name, recipe in RECIPES.items() if recipe.engine == "ort"]
IMAGES = [name for name in RECIPES if name not in (*POINTWISE, *TRAINERS, *ORT)]
#: FP8 in part of the model, and with the fields that no recipe sets.
PARTLY = [
    "te-fp8 fp8_blocks=1:-1",
    "te-fp8-current fp8_blocks=1:",
    "te-fp8 fp8_format=e4m3 amax_history=16",
    "te-article-fp8 fp8_blocks=1:-1",
    "ao-fp8 fp8_blocks=1:-1",
]


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    # Torch runs a function eagerly that it has compiled for several recipes before.
    torch.compiler.reset()


def batch_size(recipe: Recipe) -> int:
    return max(16, batch_multiple(recipe))


@pytest.mark.parametrize("label", [*IMAGES, *PARTLY])
def test_a_recipe_computes_what_the_eager_float64_model_does(label: str, tmp_path: Path) -> None:
    recipe = runnable(label)
    if recipe.parallelism in (*ZERO_STAGES, "fsdp2"):  # one process group a process
        errors, checks = alone(
            "huge", batch_size(recipe), label.replace(" ", ","), tmp_path, **dict(os.environ)
        )
    else:
        errors, checks = measure(recipe, PROCESS, HUGE, batch_size(recipe))
    judge(recipe, errors, checks)


@pytest.mark.parametrize("name", ["bf16", *POINTWISE])
def test_pointwise_functions_compute_gelu(name: str) -> None:
    assert 1e-4 < gelu_error(runnable(name), DEVICE) < 1e-2
    assert 0 < gelu_error(runnable(f"{name} precision=fp32"), DEVICE) < 5e-6


def test_fp8_in_all_blocks_is_less_exact_than_in_some() -> None:
    exact = {}
    for label in ("te-bf16", "te-fp8-current fp8_blocks=2:", "te-fp8-current"):
        recipe = runnable(label)
        exact[label], _ = measure(recipe, PROCESS, HUGE, batch_size(recipe))
    errors = [found.outputs for found in exact.values()]
    assert errors == sorted(errors) and errors[0] < errors[1] < errors[2]
