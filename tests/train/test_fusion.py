"""What is said of the kernels that a forward pass ran."""

import pytest
import torch
from torch import nn
from toy import ALONE, CPU

from fastlaunch_train.loop.batch_size import probe_request
from fastlaunch_train.models.fusion import describe_kernels, is_scripted, listing, short_name
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.steppers.forward_only import ForwardStepper
from fastlaunch_train.workloads.contract import load_workload
from fastlaunch_train.workloads.gelu import Function

# Compilers warn of their own doings.
pytestmark = pytest.mark.filterwarnings("ignore")


def own_gelu(x: torch.Tensor) -> torch.Tensor:
    """As the workload's, which may have been compiled before: that is done once in a process."""
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


def described(label: str, function: Function | None = None) -> str:
    """What is said of the recipe `label` on four small tensors, compiled ahead as before training."""
    name, *overrides = label.split()
    recipe = resolve_recipe(name, overrides)
    precision = setup_precision(recipe, CPU)
    workload = load_workload("gelu:32x16")
    model = workload.build_model()
    assert workload.pointwise is not None
    workload.pointwise(model, recipe.pointwise)
    if function is not None:
        model.functions[0].function = function
    batch = next(workload.batches(probe_request(ALONE, seed=0, batch_size=4)))
    ForwardStepper(workload, recipe, precision, ALONE, model).compile_ahead(batch)
    return describe_kernels(workload, model, batch, precision, CPU, num_samples=4)


def test_written_out_it_is_five_operators_and_in_the_library_one() -> None:
    assert described("fp32") == "5 operators a tensor: mul x2, add, div, erf"
    assert described("library precision=fp32") == "1 operator a tensor: gelu"


@pytest.mark.skipif(torch._C._llvm_enabled(), reason="this torch fuses on CPUs too")
def test_scripted_without_llvm_nothing_is_fused_on_a_cpu_and_that_is_said() -> None:
    text = described("jit-script precision=fp32")
    assert text.startswith("5 operators a tensor: mul x2, add, div, erf; torch.jit.script fused nothing")
    assert "LLVM" in text


def test_a_group_that_torch_jit_script_fused_is_one_operator() -> None:
    # Its interpreter stands in for LLVM: slow, without erf, and no recipe uses it.
    must, can = torch._C._jit_get_te_must_use_llvm_cpu(), torch._C._jit_can_fuse_on_cpu()
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    torch._C._jit_override_can_fuse_on_cpu(True)
    try:
        text = described("jit-script precision=fp32", torch.jit.script(own_gelu))
    finally:
        torch._C._jit_set_te_must_use_llvm_cpu(must)
        torch._C._jit_override_can_fuse_on_cpu(can)
    assert text == "3 operators a tensor: div, erf, fused_mul_add_mul"


@pytest.mark.full
def test_compiled_for_a_cpu_it_is_one_kernel() -> None:
    from torch._inductor.codecache import PyCodeCache

    torch.compiler.reset()
    # It holds what other tests of this process compiled, and a run is a process of its own.
    PyCodeCache.cache_clear()
    assert described("compile precision=fp32") == "1 kernel a tensor: cpp_fused_add_div_erf_mul_0"


def test_kernels_are_listed_by_number_and_name() -> None:
    assert listing("kernel", "tensor", {"b": 2, "a": 2, "c": 4}, 2) == "4 kernels a tensor: c x2, a, b"
    assert listing("kernel", "tensor", {"a": 8}, 8) == "1 kernel a tensor: a"
    # One for all of them is not a whole number each.
    assert listing("kernel", "tensor", {"a": 1}, 8) == "1 kernel for 8 tensors: a"
    assert listing("operator", "tensor", {}, 8) == "0 operators a tensor"
    many = listing("kernel", "tensor", {f"k{number:02}": 1 for number in range(15)}, 1)
    assert many.endswith("k11, 3 others")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("triton_poi_fused_add_div_erf_mul_0", "triton_poi_fused_add_div_erf_mul_0"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, "
            "float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, "
            "at::native::BinaryFunctor<float, at::native::binary_internal::MulFunctor<float> >)",
            "vectorized_elementwise_kernel(Mul)",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::erf_kernel_cuda(at::"
            "TensorIteratorBase&)::{lambda()#1}::operator()() const, std::array<char*, 2ul> >()",
            "vectorized_elementwise_kernel(erf)",
        ),
    ],
)
def test_a_kernels_name_is_cut_to_what_tells_it_from_others(kernel: str, name: str) -> None:
    assert short_name(kernel) == name


def test_a_model_is_scripted_where_a_part_of_it_is() -> None:
    workload = load_workload("gelu:32x16")
    model = nn.Sequential(workload.build_model())
    assert not is_scripted(model)
    assert workload.pointwise is not None
    workload.pointwise(model[0], "scripted")
    assert is_scripted(model)
