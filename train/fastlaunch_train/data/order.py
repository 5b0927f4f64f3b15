"""Which samples are in which batch: shuffled anew each epoch to train on, or once through to score."""

import hashlib
from collections.abc import Iterator

import torch

from fastlaunch_train.workloads.contract import DataRequest

#: The label of what fills up a batch: torch's cross entropy leaves it out of its sum (its `ignore_index`).
NO_LABEL = -100


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits for the random generator of whatever `parts` name; other parts, another seed."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def shuffled(num_samples: int, request: DataRequest) -> Iterator[list[tuple[int, int]]]:
    """This rank's (epoch, index) pairs, batch by batch and without end, from `first_step` on.

    Every epoch is all samples in another order, drawn from the seed and the epoch. Epochs follow each other
    without a gap, so that a batch may hold the end of one and the start of the next. The global batch of step
    n is the same for any number of ranks that share it.
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
    """This rank's indices of `num_samples`, each sample once over all ranks, batch by batch.

    Every rank has as many batches, all of them full: sharded models are evaluated by all ranks together, and
    compiled ones for one shape. What is short of that is None, to be filled with a sample without label.
    """
    per_step = request.world_size * request.batch_size
    for start in range(request.rank * request.batch_size, _up(num_samples, per_step), per_step):
        yield [i if i < num_samples else None for i in range(start, start + request.batch_size)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
