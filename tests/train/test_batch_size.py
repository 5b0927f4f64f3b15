"""The search for the largest batch, and the memory that a step on a CPU is taken to need."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy import ALONE, CPU

from fastlaunch_train.checks.batch_size import (
    _largest_in_budget,
    find_batch_size,
    largest_batch,
    largest_batch_that_fits,
    recipe_to_try,
    step_bytes,
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


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 50), nn.GELU(), nn.Linear(50, 10))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int) -> None:
    optimizer.zero_grad()
    model(torch.ones(batch_size, 100)).sum().backward()
    optimizer.step()


NUM_WEIGHTS = 100 * 50 + 50 + 50 * 10 + 10


@pytest.mark.parametrize(("name", "num_copies"), [("sgd", 3), ("adamw", 4)])
def test_step_bytes_by_hand(name: str, num_copies: int) -> None:
    model = layer()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    counts = [step_bytes(lambda: train_step(model, optimizer, 8), model) for _ in range(2)]
    # Weights, gradients, momentum (two moments and four step counters in AdamW); of each sample the input,
    # GELU's input and its output.
    expected = 4 * (num_copies * NUM_WEIGHTS + 8 * (100 + 50 + 50)) + (4 * 4 if name == "adamw" else 0)
    assert counts == [expected, expected]


def find(
    budget_bytes: int, agree: Callable[[bool], bool] = bool, step_s: float = 0.0
) -> tuple[int, list[int]]:
    """The batch size that is found, and those that were tried; a sample takes 800 bytes."""
    model, tried, now_s = layer(), [], 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch_size: int) -> None:
        nonlocal now_s
        now_s += step_s * batch_size / 16
        tried.append(batch_size)
        train_step(model, optimizer, batch_size)

    size = find_batch_size(
        step,
        device=CPU,
        model=model,
        budget_bytes=budget_bytes,
        agree=agree,
        clock=lambda: now_s,
    )
    return size, tried


@pytest.mark.parametrize(("samples", "tried"), [(100, [96]), (3, [3]), (4000, [4000])])
def test_a_budget_gives_the_batch_that_fits_into_it(samples: int, tried: list[int]) -> None:
    assert find(4 * 2 * NUM_WEIGHTS + samples * 800) == (tried[0], [8, 16, 16, *tried])


@pytest.mark.parametrize(("step_s", "size"), [(0.2, 128), (0.22, 128), (0.48, 64), (2.0, 16), (6.0, 8)])
def test_a_step_on_a_cpu_takes_two_seconds_at_most(step_s: float, size: int) -> None:
    # step_s: with 16 samples. The size is a power of two, so that noise seldom changes it.
    assert find(10**9, step_s=step_s)[0] == size


def test_the_rank_with_the_least_memory_decides() -> None:
    # Thirteen sizes are quick enough; 8 and 16 fit all ranks, 32 and 24 do not.
    answers = iter([*[True] * 13, True, True, False, False])
    assert find(10**9, lambda fits: fits and next(answers))[0] == 16


def test_a_budget_too_small_for_one_sample_is_refused() -> None:
    with pytest.raises(WorkloadError, match="not even one sample fits"):
        find(1000)


@given(
    fixed=st.integers(0, 10**6),
    per_sample=st.integers(1, 10**4),
    curve=st.floats(0, 0.2),
    room=st.integers(1, 3000),
)
def test_a_step_that_grows_faster_than_a_line_still_fits(
    fixed: int, per_sample: int, curve: float, room: int
) -> None:
    def bytes_of(size: int) -> int:
        return fixed + per_sample * size + int(curve * per_sample * size**1.5)

    budget = bytes_of(room)
    found = _largest_in_budget(bytes_of, budget_bytes=budget, agree=lambda fits: fits, granularity=8)
    assert bytes_of(found) <= budget


def searched(recipe_name: str, overrides: list[str], workload: Workload = toy.TOY) -> int:
    return common([resolve_recipe(recipe_name, overrides)], workload)


def common(recipes: list[Recipe], workload: Workload = toy.TOY) -> int:
    # No step takes long, however busy the machine is.
    return largest_batch_that_fits(workload, recipes, ALONE, seed=0, budget_bytes=2**20, clock=lambda: 0.0)


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
    assert len(seen) == 4
    assert [gradients for gradients, _, _ in seen[1:]] == [kept] * 3
    assert all(num_held == parts * size for _, size, num_held in seen)
    assert seen[-1][1] == found // parts


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
    # Recomputed, it needs less; with masters, more.
    assert searched("bf16", ["activation_checkpointing=block"]) > plain
    masters = searched("bf16", ["parameter_dtype=bf16-master"])
    assert masters != plain
