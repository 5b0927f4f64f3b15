"""Checkpoints: the complete state, so that a resumed run takes the same next step.

A save copies the state to host memory, and a thread writes the copy while the steps go on. Rank 0 writes
`step-<n>.pt`. What is sharded over N ranks goes into a file of each, and then rank 0 writes
`step-<n>-a<attempt>-of-<N>.pt`: a checkpoint all of whose files are there is usable, on any number of ranks.
With the attempt in their names, files of two attempts at a step never count as one checkpoint. A file gets
its name only when it is complete (written aside, synced, renamed). Only the two newest checkpoints stay.
"""

import errno
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import keystr, tree_map, tree_map_with_path

from fastlaunch_train.checks.finiteness import first_names, not_finite, not_finite_message
from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import Process, agree, broadcast_object, gather_object
from fastlaunch_train.distributed.shard_files import damaged, load_shards, save_shards, write_whole
from fastlaunch_train.loop.evaluation import Evaluations
from fastlaunch_train.loop.training import PhaseClock, Saves
from fastlaunch_train.process.failures import NanLossError, UnsavedError
from fastlaunch_train.recipes.recipe import ZERO_STAGES, Recipe, RecipeError
from fastlaunch_train.records.records import WRITE_PHASE
from fastlaunch_train.steppers.optimizers import optimizer_name
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.workloads.contract import Workload
from fastlaunch_train.workloads.registry import Scalar

log = logging.getLogger("fastlaunch_train")

#: Number of newest checkpoints to keep.
KEPT = 2
#: Seconds. A longer save may not finish on a spot instance: EC2 takes it two minutes after its notice.
LONG_CHECKPOINT_S = 60.0

#: Key of the Evaluations.state(), beside a Stepper's state.
_EVALUATIONS = "evaluations"
#: Key of the name of a sharded tensor, beside its layout, which takes its place in rank 0's file.
_SHARDED = "sharded"
#: The files of checkpoints, and the remains of killed processes; other files belong to the user.
_FILE = re.compile(
    r"step-(?P<step>\d{8,})(-a(?P<attempt>\d+)(-of-(?P<shards>\d{5})|\.\d{5}-of-\d{5}))?\.(pt|distcp|partial)"
)

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

    def differing(self, other: "Identity", *, can_reshard: bool = False) -> list[str]:
        """Return the names of the fields that differ. A missing digest does not differ.

        can_reshard: whether the number of ranks may differ if a step takes as many samples.
        """
        free = {"data_digest"} if None in (self.data_digest, other.data_digest) else set()
        if can_reshard and self.batch_size * self.world_size == other.batch_size * other.world_size:
            free |= {"batch_size", "world_size"}
        return [name for name, value in vars(self).items() if vars(other)[name] != value and name not in free]


class Checkpointing(Saves):
    """Saves and resumes `stepper` and `evaluations`; all ranks make the same calls.

    evaluations: hold the best weights so far.
    """

    def __init__(
        self,
        *,
        directory: Path,
        identity: Identity,
        process: Process,
        stepper: Stepper,
        evaluations: Evaluations | None,
        phase: PhaseClock,
        attempt: int,
    ) -> None:
        self.directory = directory
        self._identity = identity
        self._process = process
        self._stepper = stepper
        self._evaluations = evaluations
        self._phase = phase
        self._is_sharded = stepper.recipe.parallelism == "fsdp2"
        self._shards = f"-a{attempt}-of-{process.world_size:05d}" if self._is_sharded else ""
        # The thread that writes has its own group: its messages would mix with those of the steps.
        self._group = dist.new_group(backend="gloo") if self._is_sharded else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        #: The checkpoint under way, alike on every rank, and what this rank writes of it.
        self._path: Path | None = None
        self._writing: Future[float] | None = None
        self._last: Path | None = None

    def save(self, step: int) -> None:
        """Begin to save the checkpoint of `step`, once the one before is written.

        Raises NanLossError, on every rank, if the state is not finite: no run could go on from it, and it
        would replace a checkpoint from which a run can. Raises what `finish` does.
        """
        self.finish()
        self._phase("checkpoint", lambda: self._begin(step), step=step)

    @property
    def is_begun(self) -> bool:
        return self._path is not None

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint under way, if there is one.

        Raises UnsavedError on every rank if a disk refused it; the checkpoint before it stays.
        """
        path, writing = self._path, self._writing
        if path is None:
            return
        if writing and self.is_writing:
            # The training stands still meanwhile.
            self._phase("checkpoint", lambda: wait([writing]) and path.name, step=_step_of(path))
        error = writing.exception() if writing else None
        self._path, self._writing = None, None
        (is_failed,) = agree(self._process, [float(error is not None)])
        if is_failed:
            refusals = gather_object(self._process, _refusal(error))
            refusal = broadcast_object(self._process, next(filter(None, refusals), None))
            raise refusal or error or RuntimeError(f"{path} could not be written by another rank")
        self._last = path
        if writing is None:
            return
        seconds = writing.result()
        self._phase.add(WRITE_PHASE, seconds, step=_step_of(path), detail=path.name)
        if seconds > LONG_CHECKPOINT_S:
            log.warning(
                "warning: the checkpoint took %.0f s. A spot instance is gone two minutes after its notice, "
                "and the upload of the checkpoint has to fit into them too",
                seconds,
            )

    def close(self) -> None:
        """Give this rank's part of a checkpoint under way some time, after the training has failed."""
        if self._writing is not None:
            wait([self._writing], timeout=LONG_CHECKPOINT_S)

    def _begin(self, step: int) -> str | None:
        process = self._process
        random_states = gather_object(process, random_state(process.device))
        state = self._stepper.state()
        if self._evaluations is not None:
            state[_EVALUATIONS] = [self._evaluations.state()]
        is_writer = self._is_sharded or process.rank == 0
        bad = not_finite(tree_map(fsdp.local_shard, state), self._stepper.model) if is_writer else []
        if agree(process, [float(len(bad))])[0]:
            raise NanLossError(
                f"{not_finite_message(step, bad)}: it is not saved, "
                + (
                    f"{self._last.name} is the last checkpoint"
                    if self._last
                    else "and there is no checkpoint before it"
                )
            )
        self._path = path = checkpoint_path(self.directory, step, self._shards)
        if not is_writer:
            return None
        content = {"step": step, "identity": vars(self._identity), "random_states": random_states}
        content |= _copied(state)
        self._writing = self._thread.submit(lambda: self._write(path, content))
        return path.name

    def _write(self, path: Path, content: dict[str, Any]) -> float:
        """Write this rank's part; return the seconds."""
        started = time.perf_counter()
        rest, tensors = _split(content)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnsavedError(error.errno, error.strerror, str(path)) from error
        if self._group is None:
            write_whole(path, rest)
        else:
            save_shards(
                tensors,
                shard_path(path, self._process.rank),
                self._group,
                complete=lambda index: write_whole(path, {**rest, "index": index}),
            )
        if self._process.local_rank == 0:
            # All ranks have written theirs, and begin no other before this one is finished.
            files = _files(self.directory)
            kept = sorted({step for step, file in files if file.suffix != ".partial"})[-KEPT:]
            for step, file in files:
                if step not in kept:
                    file.unlink(missing_ok=True)
        return time.perf_counter() - started

    def resume(self, *, last_step: int) -> int:
        """Load the newest checkpoint that rank 0 sees; return its step, or 0 if there is none.

        Raises RecipeError if it belongs to another job, is later than `last_step`, or is not finite.
        """
        path = newest_checkpoint(self._process, self.directory)
        if path is None:
            return 0
        content = read_checkpoint(path, identity=self._identity)
        step = _step_of(path)
        # A run that was killed after its last checkpoint has no step left; it just completes.
        if step > last_step:
            raise RecipeError(f"{path} is after step {step}, and --steps is {last_step}", "give more --steps")
        random_states, index = content.pop("random_states"), content.pop("index", None)
        if self._group is not None:
            if index is None:
                raise RecipeError(
                    f"{path} is of an older version, which kept the weights of all ranks in one file",
                    "start without --resume",
                )
            content, tensors = _joined(content, self._process)
            load_shards(tensors, lambda rank: shard_path(path, rank), index, self._group)
        bad = not_finite(tree_map(fsdp.local_shard, content), self._stepper.model)
        if agree(self._process, [float(len(bad))])[0]:
            raise RecipeError(
                f"{path} holds what is not finite{f': {first_names(bad)}' if bad else ''}",
                "remove it, so that the one before is taken",
            )
        evaluations = content.pop(_EVALUATIONS, None)
        if self._evaluations is not None and evaluations is not None:
            self._evaluations.load_state(evaluations[0])
        self._stepper.load_state(content)
        # Other ranks than those that saved them begin with generators of their own.
        if len(random_states) == self._process.world_size:
            restore_random_state(random_states[self._process.rank], self._process.device)
        self._last = path
        if self._process.local_rank == 0:
            for other, file in _files(self.directory):
                if other > step or file.suffix == ".partial":
                    file.unlink(missing_ok=True)
        return step


def checkpoint_path(directory: Path, step: int, shards: str = "") -> Path:
    """Return the path of rank 0's file of the checkpoint after `step`. shards: `-a2-of-00016`, if any."""
    return directory / f"step-{step:08d}{shards}.pt"


def shard_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's file beside `path`, a sharded checkpoint's."""
    attempt, _, num_shards = path.stem.partition("-of-")
    return path.with_name(f"{attempt}.{rank:05d}-of-{num_shards}.distcp")


def latest_checkpoint(directory: Path) -> Path | None:
    """Return rank 0's file of the newest checkpoint in `directory` with all of its files, if there is one."""
    whole = [path for _, path in _files(directory) if path.suffix == ".pt" and _is_whole(path)]
    return max(whole, key=lambda path: (_step_of(path), path.name), default=None)


def newest_checkpoint(process: Process, directory: Path) -> Path | None:
    """Return the newest checkpoint that rank 0 sees, if there is one. Every rank calls this."""
    path: Path | None = broadcast_object(process, latest_checkpoint(directory))
    return path and directory / path.name


def _is_whole(path: Path) -> bool:
    match = _FILE.fullmatch(path.name)
    shards = range(int(match["shards"] or 0) if match else 0)
    return all(shard_path(path, rank).exists() for rank in shards)


def _files(directory: Path) -> list[tuple[int, Path]]:
    """Return all files of checkpoints, and of those that were not completed, with their steps."""
    return [(_step_of(path), path) for path in directory.glob("step-*") if _FILE.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    match = _FILE.fullmatch(path.name)
    assert match
    return int(match["step"])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with its tensors copied to host memory, tied ones once."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        value = fsdp.local_shard(leaf.detach())
        place = (value.data_ptr(), value.dtype, value.shape, value.stride(), id(leaf) * (not value.numel()))
        if place not in copies:
            copies[place] = leaf.detach().to("cpu", copy=True)
        return copies[place]

    copy: dict[str, Any] = tree_map(copied, state)
    return copy


def _split(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the content with names in place of its sharded tensors, and these by their names."""
    tensors: dict[str, torch.Tensor] = {}

    def named(path: tuple[Any, ...], leaf: Any) -> Any:
        if not fsdp.is_sharded(leaf):
            return leaf
        name = keystr(path)
        tensors[name] = leaf
        return {_SHARDED: name, **fsdp.layout(leaf)}

    return tree_map_with_path(named, content), tensors


def _joined(content: dict[str, Any], process: Process) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what `_split` was given, with empty tensors sharded over the present ranks, and these."""
    tensors: dict[str, torch.Tensor] = {}

    def is_named(part: Any) -> bool:
        return isinstance(part, dict) and _SHARDED in part

    def sharded(part: Any) -> Any:
        if not is_named(part):
            return part
        tensors[part[_SHARDED]] = tensor = fsdp.empty(part, process)
        return tensor

    return tree_map(sharded, content, is_leaf=is_named), tensors


def _refusal(error: BaseException | None) -> UnsavedError | None:
    """Return what a disk said, of any rank, if that is the error."""
    if isinstance(error, CheckpointException):
        errors: list[BaseException | None] = [failure[0] for failure in error.failures.values()]
    else:
        errors = [error]
    return next((error for error in errors if isinstance(error, UnsavedError)), None)


def read_checkpoint(path: Path, *, identity: Identity) -> dict[str, Any]:
    """Return the content of rank 0's file, on the CPU. Raises RecipeError unless it is of this job."""
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved = Identity(**content.pop("identity"))
        del content["step"]
        _ = content["random_states"]
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise damaged(path, error) from None
    different = identity.differing(saved, can_reshard="index" in content)
    if different:
        as_saved = ", ".join(f"{name} {vars(saved)[name]}" for name in different)
        raise RecipeError(
            f"{path} was made with another {', '.join(different)}",
            f"resume with {as_saved}, or start without --resume",
        )
    return content


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


def check_writers_space(process: Process, directory: Path, checkpoint_bytes: int, *, sharded: bool) -> None:
    """Raise on every rank what `check_space` raises where checkpoints are written. Every rank calls this.

    That is rank 0's node or, for shards, every node. Others may have disks without room for a checkpoint.
    """
    num_bytes = checkpoint_bytes // process.num_nodes if sharded else checkpoint_bytes
    is_writer = process.local_rank == 0 if sharded else process.rank == 0
    _on_writers(process, is_writer, lambda: check_space(directory, num_bytes))


def check_model_space(process: Process, directory: Path, model: nn.Module) -> None:
    """Raise OSError on every rank if the writer's disk cannot hold the model. Every rank calls this."""
    needed = sum(map(_bytes, model.parameters()))

    def check() -> None:
        free = shutil.disk_usage(directory).free
        if free < needed:
            message = f"the model takes {needed / 2**30:.2f} GiB at the end, {free / 2**30:.2f} are free"
            raise OSError(errno.ENOSPC, message, str(directory))

    _on_writers(process, process.rank == 0, check)


def _on_writers(process: Process, is_writer: bool, check: Callable[[], None]) -> None:
    refusal: RecipeError | OSError | None = None
    if is_writer:
        try:
            check()
        except (RecipeError, OSError) as error:
            refusal = error
    refusals = gather_object(process, refusal)
    refusal = broadcast_object(process, next(filter(None, refusals), None))
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
    free = shutil.disk_usage(directory).free + sum(path.stat().st_size for _, path in _files(directory))
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
