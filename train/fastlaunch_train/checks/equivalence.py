"""Whether a recipe computes what the model does, each sample by itself; seen in outputs, before training.

Recipes that fail are trained all the same, and marked: so we see what a fast wrong recipe would cost.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.models.precision import Precision, full_fp32, set_fp32_products
from fastlaunch_train.recipes.recipe import TE_SCALINGS, Recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.workloads.contract import Batch, Workload

#: Relative error that a whole model's outputs may have. Measured on a CPU, on ViTs of width 1280 with 2, 6,
#: 12 and 20 blocks: bf16 7e-3 to 9e-3, FP8 with a scale for each tensor 0.09 to 0.11. (It hardly grows with
#: depth: the first blocks make up most of what the class token holds.) Against a block in float64,
#: Transformer Engine in bf16 is off by 3.2 times as much as timm's, whose residual stream is fp32, and
#: delayed scaling by 1.6 times as much as a scale for each tensor (H200, release 2.20.2): 3e-2 and 0.17 are
#: expected, and the limits are 1.5 times that. A model that attends across the batch, or another model, is
#: off by 1. TF32 and fp16 keep three bits more than bf16, and get a fifth of its limit.
EQUIVALENCE_LIMITS = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2, "fp8": 0.25}
#: How much, relative to its norm, a sample's output may change that should not: only sums in another order
#: flip the last bit of some values, which is 2^-8 of a bf16 value. An output that should change does by far
#: more: random images differ by 0.13 to 0.96 in the outputs of untrained ViTs.
STILL_LIMITS = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3, "bf16": 4e-3, "fp8": 4e-3}
#: The usual relative error of native models in a precision; for FP8, in bf16. Both outputs of a classifier of
#: two classes may be near 0, and every error large beside them: of 150 untrained DistilBERTs in bf16 the
#: median is 4e-3, the largest 0.07. There the limits grow with the native model's error, that of equivalence
#: up to LARGEST_LIMIT.
USUAL_ROUNDING = {"tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 1e-2}
LARGEST_LIMIT, MOST_TIMES = 0.5, 10.0
#: Samples have to differ in the recipe's outputs if in the reference they do by so many times STILL_LIMITS.
DISTINCT = 3.0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the native model says of a batch."""

    #: (samples, ...) in fp32; None if the workload has no outputs.
    outputs: torch.Tensor | None
    #: The relative error of the same model in the recipe's precision, without FP8; 0 in fp32.
    rounding: float = 0.0


def compute_reference(workload: Workload, recipe: Recipe, model: nn.Module, probe: Batch) -> Reference:
    """Return the outputs of the native `model` for `probe`, in fp32 and in evaluation mode.

    Called before `convert_model`. The model, its buffers and the random state stay as they were.
    """
    if workload.outputs is None:
        return Reference(outputs=None)
    with preserve_state(model), full_fp32(), torch.no_grad():
        model.eval()
        exact = workload.outputs(model, _in_fp32(probe)).float()
        if recipe.precision not in USUAL_ROUNDING:
            return Reference(outputs=exact)
        with _low_precision(recipe.precision, exact.device.type):
            rounded = workload.outputs(model, probe).float()
    return Reference(outputs=exact, rounding=relative_error(rounded, exact))


def run_checks(
    workload: Workload,
    recipe: Recipe,
    precision: Precision,
    model: nn.Module,
    probe: Batch,
    reference: Reference,
) -> list[Check]:
    """Return the checks of the converted `model` for the record.

    * `equivalence`: the error of the outputs relative to the reference.
    * `without-fp8`: the same with Transformer Engine's FP8 blocks computing in bf16, since a late block could
      be missing within the error of FP8.
    * `isolation`: one sample is replaced by another, and its output alone changes.
    * `permutation`: the batch is permuted, and the outputs permute.

    The last two need three samples, and require a change only if the reference changes, which that of some
    untrained models does not. Without outputs there are no checks. A check that fails is a line with `passed`
    False, not an error. Model, buffers and random state stay as they were.
    """
    if workload.outputs is None or reference.outputs is None:
        return []
    outputs_of, exact = workload.outputs, reference.outputs
    still = STILL_LIMITS[recipe.precision] * times_usual(recipe.precision, reference.rounding)
    with preserve_state(model):
        if recipe.fp8_scaling == "delayed":
            # Scales are only updated with gradients. They are known from the second pass on: of Transformer
            # Engine's blocks at its start or before, of fused ones after its start.
            for _ in range(2):
                with precision.autocast():
                    outputs_of(model, probe)
        model.eval()

        def outputs(
            samples: Sequence[int] | None = None, autocast: Callable[[], Any] = precision.autocast
        ) -> torch.Tensor:
            with torch.no_grad(), autocast():
                given = outputs_of(model, probe if samples is None else take(probe, samples))
            # A copy: the next pass overwrites what a CUDA graph returned.
            return given.to(torch.float32, copy=True)

        checks = [_equivalence(outputs(), exact, equivalence_limit(recipe.precision, reference.rounding))]
        if recipe.fp8_scaling in TE_SCALINGS:
            in_bf16 = functools.partial(torch.autocast, exact.device.type, torch.bfloat16)
            limit = equivalence_limit("bf16", reference.rounding)
            checks.append(_equivalence(outputs(None, in_bf16), exact, limit, name="without-fp8"))
        if len(exact) >= 3:
            checks += [_isolation(outputs, exact, still), _permutation(outputs, exact, still)]
    return checks


def equivalence_limit(precision: str, rounding: float) -> float:
    """Return the relative error that a recipe may have if the native model has that of `rounding`."""
    return min(EQUIVALENCE_LIMITS[precision] * times_usual(precision, rounding), LARGEST_LIMIT)


def times_usual(precision: str, rounding: float) -> float:
    """Return how many times the usual error `rounding` is, from 1 to MOST_TIMES."""
    if precision not in USUAL_ROUNDING or not rounding > USUAL_ROUNDING[precision]:
        return 1.0
    return min(rounding / USUAL_ROUNDING[precision], MOST_TIMES)


def _low_precision(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Return a context of this precision; TF32 is allowed until the caller's context ends."""
    if precision == "tf32":
        set_fp32_products(allow_tf32=True)
        return contextlib.nullcontext()
    return torch.autocast(device_type, torch.float16 if precision == "fp16" else torch.bfloat16)


def _in_fp32(value: Any) -> Any:
    """Return a batch with its floating-point tensors in fp32: some workloads' have the recipe's dtype."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_in_fp32(item) for item in value)
    return value


def take(value: Any, samples: Sequence[int]) -> Any:
    """Return a batch of the chosen `samples` of a batch, in their order; what is not a tensor stays."""
    if isinstance(value, torch.Tensor):
        return value[list(samples)] if value.dim() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(take(item, samples) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(take(item, samples) for item in value)
    if isinstance(value, Mapping):
        return {key: take(item, samples) for key, item in value.items()}
    return value


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference over that of `exact`; infinite if only the latter is 0."""
    difference, size = float((value - exact).norm()), float(exact.norm())
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def _equivalence(
    outputs: torch.Tensor, exact: torch.Tensor, limit: float, *, name: str = "equivalence"
) -> Check:
    if outputs.shape != exact.shape:
        detail = f"outputs of shape {tuple(outputs.shape)}, not {tuple(exact.shape)}"
        return Check(name=name, passed=False, limit=limit, detail=detail)
    return judge(name, relative_error(outputs, exact), limit)


def _isolation(outputs: Any, exact: torch.Tensor, limit: float) -> Check:
    """Replace sample 0, in the second place, by the sample least like it, which is also in the third.

    So both batches hold the same samples, and what is scaled by the largest value in the batch is scaled
    alike. If any output but the second changes, it depends on another sample than its own.
    """
    differences = [relative_error(each, exact[0]) for each in exact]
    other = max(range(1, len(exact)), key=lambda index: differences[index])
    rest = [index for index in range(1, len(exact)) if index != other][: len(exact) - 3]
    before, after = outputs([0, 0, other, *rest]), outputs([0, other, other, *rest])
    changes = [relative_error(b, a) for a, b in zip(before, after, strict=True)]
    own = changes.pop(1)
    problem = None
    if own <= limit and differences[other] > DISTINCT * limit:
        problem = "the output of the sample that was replaced did not change"
    return judge("isolation", max(changes), limit, problem)


def _permutation(outputs: Any, exact: torch.Tensor, limit: float) -> Check:
    order = [*range(1, len(exact)), 0]
    before, after = outputs(), outputs(order)
    # Outputs that say nothing of their samples permute too, so they have to move.
    problem = None
    if relative_error(after, before) <= limit and relative_error(exact[order], exact) > DISTINCT * limit:
        problem = "the outputs did not move with the samples"
    return judge("permutation", relative_error(after, before[order]), limit, problem)


def judge(name: str, value: float, limit: float, problem: str | None = None) -> Check:
    """Return the check that measured `value`, and maybe a `problem`; what is not finite fails."""
    if not math.isfinite(value) or not math.isfinite(limit):
        known = limit if math.isfinite(limit) else None
        return Check(name=name, passed=False, limit=known, detail=problem or "not a finite number")
    return Check(
        name=name, passed=value <= limit and problem is None, value=value, limit=limit, detail=problem
    )
