"""What a session trains with: the model, and the largest batch that fits."""

import gc
from dataclasses import replace

import torch
from torch import nn

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed.parallel import Process, agree
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import Precision, batch_multiple
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.steppers.stepping import build_stepper
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import DataRequest, Workload, next_batch


def build_native(workload: Workload, seed: int, process: Process) -> nn.Module:
    """The workload's model as it builds it, on this rank's device, in training mode; weights by `seed`."""
    torch.manual_seed(seed)
    model = workload.build_model()
    empty = isinstance(model, nn.Module) and next(model.parameters(), None) is None
    if not isinstance(model, nn.Module) or (workload.trains and empty):
        what = type(model).__name__
        raise WorkloadError(
            f"workload {workload.name!r}: build_model returned {what}, which has nothing to train",
            "return a torch module with parameters",
        )
    return model.to(process.device).train()


def largest_batch_that_fits(
    workload: Workload,
    recipe: Recipe,
    precision: Precision,
    process: Process,
    *,
    seed: int,
    budget_bytes: int,
) -> int:
    """Samples per rank that the rank with the least memory can take, found on a model that is then let go.

    budget_bytes: what may be used on a machine without a GPU. Raises WorkloadError if nothing is trained.
    """
    if not workload.trains:
        raise WorkloadError(
            f"workload {workload.name!r} trains nothing: any batch measures the same", "give --batch-size 8"
        )
    found = _try_batches(workload, recipe, precision, process, seed=seed, budget_bytes=budget_bytes)
    gc.collect()
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    return found


def recipe_to_try(recipe: Recipe, world_size: int) -> Recipe:
    """What each of `world_size` ranks tries by itself, with one micro-batch, in place of `recipe`.

    By itself, so that one which runs out of memory leaves no other waiting for it: what fits here unsharded
    fits sharded. One micro-batch of a step, since each frees what it took before the next, but for gradients:
    they stay where a micro-batch adds to those of another, and in DDP's buckets, and the forward pass has to
    fit beside them.
    """
    return replace(
        recipe,
        parallelism="ddp",
        engine="torch",
        ddp_bucket_mb=Recipe.ddp_bucket_mb,
        overlap_comm=Recipe.overlap_comm,
        grad_accumulation=1,
        set_to_none=recipe.set_to_none and recipe.grad_accumulation == 1 and world_size == 1,
        compile_mode="none",
        compile_backend=Recipe.compile_backend,
        compile_scope=Recipe.compile_scope,
    )


def _try_batches(
    workload: Workload,
    recipe: Recipe,
    precision: Precision,
    process: Process,
    *,
    seed: int,
    budget_bytes: int,
) -> int:
    from fastlaunch_train.checks.batch_size import find_batch_size

    parts = recipe.grad_accumulation
    recipe_alone = recipe_to_try(recipe, process.world_size)
    # Of its own: Transformer Engine's modules would remember the trial steps in their FP8 scales.
    model = build_native(workload, seed, process)
    convert_model(model, workload, recipe)
    stepper = build_stepper(
        workload, recipe_alone, replace(precision, scaler=None), replace(process, world_size=1), model
    )

    def step(batch_size: int) -> None:
        request = probe_request(process, seed=seed, batch_size=batch_size * parts)
        request = replace(request, dtype=computed_in(recipe))
        # Its inputs are there as long as the whole step takes.
        whole = next_batch(workload, workload.batches(request))
        stepper.step(split_batch(whole, parts)[0])

    found = find_batch_size(
        step,
        device=process.device,
        model=model,
        budget_bytes=budget_bytes,
        agree=lambda fits: agree(process, [float(not fits)])[0] == 0.0,
        granularity=batch_multiple(recipe),
    )
    return found * parts


def computed_in(recipe: Recipe) -> torch.dtype:
    """The dtype of the inputs of a workload whose inputs alone decide what it computes in."""
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    return dtypes.get(recipe.precision, torch.float32)


def probe_request(process: Process, *, seed: int, batch_size: int) -> DataRequest:
    """Asks for batches to try something on: synthetic, from the first step, without workers."""
    return DataRequest(
        arm="synthetic",
        batch_size=batch_size,
        seed=seed,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        num_workers=0,
        first_step=1,
    )
