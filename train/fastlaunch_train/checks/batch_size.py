"""The largest batch size that fits: doubling, then bisection, with a trial step at each size."""

import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import Process, agree
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.process.failures import is_out_of_memory
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.rules import batch_multiple
from fastlaunch_train.steppers.stepping import build_native, build_stepper
from fastlaunch_train.workloads.contract import DataRequest, Workload, next_batch
from fastlaunch_train.workloads.registry import WorkloadError

#: Sizes tried are multiples of it, unless not even it fits.
GRANULARITY = 8
#: Far above what a device holds of images; it ends the search for a step that takes no memory.
MAX_BATCH_SIZE = 65536
#: Fields that have their defaults in the trials: for one rank, one micro-batch, and eager steps.
_NOT_TRIED = (
    *("parallelism", "ddp_bucket_mb", "overlap_comm", "grad_accumulation"),
    *("engine", "compile_mode", "compile_backend", "compile_scope", "step_graph"),
)
#: The share of the GPU's memory to use. The rest is for communication buffers, fragmentation and kernels.
MEMORY_SHARE = 0.95
#: The longest step on a CPU that still fits. Its limit is a power of two, which noise seldom changes.
MAX_STEP_S = 2.0


def largest_batch(fits: Callable[[int], bool], *, start: int, granularity: int, limit: int) -> int:
    """Return the largest batch size that fits, up to `limit`; 0 if not even 1 does.

    It is a multiple of `granularity`, as start and limit are, or less if that does not fit. `fits` is true up
    to some size and false above. No trial is larger than `start` or twice what fits: one far too large can
    bring a machine down.
    """
    assert 0 < start <= limit
    assert start % granularity == 0
    assert limit % granularity == 0
    low, high = 0, limit + granularity
    size = start
    while high > limit and low < limit:
        if fits(size):
            low, size = size, min(2 * size, limit)
        else:
            high = size
    while low == 0 and high > 1:
        size = high // 2 // granularity * granularity or high // 2
        if fits(size):
            low = size
        else:
            high = size
    step = granularity if low >= granularity else 1
    while high - low > step and low < limit:
        size = low + max(step, (high - low) // 2 // step * step)
        if fits(size):
            low = size
        else:
            high = size
    return low


def find_batch_size(
    train_step: Callable[[int], None],
    *,
    device: torch.device,
    model: nn.Module,
    budget_bytes: int,
    agree: Callable[[bool], bool],
    granularity: int = GRANULARITY,
    limit: int = MAX_BATCH_SIZE,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the largest batch size per rank that fits on every rank, up to `limit`.

    train_step: a whole training step of `model` at a batch size.
    budget_bytes: on a CPU, the memory that counts as available; a step takes MAX_STEP_S at most there.
    agree: whether all ranks say yes.
    limit: a multiple of `granularity`.
    Raises WorkloadError if not even one sample fits.
    """
    if device.type != "cuda":

        @functools.cache
        def bytes_of(batch_size: int) -> int:
            return step_bytes(lambda: train_step(batch_size), model)

        def seconds_of(batch_size: int) -> float:
            started = clock()
            train_step(batch_size)
            return clock() - started

        first, second = (bytes_of(size) for size in (granularity, 2 * granularity))
        per_sample = max(0, second - first) / granularity
        room = granularity + (budget_bytes - first) / per_sample if per_sample else limit
        # Again: the first step of a size may compile.
        per_sample_s = seconds_of(2 * granularity) / (2 * granularity)
        size = 2 * granularity
        while size <= limit:
            # With more samples, one takes no longer: only what may be too slow is tried.
            is_quick = size > room or size * per_sample_s <= MAX_STEP_S or seconds_of(size) <= MAX_STEP_S
            if not agree(is_quick):
                limit = size // 2
            size *= 2
        return _largest_in_budget(
            bytes_of, budget_bytes=budget_bytes, agree=agree, granularity=granularity, limit=limit
        )
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device)
    try:
        largest = largest_batch(
            lambda batch_size: agree(fits_on_cuda(train_step, batch_size, device=device, model=model)),
            start=granularity,
            granularity=granularity,
            limit=limit,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    if largest == 0:
        raise WorkloadError("not even one sample fits into the GPU's memory", "take a smaller workload")
    return largest


def _largest_in_budget(
    bytes_of: Callable[[int], int],
    *,
    budget_bytes: int,
    agree: Callable[[bool], bool],
    granularity: int,
    limit: int = MAX_BATCH_SIZE,
) -> int:
    """Return the largest batch size, up to `limit`, whose step takes at most `budget_bytes`, by `bytes_of`.

    Trials are slow on a CPU, and what a step takes is a line in the batch size: two trials give the line, the
    search follows it, and the size it gives is tried.
    """
    start = granularity
    measured = {size: bytes_of(size) for size in (start, 2 * start)}
    per_sample = (measured[2 * start] - measured[start]) / start

    def fits(batch_size: int) -> bool:
        predicted = measured[start] + per_sample * (batch_size - start)
        return agree(measured.get(batch_size, predicted) <= budget_bytes)

    while True:
        largest = largest_batch(fits, start=start, granularity=start, limit=limit)
        if largest == 0:
            raise WorkloadError(
                f"not even one sample fits into {budget_bytes / 2**20:.0f} MiB",
                "give a larger --memory-budget",
            )
        if largest in measured:
            return largest
        measured[largest] = bytes_of(largest)
        if fits(largest):
            return largest
        # Not quite a line: go on along a steeper one, through what was measured.
        slope = abs(measured[largest] - measured[start]) / max(1, abs(largest - start))
        per_sample = max(1.01 * per_sample, slope)


def fits_on_cuda(
    train_step: Callable[[int], None], batch_size: int, *, device: torch.device, model: nn.Module
) -> bool:
    """Return whether two training steps fit into the memory; what they left is freed."""
    fits = True
    try:
        # The first step makes the optimizer's state, and the second has to fit beside it.
        for _ in range(2):
            train_step(batch_size)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    # Not while the exception is handled: its traceback holds the step's tensors.
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def step_bytes(train_step: Callable[[], None], model: nn.Module) -> int:
    """Return the bytes a training step holds: weights, gradients, optimizer state, masters, activations.

    They are counted, so the same every time: each storage that autograd keeps for the backward pass counts
    once, in full. Temporary values of single operations do not count, nor does the interpreter. Raises
    WorkloadError with a torch that cannot count.
    """
    try:
        from torch.optim.optimizer import register_optimizer_step_post_hook
    except ImportError:  # since torch 2.0
        raise WorkloadError(
            f"torch {torch.__version__} cannot count what a step holds, for --batch-size auto on a CPU",
            "give a number, or use torch 2.0 or newer",
        ) from None
    weights = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in (*model.parameters(), *model.buffers())
    }
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    saved: dict[int, torch.UntypedStorage] = {}
    optimizer_bytes = 0

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        # Held until the step is over, so that no other gets its address.
        saved[storage.data_ptr()] = storage
        return value.detach()

    def count_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal optimizer_bytes
        kept = [value for state in optimizer.state.values() for value in state.values()]
        updated = [value for group in optimizer.param_groups for value in group["params"]]
        masters = [value for value in updated if value.untyped_storage().data_ptr() not in weights]
        optimizer_bytes = sum(
            value.numel() * value.element_size()
            for value in (*kept, *masters)
            if isinstance(value, torch.Tensor)
        )

    hook = register_optimizer_step_post_hook(count_state)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            train_step()
    finally:
        hook.remove()
    activations = sum(storage.nbytes() for at, storage in saved.items() if at not in weights)
    return sum(weights.values()) + gradients + optimizer_bytes + activations


def largest_batch_that_fits(
    workload: Workload,
    recipes: Sequence[Recipe],
    process: Process,
    *,
    seed: int,
    budget_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return how many samples the rank with the least memory can take with every one of `recipes`.

    Each is tried on a model that is then freed. The settings of the last recipe's precision stay.
    budget_bytes: what may be used on a machine without a GPU. Raises WorkloadError if nothing is trained.
    """
    if not workload.trains:
        raise WorkloadError(
            f"workload {workload.name!r} trains nothing: any batch measures the same", "give --batch-size 8"
        )
    # Recipes that differ only in what is not tried share a trial.
    tried = {
        (recipe.grad_accumulation, _unnamed(recipe_to_try(recipe, process.world_size))): recipe
        for recipe in recipes
    }
    largest = MAX_BATCH_SIZE
    for recipe in tried.values():
        fits = _try_batches(
            workload, recipe, process, seed=seed, budget_bytes=budget_bytes, most=largest, clock=clock
        )
        largest = min(largest, fits)
        gc.collect()
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    # Each recipe needs multiples of its micro-batches, and runs well with those of its granularity.
    parts = math.lcm(*(recipe.grad_accumulation for recipe in recipes))
    well = math.lcm(*(recipe.grad_accumulation * batch_multiple(recipe) for recipe in recipes))
    common = largest // well * well or largest // parts * parts
    if common == 0:
        raise WorkloadError(f"no batch of {parts} micro-batches fits all recipes", "give a --batch-size")
    return common


def _unnamed(recipe: Recipe) -> Recipe:
    return replace(recipe, name="", description="", overrides=())


def recipe_to_try(recipe: Recipe, world_size: int) -> Recipe:
    """Return what each of `world_size` ranks tries in place of `recipe`: by itself, with one micro-batch.

    By itself, so that a rank which runs out of memory leaves no other waiting; what fits unsharded fits
    sharded. One micro-batch, since each frees what it took before the next. Only gradients stay, if
    micro-batches add to them or DDP's buckets hold them, and the forward pass has to fit beside.
    """
    defaults = {field: getattr(Recipe, field) for field in _NOT_TRIED}
    return replace(
        recipe,
        **defaults,
        set_to_none=recipe.set_to_none and recipe.grad_accumulation == 1 and world_size == 1,
    )


def _try_batches(
    workload: Workload,
    recipe: Recipe,
    process: Process,
    *,
    seed: int,
    budget_bytes: int,
    most: int,
    clock: Callable[[], float],
) -> int:
    """Return how many samples fit with `recipe`, up to about `most`."""
    parts, multiple = recipe.grad_accumulation, batch_multiple(recipe)
    precision = setup_precision(recipe, process.device)
    recipe_alone = recipe_to_try(recipe, process.world_size)
    # Not the model that is trained: Transformer Engine's modules remember the trials in their FP8 scales.
    model = build_native(workload, seed, process)
    convert_model(model, workload, recipe)
    stepper = build_stepper(
        workload, recipe_alone, replace(precision, scaler=None), replace(process, world_size=1), model
    )

    def step(batch_size: int) -> None:
        request = probe_request(process, seed=seed, batch_size=batch_size * parts, dtype=computed_in(recipe))
        # The inputs of all micro-batches are there as long as the step takes.
        whole = next_batch(workload, workload.batches(request))
        stepper.step(split_batch(whole, parts)[0])

    micro_batch_size = find_batch_size(
        step,
        device=process.device,
        model=model,
        budget_bytes=budget_bytes,
        agree=lambda fits: agree(process, [float(not fits)])[0] == 0.0,
        granularity=multiple,
        limit=-(-most // (parts * multiple)) * multiple,
        clock=clock,
    )
    return micro_batch_size * parts


def computed_in(recipe: Recipe) -> torch.dtype:
    """Return the dtype of inputs, for a workload whose inputs alone decide what it computes in."""
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(recipe.precision, torch.float32)


def probe_request(
    process: Process, *, seed: int, batch_size: int, dtype: torch.dtype = torch.float32
) -> DataRequest:
    """Return a request for batches to try something on: synthetic, from the first step, without workers."""
    return DataRequest(
        source="synthetic",
        batch_size=batch_size,
        seed=seed,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        num_workers=0,
        first_step=1,
        dtype=dtype,
    )
