"""Checkpoints: the complete state, so that a resumed run takes the same next step.

A checkpoint gets its name only when it is complete (written aside, synced, renamed), so the newest
`step-*.pt` is always usable. Only the two newest stay.
"""

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.checks.finiteness import first_names, not_finite, not_finite_message
from fastlaunch_train.distributed.parallel import (
    Process,
    agree,
    broadcast_object,
    gather_object,
)
from fastlaunch_train.loop.evaluation import Evaluations
from fastlaunch_train.loop.training import PhaseClock
from fastlaunch_train.process.failures import NanLossError, unsaved
from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe, RecipeError
from fastlaunch_train.steppers.optimizers import optimizer_name
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.workloads.contract import Workload
from fastlaunch_train.workloads.registry import Scalar

log = logging.getLogger("fastlaunch_train")

#: Number of newest checkpoints to keep.
KEPT = 2
#: Seconds. A longer save may not finish on a spot instance: EC2 takes it two minutes after its notice.
LONG_CHECKPOINT_S = 60.0

#: Key of each rank's Evaluations.state(), beside a Stepper's state.
_EVALUATIONS = "evaluations"

#: Bytes of a tensor in a checkpoint beside its values: names, shapes, alignment (torch 2.13; the 400 tensors
#: of vit-tiny took 390 bytes each).
_ENTRY_BYTES = 512
#: Bytes of a rank's random generators: the CPU's takes 5056, a GPU's 16.
_RANK_BYTES = 8192
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The job of a checkpoint; no other job can resume from it."""

    workload: str
    recipe: str
    data: str
    seed: int
    batch_size: int
    world_size: int
    sequence_length: int | None = None
    #: Digest of the samples; None if they have none or it is unknown, as in older checkpoints.
    data_digest: str | None = None
    #: Arguments of a user's own workload.
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    #: Steps over which the learning rate falls; None if it does not fall.
    schedule_steps: int | None = None

    def differing(self, other: "Identity") -> list[str]:
        """Return the names of the fields that differ. A missing digest does not differ."""
        names = [name for name, value in vars(self).items() if vars(other)[name] != value]
        if None in (self.data_digest, other.data_digest):
            names = [name for name in names if name != "data_digest"]
        return names


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Saves and resumes `stepper` and `evaluations`; rank 0 writes the state of all ranks to one file."""

    directory: Path
    identity: Identity
    process: Process
    stepper: Stepper
    #: Holds the best weights so far.
    evaluations: Evaluations | None
    #: Whether each rank has a share of the weights, so that a checkpoint holds the best weights of every
    #: rank.
    sharded: bool
    phase: PhaseClock

    def save(self, step: int) -> None:
        """Save the checkpoint of `step`. Every rank calls this.

        Raises NanLossError, on every rank, if the state is not finite: no run could go on from it, and it
        would replace a checkpoint from which a run can.
        """
        seconds = self.phase("checkpoint", lambda: self._save(step), step=step)
        if seconds > LONG_CHECKPOINT_S:
            log.warning(
                "warning: the checkpoint took %.0f s. A spot instance is gone two minutes after its notice, "
                "and the upload of the checkpoint has to fit into them too",
                seconds,
            )

    def _save(self, step: int) -> str | None:
        random_states = gather_object(self.process, random_state(self.process.device))
        state = self.stepper.state()
        if self.evaluations is not None:
            evaluation_state = self.evaluations.state()
            state[_EVALUATIONS] = (
                gather_object(self.process, evaluation_state) if self.sharded else [evaluation_state]
            )
        bad = not_finite(state, self.stepper.model) if self.process.rank == 0 else []
        if agree(self.process, [float(len(bad))])[0]:
            kept = latest_checkpoint(self.directory)
            raise NanLossError(
                f"{not_finite_message(step, bad)}: it is not saved, "
                + (f"{kept.name} is the last checkpoint" if kept else "and there is no checkpoint before it")
            )
        if self.process.rank != 0:
            return None
        path = write_checkpoint(
            self.directory, step=step, identity=self.identity, state=state, random_states=random_states
        )
        return path.name

    def resume(self, *, last_step: int) -> int:
        """Load the newest checkpoint that rank 0 sees; return its step, or 0 if there is none.

        Raises RecipeError if it belongs to another job, is later than `last_step`, or is not finite.
        """
        step = newest_step(self.process, self.directory)
        if step == 0:
            return 0
        path = checkpoint_path(self.directory, step)
        state, random_states = read_checkpoint(path, identity=self.identity)
        # A run that was killed after its last checkpoint has no step left; it just completes.
        if step > last_step:
            raise RecipeError(f"{path} is after step {step}, and --steps is {last_step}", "give more --steps")
        bad = not_finite(state, self.stepper.model)
        if bad:
            raise RecipeError(
                f"{path} holds what is not finite: {first_names(bad)}",
                "remove it, so that the one before is taken",
            )
        evaluations = state.pop(_EVALUATIONS, None)
        if self.evaluations is not None and evaluations is not None:
            self.evaluations.load_state(evaluations[self.process.rank if self.sharded else 0])
        self.stepper.load_state(state)
        restore_random_state(random_states[self.process.rank], self.process.device)
        return step


def checkpoint_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step`."""
    return directory / f"step-{step:08d}.pt"


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint in `directory`, if there is one."""
    return max(_named_by_step(directory, ".pt"), default=None)


def newest_step(process: Process, directory: Path) -> int:
    """Return the step of the newest checkpoint that rank 0 sees, or 0. Every rank calls this."""
    newest = latest_checkpoint(directory)
    step: int = broadcast_object(process, int(newest.stem.removeprefix("step-")) if newest else 0)
    return step


def _named_by_step(directory: Path, suffix: str) -> list[Path]:
    """Return complete checkpoints (`.pt`) or the remains of killed processes (`.partial`), oldest first.

    Files with other names belong to the user.
    """
    paths = directory.glob(f"step-*{suffix}")
    return sorted(path for path in paths if path.stem.removeprefix("step-").isdigit())


def write_checkpoint(
    directory: Path,
    *,
    step: int,
    identity: Identity,
    state: dict[str, Any],
    random_states: list[dict[str, torch.Tensor]],
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest two; return its path. For rank 0.

    Raises UnsavedError if the disk refuses. Earlier checkpoints stay.
    """
    path = checkpoint_path(directory, step)
    partial = path.with_suffix(".partial")
    content = {"step": step, "identity": vars(identity), **state, "random_states": random_states}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in _named_by_step(directory, ".partial"):
            leftover.unlink(missing_ok=True)
        with partial.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        refusal = unsaved(error, path) if isinstance(error, (OSError, RuntimeError)) else None
        if refusal is None:
            raise
        raise refusal from error
    for old in _named_by_step(directory, ".pt")[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(
    path: Path, *, identity: Identity
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """Return the state in `path`, on the CPU, and the random states of all ranks, in order.

    Raises RecipeError unless it is a checkpoint of this job.
    """
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved = Identity(**content.pop("identity"))
        del content["step"]
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
    return content, random_states


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of this rank's random generators."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Set this rank's random generators to `state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def check_writers_space(process: Process, directory: Path, checkpoint_bytes: int) -> None:
    """Raise on every rank what `check_space` raises on the rank that writes. Every rank calls this.

    Other nodes write no checkpoints, and may have disks without room for one.
    """
    _on_the_writer(process, lambda: check_space(directory, checkpoint_bytes))


def check_model_space(process: Process, directory: Path, model: nn.Module) -> None:
    """Raise OSError on every rank if the writer's disk cannot hold the model. Every rank calls this."""
    needed = sum(map(_bytes, model.parameters()))

    def check() -> None:
        free = shutil.disk_usage(directory).free
        if free < needed:
            message = f"the model takes {needed / 2**30:.2f} GiB at the end, {free / 2**30:.2f} are free"
            raise OSError(errno.ENOSPC, message, str(directory))

    _on_the_writer(process, check)


def _on_the_writer(process: Process, check: Callable[[], None]) -> None:
    refusal: RecipeError | OSError | None = None
    if process.rank == 0:
        try:
            check()
        except (RecipeError, OSError) as error:
            refusal = error
    refusal = broadcast_object(process, refusal)
    if refusal is not None:
        raise refusal


def check_space(directory: Path, checkpoint_bytes: int) -> None:
    """Raise OSError if the disk cannot hold KEPT checkpoints and the one that is being written.

    directory: folder of the checkpoints, created if need be. New checkpoints replace those in it, so their
    space counts as free. Raises RecipeError if nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise RecipeError(
            f"no checkpoint can be written to {directory}: {error.strerror}",
            "give another --output, or leave out --checkpoint-every",
        ) from error
    replaced = [*_named_by_step(directory, ".pt"), *_named_by_step(directory, ".partial")]
    free = shutil.disk_usage(directory).free + sum(path.stat().st_size for path in replaced)
    needed = (KEPT + 1) * checkpoint_bytes
    if free < needed:
        message = (
            f"{KEPT + 1} checkpoints of {checkpoint_bytes / 2**30:.2f} GiB need {needed / 2**30:.2f} GiB, "
            f"{free / 2**30:.2f} are free"
        )
        raise OSError(errno.ENOSPC, message, str(directory))


def checkpoint_bytes(
    model: nn.Module, workload: Workload, recipe: Recipe, *, world_size: int, best: bool
) -> int:
    """Return the size of a checkpoint: weights, optimizer state, fp32 masters, best weights if `best`.

    model: as trained: wrapped, sharded, in its parameters' dtypes. All ranks get the same size.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Tied weights are saved once, unless they are gathered or copied one by one.
    tensors = list(_state_tensors(model, once=recipe.parallelism == "ddp"))
    total = sum(_bytes(tensor) for tensor in tensors)
    masters = recipe.parallelism in ZERO_STAGES or recipe.parameter_dtype == "bf16-master"
    num_entries = len(tensors)
    for parameter in parameters:
        element_bytes = _FP32_BYTES if masters else parameter.element_size()
        sizes = _moment_sizes(workload, recipe, parameter.shape)
        total += sum(sizes) * element_bytes
        num_entries += len(sizes)
        if masters:
            total += parameter.numel() * _FP32_BYTES
            num_entries += 1
    if best:
        held = [*parameters, *model.buffers()]
        total += sum(_bytes(tensor) for tensor in held)
        num_entries += len(held)
    return total + num_entries * _ENTRY_BYTES + world_size * _RANK_BYTES


def _moment_sizes(workload: Workload, recipe: Recipe, shape: torch.Size) -> list[int]:
    """Return the number of values in each tensor of the optimizer's state for one parameter."""
    name = optimizer_name(workload, recipe)
    if name == "sgd":
        return [shape.numel()] if workload.momentum else []
    # We assume the same for a workload's own optimizer.
    if name in ("adamw", "own"):
        return [shape.numel(), shape.numel(), 1]
    if len(shape) >= 2:
        return [shape.numel() // shape[-1], shape.numel() // shape[-2]]
    return [shape.numel()]


def _state_tensors(model: nn.Module, *, once: bool) -> Iterator[torch.Tensor]:
    """Yield the tensors of `model_state` without building it, which may compute slow extra states."""
    seen = set()
    for _, module in model.named_modules(remove_duplicate=False):
        not_saved = module._non_persistent_buffers_set
        buffers = [value for name, value in module.named_buffers(recurse=False) if name not in not_saved]
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        for tensor in (*trained, *buffers):
            if not once or id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
