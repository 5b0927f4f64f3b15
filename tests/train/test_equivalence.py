"""Every recipe that runs on a CPU: outputs and gradients against the eager float64 model, samples apart.

Each recipe has its place in one of the tables below, so that a new one without a test fails.
"""

import copy
from pathlib import Path

import pytest
import torch
from entrypoint import arguments, ended, record
from equivalence import TINY, WIDE, Errors, alone, exactly, gelu_error, images, judge, limits, measure, vit
from toy import ALONE, CPU

from fastlaunch_train.checks.equivalence import relative_error
from fastlaunch_train.checks.runs_here import runnable_recipes, this_machine
from fastlaunch_train.loop.batch_size import probe_request
from fastlaunch_train.loop.checkpoint import checkpoint_path
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.steppers.stepping import build_native
from fastlaunch_train.workloads.contract import load_workload

TESTS = Path(__file__).parents[1]

#: Tried in this process.
HERE = ("fp32", "bf16", "fp16")
#: Tried in a process of its own, for its compiler or process group: sizes of the ViT, its batch, overrides.
IN_A_PROCESS = {
    "compile": ("tiny", 8, ""),
    "compile-model": ("shallow", 8, ""),
    "compile-reduce-overhead": ("shallow", 8, ""),
    "compile-max-autotune": ("shallow", 8, ""),
    # Inductor has nothing to do with where FP8 rounds, and takes a minute of a CPU's time.
    "ao-fp8": ("tiny", 16, ",compile_backend=eager"),
    "ao-fp8-rowwise": ("wide", 16, ",compile_backend=eager"),
    "fsdp2": ("shallow", 8, ""),
    "zero1": ("shallow", 8, ""),
    "zero2": ("shallow", 8, ""),
}
#: Of pointwise functions, which the workload gelu has.
POINTWISE = ("jit-script", "library")
#: With all others, on a GPU: tests/gpu/test_recipe_equivalence.py.
ON_A_GPU = (
    *("tf32", "graph", "liger"),
    *("te-bf16", "te-fp8", "te-fp8-current", "te-fp8-block", "te-mxfp8", "te-article", "te-article-fp8"),
)
#: Of frozen weights, in test_fine_tuning.py.
FROZEN = ("fp8-frozen", "nf4")
#: Of wider blocks, in test_fp8_fused.py.
FUSED = ("fp8-fused", "bf16-fused")
#: Whose steps the code of another package makes, which only a whole run has.
TRAINERS = ("lightning", "transformers")
#: In ORTModule's own environment, with losses that are eager's: test_ort_trains_as_torch_does.
IN_ITS_ENVIRONMENT = ("ort", "ort-zero1")


def test_every_recipe_is_tried_somewhere() -> None:
    on_a_cpu = [*HERE, *IN_A_PROCESS, *POINTWISE, *FROZEN, *FUSED, *TRAINERS, *IN_ITS_ENVIRONMENT]
    assert sorted([*on_a_cpu, *ON_A_GPU]) == sorted(RECIPES)
    assert torch.cuda.is_available() or set(runnable_recipes(this_machine(CPU))) <= set(on_a_cpu)


@pytest.mark.parametrize("name", HERE)
def test_a_recipe_computes_what_the_eager_float64_model_does(name: str) -> None:
    judge(RECIPES[name], *measure(RECIPES[name], ALONE, TINY, 4))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_a_recipe_in_its_own_process_does_too(name: str, tmp_path: Path) -> None:
    if name not in runnable_recipes(this_machine(CPU)):
        pytest.skip("its package or compiler is not installed")
    sizes, batch_size, overrides = IN_A_PROCESS[name]
    judge(RECIPES[name], *alone(sizes, batch_size, name + overrides, tmp_path, CUDA_VISIBLE_DEVICES=""))


@pytest.mark.filterwarnings(r"ignore:.*torch\.jit\.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["bf16", *POINTWISE])
def test_pointwise_functions_compute_gelu(name: str) -> None:
    # In bf16 each of five operations rounds by up to 2^-9; 1.41421 is the root of two but for 2.5e-6.
    assert 1e-4 < gelu_error(RECIPES[name], CPU) < 1e-2
    assert 0 < gelu_error(resolve_recipe(name, ["precision=fp32"]), CPU) < 5e-6


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainers_step_subtracts_the_float64_models_gradients(name: str, tmp_path: Path) -> None:
    if name not in runnable_recipes(this_machine(CPU)):
        pytest.skip("its package is not installed")
    sgd = ("--set", "optimizer=sgd", "--set", "learning_rate=1", "--steps", "1", "--checkpoint-every", "1")
    ended(0, arguments(tmp_path, *sgd, "--batch-size", "8", workload="vit-tiny", recipe=name))
    workload = load_workload("vit-tiny")
    model = build_native(workload, 0, ALONE)
    before = {name: value.detach().double() for name, value in copy.deepcopy(model).named_parameters()}
    batch = next(workload.batches(probe_request(ALONE, seed=0, batch_size=8)))
    loss = workload.loss(copy.deepcopy(model).double(), (batch[0].double(), batch[1])).item()
    _, gradients = exactly(workload, model, batch)
    written = record(tmp_path)
    assert [(check.name, check.passed) for check in written.checks] == [
        (name, True)
        for name in (
            *("equivalence", "isolation", "permutation"),
            *("gradients", "gradients-by-tensor", "as-trained"),
        )
    ]
    (told,) = written.steps
    assert told.loss == pytest.approx(loss, rel=1e-2)
    saved = torch.load(checkpoint_path(tmp_path / "checkpoints", 1), weights_only=True)["model"]
    errors = {
        name: relative_error(before[name] - saved[name].double(), exact) for name, exact in gradients.items()
    }
    print(name, loss, told.loss, errors)
    assert max(errors.values()) < limits(RECIPES[name])[2]


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
