"""Which samples are in which batch, and how a batch is split into micro-batches."""

import itertools
from collections import namedtuple

import pytest
import torch
from data_requests import request
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch_train.data.batches import share, shuffled, split_batch
from fastlaunch_train.recipes.recipe import RecipeError

Pair = namedtuple("Pair", ["x", "y"])


@given(parts=st.integers(2, 5), size=st.integers(1, 4))
def test_parts_of_every_tensor_in_order(parts: int, size: int) -> None:
    whole = torch.arange(parts * size * 2).reshape(-1, 2)
    batch = {"a": (whole, [whole[:, 0]]), "pair": Pair(whole, "text"), "number": 7}
    split = split_batch(batch, parts)
    assert len(split) == parts
    for index, part in enumerate(split):
        mine = whole[index * size : (index + 1) * size]
        assert torch.equal(part["a"][0], mine)
        assert torch.equal(part["a"][1][0], mine[:, 0])
        assert torch.equal(part["pair"].x, mine)
        assert (part["pair"].y, part["number"]) == ("text", 7)
        # Views: nothing is copied.
        assert part["a"][0].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("batch", [torch.ones(5, 2), [torch.ones(4), torch.ones(3)], torch.ones(())])
def test_what_does_not_divide_is_refused(batch: object) -> None:
    with pytest.raises(RecipeError):
        split_batch(batch, 2)


def global_batches(num_samples: int, number: int, *, world_size: int, **changes: int) -> list[list[int]]:
    """The indices of each step, of all ranks in order."""
    ranks = [
        itertools.islice(shuffled(num_samples, request(rank=rank, world_size=world_size, **changes)), number)
        for rank in range(world_size)
    ]
    return [[index for keys in step for _, index in keys] for step in zip(*ranks, strict=True)]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_has_every_sample_once(num_samples: int, ranks: int, batch_size: int, seed: int) -> None:
    number = 2 * num_samples // (ranks * batch_size) + 1
    found = global_batches(num_samples, number, world_size=ranks, batch_size=batch_size, seed=seed)
    stream = list(itertools.chain(*found))
    for epoch in (0, 1):
        part = stream[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples))


def test_epochs_seeds_and_steps_have_orders_of_their_own() -> None:
    stream = list(itertools.chain(*global_batches(50, 25, world_size=1)))
    assert stream[:50] != stream[50:]
    assert stream != list(itertools.chain(*global_batches(50, 25, world_size=1, seed=1)))
    epochs = [epoch for keys in itertools.islice(shuffled(6, request()), 3) for epoch, _ in keys]
    assert epochs == [0] * 6 + [1] * 6


def test_a_resumed_run_goes_on_where_it_was() -> None:
    whole = global_batches(7, 9, world_size=2)
    assert global_batches(7, 4, world_size=2, first_step=6) == whole[5:]


def test_a_global_batch_is_the_same_however_many_ranks_share_it() -> None:
    alone = global_batches(23, 8, world_size=1, batch_size=12)
    assert global_batches(23, 8, world_size=3, batch_size=4) == alone


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 7))
def test_held_out_samples_are_shared_in_equally_many_full_batches(
    num_samples: int, ranks: int, batch_size: int
) -> None:
    found = [
        list(share(num_samples, request(rank=rank, world_size=ranks, batch_size=batch_size)))
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in found}) == 1
    assert all(len(batch) == batch_size for batches in found for batch in batches)
    indices = [index for batches in found for batch in batches for index in batch]
    assert sorted(index for index in indices if index is not None) == list(range(num_samples))
    assert indices.count(None) < ranks * batch_size
