"""The entrypoint and the launcher on GPUs, as processes: alone, two ranks over NCCL, and resumed in FP8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastlaunch_train.records import RankRecord, read_record
from fastlaunch_train.runs_here import runnable_recipes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


def train(output: Path, recipe: str, *more: str, nproc: int = 1, steps: int = 24) -> list[RankRecord]:
    run(
        *("--workload", "vit-tiny", "--recipe", recipe, "--batch-size", "16", "--steps", str(steps)),
        *("--output", str(output), *more),
        nproc=nproc,
    )
    return [read_record(path) for path in sorted(output.glob("rank-*.jsonl"))]


def losses(record: RankRecord) -> list[float | None]:
    return [step.loss for step in record.steps]


@pytest.mark.parametrize("recipe", ["fp32", "tf32", "bf16", "fp16", "compile", "te-bf16", "te-fp8"])
def test_every_recipe_trains_and_says_with_which_attention(tmp_path: Path, recipe: str) -> None:
    if recipe not in runnable_recipes(torch.device("cuda")):
        pytest.skip(f"{recipe} cannot run here")
    (record,) = train(tmp_path, recipe, steps=60)
    assert record.header["machine"]["device_type"] == "cuda"
    assert record.header["attention_backend"] not in (None, "none", "te:unfused")
    found = [loss for loss in losses(record) if loss is not None]
    assert sum(found[-10:]) < sum(found[:10])


@pytest.mark.parametrize("recipe", ["bf16", "te-fp8"])
def test_resuming_goes_on_as_if_it_had_not_stopped(tmp_path: Path, recipe: str) -> None:
    if recipe not in runnable_recipes(torch.device("cuda")):
        pytest.skip(f"{recipe} cannot run here")
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
@pytest.mark.parametrize("recipe", ["bf16", "compile", "te-fp8"])
def test_two_ranks_train_as_one_over_nccl(tmp_path: Path, recipe: str) -> None:
    if recipe not in runnable_recipes(torch.device("cuda")):
        pytest.skip(f"{recipe} cannot run here")
    first, second = train(tmp_path, recipe, nproc=2, steps=60)
    assert first.header["world_size"] == second.header["world_size"] == 2
    assert first.header["versions"]["nccl"]
    assert [(b.first_step, b.last_step) for b in first.blocks] == [
        (b.first_step, b.last_step) for b in second.blocks
    ]
    assert losses(first) != losses(second), "each rank has its own data"
    for record in (first, second):
        found = [loss for loss in losses(record) if loss is not None]
        assert sum(found[-10:]) < sum(found[:10])


def test_submit_trains_on_every_gpu_and_compare_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("platformdirs")
    arguments = ("submit", "--local", "--workload", "vit-tiny", "--batch-size", "16", "--steps", "150")
    run(*arguments, module="fastlaunch", home=tmp_path)
    table = run("compare", "--output", "csv", module="fastlaunch", home=tmp_path)
    assert torch.cuda.get_device_name() in table
    (record,) = {read_record(path).header["world_size"] for path in tmp_path.glob("runs/*/rank-*.jsonl")}
    assert record == torch.cuda.device_count()
