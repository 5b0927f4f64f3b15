"""The entrypoint over two ranks with shards: one checkpoint file, and the losses of a run without a stop."""

import importlib.util
from pathlib import Path

import entrypoint
import pytest
import torch

STEPS = 6


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
    assert [path.name for path in sorted((stopped / "checkpoints").iterdir())] == [
        "step-00000002.pt",
        "step-00000004.pt",
    ]
    # Tensors and plain values alone: nothing of a file is ever run.
    content = torch.load(stopped / "checkpoints" / "step-00000004.pt", weights_only=True)
    assert (content["step"], len(content["random_states"])) == (4, 2)
    train(stopped, STEPS, "--checkpoint-every", "2", "--resume")
    for rank in (0, 1):
        both = losses(stopped, 1, rank) + losses(stopped, 2, rank)
        assert len(both) == STEPS
        assert both == losses(whole, 1, rank)


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
