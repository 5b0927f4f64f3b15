"""The loops of Lightning and of Transformers: what they train, record and leave is what our loop does."""

from pathlib import Path

import pytest
import torch
from entrypoint import TINY, arguments, end_of, ended, record, run_command

from fastlaunch_train.loop.trainers.adapter import LossShare, StepLoss, check_trainer
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import RankRecord
from fastlaunch_train.workloads.contract import load_workload

CPU = torch.device("cpu")
LOOPS = ("lightning", "transformers")
EVALUATED = f"{TINY}:evaluated"

both_loops = pytest.mark.parametrize("loop", LOOPS)


def asked(
    output: Path, *more: str, loop: str = "ours", recipe: str = "fp32", of: str = "evaluated"
) -> list[str]:
    return [*arguments(output, *more, workload=f"{TINY}:{of}", recipe=recipe), "--set", f"loop={loop}"]


def losses(read: RankRecord) -> list[float | None]:
    return [step.loss for step in read.steps]


def scores(read: RankRecord) -> list[tuple[int, str, str, float | None]]:
    return [(e.step, e.split, e.weights, e.loss) for e in read.evals]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    """24 steps of two micro-batches each, with dropout and batch normalisation, by our own loop."""
    output = tmp_path_factory.mktemp("ours")
    more = ("--steps", "24", "--eval-every", "7", "--set", "grad_accumulation=2")
    ended(0, asked(output, *more))
    return record(output)


@both_loops
@pytest.mark.slow
def test_steps_evaluations_and_blocks_are_those_of_our_loop(
    ours: RankRecord, tmp_path: Path, loop: str
) -> None:
    more = ("--steps", "24", "--eval-every", "7", "--set", "grad_accumulation=2")
    printed = ended(0, asked(tmp_path, *more, loop=loop))
    found = record(tmp_path)
    assert losses(found) == pytest.approx(losses(ours), rel=1e-6)
    assert [e[:3] for e in scores(found)] == [e[:3] for e in scores(ours)]
    assert [e[3] for e in scores(found)] == pytest.approx([e[3] for e in scores(ours)], rel=1e-5)
    assert [(step.num_tokens, step.num_padding) for step in found.steps] == [
        (step.num_tokens, step.num_padding) for step in ours.steps
    ]
    assert {7, 14, 21, 24} <= {block.last_step for block in found.blocks}
    assert found.blocks[0].last_step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000-attempt-1.jsonl"], (
        "nothing else is left"
    )
    assert "%|" not in printed and "Tip" not in printed


@both_loops
@pytest.mark.full
def test_a_trainer_that_is_stopped_goes_on_as_if_it_had_not_been(
    ours: RankRecord, tmp_path: Path, loop: str
) -> None:
    more = ("--steps", "24", "--eval-every", "7", "--checkpoint-every", "100", "--set", "grad_accumulation=2")
    argv = asked(tmp_path, *more, loop=loop, of="stopped_at_micro_batch_34")
    ended(130, argv)
    first = record(tmp_path)
    assert first.end is not None
    assert (first.end.status, first.end.message) == ("interrupted", "stopped by SIGTERM")
    ended(0, [*argv, "--resume"])
    second = record(tmp_path, attempt=2)
    assert second.header["first_step"] == 18
    assert losses(first) + losses(second) == pytest.approx(losses(ours), rel=1e-6)
    assert scores(second)[0][0] == 21


@both_loops
@pytest.mark.full
def test_a_loss_that_is_no_number_ends_a_trainer(tmp_path: Path, loop: str) -> None:
    ended(33, asked(tmp_path, "--steps", "40", loop=loop, of="evaluated_nan"))
    end = end_of(tmp_path)
    assert end.status == "nan_loss"


@both_loops
@pytest.mark.full
def test_a_trainer_waits_for_no_loss(tmp_path: Path, loop: str) -> None:
    more = ("--steps", "6", "--set", "grad_accumulation=2")
    ended(0, asked(tmp_path, *more, loop=loop, of="not_waited_for"))


@both_loops
@pytest.mark.full
def test_a_trainer_compiles_before_its_first_step(tmp_path: Path, loop: str) -> None:
    compiling = ("compile_mode=default", "compile_backend=aot_eager", "compile_scope=model")
    sets = [word for setting in compiling for word in ("--set", setting)]
    ended(
        0,
        asked(tmp_path, "--steps", "12", "--eval-every", "5", *sets, loop=loop, recipe="bf16", of="compiled"),
    )
    found = record(tmp_path)
    assert [phase.name for phase in found.phases].count("compile") == 2, "training, and evaluation"
    compiles = [block.num_compiles for block in found.blocks]
    assert compiles[0] >= 2
    assert set(compiles) == {compiles[0]}


@both_loops
@pytest.mark.full
def test_a_trainers_mixed_precision_is_close_to_ours(tmp_path: Path, loop: str) -> None:
    precision = "fp16" if loop == "lightning" else "bf16"
    found = {}
    for each in ("ours", loop):
        ended(0, asked(tmp_path / each, "--steps", "12", loop=each, recipe=precision))
        found[each] = losses(record(tmp_path / each))
    assert found[loop] == pytest.approx(found["ours"], rel=0.05, abs=0.02)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", ["grad_accumulation=2", "wire_dtype=bf16"])
def test_two_ranks_of_a_trainer_train_as_two_of_ours(setting: str, tmp_path: Path) -> None:
    more = ("--steps", "12", "--eval-every", "5", "--set", setting)
    found: dict[str, list[RankRecord]] = {}
    for loop in ("ours", *LOOPS):
        code, printed = run_command(asked(tmp_path / loop, *more, loop=loop), nproc=2)
        assert code == 0, printed
        found[loop] = [record(tmp_path / loop, rank=rank) for rank in range(2)]
    for loop in LOOPS:
        for mine, theirs in zip(found["ours"], found[loop], strict=True):
            assert losses(theirs) == pytest.approx(losses(mine), rel=1e-5)
            assert [e[3] for e in scores(theirs)] == pytest.approx([e[3] for e in scores(mine)], rel=1e-4)


@both_loops
@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["precision=fp8", "fp8_scaling=tensorwise"], "precision=bf16"),
        (["set_to_none=false"], "set_to_none"),
        (["precision=fp16"], "on a GPU alone"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused(loop: str, settings: list[str], word: str) -> None:
    recipe = resolve_recipe("fp32", [f"loop={loop}", *settings])
    workload = load_workload(f"{EVALUATED}")
    if loop == "lightning" and settings[0] != "precision=fp8":
        check_trainer(workload, recipe, CPU)
        return
    with pytest.raises(RecipeError) as raised:
        check_trainer(workload, recipe, CPU)
    assert word in f"{raised.value.message} {raised.value.hint}"
    assert "loop=ours" in (raised.value.hint or "")


@both_loops
@pytest.mark.parametrize("override", ["grad_accumulation=2", "set_to_none=false"])
def test_gradients_that_cuda_graphs_overwrite_are_refused_where_they_are_added_up(
    loop: str, override: str
) -> None:
    workload = load_workload(EVALUATED)
    graphs = ["compile_mode=reduce-overhead", "compile_scope=model"]
    with pytest.raises(RecipeError, match="CUDA graph overwrites"):
        check_trainer(
            workload, resolve_recipe("bf16", [f"loop={loop}", *graphs, override]), torch.device("cuda")
        )
    check_trainer(workload, resolve_recipe("bf16", [f"loop={loop}", *graphs]), torch.device("cuda"))


@pytest.mark.slow
def test_what_is_not_trained_is_refused(tmp_path: Path) -> None:
    printed = ended(2, asked(tmp_path, loop="lightning", of="untrainable"))
    assert "nothing to train" in printed


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    step_loss = StepLoss()
    reused = torch.tensor(1.0)
    step_loss.add(reused)
    reused += 2
    step_loss.add(reused)
    assert step_loss.take() == 2.0, "1 and 3, though both were in the same place"
    step_loss.add(torch.tensor(5.0))
    assert step_loss.take() == 5.0


@pytest.mark.parametrize(("precision", "scale"), [("fp32", 1.0), ("fp16", 2.0**16)])
def test_micro_batches_that_are_added_up_are_noticed(precision: str, scale: float) -> None:
    recipe = resolve_recipe(precision, ["loop=transformers", "grad_accumulation=4"])
    arithmetic = setup_precision(recipe, CPU)

    def first_step(factor: float) -> LossShare:
        share = LossShare(recipe, arithmetic)
        weight = torch.ones((), requires_grad=True)
        for _ in range(4):
            loss = weight * 3.0
            share.watch(loss)
            loss *= factor  # in place, as some releases do
            loss.backward()
        return share

    mean = first_step(scale / 4)
    mean.check()
    mean.check()
    with pytest.raises(RecipeError, match="no mean of the 4 micro-batches"):
        first_step(scale).check()
