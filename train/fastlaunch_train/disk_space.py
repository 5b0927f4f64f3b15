"""Room on the disk for checkpoints, before a training that could not save the first one."""

import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process, broadcast_object
from fastlaunch_train.loop.checkpoint import KEPT, left_over, saved_in
from fastlaunch_train.recipes.recipes import Recipe, RecipeError
from fastlaunch_train.recipes.rules import ZERO_STAGES
from fastlaunch_train.workloads.contract import Workload

#: What a tensor takes in a checkpoint beside its values: names, shapes, alignment (torch 2.13; 400 of them in
#: vit-tiny took 390 bytes each).
_ENTRY_BYTES = 512
#: Random generators of a rank: 5056 bytes of the CPU's, 16 of a GPU's.
_RANK_BYTES = 8192
_FP32_BYTES = 4


def check_writers_space(process: Process, directory: Path, checkpoint_bytes: int) -> None:
    """As `check_space`, for the rank that writes: every rank calls this, and raises what it does there.

    Other nodes write no checkpoints, and may have disks without room for one.
    """
    refused: RecipeError | OSError | None = None
    if process.rank == 0:
        try:
            check_space(directory, checkpoint_bytes)
        except (RecipeError, OSError) as error:
            refused = error
    refused = broadcast_object(process, refused)
    if refused is not None:
        raise refused


def check_space(directory: Path, checkpoint_bytes: int) -> None:
    """OSError if the disk cannot hold KEPT checkpoints beside the one that is being written.

    directory: of the checkpoints, which is made; those that are in it are replaced by the new ones, and what
    a killed process left half written is removed. Raises RecipeError if nothing can be written there.
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
    there = sum(path.stat().st_size for path in (*saved_in(directory), *left_over(directory)))
    needed = (KEPT + 1) * checkpoint_bytes
    free = shutil.disk_usage(directory).free
    if free + there < needed:
        told = (
            f"{KEPT + 1} checkpoints of {checkpoint_bytes / 2**30:.2f} GiB need {needed / 2**30:.2f} GiB, "
            f"{(free + there) / 2**30:.2f} are free"
        )
        raise OSError(errno.ENOSPC, told, str(directory))


def checkpoint_bytes(
    model: nn.Module, workload: Workload, recipe: Recipe, *, world_size: int, best: bool
) -> int:
    """The size of a checkpoint: weights, optimizer state, fp32 masters, and the best weights if `best`.

    model: as it is trained, wrapped and sharded, in its parameters' dtypes. The same on every rank.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Weights that are tied are one in a file, unless they were gathered or copied one by one.
    tensors = list(_saved(model, once=recipe.parallelism in ("ddp", "zero3")))
    total = sum(_bytes(tensor) for tensor in tensors)
    masters = recipe.parallelism in ZERO_STAGES or recipe.parameter_dtype == "bf16-master"
    entries = len(tensors)
    for parameter in parameters:
        element_bytes = _FP32_BYTES if masters else parameter.element_size()
        for numbers in _moments(workload, recipe, _shape(parameter)):
            total += numbers * element_bytes
            entries += 1
        if masters:
            total += _numel(parameter) * _FP32_BYTES
            entries += 1
    if best:
        held = [*model.parameters(), *model.buffers()]
        total += sum(_bytes(tensor) for tensor in held)
        entries += len(held)
    return total + entries * _ENTRY_BYTES + world_size * _RANK_BYTES


def _moments(workload: Workload, recipe: Recipe, shape: torch.Size) -> Iterator[int]:
    """How many numbers each tensor of the optimizer's state of a parameter has."""
    name = workload.optimizer if recipe.optimizer == "workload" else recipe.optimizer
    if name == "sgd":
        yield from [shape.numel()] if workload.momentum else []
    elif name == "adamw":
        yield from (shape.numel(), shape.numel(), 1)
    elif len(shape) >= 2:
        yield from (shape.numel() // shape[-1], shape.numel() // shape[-2])
    else:
        yield shape.numel()


def _saved(model: nn.Module, *, once: bool) -> Iterator[torch.Tensor]:
    """What is in the state dict of `model`, which itself would ask modules for states that take time."""
    seen = set()
    for _, module in model.named_modules(remove_duplicate=False):
        passing = module._non_persistent_buffers_set
        buffers = [value for name, value in module.named_buffers(recurse=False) if name not in passing]
        for tensor in (*module.parameters(recurse=False), *buffers):
            # Not by address: what ZeRO-3 has sharded has none.
            if not once or id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _bytes(tensor: torch.Tensor) -> int:
    return _numel(tensor) * tensor.element_size()


def _numel(tensor: torch.Tensor) -> int:
    """Of the whole tensor, where each rank holds a part."""
    return int(getattr(tensor, "ds_numel", tensor.numel()))


def _shape(tensor: torch.Tensor) -> torch.Size:
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape
