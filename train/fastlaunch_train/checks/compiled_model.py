"""Whether the model that is trained computes what it did before it was compiled, sharded and wrapped.

The checks before training see the model that the recipe converts. Afterwards it is compiled, run by ONNX
Runtime, sharded, held in bf16. This check sees that in the first passes of the training: only they go through
the graphs that steps do, and so it costs no more than a copy of some outputs.
"""

import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
#: Methods that Python looks up in the class of a container of modules, not in the object.
_OF_CONTAINERS = ("__getitem__", "__iter__", "__len__", "__contains__")
#: Eager passes that measure the spread of a model which draws, and how many of its standard deviations are
#: allowed: in 80 trials of GPT-2, eager and compiled, the most was 3.7. Few outputs (two to four classes of 1
#: to 12 samples) have long tails: of 7578 right trials 10 were off by 8, and one by 12.
DRAWS, SPREADS = 16, 12.0


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Relative errors that are allowed."""

    #: For the sample that is furthest off.
    sample: float
    #: For all outputs, along what they should be.
    along: float


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What a forward pass gave."""

    #: Some values of each output of the model: (samples, values) in fp32.
    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor

    def values(self, *, of_loss: bool) -> tuple[torch.Tensor, ...]:
        """Return the outputs, or the loss in their place, in fp64."""
        values = (self.loss.reshape(1, 1),) if of_loss else self.outputs
        return tuple(value.detach().to(torch.float64) for value in values)


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
        self._workload = workload
        self._batch = batch
        self._seen: list[_Pass] = []
        # The pass that compiles and the first step's have the same weights; later ones have others. Where
        # steps are captured, later passes before the first step may have other scales.
        self._num_passes = 2 if recipe.compiles and not recipe.step_graph else 1
        self._done = False
        usual = equivalence_limit(recipe.precision, rounding)
        fp8 = recipe.precision == "fp8"
        self._limits = _Limits(sample=FP8_LIMIT if fp8 else usual, along=FP8_ALONG if fp8 else usual)
        with preserve_state(model), torch.no_grad():
            self._expected = list(self._eager(model, precision.autocast))

    @property
    def workload(self) -> Workload:
        """The workload to train with, whose `loss` is watched in the first passes on the batch."""
        return replace(self._workload, loss=self._loss)

    @property
    def unwatched(self) -> Workload:
        """The workload as it was given, for passes that are not the training's own."""
        return self._workload

    def check(self) -> Check | None:
        """Return the check for the record, after the first step; None if no pass on the batch was seen."""
        seen, self._seen, self._done = self._seen, [], True
        passes, self._expected, self._batch = self._expected, [], None
        drawn_shapes = {tuple(value.shape for value in each.outputs) for each in passes}
        of_loss = len(drawn_shapes) > 1 or not all(each.outputs for each in (*seen, *passes))
        expected = [each.values(of_loss=of_loss) for each in passes]
        checks = [_compared(each.values(of_loss=of_loss), expected, self._limits) for each in seen]
        return max(checks, key=_badness, default=None)

    def _eager(self, model: nn.Module, autocast: Callable[[], Any]) -> Iterator[_Pass]:
        # On copies: a loss may write to its batch, and the first step still needs it.
        before = _random_states(model)
        with autocast():
            first = _watched(self._workload, model, map_tensors(torch.Tensor.clone, self._batch))
        if _random_states(model) == before:
            yield first
            return
        # Without the first: an eager training draws the same for its first step.
        for _ in range(DRAWS):
            with autocast():
                yield _watched(self._workload, model, map_tensors(torch.Tensor.clone, self._batch))

    def _loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if self._done or not _same(batch, self._batch):
            return self._workload.loss(model, batch)
        watched = _watched(self._workload, model, batch)
        self._seen.append(replace(watched, loss=_copy(watched.loss)))
        self._done = len(self._seen) == self._num_passes
        return watched.loss


class _Recorder:
    """Stands for a model: calls it, and keeps some values of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__.update(_model=model, _outputs=[])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._model(*args, **kwargs)
        self._outputs.extend(
            _copy(_some(tensor.detach())) for tensor in tensors_in(outputs) if _of_samples(tensor)
        )
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # For a workload that calls isinstance.
        return type(self.__dict__["_model"])


def _recorder(model: nn.Module) -> Any:
    names = [name for name in _OF_CONTAINERS if hasattr(type(model), name)]
    return type("_Recorder", (_Recorder,), {name: _passed_on(name) for name in names})(model)


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._model, name)(*args)


def _watched(workload: Workload, model: nn.Module, batch: Batch) -> _Pass:
    recorder = _recorder(model)
    loss = workload.loss(recorder, batch)
    check_loss(workload, loss)
    return _Pass(outputs=tuple(recorder._outputs), loss=loss)


def _compared(
    outputs: Sequence[torch.Tensor], expected: Sequence[Sequence[torch.Tensor]], limits: _Limits
) -> Check:
    """Return the check of the output that is furthest off."""
    shapes, right = ([tuple(each.shape) for each in values] for values in (outputs, expected[0]))
    if shapes != right:
        return Check(name=NAME, passed=False, detail=f"outputs of shapes {shapes}, not {right}")
    each = zip(outputs, zip(*expected, strict=True), strict=True)
    return max((_judged(y, torch.stack(draws), limits) for y, draws in each), key=_badness)


def _judged(output: torch.Tensor, draws: torch.Tensor, limits: _Limits) -> Check:
    """Return the worse of two checks: along the mean of the draws, and of the distance from it.

    output: (samples, values). draws: the same of eager passes, (1 or DRAWS, samples, values).
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
    along = (draws * mean).sum((1, 2))
    more = float((output * mean).sum() - along.mean())
    if number == 1:
        furthest = float((output - mean).square().sum(1).max()) * len(mean)
        distant = judge(NAME, _ratio(furthest, size) ** 0.5, limits.sample)
        return max(judge(NAME, _ratio(abs(more), size), limits.along), distant, key=_badness)
    spread = (draws - mean).square().sum((1, 2)) * number / (number - 1)
    variance = float(spread.mean())
    # The mean holds a share of each draw's own noise, and is off by as much.
    more += variance / number
    further = float((output - mean).square().sum()) - variance * (number + 1) / number
    allowed_more = limits.along * size + SPREADS * float(along.std())
    allowed_further = limits.sample**2 * size + SPREADS * float(spread.std())
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


def _of_samples(value: torch.Tensor) -> bool:
    return bool(value.dim() and value.numel() and value.is_floating_point())


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
