"""The largest batch size that fits: doubling, then bisection, with a trial step at each size."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import Process, agree
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.process.failures import is_out_of_memory
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.rules import batch_multiple
from fastlaunch_train.steppers.stepping import build_native, build_stepper
from fastlaunch_train.workloads.contract import DataRequest, Workload, next_batch
from fastlaunch_train.workloads.registry import WorkloadError

#: Far more images than fit into a device; ends the search if a step takes no memory.
MAX_BATCH_SIZE = 65536
#: Fields that trials leave at their defaults: one rank, one micro-batch, eager steps.
_NOT_TRIED = (
    *("parallelism", "ddp_bucket_mb", "overlap_comm", "grad_accumulation"),
    *("engine", "compile_mode", "compile_backend", "compile_scope", "step_graph"),
)
#: The share of the GPU's memory to use; communication buffers, fragmentation and kernels need the rest.
MEMORY_SHARE = 0.95
#: Return whether training steps fit into the memory; takes the step, batch size, device and model.
Fits = Callable[[Callable[[int], None], int, torch.device, nn.Module], bool]


def largest_batch(fits: Callable[[int], bool], *, start: int, granularity: int, limit: int) -> int:
    """Return the largest batch size that fits, up to `limit`; 0 if not even 1 does.

    It is a multiple of `granularity`, as start and limit are, or less if not even `granularity` fits. `fits`
    is true up to some size and false above. No trial exceeds `start` or twice the largest size that fits: a
    batch far too large can bring a machine down.
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


def fits_on_cuda(
    train_step: Callable[[int], None], batch_size: int, device: torch.device, model: nn.Module
) -> bool:
    """Return whether two training steps fit into the memory, and free their memory."""
    fits = True
    try:
        # The first step creates the optimizer's state; the second has to fit beside it.
        for _ in range(2):
            train_step(batch_size)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    # Collect only after handling the exception, since its traceback keeps the step's tensors.
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def auto_batch_size(
    workload: Workload, recipes: Sequence[Recipe], process: Process, *, seed: int, default: int
) -> int:
    """Return the largest batch size per rank that fits with every one of `recipes`.

    default: the workload's batch size, used on a machine without a GPU, rounded up to whole micro-batches.
    Raises WorkloadError if the workload trains nothing or nothing fits.
    """
    if not workload.trains:
        raise WorkloadError(
            f"workload {workload.name!r} trains nothing: any batch measures the same", "give --batch-size 8"
        )
    if process.device.type != "cuda":
        parts = math.lcm(*(recipe.grad_accumulation for recipe in recipes))
        return -(-default // parts) * parts
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, process.device)
    try:
        largest = largest_batch_that_fits(workload, recipes, process, seed=seed, fits=fits_on_cuda)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, process.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(process.device)
    return largest


def largest_batch_that_fits(
    workload: Workload, recipes: Sequence[Recipe], process: Process, *, seed: int, fits: Fits
) -> int:
    """Return how many samples the rank with the least memory can take with every one of `recipes`.

    Try each recipe on a model of its own and free it. The last recipe's precision settings stay.
    """
    # Recipes that differ only in untried fields share a trial.
    tried = {
        (
            recipe.grad_accumulation,
            replace(recipe_to_try(recipe, process.world_size), name="", description="", overrides=()),
        ): recipe
        for recipe in recipes
    }
    largest = MAX_BATCH_SIZE
    for recipe in tried.values():
        largest = min(largest, _try_batches(workload, recipe, process, seed=seed, most=largest, fits=fits))
        gc.collect()
    # Each recipe needs a multiple of its micro-batches, and is fast at multiples of its granularity.
    parts = math.lcm(*(recipe.grad_accumulation for recipe in recipes))
    length = workload.sequence_length
    well = math.lcm(*(recipe.grad_accumulation * batch_multiple(recipe, length) for recipe in recipes))
    common = largest // well * well or largest // parts * parts
    if common == 0:
        raise WorkloadError(f"no batch of {parts} micro-batches fits all recipes", "give a --batch-size")
    return common


def recipe_to_try(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe that each of `world_size` ranks tries alone, with one micro-batch, for `recipe`.

    A rank tries alone so that running out of memory leaves no other rank waiting; a batch that fits unsharded
    fits sharded. One micro-batch is enough, since each frees its memory before the next. Only gradients stay,
    if micro-batches add to them or DDP's buckets hold them, and the forward pass has to fit beside them.
    """
    defaults = {field: getattr(Recipe, field) for field in _NOT_TRIED}
    return replace(
        recipe,
        **defaults,
        set_to_none=recipe.set_to_none and recipe.grad_accumulation == 1 and world_size == 1,
    )


def _try_batches(
    workload: Workload, recipe: Recipe, process: Process, *, seed: int, most: int, fits: Fits
) -> int:
    """Return the number of samples that fit with `recipe`, up to about `most`."""
    parts, multiple = recipe.grad_accumulation, batch_multiple(recipe, workload.sequence_length)
    precision = setup_precision(recipe, process.device)
    recipe_alone = recipe_to_try(recipe, process.world_size)
    # Use another model than the trained one, since Transformer Engine's FP8 scales remember the trials.
    model = build_native(workload, seed, process)
    convert_model(model, workload, recipe)
    stepper = build_stepper(
        workload, recipe_alone, replace(precision, scaler=None), replace(process, world_size=1), model
    )

    def step(batch_size: int) -> None:
        request = probe_request(process, seed=seed, batch_size=batch_size * parts, dtype=computed_in(recipe))
        # The inputs of all micro-batches are in memory for the whole step.
        whole = next_batch(workload, workload.batches(request))
        train_step(stepper, split_batch(whole, parts)[0])

    def fits_all_ranks(batch_size: int) -> bool:
        return agree(process, [float(not fits(step, batch_size, process.device, model))])[0] == 0.0

    micro_batch_size = largest_batch(
        fits_all_ranks, start=multiple, granularity=multiple, limit=-(-most // (parts * multiple)) * multiple
    )
    if micro_batch_size == 0:
        raise WorkloadError("not even one sample fits into the GPU's memory", "take a smaller workload")
    return micro_batch_size * parts


def computed_in(recipe: Recipe) -> torch.dtype:
    """Return the dtype of inputs, for a workload whose inputs alone decide its compute dtype."""
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(recipe.precision, torch.float32)


def probe_request(
    process: Process, *, seed: int, batch_size: int, dtype: torch.dtype = torch.float32
) -> DataRequest:
    """Return a request for trial batches: synthetic, from the first step, without workers."""
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
