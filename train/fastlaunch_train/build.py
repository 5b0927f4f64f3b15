"""What a session trains with: model, optimizer, and the largest batch that fits."""

import gc

import torch
from torch import nn

from fastlaunch_train import optimizers
from fastlaunch_train.parallel import Process, agree
from fastlaunch_train.precision import Precision, batch_multiple
from fastlaunch_train.recipes import Recipe, RecipeError
from fastlaunch_train.workload import DataRequest, Workload, next_batch
from fastlaunch_train.workloads import WorkloadError


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


def build_model(workload: Workload, recipe: Recipe, seed: int, process: Process) -> nn.Module:
    """The workload's model on this rank's device, in training mode, with the recipe's blocks."""
    model = build_native(workload, seed, process)
    if recipe.blocks == "te":
        from fastlaunch_train.blocks import replace_blocks

        if workload.blocks is None:
            raise RecipeError(
                f"recipe {recipe.name}: workload {workload.name} has no transformer blocks to replace",
                "use a recipe with blocks=native",
            )
        replace_blocks(model, workload.blocks(model))
    return model


def build_optimizer(workload: Workload, recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the workload names, unless the recipe names another."""
    return optimizers.build_optimizer(workload, recipe, model.parameters())


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

    budget_bytes: what may be used on a machine without a GPU.
    """
    found = _try_batches(workload, recipe, precision, process, seed=seed, budget_bytes=budget_bytes)
    gc.collect()
    if process.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(process.device)
    return found


def _try_batches(
    workload: Workload,
    recipe: Recipe,
    precision: Precision,
    process: Process,
    *,
    seed: int,
    budget_bytes: int,
) -> int:
    from fastlaunch_train.batch_size import find_batch_size

    # Of its own: Transformer Engine's modules would remember the trial steps in their FP8 scales.
    model = build_model(workload, recipe, seed, process)
    optimizer = build_optimizer(workload, recipe, model)

    def step(batch_size: int) -> None:
        batch = next_batch(
            workload, workload.batches(probe_request(process, seed=seed, batch_size=batch_size))
        )
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return find_batch_size(
        step,
        device=process.device,
        model=model,
        budget_bytes=budget_bytes,
        agree=lambda fits: agree(process, [float(not fits)])[0] == 0.0,
        granularity=batch_multiple(recipe),
    )


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
