"""A whole training step in one CUDA graph: forward, backward and optimizer.

If a step consists of many short kernels, the GPU waits for the host to launch them. One call launches a
graph.
"""

import gc
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_flatten

from fastlaunch_train.data.batches import map_tensors
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.steppers.optimizers import MasterWeights
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.torch_stepper import NUM_CALIBRATION_PASSES, TorchStepper, fresh_scales
from fastlaunch_train.workloads.contract import Batch, Workload


def is_captured(workload: Workload, recipe: Recipe, process: Process) -> bool:
    """Return whether the steps of a training are captured.

    Raises RecipeError if they are and the workload changes its learning rate: a graph cannot.
    """
    on_one_gpu = process.device.type == "cuda" and process.world_size == 1
    captured = recipe.step_graph and on_one_gpu and workload.trains
    if captured and workload.has_schedule:
        raise RecipeError(
            f"recipe {recipe.label}: a captured step has one learning rate, and workload {workload.name} "
            "changes it",
            "use a recipe with step_graph=false",
        )
    return captured


class CapturedStep:
    """Does `step` of `stepper`: captures it at the first batch, and replays it from then on.

    It copies every batch to the place of the first, so all need the first one's shapes. The graph updates the
    state that the stepper has at the capture: load a checkpoint before.
    """

    def __init__(self, stepper: Stepper, step: Callable[[Stepper, Batch], torch.Tensor]) -> None:
        assert isinstance(stepper, TorchStepper)
        self._stepper = stepper
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = None
        self._loss = torch.zeros(())

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Do one optimizer step on `batch`; return its loss. Raises RecipeError if its form differs."""
        if self._graph is None:
            self._capture(batch)
        assert self._graph is not None
        copy_batch(self._batch, batch)
        self._graph.replay()
        # The next replay overwrites it.
        return self._loss.clone()

    def compile_ahead(self, batch: Batch) -> None:
        """Capture the step without training."""
        self._capture(batch)
        torch.cuda.synchronize()

    def _capture(self, batch: Batch) -> None:
        stepper = self._stepper
        self._batch = map_tensors(torch.Tensor.clone, batch)
        # New scales keep the magnitudes of these passes; scales of a checkpoint stay.
        new_scales = fresh_scales(stepper.model, stepper.recipe)
        buffers = [
            (buffer, buffer.clone()) for buffer in stepper.model.buffers() if id(buffer) not in new_scales
        ]
        device = torch.cuda.current_device()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.random.fork_rng(devices=[device]), torch.cuda.stream(stream):
            for number in range(NUM_CALIBRATION_PASSES):
                stepper.optimizer.zero_grad(set_to_none=True)
                # The first pass is on the batch itself: its outputs are compared with the eager model's.
                stepper.forward_backward(self._batch if number else batch, last=True)
            _prepare(stepper.optimizer)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for buffer, before in buffers:
                # A copy counts as a change: after a copy of a scale, each replay would round the weights
                # anew.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        # The graph creates the gradients, and overwrites them in every replay.
        stepper.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: a loader pins the memory of later batches.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss = self._step(stepper, self._batch)
        self._graph = graph


@torch.no_grad()
def _prepare(optimizer: "torch.optim.Optimizer | MasterWeights") -> None:
    """Have the optimizer create its state, as in a first step, without changing a parameter.

    A graph of the first step would create the state anew in every replay.
    """
    assert isinstance(optimizer, torch.optim.Optimizer)
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.zero_()
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def copy_batch(target: Batch, source: Batch) -> None:
    """Copy the tensors of `source` into those of `target`. Raises RecipeError if shapes or values differ."""
    (ours, form), (theirs, other) = (
        tree_flatten(target),
        tree_flatten(map_tensors(lambda tensor: tensor, source)),
    )
    hint = "use a recipe with step_graph=false"
    if form != other:
        raise RecipeError(f"a captured step takes batches of one form, {form}, and this one is {other}", hint)
    for value, new in zip(ours, theirs, strict=True):
        if isinstance(value, torch.Tensor):
            shape, others = tuple(value.shape), tuple(getattr(new, "shape", ()))
            if not isinstance(new, torch.Tensor) or shape != others:
                message = f"a captured step takes batches of one shape, {shape}, and this one is {others}"
                raise RecipeError(message, hint)
            value.copy_(new, non_blocking=True)
        elif value != new:
            raise RecipeError(f"a captured step has {value!r} in its batch, and this one {new!r}", hint)
