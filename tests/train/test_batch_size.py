"""The search for the largest batch, and the batch without a GPU."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy import ALONE

from fastlaunch_train.loop.batch_size import (
    auto_batch_size,
    largest_batch,
    largest_batch_that_fits,
    recipe_to_try,
)
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.workloads.contract import Batch, Workload
from fastlaunch_train.workloads.registry import WorkloadError


@given(
    most=st.integers(0, 5000),
    granularity=st.sampled_from([1, 8, 16]),
    start=st.integers(1, 20),
    limit=st.integers(20, 200),
)
def test_the_largest_size_is_found_with_few_safe_trials(
    most: int, granularity: int, start: int, limit: int
) -> None:
    start, limit = start * granularity, limit * granularity
    asked: list[int] = []

    def fits(size: int) -> bool:
        assert 1 <= size <= limit
        assert size <= start or size <= 2 * max(most, 1)
        assert size not in asked
        asked.append(size)
        return size <= most

    found = largest_batch(fits, start=start, granularity=granularity, limit=limit)
    capped = min(most, limit)
    assert found == (capped // granularity * granularity if capped >= granularity else capped)
    assert len(asked) <= 2 * limit.bit_length() + 2


def common(*labels: str, workload: Workload = toy.TOY) -> int:
    recipes = [toy.recipe_of(label) for label in labels]
    return largest_batch_that_fits(workload, recipes, ALONE, seed=0, fits=fits)


def fits(train_step: Callable[[int], None], batch_size: int, device: torch.device, model: nn.Module) -> bool:
    """Run the step; so many samples fit whose activations take 100 kB, as `saved_tensors_hooks` sees them."""
    saved: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        train_step(batch_size)
    return sum(saved.values()) <= 100_000


def test_without_a_gpu_it_is_the_workloads_own_in_whole_micro_batches() -> None:
    recipes = [resolve_recipe("bf16"), resolve_recipe("bf16", ["grad_accumulation=3"])]
    sizes = [auto_batch_size(toy.TOY, recipes[:n], ALONE, seed=0, default=8) for n in (1, 2)]
    assert sizes == [8, 9]
    with pytest.raises(WorkloadError, match="trains nothing"):
        forward_only = dataclasses.replace(toy.TOY, trains=False)
        auto_batch_size(forward_only, recipes, ALONE, seed=0, default=8)


def test_the_batch_fits_all_recipes_and_those_that_are_tried_alike_are_tried_once() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch[0]))
        return toy.loss(model, batch)

    counting = dataclasses.replace(toy.TOY, loss=loss)
    plain = common("bf16", workload=counting)
    once = list(sizes)
    sizes.clear()
    # Tried unsharded, and without a compiler.
    assert common("bf16", "compile", "fsdp2", "zero2", workload=counting) == plain
    assert sizes == once
    others = ("bf16 activation_checkpointing=block", "bf16 parameter_dtype=bf16-master grad_accumulation=3")
    recomputed, in_parts = map(common, others)
    assert recomputed > plain != in_parts
    assert common("bf16", *others) == min(plain, recomputed, in_parts) // 24 * 24


@pytest.mark.parametrize(("parts", "kept"), [(1, False), (4, True)])
def test_a_micro_batch_is_tried_beside_what_the_others_left(parts: int, kept: bool) -> None:
    """Gradients of those before, and inputs of all; the size found is a step's, and divides into them."""
    seen: list[tuple[bool, int, int]] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        num_held = batch[0].untyped_storage().nbytes() // batch[0][0].nbytes
        seen.append((any(p.grad is not None for p in model.parameters()), len(batch[0]), num_held))
        return toy.loss(model, batch)

    found = common(f"bf16 grad_accumulation={parts}", workload=dataclasses.replace(toy.TOY, loss=loss))
    assert found % (parts * 8) == 0
    assert {gradients for gradients, _, _ in seen[1:]} == {kept}
    assert all(num_held == parts * size for _, size, num_held in seen)
    assert found // parts in {size for _, size, _ in seen}


def test_gradients_in_the_buckets_of_ddp_are_there_all_the_time() -> None:
    assert recipe_to_try(resolve_recipe("bf16"), world_size=1).set_to_none
    assert not recipe_to_try(resolve_recipe("bf16"), world_size=2).set_to_none
    assert not recipe_to_try(resolve_recipe("bf16", ["set_to_none=false"]), world_size=1).set_to_none
