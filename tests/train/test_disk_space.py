"""What checkpoints need on the disk is known before training: never less than they take, nor much more."""

import dataclasses
import errno
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import toy
from entrypoint import arguments, record, start_command
from torch import nn
from toy import ALONE

from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.loop.checkpoint import (
    Checkpointing,
    Identity,
    check_space,
    check_writers_space,
    checkpoint_bytes,
)
from fastlaunch_train.loop.evaluation import Best, Evaluations
from fastlaunch_train.loop.timing import PhaseClock
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Eval, RecordWriter
from fastlaunch_train.workloads.contract import Workload


class Wide(nn.Module):
    """A fifth of a million weights in layers of several shapes, one of them used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.tied = self.blocks[0]
        self.norm = nn.BatchNorm1d(256)
        self.head = nn.Linear(256, toy.CLASSES)
        self.register_buffer("mask", torch.zeros(300, 300), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.relu(block(x))
        y: torch.Tensor = self.head(self.norm(self.tied(x)))
        return y


class Plain(nn.Module):
    """Without what is used twice, which a lone rank's gathered weights share after all, nor fp32 in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 256), nn.Linear(256, 256), nn.Linear(256, toy.CLASSES)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wide(optimizer: str, build_model: type[nn.Module] = Wide) -> Workload:
    name, _, momentum = optimizer.partition(" ")
    return dataclasses.replace(
        toy.TOY, build_model=build_model, optimizer=name, momentum=float(momentum or 0), learning_rate=1e-3
    )


def sizes(folder: Path, workload: Workload, recipe: Recipe, *, best: bool) -> tuple[int, int]:
    """The bytes of a checkpoint after a step, and those that were told before it."""
    stepper, data = toy.build(recipe, ALONE, workload=workload)
    told = checkpoint_bytes(stepper.model, workload, recipe, world_size=1, best=best)
    stepper.step(next(data))
    evaluations = Evaluations(every=1, last_step=9, keep_best=best)
    if best:
        score = Eval(step=1, split="validation", loss=1.0, num_samples=8, seconds=0.1)
        evaluations.best = Best(score=score, weights=stepper.weights())
    folder.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(folder / "rank-00000-attempt-1.jsonl")
    identity = Identity(workload="wide", recipe=recipe.label, data="", seed=0, batch_size=8, world_size=1)
    Checkpointing(
        directory=folder,
        identity=identity,
        process=ALONE,
        stepper=stepper,
        evaluations=evaluations,
        sharded=False,
        phase=PhaseClock(writer, ALONE.device),
    ).save(1)
    writer.close()
    (written,) = folder.glob("step-*.pt")
    return written.stat().st_size, told


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd 0.9", "adamw", "adafactor"])
@pytest.mark.parametrize("parameter_dtype", ["fp32", "bf16", "bf16-master"])
def test_a_checkpoint_takes_what_was_told(
    tmp_path: Path, optimizer: str, parameter_dtype: str, best: bool
) -> None:
    recipe = resolve_recipe("bf16", [f"parameter_dtype={parameter_dtype}"])
    written, told = sizes(tmp_path, wide(optimizer), recipe, best=best)
    assert written <= told <= 1.2 * written


def test_a_recipes_optimizer_counts_not_the_workloads(tmp_path: Path) -> None:
    recipe = resolve_recipe("fp32", ["optimizer=adamw"])
    written, told = sizes(tmp_path, wide("sgd"), recipe, best=False)
    assert written <= told <= 1.2 * written


SHARDED = (
    "fsdp2",
    "fsdp2,parameter_dtype=bf16-master",
    *("zero1", "zero2", "zero3", "zero3,parameter_dtype=bf16-master"),
)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_checkpoint_of_shards_takes_what_was_told() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    found = [line.split() for line in ran.stdout.splitlines() if line.startswith("sizes ")]
    assert len(found) == 3 * len(SHARDED)
    for _, what, written, told in found:
        assert int(written) <= int(told) <= 1.2 * int(written), what


def main() -> None:
    """In a process of its own, for the groups of these recipes: `sizes RECIPE WRITTEN TOLD` a line."""
    for arm in SHARDED:
        name, *overrides = arm.split(",")
        for optimizer in ("sgd", "sgd 0.9", "adamw"):
            with tempfile.TemporaryDirectory() as folder:
                recipe = resolve_recipe(name, overrides)
                written, told = sizes(Path(folder), wide(optimizer, Plain), recipe, best=True)
            print("sizes", f"{arm},{optimizer.replace(' ', ',')}", written, told)
    stop_process()


def test_checkpoints_that_will_not_fit_are_refused_by_their_number(tmp_path: Path) -> None:
    check_space(tmp_path / "checkpoints", 1000)
    with pytest.raises(OSError, match=r"3 checkpoints of 1048576\.00 GiB need 3145728\.00 GiB") as refused:
        check_space(tmp_path / "checkpoints", 2**50)
    assert refused.value.errno == errno.ENOSPC


def test_checkpoints_that_will_be_replaced_are_room(tmp_path: Path) -> None:
    """Sparse files: of a size that no disk has, and that takes none of it."""
    for name in ("step-00000001.pt", "step-00000002.pt", "step-00000003.partial"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**42)
    check_space(tmp_path, 2**42)
    (tmp_path / "step-00000001.pt").rename(tmp_path / "step-mine.pt")
    with pytest.raises(OSError, match="3 checkpoints"):
        check_space(tmp_path, 2**42)


def test_the_rank_that_writes_is_refused_as_others_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="3 checkpoints") as refused:
        check_writers_space(ALONE, tmp_path, 2**50)
    assert refused.value.errno == errno.ENOSPC
    check_writers_space(ALONE, tmp_path, 1000)


@pytest.mark.full
@pytest.mark.parametrize(("node", "is_refused"), [(0, True), (1, False)])
def test_only_where_checkpoints_are_written_they_need_room(
    tmp_path: Path, node: int, is_refused: bool
) -> None:
    """Two nodes with disks of their own, where one has a file in the way."""
    outputs = [tmp_path / f"node-{each}" for each in range(2)]
    for output in outputs:
        output.mkdir()
    (outputs[node] / "checkpoints").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", "--max-restarts=0")
    nodes = [
        start_command(
            arguments(output, "--checkpoint-every", "10"), rendezvous=(*master, f"--node-rank={rank}")
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        told = [each.communicate(timeout=100)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    ends = [record(output, rank=rank).end for rank, output in enumerate(outputs)]
    if is_refused:
        for end in ends:
            assert end is not None and end.status == "failed", told
            assert (end.message or "").startswith(f"no checkpoint can be written to {outputs[0]}"), told
        assert all("give another --output" in text for text in told)
    else:
        assert [end.status for end in ends if end is not None] == 2 * ["completed"], told
        assert (outputs[0] / "checkpoints" / "step-00000020.pt").exists()


if __name__ == "__main__":
    main()
