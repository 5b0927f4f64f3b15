"""Checkpoints: everything that makes the next step what it would have been without a stop.

A checkpoint appears under its own name only when it is complete (written aside, synced, renamed), so the
newest `step-*.pt` is always usable. The two newest are kept.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastlaunch_train.process.failures import unsaved
from fastlaunch_train.recipes.recipes import RecipeError

KEPT = 2

#: Of a mapping that stands for a float.
_FLOAT = "float"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a checkpoint belongs to; resuming anything else is refused.

    data_digest: of what was read; None if nothing was, or if it is not known, as of older checkpoints.
    """

    workload: str
    recipe: str
    data: str
    seed: int
    batch_size: int
    world_size: int
    sequence_length: int | None = None
    data_digest: str | None = None

    def differing(self, other: "Identity") -> list[str]:
        """Names of what the two differ in; a digest that one does not know is no difference."""
        names = [name for name, value in vars(self).items() if vars(other)[name] != value]
        if None in (self.data_digest, other.data_digest):
            names = [name for name in names if name != "data_digest"]
        return names


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` lies."""
    return directory / f"step-{step:08d}.pt"


def step_of(checkpoint: Path) -> int:
    """The step after which `checkpoint` was saved, by its name."""
    return int(checkpoint.stem.removeprefix("step-"))


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory`, if there is one."""
    found = saved_in(directory)
    return found[-1] if found else None


def saved_in(directory: Path) -> list[Path]:
    """The complete checkpoints, oldest first; other files of a user's own are none."""
    return sorted(path for path in directory.glob("step-*.pt") if path.stem.removeprefix("step-").isdigit())


def left_over(directory: Path) -> list[Path]:
    """What processes that were killed while they saved have left half written."""
    return [path for path in directory.glob("step-*.partial") if path.stem.removeprefix("step-").isdigit()]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds. state: a Stepper's. random_states: of every rank, in order."""

    step: int
    state: dict[str, Any]
    random_states: list[dict[str, torch.Tensor]]


def write_checkpoint(
    directory: Path,
    *,
    step: int,
    identity: Identity,
    state: dict[str, Any],
    random_states: list[dict[str, torch.Tensor]],
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest two; returns its path. For rank 0.

    state: a Stepper's. random_states: of every rank, in order. Raises UnsavedError where the disk refuses:
    what was there before still is.
    """
    path = checkpoint_path(directory, step)
    partial = path.with_suffix(".partial")
    content = {"step": step, "identity": vars(identity), **state, "random_states": random_states}
    if torch.__version__.startswith("1."):
        content = floats_as_text(content)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for useless in left_over(directory):
            useless.unlink(missing_ok=True)
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        told = unsaved(error, path) if isinstance(error, (OSError, RuntimeError)) else None
        if told is None:
            raise
        raise told from error
    for old in saved_in(directory)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path, *, identity: Identity) -> Saved:
    """What `path` holds, on the CPU. Raises RecipeError if it is of another job, or no checkpoint."""
    try:
        content: dict[str, Any] = floats_from_text(torch.load(path, map_location="cpu", weights_only=True))
        saved = Identity(**content.pop("identity"))
        step: int = content.pop("step")
        random_states: list[dict[str, torch.Tensor]] = content.pop("random_states")
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise RecipeError(
            f"{path} is not a checkpoint: {(str(error).splitlines() or [type(error).__name__])[0]}",
            "remove it, so that the one before is taken",
        ) from None
    different = identity.differing(saved)
    if different:
        as_saved = ", ".join(f"{name} {vars(saved)[name]}" for name in different)
        raise RecipeError(
            f"{path} was made with another {', '.join(different)}",
            f"resume with {as_saved}, or start without --resume",
        )
    return Saved(step=step, state=content, random_states=random_states)


def floats_as_text(value: Any) -> Any:
    """`value`, a nest of mappings and lists, for `torch.load` of torch 1, which reads no float safely."""
    if isinstance(value, dict):
        return {key: floats_as_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(floats_as_text(item) for item in value)
    return {_FLOAT: value.hex()} if isinstance(value, float) else value


def floats_from_text(value: Any) -> Any:
    """What `floats_as_text` was given; anything else as it is."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT}:
            return float.fromhex(value[_FLOAT])
        # Of its own kind: a state dict is an OrderedDict, with what its modules say of their versions.
        for key, item in value.items():
            value[key] = floats_from_text(item)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(floats_from_text(item) for item in value)
    return value


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's random generators, for `random_states`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set this rank's random generators to `state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
