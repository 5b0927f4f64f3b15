"""The optimizer that a recipe names; Adafactor against known answers; fp32 masters of bf16 weights."""

import copy
import dataclasses
import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from entrypoint import TINY, arguments, ended, record
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastlaunch_train.data.cpu_torchvision import prepare_torchvision
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.steppers.adafactor import Adafactor
from fastlaunch_train.steppers.optimizers import (
    LearningRates,
    MasterWeights,
    build_optimizer,
    check_optimizer,
)
from fastlaunch_train.workloads.registry import WorkloadError


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


def named() -> dict[str, nn.Parameter]:
    return {"matrix": nn.Parameter(torch.ones(2, 2)), "bias": parameters()[0]}


@pytest.mark.parametrize(
    ("overrides", "kind", "settings"),
    [
        ([], torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": None, "fused": None}),
        (["learning_rate=0.5", "optimizer_impl=foreach"], torch.optim.SGD, {"lr": 0.5, "foreach": True}),
        (["optimizer=adamw", "optimizer_impl=for-loop"], torch.optim.AdamW, {"foreach": False}),
        (["optimizer=adamw", "optimizer_impl=fused"], torch.optim.AdamW, {"fused": True}),
        (["optimizer=adafactor", "optimizer_impl=for-loop"], Adafactor, {"lr": 0.1}),
    ],
)
def test_the_recipe_chooses(
    overrides: list[str], kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    optimizer = build_optimizer(toy.TOY, resolve_recipe("fp32", overrides), named())
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in settings} == settings


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_matrices_decay_as_stated_and_biases_do_not(name: str) -> None:
    workload = dataclasses.replace(toy.TOY, optimizer=name, weight_decay=0.1, learning_rate=0.5)
    optimizer = build_optimizer(workload, RECIPES["fp32"], named())
    decays = [(group["params"][0].dim(), group["weight_decay"]) for group in optimizer.param_groups]
    assert decays == [(2, 0.1), (1, 0.0)]
    if name == "sgd":
        return  # there the decay is part of the gradient
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.zeros_like(group["params"][0])
    optimizer.step()
    left = [float(group["params"][0].detach().mean()) for group in optimizer.param_groups]
    assert left == pytest.approx([0.95, 1.0])


def test_a_workload_that_states_no_decay_gets_torchs_for_all_its_parameters() -> None:
    optimizer = build_optimizer(toy.with_optimizer("adamw", 0.1), RECIPES["fp32"], named())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01]


def own_adam(parameters: Mapping[str, nn.Parameter], rate: float) -> torch.optim.Optimizer:
    assert list(parameters) == ["matrix", "bias"]
    groups = [{"params": [parameters["bias"]], "lr": 10 * rate}, {"params": [parameters["matrix"]]}]
    return torch.optim.NAdam(groups, lr=rate)


def test_a_workload_may_make_its_optimizer_itself() -> None:
    workload = dataclasses.replace(toy.TOY, optimizer=own_adam, learning_rate=0.5)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = build_optimizer(workload, resolve_recipe("fp32", []), {**named(), "frozen": frozen})
    assert type(optimizer) is torch.optim.NAdam
    rates = LearningRates(optimizer)
    for factor in (0.5, 0.1):
        rates.scale(factor)
        assert [group["lr"] for group in optimizer.param_groups] == [5 * factor, 0.5 * factor]
    faster = resolve_recipe("fp32", ["learning_rate=2"])
    assert build_optimizer(workload, faster, named()).param_groups[1]["lr"] == 2
    other = resolve_recipe("fp32", ["optimizer=adamw"])
    assert type(build_optimizer(workload, other, named())) is torch.optim.AdamW
    check_optimizer(workload, RECIPES["te-fp8"])
    with pytest.raises(RecipeError, match="makes its optimizer itself"):
        check_optimizer(workload, resolve_recipe("fp32", ["optimizer_impl=fused"]))
    nothing = dataclasses.replace(workload, optimizer=lambda parameters, rate: None)
    with pytest.raises(WorkloadError, match="returned NoneType"):
        build_optimizer(nothing, RECIPES["fp32"], named())


@pytest.mark.parametrize("overrides", [[], ["parameter_dtype=bf16-master"]])
def test_an_own_optimizer_trains_and_resumes(overrides: list[str]) -> None:
    def adam(parameters: Mapping[str, nn.Parameter], rate: float) -> torch.optim.Optimizer:
        assert "blocks.0.norm.weight" in parameters
        return torch.optim.AdamW(parameters.values(), lr=rate)

    recipe = resolve_recipe("bf16", overrides)
    own = dataclasses.replace(toy.TOY, optimizer=adam, learning_rate=0.01)
    built_in = dataclasses.replace(own, optimizer="adamw")
    whole = toy.train(recipe, toy.ALONE, steps=4, workload=built_in)
    assert toy.train(recipe, toy.ALONE, steps=4, workload=own)["losses"] == whole["losses"]
    assert toy.train(recipe, toy.ALONE, steps=4, workload=own, resume_after=2)["losses"] == whole["losses"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", 3),
        ("weight_decay", -0.1),
        ("weight_decay", "0.1"),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", float("nan")),
        ("lr_schedule", "cosin"),
        ("warmup_steps", -1),
        ("warmup_steps", 1.5),
    ],
)
def test_what_no_step_could_have_is_refused_as_the_workload_is_made(field: str, value: object) -> None:
    with pytest.raises(WorkloadError, match=f"{field} is"):
        dataclasses.replace(toy.TOY, **{field: value})  # type: ignore[arg-type]


def test_an_own_optimizer_states_its_decay_itself() -> None:
    with pytest.raises(WorkloadError, match="weight_decay is"):
        dataclasses.replace(toy.TOY, optimizer=own_adam, weight_decay=0.1)


def test_the_header_names_what_the_workload_would_use_by_itself(tmp_path: Path) -> None:
    overrides = ["--set", "optimizer=adamw", "--set", "learning_rate=0.01"]
    ended(0, arguments(tmp_path, *overrides))
    header = record(tmp_path).header
    own, recipe = (
        {name: header[section][name] for name in ("optimizer", "learning_rate")}
        for section in ("workload", "recipe")
    )
    assert own == {"optimizer": "sgd", "learning_rate": 0.05}
    assert recipe == {"optimizer": "adamw", "learning_rate": 0.01}


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(WorkloadError, match="lion"):
        build_optimizer(toy.with_optimizer("lion", 0.1), RECIPES["fp32"], named())


def test_an_implementation_that_the_workloads_own_optimizer_lacks_is_refused() -> None:
    fused = resolve_recipe("fsdp2", ["optimizer_impl=fused"])
    with pytest.raises(RecipeError, match="no fused SGD"):
        check_optimizer(toy.TOY, fused)
    with pytest.raises(RecipeError, match="no fused adafactor"):
        check_optimizer(toy.with_optimizer("adafactor", 0.1), fused)
    check_optimizer(toy.with_optimizer("adamw", 0.1), fused)
    check_optimizer(dataclasses.replace(toy.TOY, trains=False), fused)
    check_optimizer(toy.TOY, resolve_recipe("fsdp2", ["optimizer_impl=fused", "optimizer=adamw"]))
    check_optimizer(toy.TOY, resolve_recipe("zero1", ["optimizer_impl=fused"]))


def test_the_entrypoint_refuses_it_before_it_builds_the_model(tmp_path: Path) -> None:
    more = ("--set", "optimizer_impl=fused")
    output = ended(2, arguments(tmp_path, *more, workload=f"{TINY}:no_model", recipe="fsdp2"))
    assert "no fused SGD" in output


def test_the_first_step_of_adafactor_by_hand() -> None:
    # A vector: the second moment is the square of the gradient, so the update is its sign.
    vector = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    vector.grad = torch.tensor([0.5, -4.0, 1e-3])
    # A matrix of one row and column's product: rows and columns tell all of it, and it too is the sign.
    matrix = nn.Parameter(torch.zeros(2, 2))
    matrix.grad = torch.tensor([[1.0, -2.0], [3.0, 6.0]])
    Adafactor([vector, matrix], lr=0.1).step()
    torch.testing.assert_close(vector.detach(), torch.tensor([0.9, -1.9, 2.9]))
    torch.testing.assert_close(matrix.detach(), torch.tensor([[-0.1, 0.1], [-0.1, -0.1]]))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_adafactors_second_moment_decays_with_the_step(shape: tuple[int, ...], capturable: bool) -> None:
    """Three steps by hand: v' = b v + (1 - b) g^2 with b = 1 - step^-0.8, of gradients too small to clip."""
    weight = nn.Parameter(torch.ones(shape))
    optimizer = Adafactor([weight], lr=0.1, capturable=capturable)
    left = []
    for gradient in (1.0, 0.5, 0.25):
        weight.grad = torch.full(shape, gradient)
        optimizer.step()
        left.append(float(weight.detach().flatten()[0]))
    # b is 0, 0.425651 and 0.584756; v is 1, 0.569238 and 0.358818; g / sqrt(v) 1, 0.662709 and 0.417353.
    assert left == pytest.approx([0.9, 0.833729, 0.791994], abs=2e-6)


def test_an_update_that_jumps_is_scaled_down() -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = Adafactor([weight], lr=1.0)
    weight.grad = torch.full((4,), 1e-3)
    optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.ones(4)
    optimizer.step()
    # Its root mean square would be 1 / sqrt(1 - (1 - 2 ** -0.8)) = 1.32.
    torch.testing.assert_close(before - weight.detach(), torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_one_shape_are_updated_as_each_alone_is(dtype: torch.dtype) -> None:
    shapes = [(5, 7), (3,), (5, 7), (), (2, 3, 4), (5, 7), (3,), ()]

    def trained(foreach: bool) -> list[nn.Parameter]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        optimizer = Adafactor(weights, lr=1e-2, foreach=foreach)
        for step in range(6):
            for index, weight in enumerate(weights):
                # The third has no gradient at first, and is then some steps behind its like.
                grad = (10.0 ** (index - 4) * torch.randn(weight.shape)).to(dtype)
                weight.grad = None if index == 2 and step < 3 else grad
            optimizer.step()
        return weights

    for one, other in zip(trained(foreach=True), trained(foreach=False), strict=True):
        torch.testing.assert_close(one, other)


class Operators(TorchDispatchMode):
    """Notes the operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def test_parameters_of_one_shape_take_fewer_kernels_than_each_alone() -> None:
    def num_operators(shapes: list[tuple[int, ...]], foreach: bool) -> int:
        weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = Adafactor(weights, lr=1e-2, foreach=foreach)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        with Operators() as ran:
            optimizer.step()
        return len(ran.names)

    alike, apart = [(4, 4)] * 10, [(4, 4 + index) for index in range(10)]
    assert num_operators(alike, foreach=True) < num_operators(alike, foreach=False) / 2
    assert num_operators(apart, foreach=True) == num_operators(apart, foreach=False)


@pytest.mark.parametrize("shape", [(6,), (4, 3), (1, 1, 6), (5, 2, 3, 3)])
def test_adafactor_needs_nothing_of_a_lone_weight_that_sharded_ones_lack(shape: tuple[int, ...]) -> None:
    """FSDP2's weights come alone, and DTensor cannot unbind before torch 2.10, nor select before 2.8."""
    weight = nn.Parameter(torch.ones(shape))
    weight.grad = torch.ones(shape)
    optimizer = Adafactor([weight], lr=0.1)
    for _ in range(2):
        with Operators() as ran:
            optimizer.step()
        assert "aten.mul" in ran.names
        assert not {"aten.unbind", "aten.select", "aten.stack"} & {*ran.names}


def test_adafactor_computes_gradients_by_a_closure_as_torchs_optimizers_do() -> None:
    called, alone = parameters(), parameters()
    alone[0].grad = 2.0 * alone[0].detach()
    Adafactor(alone, lr=0.1).step()

    def closure() -> torch.Tensor:
        loss = called[0].square().sum()
        loss.backward()
        return loss

    assert Adafactor(called, lr=0.1).step(closure) == 2.0
    assert torch.equal(called[0], alone[0]) and not torch.equal(called[0], torch.ones(2))


@pytest.mark.parametrize("shape", [(3,), (4, 5)])
def test_adafactor_goes_on_from_moments_in_fp32_whatever_its_weights_are(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    through = [nn.Parameter(torch.randn(shape).to(torch.bfloat16))]
    optimizer = Adafactor(through, lr=0.1)
    resumed: list[nn.Parameter] = []
    for step in range(4):
        if step == 2:
            resumed = [nn.Parameter(through[0].detach().clone())]
            other = Adafactor(resumed, lr=0.1)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        through[0].grad = torch.randn(shape).to(torch.bfloat16)
        optimizer.step()
        if resumed:
            resumed[0].grad = through[0].grad
            other.step()
    assert torch.equal(resumed[0], through[0])
    states = zip(optimizer.state[through[0]].items(), other.state[resumed[0]].items(), strict=True)
    for (name, one), (same_name, two) in states:
        assert name == same_name
        assert one == two if name == "step" else torch.equal(one, two) and two.dtype == torch.float32


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adafactor_is_what_the_transformers_trainer_runs(dtype: torch.dtype) -> None:
    prepare_torchvision()
    from transformers.optimization import Adafactor as Theirs

    def weights() -> list[nn.Parameter]:
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((5, 7), (3,), (2, 3, 4))]

    ours, theirs = weights(), weights()
    # transformers.Trainer.get_optimizer_cls_and_kwargs, --optim adafactor.
    other: Any = Theirs(theirs, lr=1e-2, scale_parameter=False, relative_step=False)  # type: ignore[no-untyped-call]
    optimizer = Adafactor(ours, lr=1e-2)
    for _ in range(5):
        for one, two in zip(ours, theirs, strict=True):
            one.grad = (3 * torch.randn(one.shape)).to(dtype)
            two.grad = one.grad.clone()
        optimizer.step()
        other.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# Masters in fp32.

SGD = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.5)


def bf16_weights() -> list[nn.Parameter]:
    frozen = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    return [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), frozen, unused]


def steps(optimizer: MasterWeights, parameter: nn.Parameter, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_small_updates_are_not_lost() -> None:
    plain, (mine, *others) = bf16_weights()[0], bf16_weights()
    alone = SGD([plain])
    for _ in range(100):
        plain.grad = torch.ones_like(plain)
        alone.step()
    # 2e-4 is less than half of bf16's step below 1, 3.9e-3.
    assert plain.tolist() == [1.0, 1.0]
    optimizer = MasterWeights([mine, *others], [mine, *others], SGD)
    steps(optimizer, mine, 100)
    assert mine.dtype == torch.bfloat16
    assert mine.tolist() == pytest.approx([0.98, 0.98], abs=2e-3)
    assert all(torch.equal(other, torch.ones_like(other)) for other in others)


def test_masters_start_at_the_values_before_rounding() -> None:
    exact = torch.linspace(1, 2, 10_001)
    mine = nn.Parameter(exact.bfloat16())
    steps(MasterWeights([mine], [exact], SGD), mine, 5)
    # 8e-4 in all, a tenth of bf16's step of 7.8e-3 between 1 and 2: one parameter in ten moves by that.
    moved = (exact.bfloat16().float() - mine.detach().float()).mean().item()
    assert moved == pytest.approx(8.1e-4, rel=0.05)


def test_masters_come_back_from_a_file() -> None:
    mine, *others = bf16_weights()
    optimizer = MasterWeights([mine, *others], [mine, *others], SGD)
    steps(optimizer, mine, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again, *rest = bf16_weights()
    other = MasterWeights([again, *rest], [again, *rest], SGD)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again, mine)
    steps(optimizer, mine, 30)
    steps(other, again, 30)
    assert torch.equal(again, mine)
    saved, loaded = optimizer.state_dict()["masters"], other.state_dict()["masters"]
    assert all(torch.equal(one, two) for one, two in zip(saved, loaded, strict=True))


def test_gradients_are_freed_or_zeroed() -> None:
    mine, *_ = bf16_weights()
    optimizer = MasterWeights([mine], [mine], SGD)
    mine.grad = torch.ones_like(mine)
    optimizer.zero_grad(set_to_none=False)
    assert mine.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert mine.grad is None
