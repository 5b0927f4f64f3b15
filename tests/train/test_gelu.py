"""The GELU workload: its data, its three ways to compute, and what a run of it records."""

import dataclasses
from pathlib import Path

import pytest
import torch
from data_requests import CPU
from data_requests import request as data_request
from entrypoint import arguments, ended, record
from torch import nn
from toy import ALONE

from fastlaunch_train.checks.equivalence import compute_reference
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.steppers.forward_only import ForwardStepper, check_forward_only
from fastlaunch_train.workloads.contract import Workload, load_workload
from fastlaunch_train.workloads.gelu import COLUMNS, COMPARED, ROWS, shape_of
from fastlaunch_train.workloads.registry import WorkloadError


@pytest.fixture
def workload() -> Workload:
    return load_workload("gelu:16x8")


def batch_of(workload: Workload, dtype: torch.dtype = torch.float32, **changes: int) -> torch.Tensor:
    request = dataclasses.replace(data_request(**({"world_size": 2, "seed": 1} | changes)), dtype=dtype)
    (x,) = next(workload.batches(request))
    assert isinstance(x, torch.Tensor)
    return x


def test_a_batch_is_so_many_tensors_of_the_asked_shape_and_dtype(workload: Workload) -> None:
    assert shape_of("gelu") == (ROWS, COLUMNS) == (12608, 5120)
    assert shape_of("gelu:256x1024") == (256, 1024)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = batch_of(workload, dtype=dtype)
        assert (x.shape, x.dtype) == ((4, 16, 8), dtype)
        assert x.float().std() > 0.5


def test_every_step_has_the_same_tensors_and_every_seed_and_rank_its_own(workload: Workload) -> None:
    steps = workload.batches(data_request())
    assert next(steps)[0] is next(steps)[0]
    torch.testing.assert_close(batch_of(workload), batch_of(workload, first_step=7))
    others = [batch_of(workload, rank=1), batch_of(workload, seed=2), batch_of(workload, seed=2, rank=1)]
    for index, x in enumerate(others):
        assert not torch.equal(x, batch_of(workload))
        assert not any(torch.equal(x, other) for other in others[:index])
    assert not torch.equal(batch_of(workload)[0], batch_of(workload)[1])


def test_it_reads_no_data(workload: Workload) -> None:
    with pytest.raises(WorkloadError, match="own data"):
        workload.batches(data_request("loader"))


@pytest.mark.parametrize("kind", ["written", "scripted", "library"])
def test_every_way_computes_gelu_in_the_tensors_own_dtype(workload: Workload, kind: str) -> None:
    model = workload.build_model()
    assert workload.pointwise is not None and workload.outputs is not None
    workload.pointwise(model, kind)
    x = batch_of(workload, dtype=torch.float64)
    outputs = workload.outputs(model, (x,))
    # 1.41421 is off by 2.5e-6 of the root of two.
    torch.testing.assert_close(outputs, nn.functional.gelu(x).flatten(1), rtol=0, atol=2e-6)
    assert workload.loss(model, (x,)).item() == outputs[-1, 0]
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):  # scripted functions are rewritten in their second call
            assert workload.loss(model, (x.bfloat16(),)).dtype == torch.bfloat16
        assert workload.loss(model, (x.float(),)).dtype == torch.float32


def test_what_was_scripted_before_is_not_taken_again(workload: Workload) -> None:
    # Else what the checks compiled would not be compiled in the phase of that name.
    model, other = workload.build_model(), workload.build_model()
    assert workload.pointwise is not None
    workload.pointwise(model, "scripted")
    first = model.functions[0].function
    workload.pointwise(other, "scripted")
    recipe = resolve_recipe("jit-script")
    ForwardStepper(workload, recipe, setup_precision(recipe, CPU), ALONE, model)
    assert len({id(f) for f in (first, model.functions[0].function, other.functions[0].function)}) == 3


def test_the_reference_is_computed_in_fp32(workload: Workload) -> None:
    model = workload.build_model()
    (x,) = probe = (batch_of(workload, dtype=torch.bfloat16),)
    outputs = compute_reference(workload, resolve_recipe("bf16"), model, probe).outputs
    assert outputs is not None
    torch.testing.assert_close(outputs, nn.functional.gelu(x.float()).flatten(1), rtol=0, atol=1e-5)


def test_the_values_compared_are_of_the_whole_tensor() -> None:
    workload = load_workload("gelu:512x1024")
    model = workload.build_model()
    assert workload.outputs is not None
    x = torch.zeros(1, 512, 1024)
    x[0, -1] = 3.0
    outputs = workload.outputs(model, (x,))
    assert outputs.shape == (1, COMPARED)
    assert outputs[0, 0] == 0 and outputs[0, -1] > 2.9


def test_no_batch_is_the_largest(tmp_path: Path) -> None:
    argv = arguments(tmp_path / "out", "--batch-size", "auto", workload="gelu:64x32")
    assert "trains nothing" in ended(2, argv)


@pytest.mark.parametrize("recipe", ["fp32", "jit-script"])
def test_a_run_records_forward_passes_and_what_they_ran(tmp_path: Path, recipe: str) -> None:
    output = ended(0, arguments(tmp_path, workload="gelu:64x32", recipe=recipe))
    written = record(tmp_path)
    assert [step.step for step in written.steps] == list(range(1, 21))
    assert written.header["workload"]["sample_unit"] == "tensors"
    details = {phase.name: phase.detail for phase in written.phases}
    assert "5 operators a tensor: mul x2, add, div, erf" in (details["kernels"] or "")
    # torch.jit.script watches the first calls and compiles in the second: none of them is a step.
    assert ("compile" in details) == (recipe == "jit-script")
    assert {check.name for check in written.checks if check.passed} >= {"equivalence", "as-trained"}
    assert "eprecat" not in output


@pytest.mark.parametrize(
    ("label", "word"),
    [
        ("bf16 grad_accumulation=2", "grad_accumulation=2"),
        ("fp32 set_to_none=false", "set_to_none=false"),
        ("te-bf16 optimizer_impl=foreach", "optimizer_impl=foreach"),
        ("fsdp2", "fsdp2"),
        *((label, None) for label in ("te-bf16", "compile-model", "jit-script", "bf16 deterministic=true")),
    ],
)
def test_what_says_how_to_train_is_refused(label: str, word: str | None, workload: Workload) -> None:
    name, *overrides = label.split()
    recipe = resolve_recipe(name, overrides)
    check_forward_only(dataclasses.replace(workload, trains=True), recipe)
    if word is None:
        check_forward_only(workload, recipe)
        return
    with pytest.raises(RecipeError, match=word):
        check_forward_only(workload, recipe)
