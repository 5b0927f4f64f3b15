"""The entrypoint and the launcher on GPUs, as processes: alone, two ranks over NCCL, and resumed in FP8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from running_here import runnable

from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch_train.recipes.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: str, nproc: int = 1, module: str = "fastlaunch_train", home: Path | None = None) -> str:
    prefix = [sys.executable, "-m"]
    if nproc > 1:
        prefix += ["torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m"]
    path = os.pathsep.join([str(ROOT / "train"), str(ROOT / "launcher"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*prefix, module, *argv],
        env={**os.environ, "PYTHONPATH": path, **({"FASTLAUNCH_HOME": str(home)} if home else {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(
    output: Path, recipe: str, *more: str, nproc: int = 1, steps: int = 24, workload: str = "vit-tiny"
) -> list[RankRecord]:
    run(
        *("--workload", workload, "--recipe", recipe, "--batch-size", "16", "--steps", str(steps)),
        *("--output", str(output), *more),
        nproc=nproc,
    )
    return [read_record(path) for path in sorted(output.glob("rank-*.jsonl"))]


def losses(record: RankRecord) -> list[float | None]:
    return [step.loss for step in record.steps]


#: Long to compile, for wider layers than vit-tiny's, of the published article alone, of another environment,
#: or of the workload gelu.
LEFT_OUT = (
    "compile-max-autotune",
    "ao-fp8-rowwise",
    "te-article",
    "te-article-fp8",
    "ort",
    "ort-zero1",
    "jit-script",
    "library",
)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in LEFT_OUT])
def test_every_recipe_trains_and_says_with_which_attention(tmp_path: Path, recipe: str) -> None:
    runnable(recipe)
    # Fused blocks need wider rows than vit-tiny has.
    workload = "vit-wide" if RECIPES[recipe].blocks == "fused" else "vit-tiny"
    (record,) = train(tmp_path, recipe, "--eval-every", "30", steps=60, workload=workload)
    assert record.header["machine"]["device_type"] == "cuda"
    assert record.header["attention_backend"] not in (None, "none", "te:unfused")
    assert all(check.passed for check in record.checks), record.checks
    assert [(score.step, score.split) for score in record.evals] == [(30, "validation"), (60, "validation")]
    # What evaluation compiles is not taken for the steps'.
    assert record.blocks[-1].num_compiles == record.blocks[1].num_compiles
    found = [loss for loss in losses(record) if loss is not None]
    assert sum(found[-10:]) < sum(found[:10])


def test_a_gpu_is_sampled_while_it_trains(tmp_path: Path) -> None:
    """Once a second, so that 60 steps of vit-tiny are over before."""
    (record,) = train(tmp_path, "bf16", steps=2000)
    assert all(block.clock_mhz and block.power_w for block in record.blocks)
    sampled = [block.utilization for block in record.blocks if block.utilization is not None]
    assert sampled and all(0 < share <= 1 for share in sampled)


@pytest.mark.parametrize("recipe", ["compile", "compile-reduce-overhead"])
def test_what_is_compiled_ahead_is_not_compiled_again(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch compiles again once the number of threads is another, and beside a GPU it is chosen."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (chosen,) = train(tmp_path / "chosen", recipe, "--eval-every", "12")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (given,) = train(tmp_path / "given", recipe, "--eval-every", "12")
    for index in (0, -1):
        assert chosen.blocks[index].num_compiles == given.blocks[index].num_compiles > 0


@pytest.mark.parametrize("recipe", ["bf16", "te-bf16", "te-fp8", "lightning", "transformers"])
def test_evaluating_changes_nothing_of_the_training(tmp_path: Path, recipe: str) -> None:
    runnable(recipe)
    same_bits = ("--set", "deterministic=true", "--set", "optimizer_impl=for-loop")
    (plain,) = train(tmp_path / "plain", recipe, *same_bits)
    (evaluated,) = train(tmp_path / "evaluated", recipe, *same_bits, "--eval-every", "5")
    assert losses(evaluated) == losses(plain)


def test_deterministic_gives_the_same_bits(tmp_path: Path) -> None:
    # Processes of their own: torch reads how cuBLAS is set up at the first product.
    (first,) = train(tmp_path / "first", "bf16", "--set", "deterministic=true")
    (second,) = train(tmp_path / "second", "bf16", "--set", "deterministic=true")
    assert losses(first) == losses(second)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recipe", ["lightning", "transformers"])
def test_trainers_train_as_our_loop_does(tmp_path: Path, recipe: str, precision: str) -> None:
    runnable(recipe)
    more = ("--set", "grad_accumulation=2", "--set", "optimizer_impl=for-loop")
    (ours,) = train(tmp_path / "ours", precision, *more)
    (theirs,) = train(tmp_path / "theirs", recipe, *more, "--set", f"precision={precision}")
    for expected, found in zip(losses(ours), losses(theirs), strict=True):
        assert expected is not None and found is not None
        assert abs(found - expected) < (1e-4 if precision == "fp32" else 0.02) * expected
    assert [path.suffix for path in (tmp_path / "theirs").iterdir()] == [".jsonl"], "nothing else is left"


@pytest.mark.parametrize("recipe", ["bf16", "te-fp8", "lightning", "transformers"])
def test_resuming_goes_on_as_if_it_had_not_stopped(tmp_path: Path, recipe: str) -> None:
    runnable(recipe)
    deterministic = ("--set", "optimizer_impl=for-loop")
    (whole,) = train(tmp_path / "whole", recipe, *deterministic)
    every = ("--checkpoint-every", "12")
    train(tmp_path / "parts", recipe, *deterministic, *every, steps=12)
    resumed = train(tmp_path / "parts", recipe, *deterministic, *every, "--resume")[1]
    assert resumed.header["first_step"] == 13
    # Atomic additions in a backward pass may come in any order: the last bits of a loss are not the same.
    for expected, found in zip(losses(whole)[12:], losses(resumed), strict=True):
        assert expected is not None and found is not None
        assert abs(found - expected) < 0.02 * expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["bf16", "compile", "te-fp8", "lightning", "transformers"])
def test_two_ranks_train_as_one_over_nccl(tmp_path: Path, recipe: str) -> None:
    runnable(recipe)
    first, second = train(tmp_path, recipe, "--eval-every", "30", nproc=2, steps=60)
    assert first.header["world_size"] == second.header["world_size"] == 2
    assert first.header["versions"]["nccl"]
    assert [(b.first_step, b.last_step) for b in first.blocks] == [
        (b.first_step, b.last_step) for b in second.blocks
    ]
    assert losses(first) != losses(second), "each rank has its own data"
    assert [score.loss for score in first.evals] == [score.loss for score in second.evals]
    assert [score.step for score in first.evals] == [30, 60]
    for record in (first, second):
        found = [loss for loss in losses(record) if loss is not None]
        assert sum(found[-10:]) < sum(found[:10])


def test_padding_is_counted_and_the_best_weights_are_tested(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (record,) = train(tmp_path, "bf16", "--eval-every", "10", workload="distilbert-tiny")
    assert all(0 < step.num_padding < step.num_tokens for step in record.steps)
    assert [(score.split, score.weights) for score in record.evals[-2:]] == [
        ("test", "current"),
        ("test", "best"),
    ]


def test_submit_trains_on_every_gpu_and_compare_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("platformdirs")
    arguments = ("submit", "--local", "--workload", "vit-tiny", "--batch-size", "16", "--steps", "150")
    run(*arguments, module="fastlaunch", home=tmp_path)
    table = run("compare", "--output", "csv", module="fastlaunch", home=tmp_path)
    assert torch.cuda.get_device_name() in table
    (record,) = {read_record(path).header["world_size"] for path in tmp_path.glob("runs/*/rank-*.jsonl")}
    assert record == torch.cuda.device_count()
