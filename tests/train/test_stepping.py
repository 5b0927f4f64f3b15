"""Steppers in a world of one: the same training as plain torch, whatever the recipe does on the way."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import toy
from torch import nn
from toy import ALONE

from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.models.precision import name_nondeterministic, setup_precision
from fastlaunch_train.models.prepare import checkpoint_blocks, hold_in_bf16
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.steppers.forward_only import ForwardStepper
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.stepping import build_stepper
from fastlaunch_train.steppers.torch_stepper import TorchStepper
from fastlaunch_train.workloads.contract import Batch

STEPS = 6

# The compiler warns of its own doings, and takes a warning that was made an error for a failure of its own.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    stop_process()


# Exact but for fp32's rounding; a bf16 product is right to 1 in 256, a bf16 weight is rounded at each step.
@pytest.mark.parametrize(
    ("recipe", "overrides", "tolerance"),
    [
        ("fp32", [], 1e-6),
        ("fp32", ["grad_accumulation=4"], 1e-6),
        ("fp32", ["activation_checkpointing=block"], 1e-6),
        ("fp32", ["set_to_none=false", "deterministic=true"], 1e-6),
        pytest.param(
            *("fp32", ["compile_mode=default", "compile_backend=aot_eager"], 1e-6), marks=pytest.mark.slow
        ),
        ("fsdp2", ["precision=fp32", "grad_accumulation=2"], 1e-6),
        ("fp16", [], 1e-3),
        ("bf16", [], 5e-3),
        ("bf16", ["parameter_dtype=bf16-master"], 1e-2),
        ("bf16", ["parameter_dtype=bf16"], 5e-2),
    ],
)
def test_losses_and_weights_are_those_of_plain_torch(
    recipe: str, overrides: list[str], tolerance: float
) -> None:
    found = toy.train(resolve_recipe(recipe, overrides), ALONE, steps=STEPS)
    losses, weights = toy.reference(steps=STEPS)
    assert 0 < toy.distance(found, losses, weights) < tolerance


@pytest.mark.parametrize(
    ("recipe", "overrides", "tolerance"),
    [
        ("fp32", [], 1e-6),
        ("fp32", ["grad_accumulation=4", "optimizer_impl=foreach"], 1e-6),
        ("fsdp2", ["precision=fp32"], 1e-6),
        ("fp16", [], 1e-3),
        ("bf16", ["parameter_dtype=bf16-master"], 1e-2),
    ],
)
def test_clipping_decay_and_schedule_are_those_of_plain_torch(
    recipe: str, overrides: list[str], tolerance: float
) -> None:
    found = toy.train(resolve_recipe(recipe, overrides), ALONE, steps=STEPS, workload=toy.PRETRAINING)
    losses, weights = toy.reference(steps=STEPS, workload=toy.PRETRAINING)
    assert 0 < toy.distance(found, losses, weights) < tolerance
    for field in ("weight_decay", "max_grad_norm", "lr_schedule"):
        default = getattr(toy.TOY, field)
        without = dataclasses.replace(toy.PRETRAINING, **{field: default})
        assert toy.distance(found, *toy.reference(steps=STEPS, workload=without)) > 2 * tolerance, field


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_rises_in_the_warm_up_and_falls_to_the_end(
    schedule: str, factors: list[float]
) -> None:
    workload = dataclasses.replace(toy.TOY, lr_schedule=schedule, warmup_steps=2)
    found = [workload.learning_rate_factor(step, 6) for step in range(1, 7)]
    assert found == pytest.approx(factors, abs=1e-6)
    assert workload.has_schedule


def test_a_run_shorter_than_its_warm_up_only_rises() -> None:
    workload = dataclasses.replace(toy.TOY, lr_schedule="linear", warmup_steps=9)
    assert [workload.learning_rate_factor(step, 2) for step in (1, 2)] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("fp16", []),
        ("bf16", ["parameter_dtype=bf16-master", "optimizer=adamw"]),
        ("bf16", ["optimizer=adafactor", "learning_rate=0.01"]),
        ("fsdp2", ["optimizer=adamw"]),
    ],
)
def test_a_resumed_training_goes_on_with_the_same_bits(recipe: str, overrides: list[str]) -> None:
    chosen = resolve_recipe(recipe, overrides)
    for workload in (toy.TOY, toy.PRETRAINING):
        whole = toy.train(chosen, ALONE, steps=STEPS, workload=workload)
        resumed = toy.train(chosen, ALONE, steps=STEPS, workload=workload, resume_after=3)
        assert resumed["losses"] == whole["losses"]
        for name, weight in whole["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name


@pytest.mark.parametrize("recipe", ["fp32", "fsdp2"])
def test_kept_weights_are_put_back(recipe: str) -> None:
    kept, changed, back = toy.train(RECIPES[recipe], ALONE, steps=1)["scores"]
    assert kept == back
    assert kept != changed


def test_the_loss_scale_goes_on_from_where_it_was() -> None:
    stepper, batches = toy.build(RECIPES["fp16"], ALONE)
    for _ in range(2):
        train_step(stepper, next(batches))
    saved = stepper.state()
    assert saved["scaler"]["_growth_tracker"] == 2
    again, _ = toy.build(RECIPES["fp16"], ALONE)
    again.load_state(saved)
    assert again.state()["scaler"] == saved["scaler"]


def test_a_step_that_the_loss_scaler_skips_is_told() -> None:
    stepper, batches = toy.build(RECIPES["fp16"], ALONE)
    scaled = [_step(stepper, next(batches))]
    # Gradients times this are no numbers in fp16.
    state = stepper.state()
    state["scaler"]["scale"] = 1e38
    stepper.load_state(state)
    scaled += [_step(stepper, next(batches)) for _ in range(2)]
    assert scaled == [(65536.0, False), (pytest.approx(1e38), True), (pytest.approx(5e37), True)]


def _step(stepper: Stepper, batch: Batch) -> tuple[float, bool]:
    """The loss scale of a step, and whether it was skipped."""
    before = stepper.weights()
    train_step(stepper, batch)
    after = stepper.weights()
    scaling = stepper.loss_scaling()
    assert scaling is not None
    scale, skipped = (value.item() for value in scaling)
    assert skipped == all(torch.equal(before[name], after[name]) for name in before)
    return scale, bool(skipped)


def test_without_loss_scaling_there_is_none() -> None:
    stepper, batches = toy.build(RECIPES["bf16"], ALONE)
    train_step(stepper, next(batches))
    assert stepper.loss_scaling() is None


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, toy.CLASSES))


def test_compiling_ahead_trains_nothing_and_draws_nothing() -> None:
    overrides = ["compile_mode=default", "compile_backend=eager", "grad_accumulation=2"]
    recipe = resolve_recipe("fp32", [*overrides, "compile_scope=model"])
    workload = dataclasses.replace(toy.TOY, build_model=with_statistics, blocks=None)
    stepper, batches = toy.build(recipe, ALONE, workload=workload)
    before = stepper.weights()
    assert "1.running_mean" in before
    generator = torch.get_rng_state()
    stepper.compile_ahead(next(batches))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], weight) for name, weight in stepper.weights().items())
    assert all(parameter.grad is None for parameter in stepper.model.parameters())


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch's compiler
@pytest.mark.parametrize("override", ["grad_accumulation=2", "set_to_none=false"])
def test_what_cuda_graphs_return_is_added_to_gradients_that_were_there(override: str) -> None:
    there = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        there.append(all(parameter.grad is not None for parameter in model.parameters()))
        # Past what is compiled.
        return toy.loss(model.forward, batch)  # type: ignore[arg-type]

    recipe = resolve_recipe("compile-reduce-overhead", ["precision=fp32", override])
    stepper, batches = toy.build(recipe, ALONE, workload=dataclasses.replace(toy.TOY, loss=loss))
    stepper.compile_ahead(next(batches))
    train_step(stepper, next(batches))
    assert there == len(there) * [True]


class Fills(nn.Module):
    """Writes to one place several times, of which torch cannot say what is left there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Put at several places at once, which torch says has no deterministic algorithm on any device.
        y: torch.Tensor = torch.zeros(4).put_(torch.tensor([0, 0]), self.scale * x.flatten()[:2]).sum()
        return y


def test_an_operator_without_a_deterministic_algorithm_is_named() -> None:
    workload = dataclasses.replace(
        toy.TOY, build_model=Fills, blocks=None, loss=lambda model, batch: model(batch[0])
    )
    stepper, batches = toy.build(resolve_recipe("fp32", ["deterministic=true"]), ALONE, workload=workload)
    with pytest.raises(RecipeError, match="no deterministic algorithm for put_"):
        train_step(stepper, next(batches))
    with pytest.raises(RuntimeError, match="deterministic"), name_nondeterministic(RECIPES["fp32"]):
        raise RuntimeError("deterministic")


def test_a_workload_that_does_not_train_is_only_called() -> None:
    workload = dataclasses.replace(toy.TOY, trains=False)
    model = toy.Toy()
    recipe = resolve_recipe(
        "fp32", ["compile_mode=default", "compile_backend=eager", "compile_scope=wrapped"]
    )
    stepper = build_stepper(workload, recipe, setup_precision(recipe, ALONE.device), ALONE, model)
    assert isinstance(stepper, ForwardStepper)
    before = stepper.weights()
    batch = next(toy.batches(toy.request(ALONE)))
    stepper.compile_ahead(batch)
    value = train_step(stepper, batch)
    torch.testing.assert_close(value, toy.loss(model, batch).detach())
    assert not value.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    stepper.load_weights(before)
    stepper.load_state(stepper.state())


def test_bf16_holds_parameters_and_not_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    hold_in_bf16(model)
    assert {parameter.dtype for parameter in model[0].parameters()} == {torch.bfloat16}
    # Which takes no bf16 parameters beside its statistics.
    assert {value.dtype for value in (*model[1].parameters(), model[1].running_mean)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(3, 2)).sum().backward()


def test_what_is_compiled_with_its_wrapper_is_the_wrapper() -> None:
    recipe = resolve_recipe(
        "fp32", ["compile_mode=default", "compile_backend=eager", "compile_scope=wrapped"]
    )
    stepper, batches = toy.build(recipe, ALONE)
    assert isinstance(stepper, TorchStepper)
    assert stepper.model._compiled_call_impl is not None
    assert all(block._compiled_call_impl is None for block in toy.TOY.blocks(stepper.model))  # type: ignore[misc]
    train_step(stepper, next(batches))


CHECKPOINTING = resolve_recipe("fp32", ["activation_checkpointing=block"])


class Counted(nn.Module):
    """A block that counts its calls, and drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = scale * self.dropout(self.linear(x).relu())
        return y


def counted_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counted(), Counted())


def gradients(model: nn.Sequential) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    for block in model:
        x = block(x, scale=2.0)
    x.sum().backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_the_same_and_each_block_runs_twice() -> None:
    plain, checkpointed = counted_blocks(), counted_blocks()
    checkpoint_blocks(checkpointed, CHECKPOINTING)
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    for one, other in zip(gradients(plain), gradients(checkpointed), strict=True):
        assert torch.equal(one, other)
    assert [block.calls for block in plain] == [1, 1]
    assert [block.calls for block in checkpointed] == [2, 2]
    with torch.no_grad():
        checkpointed(torch.ones(1, 4))
    assert [block.calls for block in checkpointed] == [3, 3]
    with pytest.raises(RecipeError, match="the model has none"):
        checkpoint_blocks(None, CHECKPOINTING)
