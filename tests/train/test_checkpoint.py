"""Checkpoints: complete or absent, two kept, and only for the job they were made by."""

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.checkpoint import (
    Checkpointing,
    Identity,
    floats_as_text,
    floats_from_text,
    latest_checkpoint,
    random_state,
    read_checkpoint,
    restore_random_state,
    write_checkpoint,
)
from fastlaunch_train.process.failures import EXIT_DISK_FULL, UnsavedError, classify
from fastlaunch_train.recipes.recipe import RecipeError

CPU = torch.device("cpu")
IDENTITY = Identity(
    workload="tiny",
    recipe="fp16",
    data="loader",
    seed=1,
    batch_size=4,
    world_size=1,
    sequence_length=64,
    data_digest="0a1b",
)


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(torch.randn(2, 4)).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def save(self, directory: Path, step: int) -> Path:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        return write_checkpoint(
            directory, step=step, identity=IDENTITY, state=state, random_states=[random_state(CPU)]
        )

    def load(self, path: Path, identity: Identity = IDENTITY) -> int:
        saved = read_checkpoint(path, identity=identity)
        self.model.load_state_dict(saved.state["model"])
        self.optimizer.load_state_dict(saved.state["optimizer"])
        self.scaler.load_state_dict(saved.state["scaler"])
        restore_random_state(saved.random_states[0], CPU)
        return saved.step


def test_a_restored_job_goes_on_as_the_saved_one_does(tmp_path: Path) -> None:
    saved, restored = Job(), Job()
    for _ in range(3):
        saved.train()
    path = saved.save(tmp_path, 3)
    state_after_saving = torch.get_rng_state()
    saved.train()
    torch.manual_seed(99)
    assert restored.load(path) == 3
    assert torch.equal(torch.get_rng_state(), state_after_saving)
    restored.train()
    assert torch.equal(saved.model.weight, restored.model.weight)
    assert saved.scaler.get_scale() == restored.scaler.get_scale()


def test_a_checkpoint_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    class Watching:
        def __reduce__(self) -> tuple[Any, ...]:
            newest.append(latest_checkpoint(tmp_path))
            return dict, ()

    newest: list[Path | None] = []
    paths = [
        write_checkpoint(
            tmp_path, step=step, identity=IDENTITY, state={"model": Watching()}, random_states=[]
        )
        for step in (1, 2)
    ]
    assert newest == [None, paths[0]]


def test_the_newest_two_are_kept_and_a_users_own_files(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    # As processes that were killed while they saved leave it.
    (tmp_path / "step-00000007.partial").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) is None
    own = {"step-final.pt", "step-mine.partial"}
    for name in own:
        (tmp_path / name).touch()
    job = Job()
    for step in (5, 10, 15, 100):
        job.save(tmp_path, step)
    assert {path.name for path in tmp_path.iterdir()} == own | {"step-00000015.pt", "step-00000100.pt"}
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-00000100.pt"


@pytest.mark.parametrize("missing", [0.999, 0.9, 0.01, 0.0003])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_partial_one(tmp_path: Path, missing: float) -> None:
    """Wherever in the file it is full: near the end torch.save has an error of its own to tell."""
    job = Job()
    job.save(tmp_path, 1)
    job.model = nn.Linear(512, 512)
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    size = job.save(tmp_path / "elsewhere", 2).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (round(size * (1 - missing)), before[1]))
    try:
        with pytest.raises(UnsavedError, match=r"File too large: .*step-00000002\.pt") as failed:
            job.save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.glob("*.*")] == ["step-00000001.pt"]
    assert classify(failed.value).exit_code == EXIT_DISK_FULL


@pytest.mark.parametrize(("seconds", "warned"), [(60.0, False), (60.5, True)])
def test_a_checkpoint_too_slow_for_spot_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float, warned: bool
) -> None:
    Checkpointing(
        directory=tmp_path,
        identity=IDENTITY,
        process=Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=CPU),
        stepper=None,  # type: ignore[arg-type]
        evaluations=None,
        sharded=False,
        phase=lambda name, work, *, step: seconds,  # type: ignore[arg-type]
    ).save(1)
    assert ("spot" in caplog.text) == warned


@pytest.mark.parametrize("change", [*vars(IDENTITY)])
def test_another_job_is_refused_by_name(tmp_path: Path, change: str) -> None:
    job = Job()
    path = job.save(tmp_path, 1)
    other = {**vars(IDENTITY), change: "other" if isinstance(vars(IDENTITY)[change], str) else 77}
    with pytest.raises(RecipeError) as refused:
        job.load(path, Identity(**other))
    assert change in refused.value.message
    assert str(vars(IDENTITY)[change]) in (refused.value.hint or "")


def test_data_that_are_not_known_are_no_other_data(tmp_path: Path) -> None:
    job, unknown = Job(), replace(IDENTITY, data_digest=None)
    job.load(job.save(tmp_path / "new", 1), unknown)
    path = job.save(tmp_path / "old", 1)
    content = torch.load(path, weights_only=True)
    del content["identity"]["data_digest"]  # as older checkpoints are
    torch.save(content, path)
    job.load(path, IDENTITY)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"step-00000001\.pt is not a checkpoint"):
        Job().load(path)


def test_floats_go_through_text_to_the_bit() -> None:
    weight = torch.ones(2)
    state = {"lr": 0.1, 3: [1, (-1e-300, True), None], "w": weight, "inner": {"betas": (0.9, 0.999)}}
    as_text = floats_as_text(state)
    assert as_text["lr"] == {"float": (0.1).hex()}
    assert as_text["w"] is weight
    assert floats_from_text(as_text) == state
    assert floats_from_text(state) == state
