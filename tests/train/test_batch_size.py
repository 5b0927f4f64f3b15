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
from fastlaunch_train.recipes.recipe import Recipe
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


def searched(recipe_name: str, overrides: list[str], workload: Workload = toy.TOY) -> int:
    return common([resolve_recipe(recipe_name, overrides)], workload)


def common(recipes: list[Recipe], workload: Workload = toy.TOY) -> int:
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


def test_the_batch_fits_all_recipes_whatever_their_order() -> None:
    recipes = [
        resolve_recipe("bf16", ["activation_checkpointing=block"]),
        resolve_recipe("bf16"),
        resolve_recipe("bf16", ["parameter_dtype=bf16-master", "grad_accumulation=3"]),
    ]
    alone = [common([recipe]) for recipe in recipes]
    assert len(set(alone)) == 3
    found = common(recipes)
    assert found == common(recipes[::-1]) == min(alone) // 24 * 24


def test_recipes_that_are_tried_alike_are_tried_once() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch[0]))
        return toy.loss(model, batch)

    counting = dataclasses.replace(toy.TOY, loss=loss)
    common([resolve_recipe("bf16")], counting)
    once = list(sizes)
    sizes.clear()
    common([resolve_recipe("bf16"), resolve_recipe("compile"), resolve_recipe("fsdp2")], counting)
    assert sizes == once


@pytest.mark.parametrize(("parts", "kept"), [(1, False), (4, True)])
def test_a_micro_batch_is_tried_beside_what_the_others_left(parts: int, kept: bool) -> None:
    """Gradients of those before, and inputs of all; the size found is a step's, and divides into them."""
    seen: list[tuple[bool, int, int]] = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        num_held = batch[0].untyped_storage().nbytes() // batch[0][0].nbytes
        seen.append((any(p.grad is not None for p in model.parameters()), len(batch[0]), num_held))
        return toy.loss(model, batch)

    found = searched("bf16", [f"grad_accumulation={parts}"], dataclasses.replace(toy.TOY, loss=loss))
    assert found % (parts * 8) == 0
    assert {gradients for gradients, _, _ in seen[1:]} == {kept}
    assert all(num_held == parts * size for _, size, num_held in seen)
    assert found // parts in {size for _, size, _ in seen}


def test_gradients_in_the_buckets_of_ddp_are_there_all_the_time() -> None:
    assert recipe_to_try(resolve_recipe("bf16"), world_size=1).set_to_none
    assert not recipe_to_try(resolve_recipe("bf16"), world_size=2).set_to_none
    assert not recipe_to_try(resolve_recipe("bf16", ["set_to_none=false"]), world_size=1).set_to_none


@pytest.mark.slow
def test_every_recipe_finds_a_batch() -> None:
    plain = searched("bf16", [])
    assert plain >= 16
    # Tried unsharded, and without a compiler.
    assert searched("fsdp2", ["compile_mode=default", "compile_scope=wrapped"]) == plain
    assert searched("zero2", []) == searched("zero1", ["overlap_comm=false"]) == plain
    # Of each of four micro-batches as much fits as of one, but for the others' inputs.
    assert 0.9 * 4 * plain < searched("bf16", ["grad_accumulation=4"]) < 4 * plain
    # Recomputed, it needs less.
    assert searched("bf16", ["activation_checkpointing=block"]) > plain
