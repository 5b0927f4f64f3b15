"""The model as it is trained: what is around it changes nothing, and a wrong compiler is caught."""

import dataclasses
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from entrypoint import TINY, arguments, ended, record, run, run_command, start
from torch import nn
from toy import ALONE

from fastlaunch_train.checks.compiled_model import CompiledModelCheck, _some
from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.steppers.stepping import Stepper, build_stepper
from fastlaunch_train.workloads.contract import Batch, Workload, load_workload

WRONG = Path(__file__).parent / "workloads" / "compiled_wrong.py"

# The compiler warns of its own doings, and takes a warning that was made an error for a failure of its own.
pytestmark = pytest.mark.filterwarnings("ignore")

#: What a compiler does to a graph of operators, in place.
Edit = Callable[[torch.fx.GraphModule], None]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    torch.compiler.reset()
    stop_process()


def larger(module: torch.fx.GraphModule) -> None:
    """A tenth is added to the first output."""
    for node in module.graph.find_nodes(op="output"):
        with module.graph.inserting_before(node):
            first, *rest = node.args[0]
            node.args = ((module.graph.call_function(torch.mul, (first, 1.1)), *rest),)


def without(*names: str) -> Edit:
    """Functions of these names return their first argument."""

    def edit(module: torch.fx.GraphModule) -> None:
        found = [node for node in module.graph.nodes if getattr(node.target, "__name__", "") in names]
        assert found, module.graph
        for node in found:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)

    return edit


def one_sample_lost(module: torch.fx.GraphModule) -> None:
    """The last sample gets what the first should."""
    for node in module.graph.find_nodes(op="output"):
        with module.graph.inserting_before(node):
            first, *rest = node.args[0]
            node.args = ((module.graph.call_function(lose_the_last, (first,)), *rest),)


def lose_the_last(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:-1], x[:1]])


def compiled_by(edit: Edit) -> Callable[..., Any]:
    """A backend of torch.compile that runs the graph as `edit` leaves it."""

    def backend(module: torch.fx.GraphModule, example: Any, **_: Any) -> Callable[..., Any]:
        edit(module)
        module.recompile()
        return module

    return backend


def first_step(
    label: str,
    workload: Workload = toy.TOY,
    seed: int = 0,
    change: Callable[[Stepper], object] = lambda stepper: None,
    backend: Callable[..., Any] | None = None,
) -> Check | None:
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
        stepper.step(batch)
    found = as_trained.check()
    print(label, seed, found)
    return found


RIGHT = [
    "fp32",
    "fp32 grad_accumulation=4",
    "fp32 activation_checkpointing=block",
    "bf16",
    "bf16 parameter_dtype=bf16",
    "bf16 parameter_dtype=bf16-master",
    "fp16",
    "fsdp2",
    "fsdp2 precision=fp32",
    "compile compile_backend=aot_eager",
    "compile precision=fp32 compile_backend=aot_eager grad_accumulation=2",
    "compile-model compile_backend=aot_eager compile_scope=wrapped",
    "fsdp2 compile_mode=default compile_backend=aot_eager",
]


@pytest.mark.parametrize("label", RIGHT)
def test_a_right_one_passes_whatever_its_seed(label: str) -> None:
    for seed in range(3):
        check = first_step(label, seed=seed)
        assert check is not None and check.passed and check.name == "as-trained"
        assert check.value is not None and check.limit is not None and check.value < check.limit / 2


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "label",
    [
        "compile",
        "compile precision=fp32",
        "compile parameter_dtype=bf16",
        "compile-model activation_checkpointing=block",
    ],
)
def test_what_really_compiles_passes(label: str) -> None:
    for seed in range(3):
        check = first_step(label, seed=seed)
        assert check is not None and check.passed


@pytest.mark.parametrize(
    "label", ["compile", "compile-model", "fsdp2 compile_mode=default", "compile precision=fp32"]
)
@pytest.mark.parametrize("edit", [larger, without("gelu"), without("layer_norm"), one_sample_lost])
def test_a_compiler_that_is_wrong_is_caught(label: str, edit: Edit) -> None:
    check = first_step(label, backend=compiled_by(edit))
    assert check is not None and not check.passed
    assert check.value is not None and check.limit is not None and check.value > 1.5 * check.limit


def test_the_same_compiler_without_a_fault_passes() -> None:
    for label in ("compile", "compile-model", "compile precision=fp32"):
        check = first_step(label, backend=compiled_by(lambda module: None))
        assert check is not None and check.passed and check.value == 0


@pytest.fixture(scope="module")
def drawing() -> Workload:
    """A language model, whose dropout draws otherwise when it is compiled."""
    return load_workload("gpt2-tiny")


@pytest.mark.slow
@pytest.mark.parametrize("label", ["bf16", "fp32", "compile-model compile_backend=aot_eager"])
def test_another_draw_is_no_error(drawing: Workload, label: str) -> None:
    for seed in range(5):
        check = first_step(label, drawing, seed=seed)
        assert check is not None and check.passed
        assert check.value, "it did draw otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("edit", [larger, without("dropout"), without("layer_norm")])
def test_a_wrong_compiler_does_not_hide_behind_what_is_drawn(drawing: Workload, edit: Edit) -> None:
    for seed in range(2):
        check = first_step("compile-model", drawing, seed=seed, backend=compiled_by(edit))
        assert check is not None and not check.passed


def test_what_is_not_finite_fails_and_can_be_written() -> None:
    def spoil(stepper: Stepper) -> None:
        for parameter in stepper.model.parameters():
            parameter.data.fill_(float("nan"))

    check = first_step("fp32", change=spoil)
    assert check is not None and not check.passed and check.value is None
    assert check.detail == "not a finite number"


def test_outputs_of_another_shape_fail() -> None:
    wide = dataclasses.replace(toy.TOY, loss=lambda model, batch: model(batch[0]).square().mean())
    check = first_step(
        "fp32",
        wide,
        change=lambda stepper: stepper.model.register_forward_hook(lambda model, given, found: found[:, :2]),
    )
    assert check is not None and not check.passed
    assert check.detail == "outputs of shapes [(8, 2)], not [(8, 5)]"


def through_a_part(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss that never calls the model itself."""
    return toy.loss(model.forward, batch)  # type: ignore[arg-type]


def test_of_a_loss_that_calls_parts_of_the_model_the_loss_is_compared() -> None:
    workload = dataclasses.replace(toy.TOY, loss=through_a_part)
    check = first_step("fp32", workload)
    assert check is not None and check.passed and check.value == 0

    def scale(stepper: Stepper) -> None:
        stepper.model.get_parameter("head.weight").data.mul_(1.1)

    check = first_step("fp32", workload, change=scale)
    assert check is not None and not check.passed


def test_a_workload_sees_the_model_as_it_is() -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert isinstance(model, toy.Toy) and isinstance(model.head, nn.Linear)
        model.last_batch_size = len(batch[0])  # type: ignore[assignment]
        return toy.loss(model, batch)

    workload = dataclasses.replace(toy.TOY, loss=loss)
    seen: list[Stepper] = []
    check = first_step("bf16", workload, change=seen.append)
    assert check is not None and check.passed
    assert seen[0].model.last_batch_size == 8


def test_where_the_batch_is_another_nothing_is_said() -> None:
    precision, recipe = setup_precision(resolve_recipe("fp32"), ALONE.device), resolve_recipe("fp32")
    model, batches = toy.Toy(), toy.batches(toy.request(ALONE))
    as_trained = CompiledModelCheck(toy.TOY, recipe, precision, model, next(batches), rounding=0.0)
    as_trained.workload.loss(model, next(batches))
    assert as_trained.check() is None
    as_trained.workload.loss(model, next(batches))


def test_a_sample_of_many_values_is_looked_at_in_part() -> None:
    outputs = _some(torch.arange(2 * 3000 * 70).view(2, 3000, 70).transpose(1, 2))
    assert outputs.shape == (2, 70 * 750)
    assert outputs[0, :3].tolist() == [0, 280, 560]
    assert _some(torch.zeros(300_000, 1)).shape == (75_000, 1)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_run_records_it_after_its_first_step(tmp_path: Path, recipe: str) -> None:
    printed = ended(0, arguments(tmp_path, "--steps", "3", recipe=recipe))
    (check,) = [check for check in record(tmp_path).checks if check.name == "as-trained"]
    assert check.passed
    assert "fails the check" not in printed


def test_a_run_that_is_wrong_only_when_compiled_is_marked_and_trains(tmp_path: Path) -> None:
    compiled = (
        "--set",
        "compile_mode=default",
        "--set",
        "compile_backend=eager",
        "--set",
        "compile_scope=model",
    )
    argv = arguments(tmp_path, "--steps", "3", *compiled, workload=f"{WRONG}:build")
    printed = ended(0, argv)
    found = record(tmp_path)
    failed = [check for check in found.checks if not check.passed]
    assert [check.name for check in failed] == ["as-trained"]
    assert failed[0].value == pytest.approx(0.5, rel=0.3)
    assert "warning: the recipe fails the check of as-trained: " in printed
    assert len(found.steps) == 3


def test_an_attempt_that_goes_on_does_not_ask_again(tmp_path: Path) -> None:
    more = ("--steps", "20", "--checkpoint-every", "5")
    argv = arguments(tmp_path, *more, workload=f"{TINY}:stopped_at_17")
    first, second = run(argv), run([*argv, "--resume"])
    assert first[0] == 130 and second[0] == 0, first[1] + second[1]
    names = [[check.name for check in record(tmp_path, attempt=attempt).checks] for attempt in (1, 2)]
    assert names == [["as-trained"], []]


def test_an_attempt_that_finds_no_checkpoint_asks(tmp_path: Path) -> None:
    ended(0, [*arguments(tmp_path, "--steps", "2"), "--resume"])
    assert [check.name for check in record(tmp_path).checks] == ["as-trained"]


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
    printed = [rank.wait(timeout_s=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    for rank in (0, 1):
        (check,) = record(tmp_path / str(rank), rank=rank).checks
        assert check.name == "as-trained" and check.passed


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "label",
    [
        "bf16",
        "fsdp2",
        "zero1",
        "zero3",
        "compile-model compile_scope=wrapped compile_backend=aot_eager",
        "lightning",
        "transformers",
        "transformers grad_accumulation=2",
    ],
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
