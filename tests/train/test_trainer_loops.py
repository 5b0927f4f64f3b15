"""The loops of Lightning and of Transformers: what they train, record and leave is what our loop does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from entrypoint import TINY, arguments, end_of, ended, losses, record, run_command, trained
from torch import nn

from fastlaunch.measure.record_files import RankRecord
from fastlaunch_train.loop.trainers.adapter import Adapter, check_trainer
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.contract import load_workload

CPU = torch.device("cpu")
LOOPS = ("lightning", "transformers")
EVALUATED = f"{TINY}:evaluated"
MICRO_BATCHES = ("--steps", "24", "--eval-every", "7", "--set", "grad_accumulation=2")

both_loops = pytest.mark.parametrize("loop", LOOPS)


def scores(read: RankRecord) -> list[tuple[int, str, str]]:
    return [(e.step, e.split, e.weights) for e in read.evals]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    """24 steps of two micro-batches each, with dropout and batch normalisation, by our own loop."""
    return trained(tmp_path_factory.mktemp("ours"), *MICRO_BATCHES, workload=EVALUATED)


@both_loops
@pytest.mark.slow
def test_steps_evaluations_and_blocks_are_those_of_our_loop(
    ours: RankRecord, tmp_path: Path, loop: str
) -> None:
    found = trained(tmp_path, *MICRO_BATCHES, "--set", f"loop={loop}", workload=EVALUATED)
    assert losses(tmp_path) == pytest.approx([step.loss for step in ours.steps], rel=1e-6)
    assert scores(found) == scores(ours)
    assert [e.loss for e in found.evals] == pytest.approx([e.loss for e in ours.evals], rel=1e-5)
    assert [step.num_padding for step in found.steps] == [step.num_padding for step in ours.steps]
    assert found.blocks[0].last_step == 1
    assert {7, 14, 21, 24} <= {block.last_step for block in found.blocks}
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000-attempt-1.jsonl"]


@pytest.mark.slow
def test_all_loops_clip_decay_and_schedule_alike(tmp_path: Path) -> None:
    more = ("--steps", "8", "--checkpoint-every", "4", "--set", "grad_accumulation=2")
    weights, headers = {}, {}
    for loop in ("ours", *LOOPS):
        found = trained(tmp_path / loop, *more, "--set", f"loop={loop}", workload=f"{TINY}:pretraining")
        weights[loop] = final_weights(tmp_path / loop, step=8)
        headers[loop] = found.header["workload"]
    for loop in LOOPS:
        assert losses(tmp_path / loop) == pytest.approx(losses(tmp_path / "ours"), rel=1e-6)
        for name, weight in weights["ours"].items():
            torch.testing.assert_close(weights[loop][name], weight, rtol=1e-5, atol=1e-7)
        assert headers[loop] == headers["ours"]
    stated = {"weight_decay": 0.1, "max_grad_norm": 0.2, "lr_schedule": "cosine", "warmup_steps": 3}
    assert stated.items() <= headers["ours"].items()


def final_weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    content = torch.load(output / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)
    return {name: value for name, value in content["model"].items() if value.is_floating_point()}


@pytest.mark.slow
def test_a_schedule_goes_on_where_it_was_and_over_no_other_number_of_steps(tmp_path: Path) -> None:
    workload, more = f"{TINY}:stopped_in_pretraining", ("--steps", "16", "--checkpoint-every", "4")
    whole = trained(tmp_path / "whole", *more, workload=f"{TINY}:pretraining")
    for loop in ("ours", *LOOPS):
        argv = arguments(tmp_path / loop, *more, "--set", f"loop={loop}", workload=workload)
        ended(130, argv)
        last = record(tmp_path / loop).steps[-1].step
        if loop == "ours":
            assert "schedule_steps 16" in ended(2, [*argv, "--steps", "30", "--resume"])
        ended(0, [*argv, "--resume"])
        again = losses(tmp_path / loop, attempt=2 if loop != "ours" else 3)
        assert again == pytest.approx([step.loss for step in whole.steps[last:]], rel=1e-6)


@both_loops
@pytest.mark.full
def test_a_trainer_that_is_stopped_goes_on_as_if_it_had_not_been(
    ours: RankRecord, tmp_path: Path, loop: str
) -> None:
    more = (*MICRO_BATCHES, "--checkpoint-every", "100", "--set", f"loop={loop}")
    argv = arguments(tmp_path, *more, workload=f"{TINY}:stopped_at_micro_batch_34")
    ended(130, argv)
    ended(0, [*argv, "--resume"])
    assert record(tmp_path, attempt=2).header["first_step"] == 18
    whole = losses(tmp_path) + losses(tmp_path, attempt=2)
    assert whole == pytest.approx([step.loss for step in ours.steps], rel=1e-6)
    assert scores(record(tmp_path, attempt=2)) == scores(ours)[2:]


@both_loops
@pytest.mark.full
def test_a_loss_that_is_no_number_ends_a_trainer(tmp_path: Path, loop: str) -> None:
    ended(33, arguments(tmp_path, "--set", f"loop={loop}", workload=f"{TINY}:nan"))
    assert end_of(tmp_path).status == "nan_loss"


@both_loops
@pytest.mark.full
def test_a_trainer_waits_for_no_loss(tmp_path: Path, loop: str) -> None:
    more = ("--steps", "6", "--set", "grad_accumulation=2", "--set", f"loop={loop}")
    trained(tmp_path, *more, workload=f"{TINY}:not_waited_for")


@both_loops
@pytest.mark.full
def test_a_trainer_compiles_before_its_first_step(tmp_path: Path, loop: str) -> None:
    settings = ("compile_mode=default", "compile_backend=aot_eager", "compile_scope=model", f"loop={loop}")
    more = [word for setting in settings for word in ("--set", setting)]
    found = trained(
        tmp_path, *("--steps", "12", "--eval-every", "5", *more), workload=f"{TINY}:compiled", recipe="bf16"
    )
    assert [phase.name for phase in found.phases].count("compile") == 2, "training, and evaluation"
    compiles = [block.num_compiles for block in found.blocks]
    assert compiles[0] >= 2
    assert set(compiles) == {compiles[0]}


@pytest.mark.parametrize(("loop", "precision"), [("lightning", "fp16"), ("transformers", "bf16")])
@pytest.mark.full
def test_a_trainers_mixed_precision_is_close_to_ours(tmp_path: Path, loop: str, precision: str) -> None:
    for each in ("ours", loop):
        trained(tmp_path / each, "--set", f"loop={each}", workload=EVALUATED, recipe=precision)
    assert losses(tmp_path / loop) == pytest.approx(losses(tmp_path / "ours"), rel=0.05, abs=0.02)
    scaling = [
        [(step.loss_scale, step.skipped) for step in record(tmp_path / each).steps] for each in ("ours", loop)
    ]
    assert scaling[0] == scaling[1]
    assert scaling[0][0] == ((65536.0, False) if precision == "fp16" else (None, None))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", ["grad_accumulation=2", "wire_dtype=bf16"])
def test_two_ranks_of_a_trainer_train_as_two_of_ours(setting: str, tmp_path: Path) -> None:
    more = ("--steps", "12", "--eval-every", "5", "--set", setting)
    for loop in ("ours", *LOOPS):
        argv = arguments(tmp_path / loop, *more, "--set", f"loop={loop}", workload=EVALUATED)
        code, printed = run_command(argv, nproc=2)
        assert code == 0, printed
    for rank in range(2):
        mine = record(tmp_path / "ours", rank=rank)
        for loop in LOOPS:
            theirs = record(tmp_path / loop, rank=rank)
            assert losses(tmp_path / loop, rank=rank) == pytest.approx(
                losses(tmp_path / "ours", rank=rank), rel=1e-5
            )
            assert [e.loss for e in theirs.evals] == pytest.approx([e.loss for e in mine.evals], rel=1e-4)


GRAPHS = ("precision=bf16", "compile_mode=reduce-overhead", "compile_scope=model")


@pytest.mark.parametrize(
    ("settings", "device", "function", "word"),
    [
        (("loop=lightning", "precision=fp8", "fp8_scaling=tensorwise"), "cpu", "build", "precision=bf16"),
        (("loop=lightning",), "cpu", "untrainable", "nothing to train"),
        (("loop=lightning", "set_to_none=false"), "cpu", "build", None),
        (("loop=lightning", "precision=fp16"), "cpu", "build", None),
        (("loop=transformers", "set_to_none=false"), "cpu", "build", "set_to_none"),
        (("loop=transformers", "precision=fp16"), "cpu", "build", "on a GPU"),
        (("loop=lightning", "precision=bf16", "optimizer_impl=fused"), "cpu", "build", None),
        (("loop=lightning", "precision=bf16", "optimizer_impl=fused"), "cpu", "pretraining", "foreach"),
        (("loop=lightning", "optimizer_impl=fused"), "cpu", "pretraining", None),
        (("loop=transformers", *GRAPHS), "cuda", "build", None),
        (("loop=transformers", *GRAPHS, "grad_accumulation=2"), "cuda", "build", "CUDA graph overwrites"),
        (("loop=lightning", *GRAPHS, "set_to_none=false"), "cuda", "build", "CUDA graph overwrites"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(
    settings: tuple[str, ...], device: str, function: str, word: str | None
) -> None:
    recipe, workload = resolve_recipe("fp32", settings), load_workload(f"{TINY}:{function}")
    if word is None:
        check_trainer(workload, recipe, torch.device(device))
        return
    with pytest.raises(RecipeError) as raised:
        check_trainer(workload, recipe, torch.device(device))
    assert word in f"{raised.value.message} {raised.value.hint}"
    assert "loop=ours" in (raised.value.hint or "")


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    recorded: list[float] = []
    training = SimpleNamespace(
        recipe=resolve_recipe("fp32"), workload=SimpleNamespace(loss=lambda model, batch: batch), last_step=9
    )
    loop: Any = SimpleNamespace(
        training=training, last_done=0, after_step=lambda loss: recorded.append(float(loss))
    )
    adapter, model = Adapter(loop), nn.Identity()
    reused = torch.tensor(1.0)
    adapter.train_on(model, reused)
    reused += 2
    adapter.train_on(model, reused)
    adapter.end_step()
    adapter.train_on(model, torch.tensor(5.0))
    adapter.end_step()
    # 1 and 3, though both were in the same place.
    assert recorded == [2.0, 5.0]
