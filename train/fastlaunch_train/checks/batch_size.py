"""The largest batch size that fits: doubling, then bisection, with a trial step at each size."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastlaunch_train.process.failures import is_out_of_memory
from fastlaunch_train.workloads import WorkloadError

#: Sizes tried are multiples of it, unless not even it fits.
GRANULARITY = 8
#: Far above what a device holds of images: a step that takes no memory is not tried for ever.
MAX_BATCH_SIZE = 65536
#: Of the GPU's memory, for what comes later: communication buffers, fragmentation, compiled kernels.
MEMORY_SHARE = 0.95


def largest_batch(fits: Callable[[int], bool], *, start: int, granularity: int, limit: int) -> int:
    """The largest batch size that fits, up to `limit`; 0 if not even 1 does.

    A multiple of `granularity`, as start and limit are; or less than it, if it does not fit. `fits` is true
    up to some size and false above. It is never asked for more than twice what fits, or `start`: a trial
    far too large can bring a machine down.
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
) -> int:
    """The largest batch size per rank that fits on every rank.

    train_step: one whole training step of `model` at a batch size.
    budget_bytes: on a CPU, the memory that counts as available. agree: whether all ranks say yes.
    granularity: what the size is a multiple of, unless not even that fits.
    Raises WorkloadError if not even one sample fits.
    """
    if device.type != "cuda":
        return _largest_in_budget(
            lambda batch_size: step_bytes(lambda: train_step(batch_size), model),
            budget_bytes=budget_bytes,
            agree=agree,
            granularity=granularity,
        )
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device)
    try:
        found = largest_batch(
            lambda batch_size: agree(fits_on_cuda(train_step, batch_size, device=device, model=model)),
            start=granularity,
            granularity=granularity,
            limit=MAX_BATCH_SIZE,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    if found == 0:
        raise WorkloadError("not even one sample fits into the GPU's memory", "take a smaller workload")
    return found


def _largest_in_budget(
    bytes_of: Callable[[int], int], *, budget_bytes: int, agree: Callable[[bool], bool], granularity: int
) -> int:
    """The largest batch size whose step takes at most `budget_bytes`, by `bytes_of` a batch size.

    A trial step is slow on a CPU, and what a step takes is a line in the batch size: two trials give the
    line, the search goes along it, and the size found is tried.
    """
    start = granularity
    measured = {size: bytes_of(size) for size in (start, 2 * start)}
    per_sample = (measured[2 * start] - measured[start]) / start

    def fits(batch_size: int) -> bool:
        predicted = measured[start] + per_sample * (batch_size - start)
        return agree(measured.get(batch_size, predicted) <= budget_bytes)

    found = 0
    while True:
        found = largest_batch(fits, start=start, granularity=start, limit=MAX_BATCH_SIZE)
        if found == 0:
            raise WorkloadError(
                f"not even one sample fits into {budget_bytes / 2**20:.0f} MiB",
                "give a larger --memory-budget",
            )
        if found in measured:
            return found
        measured[found] = bytes_of(found)
        if fits(found):
            return found
        # Not quite a line: a steeper one, through what was seen.
        seen = abs(measured[found] - measured[start]) / max(1, abs(found - start))
        per_sample = max(1.01 * per_sample, seen)


def fits_on_cuda(
    train_step: Callable[[int], None], batch_size: int, *, device: torch.device, model: nn.Module
) -> bool:
    """Whether two training steps run without running out of memory; what they left is freed."""
    fits = True
    try:
        # The first step makes the optimizer's state; the second has to fit beside it.
        for _ in range(2):
            train_step(batch_size)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fits = False
    # Only here: while the exception was handled, its traceback held the step's tensors.
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def step_bytes(train_step: Callable[[], None], model: nn.Module) -> int:
    """Bytes that a training step holds: weights, gradients, optimizer state, masters, what backward needs.

    Counted, so the same every time: each storage that autograd keeps for the backward pass counts once, in
    full. Temporary values of single operations are not in it, nor is the interpreter. Raises WorkloadError
    with a torch that cannot count.
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
        # Held until the step is over, so that its address is not given to another.
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
