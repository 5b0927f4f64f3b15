"""The entrypoint over ranks with shards: a file of each rank, and the losses of a run without a stop."""

import importlib.util
import shutil
from pathlib import Path

import entrypoint
import pytest
import torch
import toy
from toy import recipe_of

from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.loop.checkpoint import _split, latest_checkpoint, shard_path
from fastlaunch_train.recipes.recipe import RecipeError

STEPS = 6
TOY = f"{Path(toy.__file__).resolve()}:workload"


def losses(output: Path, attempt: int, rank: int = 0) -> list[float | None]:
    return [step.loss for step in entrypoint.record(output, rank=rank, attempt=attempt).steps]


@pytest.mark.parametrize(
    "recipe", [pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.full)]
)
def test_resumed_shards_give_the_losses_of_a_run_without_a_stop(tmp_path: Path, recipe: str) -> None:
    if recipe == "zero2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")

    def train(output: Path, steps: int, *more: str) -> None:
        asked = ["--steps", str(steps), "--set", "grad_accumulation=2", *more]
        argv = entrypoint.arguments(output, *asked, recipe=recipe)
        code, said = entrypoint.run_command(argv, nproc=2)
        assert code == 0, said

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, STEPS)
    train(stopped, 4, "--checkpoint-every", "2")
    kept = ("step-00000002", "step-00000004")
    parts = ("-a1-of-00002.pt", "-a1.00000-of-00002.distcp", "-a1.00001-of-00002.distcp")
    names = {step + part for step in kept for part in (parts if recipe == "fsdp2" else (".pt",))}
    assert {path.name for path in (stopped / "checkpoints").iterdir()} == names
    # Tensors and plain values alone: nothing of a file is ever run.
    for path in (stopped / "checkpoints").iterdir():
        content = torch.load(path, weights_only=True)
        if path.suffix == ".pt":
            assert (path.stem[5:13], len(content["random_states"])) == (f"{content['step']:08d}", 2)
    train(stopped, STEPS, "--checkpoint-every", "2", "--resume")
    for rank in (0, 1):
        both = losses(stopped, 1, rank) + losses(stopped, 2, rank)
        assert len(both) == STEPS
        assert both == losses(whole, 1, rank)


@pytest.mark.slow
def test_shards_of_two_ranks_go_on_on_another_number(tmp_path: Path) -> None:
    """With the same weights and moments; of three ranks, one has no part of some."""

    def train(output: Path, steps: int, num_ranks: int, *more: str) -> None:
        asked = ["--steps", str(steps), "--set", "precision=fp32", "--set", "optimizer=adamw", *more]
        argv = entrypoint.arguments(
            output, *asked, "--batch-size", str(6 // num_ranks), workload=TOY, recipe="fsdp2"
        )
        code, printed = entrypoint.run_command(argv, nproc=num_ranks)
        assert code == 0, printed

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, STEPS, 2)
    train(stopped, 4, 2, "--checkpoint-every", "4")
    expected = [mean_loss(whole, 1, step, num_ranks=2) for step in range(4, STEPS)]
    for num_ranks in (1, 3):
        output = tmp_path / str(num_ranks)
        shutil.copytree(stopped, output)
        train(output, STEPS, num_ranks, "--resume")
        losses = [mean_loss(output, 2, step, num_ranks=num_ranks) for step in range(STEPS - 4)]
        assert losses == pytest.approx(expected, rel=1e-5)

    try:
        stepper, _ = toy.build(recipe_of("fsdp2 precision=fp32 optimizer=adamw"), toy.ALONE, seed=99)
        path = stopped / "checkpoints" / "step-00000004-a1-of-00002.pt"
        identity = {**torch.load(path, weights_only=True)["identity"], "batch_size": 6, "world_size": 1}
        toy.checkpointing(path.parent, stepper, **identity).resume(last_step=4)
        state = stepper.state()
        tensors = dict(_split({"model": state["model"], "optimizer": state["optimizer"]})[1])
        shards = [torch.load(shard_path(path, rank), weights_only=True) for rank in range(2)]
        assert len(tensors) == 3 * len(state["model"])
        for name, tensor in tensors.items():
            parts = [part for shard in shards for (of, *_), part in shard.items() if of == name]
            assert torch.equal(fsdp.local_shard(tensor), torch.cat(parts)), name
        with pytest.raises(RecipeError, match="another batch_size, world_size"):
            toy.checkpointing(path.parent, stepper, **{**identity, "batch_size": 4}).resume(last_step=4)
        for content in (b"", shard_path(path, 0).read_bytes(), shard_path(path, 1).read_bytes()[:500]):
            shard_path(path, 1).write_bytes(content)
            with pytest.raises(RecipeError, match=r"a1\.00001-of-00002\.distcp holds no checkpoint"):
                toy.checkpointing(path.parent, stepper, **identity).resume(last_step=4)
        shard_path(path, 1).unlink()
        assert toy.checkpointing(path.parent, stepper, **identity).resume(last_step=4) == 0
    finally:
        stop_process()


@pytest.mark.slow
def test_shards_that_one_rank_cannot_write_end_the_run_on_all_and_are_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    # In the way of the second rank's file.
    (folder / "step-00000004-a1.00001-of-00002.partial").mkdir(parents=True)
    argv = entrypoint.arguments(tmp_path, "--steps", "30", "--checkpoint-every", "4", recipe="fsdp2")
    code, printed = entrypoint.run_command(argv, nproc=2)
    assert code != 0, printed
    for rank in (0, 1):
        end = entrypoint.end_of(tmp_path, rank=rank)
        assert end.status == "failed" and "step-00000004-a1.00001-of-00002.distcp" in (end.message or ""), (
            printed
        )
        assert end.num_steps < 12
    assert latest_checkpoint(folder) is None
    assert not (folder / "step-00000004-a1-of-00002.pt").exists()


def mean_loss(output: Path, attempt: int, place: int, *, num_ranks: int) -> float:
    values = [losses(output, attempt, rank)[place] for rank in range(num_ranks)]
    return sum(value for value in values if value is not None) / num_ranks


@pytest.mark.full
def test_statistics_of_each_rank_are_scored_as_after_a_stop(tmp_path: Path) -> None:
    def score(output: Path, steps: int, *more: str) -> float | None:
        argv = entrypoint.arguments(
            output,
            *("--steps", str(steps), "--eval-every", "20", *more),
            workload=f"{entrypoint.TINY}:evaluated",
            recipe="fsdp2",
        )
        code, said = entrypoint.run_command(argv, nproc=2)
        assert code == 0, said
        found = entrypoint.record(output, attempt=2 if "--resume" in more else 1)
        (last,) = [e.loss for e in found.evals if (e.step, e.split) == (steps, "validation")]
        return last

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    score(stopped, 4, "--checkpoint-every", "4")
    assert score(stopped, STEPS, "--checkpoint-every", "4", "--resume") == score(whole, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fsdp2", "zero2"])
def test_alone_without_torchrun(tmp_path: Path, recipe: str) -> None:
    if recipe == "zero2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    code, said = entrypoint.run_command(entrypoint.arguments(tmp_path, "--steps", "3", recipe=recipe))
    assert code == 0, said
    assert len(losses(tmp_path, 1)) == 3
    (warning,) = (text for text in entrypoint.record(tmp_path).header["warnings"] if "shards nothing" in text)
    assert f"warning: {warning}" in said
