"""Check that the trained model computes the same as before it was compiled, sharded and wrapped.

The checks before training see the model that the recipe converts. Later it is compiled, run by ONNX Runtime,
sharded or held in bf16. This check watches the first passes of the training, since only they use the graphs
of the steps. So it costs only a copy of some outputs.
"""

import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastlaunch_train.checks.equivalence import equivalence_limit, judge
from fastlaunch_train.data.batches import map_tensors, tensors_in
from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.steppers.stepper import check_loss
from fastlaunch_train.workloads.contract import Batch, Workload

NAME = "as-trained"
#: Limits for FP8: for the worst sample, and for all outputs along their expected value. A value that is
#: rounded differently before a product becomes the next value of E4M3, 1/16 to 1/8 away: for six seeds of
#: ViT-Huge, compiled by torch with torchao's FP8, the worst sample was off by 0.048 to 0.102, and all outputs
#: along their expected value by at most 0.004 (H200, torch 2.11). Transformer Engine's modules gave the same
#: bits. For other precisions both limits are that of equivalence, which compares with fp32: two models of one
#: precision differ by no more (bf16: 0.009 compiled, 0.017 with parameters in bf16 or FSDP2).
FP8_LIMIT, FP8_ALONG = 0.15, 0.02
#: The most values of an output to keep: the logits of four sequences are 131 million.
_MOST_VALUES = 2**17
#: Number of eager passes that measure the spread of a model with random draws, and the standard deviations
#: that are allowed: 80 trials of GPT-2, eager and compiled, reached 3.7. Few outputs (two to four classes of
#: 1 to 12 samples) have long tails: among 7578 right trials 10 were off by 8, and one by 12.
DRAWS, SPREADS = 16, 12.0


class CompiledModelCheck:
    """Compares a model's outputs in `workload.loss` in its first passes with those before them.

    Create it from the converted `model`, before `build_stepper` changes that: it runs the model eagerly,
    without gradients, and leaves it as it was. The compiled form of a model with dropout draws differently,
    so several passes measure the usual spread.
    batch: a micro-batch of the first step; kept until `check`. rounding: that of its `Reference`.
    """

    def __init__(
        self,
        workload: Workload,
        recipe: Recipe,
        precision: Precision,
        model: nn.Module,
        batch: Batch,
        *,
        rounding: float,
    ) -> None:
        #: The original workload, for passes outside of the training.
        self.unwatched = workload
        #: The workload to train with; its `loss` is watched in the first passes on the batch.
        self.workload = replace(workload, loss=self._loss)
        self._batch = batch
        #: The values of each pass's outputs, (samples, values), and then its loss.
        self._seen: list[list[torch.Tensor]] = []
        # The pass that compiles and the first step's pass have the same weights; later passes have others. If
        # steps are captured, later passes before the first step may have other scales.
        self._num_passes = 2 if recipe.compiles and not recipe.step_graph else 1
        usual = equivalence_limit(recipe.precision, rounding)
        self._limits = (FP8_LIMIT, FP8_ALONG) if recipe.precision == "fp8" else (usual, usual)
        with preserve_state(model), torch.no_grad():
            self._expected = list(self._eager(model, precision.autocast))

    def check(self) -> Check | None:
        """Return the check for the record, after the first step; None if no pass on the batch was seen."""
        seen, self._seen, self._num_passes = self._seen, [], 0
        passes, self._expected, self._batch = self._expected, [], None
        # Compare only the loss if the model's outputs differ in number or were not seen.
        of_loss = len({_shapes(values) for values in passes}) > 1
        of_loss = of_loss or any(len(values) == 1 for values in (*seen, *passes))
        part = slice(-1, None) if of_loss else slice(-1)
        expected = [values[part] for values in passes]
        checks = [_compared(values[part], expected, *self._limits) for values in seen]
        return max(checks, key=_badness, default=None)

    def _eager(self, model: nn.Module, autocast: Callable[[], Any]) -> Iterator[list[torch.Tensor]]:
        # Pass copies: a loss may write to its batch, and the first step still needs the batch.
        before = _random_states(model)
        with autocast():
            _, first = _watched(self.unwatched, model, map_tensors(torch.Tensor.clone, self._batch))
        if _random_states(model) == before:
            yield first
            return
        # Leave out the first pass: an eager training repeats its draws in the first step.
        for _ in range(DRAWS):
            with autocast():
                yield _watched(self.unwatched, model, map_tensors(torch.Tensor.clone, self._batch))[1]

    def _loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if len(self._seen) >= self._num_passes or not _same(batch, self._batch):
            return self.unwatched.loss(model, batch)
        loss, values = _watched(self.unwatched, model, batch)
        self._seen.append(values)
        return loss


def _watched(workload: Workload, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss, and the values of the model's outputs with the loss last."""
    values: list[torch.Tensor] = []
    before = model.__dict__.get("_compiled_call_impl")
    inner = before or model._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        values.extend(
            _copy(_some(tensor.detach()))
            for tensor in tensors_in(outputs)
            if tensor.dim() and tensor.numel() and tensor.is_floating_point()
        )
        return outputs

    # Replace the attribute where a module keeps its compiled form: a forward hook would be compiled with it.
    model.__dict__["_compiled_call_impl"] = call
    try:
        loss = workload.loss(model, batch)
    finally:
        del model.__dict__["_compiled_call_impl"]
        if before is not None:
            model.__dict__["_compiled_call_impl"] = before
    check_loss(workload, loss)
    return loss, [*values, _copy(loss).reshape(1, 1)]


def _shapes(values: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in values)


def _compared(
    outputs: Sequence[torch.Tensor], expected: Sequence[Sequence[torch.Tensor]], sample: float, along: float
) -> Check:
    """Return the check of the output with the largest error."""
    shapes, right = _shapes(outputs), _shapes(expected[0])
    if shapes != right:
        return Check(name=NAME, passed=False, detail=f"outputs of shapes {shapes}, not {right}")
    pairs = zip(outputs, zip(*expected, strict=True), strict=True)
    judged = (_judged(y.double(), torch.stack(draws).double(), sample, along) for y, draws in pairs)
    return max(judged, key=_badness)


def _judged(output: torch.Tensor, draws: torch.Tensor, sample: float, along: float) -> Check:
    """Return the worse of two checks: of the size along the draws' mean, and of the distance from the mean.

    output: (samples, values). draws: those of eager passes, (1 or DRAWS, samples, values). sample, along:
    allowed relative errors of the worst sample, and along the mean. Along the mean, which is hardly random,
    all outputs together may be larger or smaller. The distance from a single draw is that of the worst
    sample, relative to the root mean square of samples' norms. With several draws, it is the root of the
    difference between the squared distance and the draws' own, relative to the mean's norm: a model that no
    longer draws is as far off as the draws are. A value that is infinite in all of them, as masked values
    are, does not differ.
    """
    masked = (draws == output).all(0) & output.isinf()
    output, draws = output.masked_fill(masked, 0), draws.masked_fill(masked, 0)
    mean = draws.mean(0)
    size, number = float(mean.square().sum()), len(draws)
    parallel = (draws * mean).sum((1, 2))
    more = float((output * mean).sum() - parallel.mean())
    if number == 1:
        furthest = float((output - mean).square().sum(1).max()) * len(mean)
        distant = judge(NAME, _ratio(furthest, size) ** 0.5, sample)
        return max(judge(NAME, _ratio(abs(more), size), along), distant, key=_badness)
    spread = (draws - mean).square().sum((1, 2)) * number / (number - 1)
    variance = float(spread.mean())
    # The mean contains a share of each draw's noise, and is off by as much.
    more += variance / number
    further = float((output - mean).square().sum()) - variance * (number + 1) / number
    allowed_more = along * size + SPREADS * float(parallel.std())
    allowed_further = sample**2 * size + SPREADS * float(spread.std())
    return max(
        judge(NAME, _ratio(abs(more), size), _ratio(allowed_more, size)),
        judge(NAME, _ratio(abs(further), size) ** 0.5, _ratio(allowed_further, size) ** 0.5),
        key=_badness,
    )


def _ratio(value: float, size: float) -> float:
    if size == 0:
        return 0.0 if value == 0 else math.inf
    return value / size


def _badness(check: Check) -> tuple[bool, float]:
    known = check.value is not None and check.limit
    return not check.passed, check.value / check.limit if known else math.inf  # type: ignore[operator]


def _some(value: torch.Tensor) -> torch.Tensor:
    """Return (samples, values), dropping every other value until _MOST_VALUES are left; drop samples last."""
    while value.numel() > _MOST_VALUES:
        longest = max(range(value.dim()), key=lambda dim: (dim > 0) * value.shape[dim])
        longest = longest if value.shape[longest] > 1 else 0
        value = value[(slice(None),) * longest + (slice(None, None, 2),)]
    return value.reshape(len(value), -1)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32: the next pass overwrites what a CUDA graph returned."""
    return value.detach().to(torch.float32, copy=True)


def _same(batch: Batch, other: Batch) -> bool:
    """Return whether two batches share memory; `other` is kept, so nothing else can take its place."""
    places = [[(tensor.data_ptr(), tensor.shape) for tensor in tensors_in(nest)] for nest in (batch, other)]
    return places[0] == places[1]


def _random_states(model: nn.Module) -> tuple[Any, ...]:
    """Return the state of every generator that `model` may draw from."""
    first = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(()))
    on_gpu = first.device.type == "cuda"
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(first.device)] if on_gpu else [])]
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = pickle.dumps(numpy_random.get_state()) if numpy_random else b""
    return (random.getstate(), of_numpy, *(bytes(state.tolist()) for state in states))
