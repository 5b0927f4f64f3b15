"""Whether the model that is trained computes what it did before it was compiled, sharded and wrapped.

The checks before training see the model that the recipe converts. What is done to it afterwards (it is
compiled, run by ONNX Runtime, sharded, held in bf16) is seen here: in the first passes of the training, which
alone go through the graphs that steps do, and so cost nothing more than a copy of some outputs.
"""

import copy
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fastlaunch_train.checks.equivalence import equivalence_limit, judged
from fastlaunch_train.loop.train import compiles
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.steppers.torch_stepper import check_loss
from fastlaunch_train.undisturbed import left_as_it_was
from fastlaunch_train.workloads.contract import Batch, Workload

NAME = "as-trained"
#: Of FP8, for the sample that is furthest off, and for all outputs along what they should be. What is rounded
#: otherwise before a product becomes the next value of E4M3, 1/16 to 1/8 away: of a ViT-Huge of six seeds,
#: compiled by torch with torchao's FP8, a sample was off by 0.048 to 0.102, and all along by at most 0.004
#: (H200, torch 2.11). Transformer Engine's modules gave the same bits. Elsewhere both are the limit of
#: equivalence, which is of one arithmetic against fp32: of two of one precision no more is expected (bf16:
#: 0.009 compiled, 0.017 with parameters in bf16 or FSDP2).
FP8_LIMIT, FP8_ALONG = 0.15, 0.02
#: Values of an output that are kept, at most: four sequences' logits are 131 million. Samples go last.
_MOST_VALUES = 2**17
#: What Python looks up in the class of a container of modules, not in itself.
_OF_CONTAINERS = ("__getitem__", "__iter__", "__len__", "__contains__")
#: Eager passes by which the outputs' spread is known, of a model that draws, and how many of their standard
#: deviations are allowed: in 80 trials of GPT-2, eager and compiled, the most was 3.7. Few outputs (two
#: to four classes of 1 to 12 samples) have long tails: of 7578 right trials 10 were off by 8, and one by 12.
DRAWS, SPREADS = 16, 12.0


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Relative errors that are allowed: `sample` of the one furthest off, `along` of what all should be."""

    sample: float
    along: float


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What a forward pass said: some values of each output of the model, (samples, values) in fp32."""

    outputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor

    def values(self, *, of_loss: bool) -> tuple[torch.Tensor, ...]:
        """The outputs, or the loss as one, in fp64."""
        found = (self.loss.reshape(1, 1),) if of_loss else self.outputs
        return tuple(value.detach().to(torch.float64) for value in found)


class AsTrained:
    """Compares what `workload.loss` gets out of a model in its first passes with what it got before them.

    Made of the converted `model`, before `stepping.build_stepper` changes that; it runs it eagerly, without
    gradients, and leaves it as it was. Of a model that draws (dropout), whose compiled form draws otherwise,
    several passes tell what is usual.
    batch: a micro-batch of the first step, which is kept until `check`. rounding: as of `checks.Reference`.
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
        self._of = workload
        self._batch = batch
        self._seen: list[_Pass] = []
        # The one that compiles and the first step's have the same weights; later ones have others.
        self._num_passes = 2 if compiles(recipe) else 1
        self._done = False
        usual = equivalence_limit(recipe.precision, rounding)
        fp8 = recipe.precision == "fp8"
        self._limits = _Limits(sample=FP8_LIMIT if fp8 else usual, along=FP8_ALONG if fp8 else usual)
        with left_as_it_was(model), torch.no_grad():
            self._expected = list(self._eager(model, precision.autocast))

    @property
    def workload(self) -> Workload:
        """The workload to train with: its `loss` is looked at in the first passes on the batch."""
        return replace(self._of, loss=self._loss)

    @property
    def unwatched(self) -> Workload:
        """The workload as it was given, for passes that are not the training's own."""
        return self._of

    def check(self) -> Check | None:
        """The line for the record, after the first step; None if no pass on the batch was seen."""
        seen, self._seen, self._done = self._seen, [], True
        passes, self._expected, self._batch = self._expected, [], None
        drawn_shapes = {tuple(value.shape for value in each.outputs) for each in passes}
        of_loss = len(drawn_shapes) > 1 or not all(each.outputs for each in (*seen, *passes))
        expected = [each.values(of_loss=of_loss) for each in passes]
        found = [_compared(each.values(of_loss=of_loss), expected, self._limits) for each in seen]
        return max(found, key=_badness, default=None)

    def _eager(self, model: nn.Module, autocast: Callable[[], Any]) -> Iterator[_Pass]:
        # Of copies: a loss may write to its batch, and the first step's is still to come.
        before = _random_states(model)
        with autocast():
            first = _watched(self._of, model, _copied(self._batch))
        if _random_states(model) == before:
            yield first
            return
        # Not the first: an eager training draws the same for its first step.
        for _ in range(DRAWS):
            with autocast():
                yield _watched(self._of, model, _copied(self._batch))

    def _loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if self._done or not _same(batch, self._batch):
            return self._of.loss(model, batch)
        found = _watched(self._of, model, batch)
        self._seen.append(replace(found, loss=_copy(found.loss)))
        self._done = len(self._seen) == self._num_passes
        return found.loss


class _Recorder:
    """Stands for a model: calls it, and keeps some values of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__.update(_model=model, _outputs=[])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._model(*args, **kwargs)
        self._outputs.extend(
            _copy(_some(tensor.detach())) for tensor in _tensors(found) if _of_samples(tensor)
        )
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # For a workload that asks what the model is.
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
    found: Sequence[torch.Tensor], expected: Sequence[Sequence[torch.Tensor]], limits: _Limits
) -> Check:
    """The output that is furthest off, by how much and how much it may be."""
    shapes, wanted = ([tuple(each.shape) for each in values] for values in (found, expected[0]))
    if shapes != wanted:
        return Check(name=NAME, passed=False, detail=f"outputs of shapes {shapes}, not {wanted}")
    each = zip(found, zip(*expected, strict=True), strict=True)
    return max((_judged(y, torch.stack(draws), limits) for y, draws in each), key=_badness)


def _judged(found: torch.Tensor, draws: torch.Tensor, limits: _Limits) -> Check:
    """found: (samples, values). draws: the same of eager passes, (1 or DRAWS, samples, values).

    The worse of two: by how much all outputs together are more or less along the draws' mean, which is hardly
    drawn; and how far they are from it. Of one draw that is the distance of the sample that is furthest off,
    relative to the root mean square of samples' norms. Of several it is by how much the squared distance is
    more or less than theirs, as a root and relative to the mean's norm: a model that draws nothing any more
    is as far off as the draws are. What is infinite in all of them, as masked values are, does not differ.
    """
    masked = (draws == found).all(0) & found.isinf()
    found, draws = found.masked_fill(masked, 0), draws.masked_fill(masked, 0)
    mean = draws.mean(0)
    size, number = float(mean.square().sum()), len(draws)
    along = (draws * mean).sum((1, 2))
    more = float((found * mean).sum() - along.mean())
    if number == 1:
        furthest = float((found - mean).square().sum(1).max()) * len(mean)
        distant = judged(NAME, _ratio(furthest, size) ** 0.5, limits.sample)
        return max(judged(NAME, _ratio(abs(more), size), limits.along), distant, key=_badness)
    spread = (draws - mean).square().sum((1, 2)) * number / (number - 1)
    variance = float(spread.mean())
    # Each of the draws is in their mean, and so is as much of its own noise; the mean is off by as much.
    more += variance / number
    further = float((found - mean).square().sum()) - variance * (number + 1) / number
    allowed_more = limits.along * size + SPREADS * float(along.std())
    allowed_further = limits.sample**2 * size + SPREADS * float(spread.std())
    return max(
        judged(NAME, _ratio(abs(more), size), _ratio(allowed_more, size)),
        judged(NAME, _ratio(abs(further), size) ** 0.5, _ratio(allowed_further, size) ** 0.5),
        key=_badness,
    )


def _ratio(value: float, size: float) -> float:
    if size == 0:
        return 0.0 if value == 0 else math.inf
    return value / size


def _badness(check: Check) -> tuple[bool, float]:
    known = check.value is not None and check.limit
    return not check.passed, check.value / check.limit if known else math.inf  # type: ignore[operator]


def _copied(batch: Batch) -> Batch:
    # Tensors by themselves: else of a view all that it is a part of would be copied.
    return copy.deepcopy(batch, {id(tensor): tensor.clone() for tensor in _tensors(batch)})


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a nest, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _of_samples(value: torch.Tensor) -> bool:
    return bool(value.dim() and value.numel() and value.is_floating_point())


def _some(value: torch.Tensor) -> torch.Tensor:
    """(samples, values): every other one of the longest dimension, until _MOST_VALUES or less are left."""
    while value.numel() > _MOST_VALUES:
        longest = max(range(value.dim()), key=lambda dim: (dim > 0) * value.shape[dim])
        longest = longest if value.shape[longest] > 1 else 0
        value = value[(slice(None),) * longest + (slice(None, None, 2),)]
    return value.reshape(len(value), -1)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """In fp32: what a CUDA graph returned is overwritten by the next pass."""
    return value.detach().to(torch.float32, copy=True)


def _same(one: Any, other: Any) -> bool:
    """Whether two batches are the same memory; `other` is kept, so that nothing else takes its place."""
    if isinstance(one, torch.Tensor):
        same_place = isinstance(other, torch.Tensor) and one.data_ptr() == other.data_ptr()
        return same_place and one.shape == other.shape
    if isinstance(one, (tuple, list)):
        fits = isinstance(other, (tuple, list)) and len(one) == len(other)
        return fits and all(map(_same, one, other))
    if isinstance(one, Mapping):
        fits = isinstance(other, Mapping) and one.keys() == other.keys()
        return fits and all(_same(item, other[key]) for key, item in one.items())
    return type(one) is type(other)


def _random_states(model: nn.Module) -> tuple[Any, ...]:
    """Of every generator that `model` may draw from."""
    first = next(iter([*model.parameters(), *model.buffers()]), torch.zeros(()))
    on_gpu = first.device.type == "cuda"
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(first.device)] if on_gpu else [])]
    numpy_random = sys.modules.get("numpy.random")
    of_numpy = pickle.dumps(numpy_random.get_state()) if numpy_random else b""
    return (random.getstate(), of_numpy, *(bytes(state.tolist()) for state in states))
