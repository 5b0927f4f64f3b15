"""Whether the model that is trained computes what it did before it was compiled, sharded and wrapped.

The checks before training see the model that the recipe converts. Afterwards it is compiled, run by ONNX
Runtime, sharded, held in bf16. This check watches the first passes of the training, since only they go
through the graphs that steps use. So it costs no more than a copy of some outputs.
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
from fastlaunch_train.steppers.torch_stepper import check_loss
from fastlaunch_train.workloads.contract import Batch, Workload

NAME = "as-trained"
#: Limits for FP8: on the sample that is furthest off, and on all outputs along what they should be. A value
#: that is rounded otherwise before a product becomes the next value of E4M3, 1/16 to 1/8 away: in a ViT-Huge
#: of six seeds, compiled by torch with torchao's FP8, a sample was off by 0.048 to 0.102, and all along by at
#: most 0.004 (H200, torch 2.11). Transformer Engine's modules gave the same bits. For other precisions both
#: are the limit of equivalence, which compares with fp32: two models of one precision differ by no more
#: (bf16: 0.009 compiled, 0.017 with parameters in bf16 or FSDP2).
FP8_LIMIT, FP8_ALONG = 0.15, 0.02
#: Values of an output that are kept, at most: the logits of four sequences are 131 million.
_MOST_VALUES = 2**17
#: Eager passes that measure the spread of a model which draws, and how many of its standard deviations are
#: allowed: in 80 trials of GPT-2, eager and compiled, the most was 3.7. Few outputs (two to four classes of 1
#: to 12 samples) have long tails: of 7578 right trials 10 were off by 8, and one by 12.
DRAWS, SPREADS = 16, 12.0


class CompiledModelCheck:
    """Compares what `workload.loss` gets out of a model in its first passes with what it got before them.

    Made of the converted `model`, before `build_stepper` changes that: runs it eagerly, without gradients,
    and leaves it as it was. The compiled form of a model with dropout draws otherwise, so several passes
    measure what is usual.
    batch: a micro-batch of the first step; kept until `check`. rounding: of its `Reference`.
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
        #: The workload as it was given, for passes that are not the training's own.
        self.unwatched = workload
        #: The workload to train with, whose `loss` is watched in the first passes on the batch.
        self.workload = replace(workload, loss=self._loss)
        self._batch = batch
        #: For each pass, the values of its outputs, (samples, values), and then its loss.
        self._seen: list[list[torch.Tensor]] = []
        # The pass that compiles and the first step's have the same weights; later ones have others. Where
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
        # The loss alone, where the model's outputs differ in number or were not seen.
        of_loss = len({_shapes(values) for values in passes}) > 1
        of_loss = of_loss or any(len(values) == 1 for values in (*seen, *passes))
        part = slice(-1, None) if of_loss else slice(-1)
        expected = [values[part] for values in passes]
        checks = [_compared(values[part], expected, *self._limits) for values in seen]
        return max(checks, key=_badness, default=None)

    def _eager(self, model: nn.Module, autocast: Callable[[], Any]) -> Iterator[list[torch.Tensor]]:
        # On copies: a loss may write to its batch, and the first step still needs it.
        before = _random_states(model)
        with autocast():
            _, first = _watched(self.unwatched, model, map_tensors(torch.Tensor.clone, self._batch))
        if _random_states(model) == before:
            yield first
            return
        # Without the first: an eager training draws the same for its first step.
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
    """Return the loss, and the values of the model's outputs and last of the loss."""
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

    # Where a module keeps its compiled form, and not a forward hook, which would be compiled with it.
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
    """Return the check of the output that is furthest off."""
    shapes, right = _shapes(outputs), _shapes(expected[0])
    if shapes != right:
        return Check(name=NAME, passed=False, detail=f"outputs of shapes {shapes}, not {right}")
    pairs = zip(outputs, zip(*expected, strict=True), strict=True)
    judged = (_judged(y.double(), torch.stack(draws).double(), sample, along) for y, draws in pairs)
    return max(judged, key=_badness)


def _judged(output: torch.Tensor, draws: torch.Tensor, sample: float, along: float) -> Check:
    """Return the worse of two checks: along the mean of the draws, and of the distance from it.

    output: (samples, values). draws: the same of eager passes, (1 or DRAWS, samples, values). sample, along:
    relative errors that are allowed, of the sample that is furthest off and along what they should be.
    Along the mean, which is hardly drawn, all outputs together may be larger or smaller. The distance from a
    single draw is that of the sample furthest off, relative to the root mean square of samples' norms. From
    several, it is by how much the squared distance is more or less than theirs, as a root and relative to the
    mean's norm: a model that no longer draws is as far off as the draws are. A value that is infinite in all
    of them, as masked ones are, does not differ.
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
    # The mean holds a share of each draw's own noise, and is off by as much.
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
    """Return (samples, values), every other one left out until they are _MOST_VALUES; samples go last."""
    while value.numel() > _MOST_VALUES:
        longest = max(range(value.dim()), key=lambda dim: (dim > 0) * value.shape[dim])
        longest = longest if value.shape[longest] > 1 else 0
        value = value[(slice(None),) * longest + (slice(None, None, 2),)]
    return value.reshape(len(value), -1)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32: the next pass overwrites what a CUDA graph returned."""
    return value.detach().to(torch.float32, copy=True)


def _same(batch: Batch, other: Batch) -> bool:
    """Return whether two batches are the same memory; as `other` is kept, nothing else takes its place."""
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
