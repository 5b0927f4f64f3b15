"""Batches of any shape, split along the samples."""

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.recipes.recipe import RecipeError

Pair = namedtuple("Pair", ["x", "y"])


def test_one_part_is_the_batch_itself() -> None:
    batch = {"x": torch.ones(3)}
    (part,) = split_batch(batch, 1)
    assert part is batch


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
    with pytest.raises(RecipeError, match="does not divide into 2 micro-batches") as refused:
        split_batch(batch, 2)
    assert "grad_accumulation=2" in (refused.value.hint or "")
