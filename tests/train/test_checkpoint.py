"""Checkpoints: complete or absent, two kept, only for their own job, and of a size known before training."""

import copy
import dataclasses
import errno
import importlib.util
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from entrypoint import arguments, end_of, start_command
from torch import nn
from toy import ALONE

from fastlaunch_train.distributed.parallel import stop_process
from fastlaunch_train.distributed.shard_files import write_whole
from fastlaunch_train.loop import checkpoint
from fastlaunch_train.loop.checkpoint import (
    Checkpointing,
    Identity,
    check_space,
    check_writers_space,
    checkpoint_bytes,
    checkpoint_path,
    latest_checkpoint,
)
from fastlaunch_train.loop.evaluation import Best, Evaluations
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.process.failures import EXIT_DISK_FULL, UnsavedError, classify
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Eval
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.workloads.contract import Workload

IDENTITY = {"sequence_length": 64, "data_digest": "0a1b"}


def checkpointing(
    directory: Path, stepper: Stepper | None = None, evaluations: Evaluations | None = None, **identity: Any
) -> Checkpointing:
    """What saves a lone rank's checkpoints."""
    stepper = stepper or toy.build(resolve_recipe("fp32"), ALONE)[0]
    return toy.checkpointing(directory, stepper, evaluations, **{**IDENTITY, **identity})


def save(
    directory: Path, step: int, stepper: Stepper | None = None, evaluations: Evaluations | None = None
) -> Path:
    """The path of a new checkpoint of that step."""
    saving = checkpointing(directory, stepper, evaluations)
    saving.save(step)
    saving.finish()
    path = latest_checkpoint(directory)
    assert path is not None
    return path


def test_a_restored_job_goes_on_as_the_saved_one_does(tmp_path: Path) -> None:
    # With dropout, an optimizer and a scaler, which have states too.
    workload = dataclasses.replace(toy.TOY, build_model=lambda: nn.Sequential(toy.Toy(), nn.Dropout()))
    workload = dataclasses.replace(workload, blocks=None)
    recipe = resolve_recipe("fp16")
    whole, data = toy.build(recipe, ALONE, workload=workload)
    for _ in range(3):
        train_step(whole, next(data))
    save(tmp_path, 3, whole)
    batch = next(data)
    expected = [float(train_step(whole, batch)) for _ in range(3)]
    restored, _ = toy.build(recipe, ALONE, seed=99, workload=workload)
    assert checkpointing(tmp_path, restored).resume(last_step=9) == 3
    assert [float(train_step(restored, batch)) for _ in range(3)] == expected


def test_a_checkpoint_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    class Watching:
        def __reduce__(self) -> tuple[Any, ...]:
            newest.append(latest_checkpoint(tmp_path))
            return dict, ()

    newest: list[Path | None] = []
    paths = [checkpoint_path(tmp_path, step) for step in (1, 2)]
    for path in paths:
        write_whole(path, {"model": Watching()})
    assert newest == [None, paths[0]]


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved is the state at the save, however late it is written; the next save waits for it."""
    may_write, write = threading.Event(), checkpoint.write_whole
    stepper, data = toy.build(resolve_recipe("fp32"), ALONE)
    train_step(stepper, next(data))
    before = copy.deepcopy(stepper.state())
    saving = checkpointing(tmp_path, stepper)
    monkeypatch.setattr(checkpoint, "write_whole", lambda *args: may_write.wait(60) and write(*args))
    saving.save(1)
    train_step(stepper, next(data))
    assert saving.is_begun and saving.is_writing and latest_checkpoint(tmp_path) is None
    threading.Timer(0.2, may_write.set).start()
    saving.save(2)
    assert checkpoint_path(tmp_path, 1).exists()
    saving.finish()
    assert not saving.is_begun
    saved = torch.load(checkpoint_path(tmp_path, 1), weights_only=True)["model"]
    assert saved.keys() == before["model"].keys()
    assert all(torch.equal(saved[name], weight) for name, weight in before["model"].items())
    waits, writes = (
        [line.step for line in saving._phase._writer if line.name == name]  # type: ignore[attr-defined]
        for name in ("checkpoint", "checkpoint-write")
    )
    # The second save stood still for the first, too.
    assert (waits[:3], writes) == ([1, 1, 2], [1, 2])


def test_the_newest_two_are_kept_and_a_users_own_files(tmp_path: Path) -> None:
    # As processes that were killed while they saved leave it.
    (tmp_path / "step-00000007.partial").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) is None
    own = {"step-final.pt", "step-mine.partial"}
    for name in own:
        (tmp_path / name).touch()
    newest = [save(tmp_path, step).name for step in (5, 10, 15, 100)][-1]
    assert newest == "step-00000100.pt"
    assert {path.name for path in tmp_path.iterdir()} == own | {"step-00000015.pt", newest}


@pytest.mark.parametrize("missing", [0.999, 0.01, 0.0003])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_partial_one(tmp_path: Path, missing: float) -> None:
    """Wherever in the file it is full: near the end torch.save has an error of its own to tell."""
    save(tmp_path, 1)
    large, _ = toy.build(resolve_recipe("fp32"), ALONE, workload=wide("sgd"))
    size = save(tmp_path / "elsewhere", 2, large).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (round(size * (1 - missing)), before[1]))
    try:
        with pytest.raises(UnsavedError, match=r"File too large: .*step-00000002\.pt") as failed:
            save(tmp_path, 2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.glob("*.*")] == ["step-00000001.pt"]
    assert classify(failed.value).exit_code == EXIT_DISK_FULL


@pytest.mark.parametrize(("limit_s", "warned"), [(60.0, False), (0.0, True)])
def test_a_checkpoint_too_slow_for_spot_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    warned: bool,
) -> None:
    monkeypatch.setattr(checkpoint, "LONG_CHECKPOINT_S", limit_s)
    save(tmp_path, 1)
    assert ("spot" in caplog.text) == warned


@pytest.mark.parametrize("change", [field.name for field in dataclasses.fields(Identity)])
def test_another_job_is_refused_by_name(tmp_path: Path, change: str) -> None:
    path = save(tmp_path, 1)
    value = torch.load(path, weights_only=True)["identity"][change]
    other = {change: "other" if isinstance(value, str) else 77}
    with pytest.raises(RecipeError) as refused:
        checkpointing(tmp_path, **other).resume(last_step=9)
    assert change in refused.value.message
    assert str(value) in (refused.value.hint or "")


def test_data_that_are_not_known_are_no_other_data(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    checkpointing(tmp_path, data_digest=None).resume(last_step=9)
    content = torch.load(path, weights_only=True)
    del content["identity"]["data_digest"]  # as older checkpoints are
    torch.save(content, path)
    checkpointing(tmp_path).resume(last_step=9)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "step-00000001.pt").write_bytes(content)
    with pytest.raises(RecipeError, match=r"step-00000001\.pt holds no checkpoint"):
        checkpointing(tmp_path).resume(last_step=9)


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
    """Return the bytes of a checkpoint after a step, and those expected before it."""
    stepper, data = toy.build(recipe, ALONE, workload=workload)
    expected = checkpoint_bytes(stepper.model, workload, recipe, world_size=1, best=best)
    train_step(stepper, next(data))
    evaluations = Evaluations(every=1, last_step=9, keep_best=best)
    if best:
        score = Eval(step=1, split="validation", loss=1.0, num_samples=8, seconds=0.1)
        evaluations.best = Best(score=score, weights=stepper.weights())
    save(folder, 1, stepper, evaluations)
    return sum(file.stat().st_size for file in folder.glob("step-*")), expected


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "overrides"),
    [
        ("sgd", ("parameter_dtype=fp32",)),
        ("sgd 0.9", ("parameter_dtype=bf16",)),
        ("sgd 0.9", ("parameter_dtype=bf16-master",)),
        ("adamw", ("parameter_dtype=fp32",)),
        ("adamw", ("parameter_dtype=bf16-master",)),
        ("adafactor", ("parameter_dtype=bf16",)),
        ("sgd", ("optimizer=adamw",)),
    ],
)
def test_a_checkpoint_takes_what_is_expected(
    tmp_path: Path, optimizer: str, overrides: tuple[str, ...], best: bool
) -> None:
    """Never more, and not much less."""
    written, expected = sizes(tmp_path, wide(optimizer), resolve_recipe("bf16", overrides), best=best)
    assert written <= expected <= 1.2 * written


SHARDED = (
    "fsdp2",
    "fsdp2,parameter_dtype=bf16-master",
    *("zero1", "zero2", "zero2,parameter_dtype=bf16-master"),
)


@pytest.mark.full
@pytest.mark.timeout(330)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_checkpoint_of_shards_takes_what_is_expected() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    found = [line.split() for line in ran.stdout.splitlines() if line.startswith("sizes ")]
    assert len(found) == 2 * len(SHARDED)
    for _, what, written, expected in found:
        assert int(written) <= int(expected) <= 1.2 * int(written), what


def main() -> None:
    """In a process of its own, for the groups of these recipes: `sizes RECIPE WRITTEN EXPECTED` a line."""
    for arm in SHARDED:
        name, *overrides = arm.split(",")
        for optimizer in ("sgd 0.9", "adamw"):
            with tempfile.TemporaryDirectory() as folder:
                recipe = resolve_recipe(name, overrides)
                written, expected = sizes(Path(folder), wide(optimizer, Plain), recipe, best=True)
            print("sizes", f"{arm},{optimizer.replace(' ', ',')}", written, expected)
    stop_process()


def test_checkpoints_that_will_not_fit_are_refused_by_their_number(tmp_path: Path) -> None:
    check_space(tmp_path / "checkpoints", 1000)
    with pytest.raises(OSError, match="3 checkpoints of 1048576") as refused:
        check_writers_space(ALONE, tmp_path / "checkpoints", 2**50, sharded=False)
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
        printed = [each.communicate(timeout=100)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
    ends = [end_of(output, rank=rank) for rank, output in enumerate(outputs)]
    assert [end.status for end in ends] == 2 * ["failed" if is_refused else "completed"], printed
    if is_refused:
        assert all(str(outputs[0]) in (end.message or "") for end in ends), printed
    else:
        assert (outputs[0] / "checkpoints" / "step-00000020.pt").exists()


if __name__ == "__main__":
    main()
