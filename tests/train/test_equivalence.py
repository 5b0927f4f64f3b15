"""Every recipe that runs on a CPU: outputs and gradients against the eager float64 model, samples apart.

Each recipe has its place in one of the tables below, so that a new one without a test fails.
"""

import copy
from pathlib import Path

import pytest
import torch
from equivalence import TINY, WIDE, Errors, alone, gelu_error, images, judge, measure, vit

from fastlaunch_train.checks import relative_error
from fastlaunch_train.parallel import Process
from fastlaunch_train.recipes import RECIPES, resolve_recipe
from fastlaunch_train.runs_here import runnable_recipes

CPU = torch.device("cpu")
PROCESS = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=CPU)
TESTS = Path(__file__).parents[1]

#: Tried in this process.
HERE = ("fp32", "bf16", "fp16")
#: Tried in a process of its own, for its compiler or process group: sizes of the ViT, its batch, overrides.
ALONE = {
    "compile": ("tiny", 8, ""),
    "compile-model": ("tiny", 8, ""),
    "compile-reduce-overhead": ("tiny", 8, ""),
    "compile-max-autotune": ("tiny", 8, ""),
    # Inductor has nothing to do with where FP8 rounds, and takes a minute of a CPU's time.
    "ao-fp8": ("tiny", 16, ",compile_backend=eager"),
    "ao-fp8-rowwise": ("wide", 16, ",compile_backend=eager"),
    "fsdp2": ("tiny", 8, ""),
    "zero1": ("tiny", 8, ""),
    "zero2": ("tiny", 8, ""),
    "zero3": ("tiny", 8, ""),
}
#: Of pointwise functions, which the workload gelu has.
POINTWISE = ("jit-script", "library")
#: With all others, on a GPU: tests/gpu/test_recipe_equivalence.py.
ON_A_GPU = (
    "tf32",
    *("te-bf16", "te-fp8", "te-fp8-current", "te-fp8-block", "te-mxfp8", "te-article", "te-article-fp8"),
)
#: Where losses and weights are held to those of our loop or of the eager model, in other files.
ELSEWHERE = {
    "lightning": "train/test_trainer_loops.py",
    "transformers": "train/test_trainer_loops.py",
    "ort": "train/test_ort_environment.py",
    "ort-zero1": "train/test_ort_environment.py",
}


def test_every_recipe_is_tried_somewhere() -> None:
    places = [*HERE, *ALONE, *POINTWISE, *ON_A_GPU, *ELSEWHERE]
    assert sorted(places) == sorted(RECIPES)
    assert set(runnable_recipes(CPU)) <= {*HERE, *ALONE, *POINTWISE, *ELSEWHERE}


@pytest.mark.parametrize("name", HERE)
def test_a_recipe_computes_what_the_eager_float64_model_does(name: str) -> None:
    judge(RECIPES[name], *measure(RECIPES[name], PROCESS, TINY, 4))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ALONE)
def test_a_recipe_in_its_own_process_does_too(name: str, tmp_path: Path) -> None:
    if name not in runnable_recipes(CPU):
        pytest.skip("its package or compiler is not installed")
    sizes, batch_size, overrides = ALONE[name]
    judge(RECIPES[name], *alone(sizes, batch_size, name + overrides, tmp_path, CUDA_VISIBLE_DEVICES=""))


@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["bf16", *POINTWISE])
def test_pointwise_functions_compute_gelu(name: str) -> None:
    # In bf16 each of five operations rounds by up to 2^-9; 1.41421 is the root of two but for 2.5e-6.
    assert 1e-4 < gelu_error(RECIPES[name], CPU) < 1e-2
    assert 0 < gelu_error(resolve_recipe(name, ["precision=fp32"]), CPU) < 5e-6


def test_a_gradient_that_is_off_is_seen() -> None:
    workload = vit(WIDE | {"embed_dim": 64, "num_heads": 4})
    torch.manual_seed(0)
    model = workload.build_model()
    batch = images(WIDE, 4, CPU)
    other = copy.deepcopy(model)
    for one, factor in ((model, 1.0), (other, 1.05)):
        (workload.loss(one, batch) * factor).backward()  # type: ignore[no-untyped-call]
    error = relative_error(other.head.weight.grad, model.head.weight.grad)
    assert not Errors(outputs=0, gradients=error, worst=error, worst_name="").within(RECIPES["bf16"])
