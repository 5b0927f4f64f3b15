"""The model as it is trained: what is around it changes nothing, and a wrong compiler is caught."""

import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import toy
from entrypoint import TINY, arguments, ended, record, run_command, start
from torch import nn
from toy import ALONE

from fastlaunch_train.checks.compiled_model import CompiledModelCheck, _judged, _some
from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.stepping import build_stepper
from fastlaunch_train.workloads.contract import Batch, Workload, load_workload

# The compiler warns of its own doings, and takes a warning that was made an error for a failure of its own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.compiler.reset()
    stop_process()


def changed_output(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """A backend of torch.compile whose graphs' first output goes through `function`."""

    def backend(module: torch.fx.GraphModule, example: Any, **_: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            first, *rest = module(*arguments)
            return (function(first), *rest)

        return run

    return backend


def without(name: str) -> Callable[..., Any]:
    """A backend of torch.compile in whose graphs functions of this name return their first argument."""

    def backend(module: torch.fx.GraphModule, example: Any, **_: Any) -> Callable[..., Any]:
        found = [node for node in module.graph.nodes if getattr(node.target, "__name__", "") == name]
        assert found, module.graph
        for node in found:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        module.recompile()
        return module

    return backend


larger = changed_output(lambda x: 1.1 * x)
one_sample_lost = changed_output(lambda x: torch.cat([x[:-1], x[:1]]))


def first_step(
    label: str,
    workload: Workload = toy.TOY,
    seed: int = 0,
    change: Callable[[Stepper], object] = lambda stepper: None,
    backend: Callable[..., Any] | None = None,
) -> Check:
    """The check of a training's first step."""
    name, *overrides = label.split()
    recipe = resolve_recipe(name, overrides)
    if backend is not None:
        # By its function: no name would have to be registered, and be there for other tests.
        object.__setattr__(recipe, "compile_backend", backend)
    precision = setup_precision(recipe, ALONE.device)
    torch.manual_seed(seed)
    model = workload.build_model().train()
    convert_model(model, workload, recipe)
    batch = next(workload.batches(dataclasses.replace(toy.request(ALONE), seed=seed)))
    part = split_batch(batch, recipe.grad_accumulation)[0]
    as_trained = CompiledModelCheck(workload, recipe, precision, model, part, rounding=0.0)
    stepper = build_stepper(as_trained.workload, recipe, precision, ALONE, model)
    change(stepper)
    if recipe.compiles:
        stepper.compile_ahead(batch)
    for _ in range(2):
        train_step(stepper, batch)
    check = as_trained.check()
    assert check is not None
    return check


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "label",
    [
        "fp32",
        "fp32 grad_accumulation=4",
        "fp32 activation_checkpointing=block",
        "bf16",
        "bf16 parameter_dtype=bf16-master",
        "fp16",
        "fsdp2",
        pytest.param(
            "compile precision=fp32 compile_backend=aot_eager grad_accumulation=2", marks=pytest.mark.slow
        ),
        pytest.param("fsdp2 compile_mode=default compile_backend=aot_eager", marks=pytest.mark.slow),
        pytest.param("compile", marks=pytest.mark.full),
        pytest.param("compile-model activation_checkpointing=block", marks=pytest.mark.full),
    ],
)
def test_a_right_one_passes_whatever_its_seed(label: str) -> None:
    for seed in range(3):
        check = first_step(label, seed=seed)
        assert check.passed and check.name == "as-trained"
        assert check.value is not None and check.limit is not None and check.value < check.limit / 2


@pytest.mark.parametrize(
    ("label", "backend"),
    [
        ("compile", without("gelu")),
        ("compile", one_sample_lost),
        ("compile precision=fp32", larger),
        ("fsdp2 compile_mode=default", without("layer_norm")),
        pytest.param("compile-model", larger, marks=pytest.mark.slow),
    ],
)
def test_a_compiler_that_is_wrong_is_caught(label: str, backend: Callable[..., Any]) -> None:
    check = first_step(label, backend=backend)
    assert not check.passed
    assert check.value is not None and check.limit is not None and check.value > 1.5 * check.limit


def test_the_same_compiler_without_a_fault_passes() -> None:
    check = first_step("compile precision=fp32", backend=changed_output(lambda x: x))
    assert check.passed and check.value == 0


@pytest.mark.slow
def test_a_wrong_compiler_does_not_hide_behind_what_is_drawn() -> None:
    """A language model's dropout draws otherwise when it is compiled: by itself that is no error."""
    drawing = load_workload("gpt2-tiny")
    for seed in range(2):
        for label in ("bf16", "compile-model compile_backend=aot_eager"):
            check = first_step(label, drawing, seed=seed)
            assert check.passed and check.value, "it did draw otherwise"
        for wrong in (larger, without("dropout"), without("layer_norm")):
            assert not first_step("compile-model", drawing, seed=seed, backend=wrong).passed


class Masked(toy.Toy):
    """Its last class has a logit of its own."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.last = torch.tensor([0.0] * (toy.CLASSES - 1) + [last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1) + self.last


def of_the_first_classes(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0])[:, :-1], batch[1].clamp(max=toy.CLASSES - 2))


def narrow(stepper: Stepper) -> None:
    stepper.model.register_forward_hook(lambda model, given, found: found[:, :2])


def scale_the_head(stepper: Stepper) -> None:
    stepper.model.get_parameter("head.weight").data.mul_(1.1)


def unmask(stepper: Stepper) -> None:
    stepper.model.last = torch.zeros(toy.CLASSES)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"loss": lambda model, batch: model(batch[0]).square().mean()}, narrow),
        # A loss that never calls the model itself: it is compared instead.
        ({"loss": lambda model, batch: toy.loss(model.forward, batch)}, scale_the_head),
        # What all passes mask is no difference.
        ({"build_model": lambda: Masked(-float("inf")), "loss": of_the_first_classes}, unmask),
    ],
)
def test_a_model_that_changed_between_is_caught(
    changes: dict[str, Any], wrong: Callable[[Stepper], object]
) -> None:
    workload = dataclasses.replace(toy.TOY, **changes)
    assert first_step("fp32", workload).passed
    assert not first_step("fp32", workload, change=wrong).passed


def drawn_by_numpy(model: nn.Module, batch: Batch) -> torch.Tensor:
    share = float(numpy.random.beta(0.8, 0.8))
    return toy.loss(model, (share * batch[0] + (1 - share) * batch[0].flip(0), batch[1]))


def of_some_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    kept = int(torch.randint(1, 9, ()))
    return toy.loss(model, (batch[0][:kept], batch[1][:kept]))


def in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch[0].sub_(batch[0].mean()).mul_(2)
    return toy.loss(model, batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": drawn_by_numpy},
        {"loss": of_some_samples},
        {"loss": in_place},
        {
            "loss": lambda model, batch: toy.loss(model, batch[:2]),
            "batches": lambda request: ((*batch, None) for batch in toy.batches(request)),
        },
    ],
)
def test_what_a_users_loss_may_do_is_no_error(changes: dict[str, Any]) -> None:
    for seed in range(3):
        numpy.random.seed(seed)
        assert first_step("fp32", dataclasses.replace(toy.TOY, **changes), seed=seed).passed


def test_what_was_not_finite_before_can_be_written() -> None:
    check = first_step("fp32", dataclasses.replace(toy.TOY, build_model=lambda: Masked(float("nan"))))
    assert check == Check(name="as-trained", passed=False, detail="not a finite number")


def test_where_the_batch_is_another_nothing_is_said() -> None:
    model, batches, recipe = toy.Toy(), toy.batches(toy.request(ALONE)), resolve_recipe("fp32")
    precision = setup_precision(recipe, ALONE.device)
    as_trained = CompiledModelCheck(toy.TOY, recipe, precision, model, next(batches), rounding=0.0)
    as_trained.workload.loss(model, next(batches))
    assert as_trained.check() is None
    assert "_compiled_call_impl" not in model.__dict__


def test_a_sample_of_many_values_is_looked_at_in_part() -> None:
    outputs = _some(torch.arange(2 * 3000 * 70).view(2, 3000, 70).transpose(1, 2))
    assert outputs.shape == (2, 70 * 750)
    assert outputs[0, :3].tolist() == [0, 280, 560]


def test_few_outputs_are_seldom_taken_for_others_by_what_was_drawn() -> None:
    """Each of so many is a run that would be barred from the ranks."""
    drawn = 1 + torch.randn(1000, 17, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    passes = [(each[0], each[1:]) for each in drawn]
    assert sum(not _judged(found, draws, 1e-4, 1e-4).passed for found, draws in passes) <= 1


# The entrypoint.


@pytest.mark.slow
def test_a_run_that_is_wrong_only_when_compiled_is_marked_and_trains(tmp_path: Path) -> None:
    more = ("--steps", "3", "--set", "compile_backend=eager")
    printed = ended(0, arguments(tmp_path, *more, workload=f"{TINY}:compiled_wrong", recipe="compile-model"))
    found = record(tmp_path)
    failed = [check for check in found.checks if not check.passed]
    assert [check.name for check in failed] == ["as-trained"]
    assert failed[0].value == pytest.approx(0.5, rel=0.3)
    assert "warning: the recipe fails the check of as-trained: " in printed
    assert len(found.steps) == 3


@pytest.mark.slow
def test_ranks_that_see_other_files_meet_all_the_same(tmp_path: Path) -> None:
    """A machine that was replaced has no checkpoint, and one that was not has: rank 0's files count."""
    stale = tmp_path / "1" / "checkpoints" / "step-00000005.pt"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        start([*arguments(tmp_path / rank, "--steps", "3"), "--resume"], RANK=rank, LOCAL_RANK=rank, **world)
        for rank in ("0", "1")
    ]
    printed = [rank.wait(timeout_s=300) for rank in ranks]
    assert [rank.poll() for rank in ranks] == [0, 0], printed
    for rank in (0, 1):
        (check,) = record(tmp_path / str(rank), rank=rank).checks
        assert check.name == "as-trained" and check.passed


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "label", ["bf16", "zero2", "compile-model compile_scope=wrapped", "transformers grad_accumulation=2"]
)
def test_ranks_pass_too(tmp_path: Path, label: str) -> None:
    recipe, *overrides = label.split()
    more = [part for override in overrides for part in ("--set", override)]
    argv = arguments(tmp_path, "--steps", "3", *more, workload="vit-tiny", recipe=recipe)
    code, printed = run_command(argv, nproc=2)
    assert code == 0, printed
    for rank in range(2):
        (check,) = [check for check in record(tmp_path, rank=rank).checks if check.name == "as-trained"]
        assert check.passed
