"""Checkpoints: complete or absent, two kept, and only for the job they were made by."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fastlaunch_train.exit_codes import EXIT_DISK_FULL
from fastlaunch_train.loop.checkpoint import (
    KEPT,
    Identity,
    floats_as_text,
    floats_from_text,
    latest_checkpoint,
    random_state,
    read_checkpoint,
    restore_random_state,
    write_checkpoint,
)
from fastlaunch_train.process.failures import UnsavedError, classify
from fastlaunch_train.recipes.recipes import RecipeError

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


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    job = Job()
    for step in (5, 10, 15, 100):
        job.save(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000015.pt", "step-00000100.pt"]
    assert KEPT == 2
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000100.pt"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None


def test_a_partial_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-00000007.partial").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) is None


def test_a_file_of_another_name_is_neither_taken_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "step-final.pt").write_bytes(b"a user's own")
    job = Job()
    for step in (1, 2, 3):
        job.save(tmp_path, step)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000003.pt"
    assert len(list(tmp_path.iterdir())) == 3


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


def test_a_folder_that_is_no_longer_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UnsavedError, match="File exists") as failed:
        Job().save(tmp_path / "checkpoints", 1)
    assert classify(failed.value).exit_code == EXIT_DISK_FULL


def test_what_a_killed_process_left_half_written_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "step-00000007.partial").write_bytes(b"half")
    (tmp_path / "step-mine.partial").write_bytes(b"a user's own")
    Job().save(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009.pt", "step-mine.partial"]


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
