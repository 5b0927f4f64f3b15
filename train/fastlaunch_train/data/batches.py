"""Deal samples into batches, reshuffled each epoch for training, in one pass for scoring."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.workloads.contract import Batch, DataRequest


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed for a random generator, derived from `parts`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def shuffled(num_samples: int, request: DataRequest) -> Iterator[list[tuple[int, int]]]:
    """Yield this rank's (epoch, index) pairs, batch by batch and without end, from `first_step` on.

    Every epoch has all samples in a new order, drawn from seed and epoch. Epochs follow each other
    without a gap: a batch may hold the end of one and the start of the next. The global batch of step n is
    the same for any number of ranks that share it.
    """
    assert num_samples >= 1
    per_step = request.world_size * request.batch_size
    start = (request.first_step - 1) * per_step + request.rank * request.batch_size
    shuffled_epoch, order = -1, torch.empty(0)
    while True:
        keys = []
        for place in range(start, start + request.batch_size):
            epoch, offset = divmod(place, num_samples)
            if epoch != shuffled_epoch:
                generator = torch.Generator().manual_seed(seed_of("shuffle", request.seed, epoch))
                shuffled_epoch, order = epoch, torch.randperm(num_samples, generator=generator)
            keys.append((epoch, int(order[offset])))
        start += per_step
        yield keys


def share(num_samples: int, request: DataRequest) -> Iterator[list[int | None]]:
    """Yield this rank's indices of `num_samples`, batch by batch; all ranks together have each sample once.

    All ranks have the same number of full batches, because sharded models are evaluated by all ranks together
    and compiled ones for one shape. Missing samples are None, to be filled with unlabelled samples.
    """
    per_step = request.world_size * request.batch_size
    end = -(-num_samples // per_step) * per_step
    for start in range(request.rank * request.batch_size, end, per_step):
        yield [i if i < num_samples else None for i in range(start, start + request.batch_size)]


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split `batch` into `parts` micro-batches of equal size, views of it.

    A batch is any nest of tuples, lists and mappings of tensors, split along their first dimension; other
    values are the same in each part. Raises RecipeError if a first dimension does not divide by `parts`.
    """
    if parts == 1:
        return [batch]
    return [map_tensors(partial(_part, index=index, parts=parts), batch) for index in range(parts)]


def _part(value: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    size = value.shape[0] if value.dim() else 0
    if size == 0 or size % parts:
        raise RecipeError(
            f"a batch of {size} does not divide into {parts} micro-batches",
            f"give a --batch-size that is a multiple of grad_accumulation={parts}",
        )
    return value[index * (size // parts) : (index + 1) * (size // parts)]


def take(batch: Batch, samples: Sequence[int]) -> Batch:
    """Return the chosen `samples` of a batch, in their order; values that are not tensors stay."""
    return map_tensors(lambda tensor: tensor[list(samples)] if tensor.dim() else tensor, batch)


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """Apply `function` to each tensor in `nest`, of tuples, lists and mappings; other values stay.

    A mapping that is not a dict, such as the BatchEncoding of Transformers, becomes one.
    """

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        return tree_map(of_leaf, dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return tree_map(of_leaf, nest)


def tensors_in(nest: Any) -> list[torch.Tensor]:
    """Return the tensors of a nest, in order."""
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, nest)
    return tensors
