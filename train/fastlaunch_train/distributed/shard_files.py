"""Save sharded tensors by torch.distributed.checkpoint, a file for each rank, and load them on any number.

The files hold tensors and plain values alone, where torch's own format is a pickle that runs what it says.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

from fastlaunch_train.process.failures import unsaved
from fastlaunch_train.recipes.recipe import RecipeError

#: By a tensor's name: its dtype, its shape, and its parts as offsets, shape and the rank whose file holds it.
Index = Mapping[str, tuple[torch.dtype, list[int], list[tuple[list[int], list[int], int]]]]


def save_shards(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    group: "dist.ProcessGroup",
    *,
    complete: Callable[[Index], None],
) -> None:
    """Write this rank's parts of sharded tensors to `path`. All ranks call it, with the same names.

    group: the only one in which they meet. complete: called on rank 0 once all ranks have written theirs, and
    before any of them returns. Raises CheckpointException on every rank if one of them, or `complete`, fails.
    """
    writer = _Writer(path, dist.get_rank(), complete)
    state_dict_saver.save(dict(tensors), storage_writer=writer, process_group=group)


def load_shards(
    tensors: Mapping[str, torch.Tensor],
    path_of: Callable[[int], Path],
    index: Index,
    group: "dist.ProcessGroup",
) -> None:
    """Fill tensors in place, which are sharded over the present ranks. All ranks call it.

    path_of: the file of a rank that saved them; every rank reads those that it needs. Raises on every rank
    what one of them met: RecipeError for a damaged file.
    """
    try:
        state_dict_loader.load(dict(tensors), storage_reader=_Reader(path_of, index), process_group=group)
    except CheckpointException as error:
        raise next(failure[0] for failure in error.failures.values()) from None


def write_whole(path: Path, content: Any) -> None:
    """Write a file that has its name only once it is complete, and on the disk.

    Raises UnsavedError if the disk refuses it; nothing of it stays then.
    """
    partial = path.with_suffix(".partial")
    try:
        # Other threads can work while torch writes to an open file.
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


def damaged(path: Path, error: Exception) -> RecipeError:
    """Return the error for a file of a checkpoint that cannot be read."""
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return RecipeError(f"{path} holds no checkpoint: {why}", "remove it, so that the one before is taken")


class _Writer(StorageWriter):
    def __init__(self, path: Path, rank: int, complete: Callable[[Index], None]) -> None:
        self._path = path
        self._rank = rank
        self._complete = complete

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        parts = {item.index: planner.resolve_data(item) for item in plan.items}
        # The last ranks have no part of a tensor with fewer rows than ranks.
        parts = {
            index: part for index, part in parts.items() if isinstance(part, torch.Tensor) and part.numel()
        }
        write_whole(self._path, {_place(index): part for index, part in parts.items()})
        return _done([WriteResult(index=index, size_in_bytes=0, storage_data=self._rank) for index in parts])

    def finish(self, metadata: dcp_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        ranks = {_place(result.index): result.storage_data for of_rank in results for result in of_rank}
        self._complete(
            {
                name: (
                    tensor.properties.dtype,
                    [*tensor.size],
                    [
                        ([*chunk.offsets], [*chunk.sizes], ranks[name, *chunk.offsets])
                        for chunk in tensor.chunks
                        if chunk.sizes.numel()
                    ],
                )
                for name, tensor in metadata.state_dict_metadata.items()
                if isinstance(tensor, dcp_metadata.TensorStorageMetadata)
            }
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    def __init__(self, path_of: Callable[[int], Path], index: Index) -> None:
        self._path_of = path_of
        self._index = index
        self._opened: dict[int, Any] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return dcp_metadata.Metadata(
            {
                name: dcp_metadata.TensorStorageMetadata(
                    properties=dcp_metadata.TensorProperties(dtype=dtype),
                    size=torch.Size(size),
                    chunks=[
                        dcp_metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                        for offsets, sizes, _ in chunks
                    ],
                )
                for name, (dtype, size, chunks) in self._index.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: dcp_metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            part = self._part(_place(item.storage_index))
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(part)
            planner.commit_tensor(item, target)
        return _done(None)

    def _part(self, place: tuple[Any, ...]) -> torch.Tensor:
        name, *offsets = place
        rank = next(rank for begin, _, rank in self._index[name][2] if begin == offsets)
        path = self._path_of(rank)
        try:
            if rank not in self._opened:
                self._opened[rank] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            part: torch.Tensor = self._opened[rank][place]
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise damaged(path, error) from None
        return part

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _place(index: dcp_metadata.MetadataIndex) -> tuple[Any, ...]:
    return (index.fqn, *(index.offset or ()))


def _done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future
