"""Check before training, by outputs, that a recipe computes the same as the model, sample by sample.

Recipes that fail are still trained, but marked, to show what a fast wrong recipe would cost.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fastlaunch_train.checks.gradients import FP16_SCALE, GradientErrors, gradient_errors, gradients_of
from fastlaunch_train.data.batches import map_tensors, take
from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.models.precision import Precision, full_fp32, set_fp32_products
from fastlaunch_train.recipes.recipe import TE_SCALINGS, Recipe
from fastlaunch_train.recipes.rules import batch_multiple
from fastlaunch_train.records.records import Check
from fastlaunch_train.workloads.contract import Batch, Workload

#: Allowed relative error of a whole model's outputs. Measured on a CPU, on ViTs of width 1280 with 2, 6, 12
#: and 20 blocks: bf16 7e-3 to 9e-3, FP8 with a scale for each tensor 0.09 to 0.11. (The error hardly grows
#: with depth: the first blocks contribute most to the class token.) Against a block in float64, Transformer
#: Engine in bf16 is off by 3.2 times as much as timm's, whose residual stream is fp32, and delayed scaling by
#: 1.6 times as much as a scale for each tensor (H200, release 2.20.2). So 3e-2 and 0.17 are expected, and the
#: limits are 1.5 times these. A model that attends across the batch, or another model, is off by 1. TF32 and
#: fp16 keep three bits more than bf16, and get a fifth of its limit.
EQUIVALENCE_LIMITS = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2, "fp8": 0.25}
#: Allowed change, relative to its norm, of an output that should not change: sums in another order flip only
#: the last bit of some values, 2^-8 of a bf16 value. An output that should change does so by far more: random
#: images differ by 0.13 to 0.96 in the outputs of untrained ViTs.
STILL_LIMITS = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-3, "bf16": 4e-3, "fp8": 4e-3}
#: The usual relative error of native models in a precision; for FP8, in bf16. Both outputs of a two-class
#: classifier may be near 0, so that every error is relatively large: among 150 untrained DistilBERTs in bf16
#: the median is 4e-3 and the largest 0.07. Then the limits grow with the native model's error, and the limit
#: of equivalence grows up to LARGEST_LIMIT.
USUAL_ROUNDING = {"tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8": 1e-2}
LARGEST_LIMIT, MOST_TIMES = 0.5, 10.0
#: All gradients together may be off by as much as outputs. Measured on a CPU, on ViTs of width 64 and 256:
#: bf16 6e-3 to 8e-3, FP8 0.08 to 0.11, and the worst tensor 1.4 times as much; with GELU's gradient halved,
#: 0.50. A tensor may be off by so many times what all may, and at most by this: a missing one is off by 1.
WORST_TIMES, WORST_LIMIT = 2.0, 0.75
#: Number of passes in which delayed scaling finds the scales of gradients, from the last layers to the first.
NUM_GRADIENT_PASSES = 3
#: If samples differ by this many times STILL_LIMITS in the reference, they have to differ in the recipe's
#: outputs.
DISTINCT = 3.0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The native model's outputs and gradients for a batch."""

    #: (samples, ...) in fp32; None if the workload has no outputs.
    outputs: torch.Tensor | None
    #: The relative error of the same model in the recipe's precision, without FP8; 0 in fp32.
    rounding: float = 0.0
    #: Gradients as `gradients_of` returns them; None if they are not compared.
    gradients: Mapping[str, torch.Tensor] | None = None
    #: Relative errors of the gradients likewise: of all together, and of each tensor that is judged by
    #: itself.
    gradient_rounding: GradientErrors = field(default_factory=GradientErrors)


def compute_reference(workload: Workload, recipe: Recipe, model: nn.Module, probe: Batch) -> Reference:
    """Return outputs and gradients of the native `model` for `probe`, in fp32 and in evaluation mode.

    Call it before `convert_model`. The model, its buffers and the random state stay as they were.
    """
    if workload.outputs is None:
        return Reference(outputs=None)
    with preserve_state(model), full_fp32():
        model.eval()
        with torch.no_grad():
            exact = workload.outputs(model, _in_fp32(probe)).float()
        gradients = None
        # The article's blocks start from other weights.
        if workload.trains and recipe.blocks != "te-article":
            few = _few(workload, recipe, probe, len(exact))
            gradients = gradients_of(workload, model, _in_fp32(few), contextlib.nullcontext)
        if recipe.precision not in USUAL_ROUNDING:
            return Reference(outputs=exact, gradients=gradients)
        low_precision = functools.partial(_low_precision, recipe.precision, exact.device.type)
        with torch.no_grad(), low_precision():
            rounded = workload.outputs(model, probe).float()
        rounding = relative_error(rounded, exact)
        if gradients is None:
            return Reference(outputs=exact, rounding=rounding)
        rough = gradients_of(workload, model, few, low_precision, scale=_loss_scale(recipe))
        gradient_rounding = gradient_errors(rough or {}, gradients)
    if rough is None or not math.isfinite(gradient_rounding.total):
        # The native model's gradients may overflow in fp16, too: training lowers the scale.
        return Reference(outputs=exact, rounding=rounding)
    return Reference(
        outputs=exact, rounding=rounding, gradients=gradients, gradient_rounding=gradient_rounding
    )


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
    * `gradients`: the error of all gradients together, relative to the reference's.
    * `gradients-by-tensor`: that of the tensor whose gradient is furthest off.

    Isolation and permutation need three samples, and require a change only if the reference changes, which
    some untrained models' does not. Gradients are taken in evaluation mode, where nothing is dropped. Without
    outputs there are no checks. A check that fails is a line with `passed` False, not an error. Model,
    buffers and random state stay as they were.
    """
    if workload.outputs is None or reference.outputs is None:
        return []
    outputs_of, exact = workload.outputs, reference.outputs
    still = STILL_LIMITS[recipe.precision] * times_usual(recipe.precision, reference.rounding)
    with preserve_state(model):
        if recipe.fp8_scaling == "delayed":
            # Only passes with gradients update scales. They are known from the second pass on: for
            # Transformer Engine's blocks at its start or before, for fused blocks after its start.
            for _ in range(2):
                with precision.autocast():
                    outputs_of(model, probe)
        model.eval()

        def outputs(
            samples: Sequence[int] | None = None, autocast: Callable[[], Any] = precision.autocast
        ) -> torch.Tensor:
            with torch.no_grad(), autocast():
                given = outputs_of(model, probe if samples is None else take(probe, samples))
            # Copy the outputs: the next pass overwrites what a CUDA graph returned.
            return given.to(torch.float32, copy=True)

        checks = [_equivalence(outputs(), exact, equivalence_limit(recipe.precision, reference.rounding))]
        if recipe.fp8_scaling in TE_SCALINGS:
            in_bf16 = functools.partial(torch.autocast, exact.device.type, torch.bfloat16)
            limit = equivalence_limit("bf16", reference.rounding)
            checks.append(_equivalence(outputs(None, in_bf16), exact, limit, name="without-fp8"))
        if len(exact) >= 3:
            checks += [_isolation(outputs, exact, still), _permutation(outputs, exact, still)]
        if reference.gradients is not None:
            few = _few(workload, recipe, probe, len(exact))
            passes = functools.partial(
                gradients_of, workload, model, few, precision.autocast, scale=_loss_scale(recipe)
            )
            if recipe.fp8_scaling == "delayed":
                model.train()
                for _ in range(NUM_GRADIENT_PASSES):
                    passes()
                model.eval()
            if (gradients := passes()) is not None:
                checks += judge_gradients(
                    recipe.precision,
                    gradient_errors(gradients, reference.gradients),
                    reference.gradient_rounding,
                )
    return checks


def judge_gradients(precision: str, errors: GradientErrors, rounding: GradientErrors) -> list[Check]:
    """Return the checks of all gradients together, and of the tensor with the largest error.

    A tensor whose gradient is inexact in the native model, too, such as that of a bias for which the samples
    cancel out, is left to the check of all gradients.
    """
    checks = [judge("gradients", errors.total, equivalence_limit(precision, rounding.total))]
    most = MOST_TIMES * USUAL_ROUNDING.get(precision, 0.0)
    limits = {
        name: min(WORST_TIMES * equivalence_limit(precision, rounding.by_tensor.get(name, 0.0)), WORST_LIMIT)
        for name in errors.by_tensor
        if rounding.by_tensor.get(name, 0.0) <= most
    }
    if limits:
        # NaN counts as the worst.
        shares = {name: errors.by_tensor[name] / limit for name, limit in limits.items()}
        worst = max(shares, key=lambda name: (math.isnan(shares[name]), shares[name]))
        check = judge("gradients-by-tensor", errors.by_tensor[worst], limits[worst])
        detail = f"the gradient of {worst} is off by {errors.by_tensor[worst]:.2g}"
        checks.append(check if check.passed else replace(check, detail=detail))
    return checks


def _few(workload: Workload, recipe: Recipe, probe: Batch, num_samples: int) -> Batch:
    """Return two samples of `probe`, or as many as the recipe needs: activations in fp32 take memory."""
    native = recipe.precision != "fp8" and recipe.blocks == "native"
    least = 2 if native else max(2, batch_multiple(recipe, workload.sequence_length))
    return take(probe, range(min(num_samples, least)))


def _loss_scale(recipe: Recipe) -> float:
    return FP16_SCALE if recipe.precision == "fp16" else 1.0


def equivalence_limit(precision: str, rounding: float) -> float:
    """Return the allowed relative error of a recipe if the native model's is `rounding`."""
    return min(EQUIVALENCE_LIMITS[precision] * times_usual(precision, rounding), LARGEST_LIMIT)


def times_usual(precision: str, rounding: float) -> float:
    """Return `rounding` as a multiple of the usual error, from 1 to MOST_TIMES."""
    if precision not in USUAL_ROUNDING or not rounding > USUAL_ROUNDING[precision]:
        return 1.0
    return min(rounding / USUAL_ROUNDING[precision], MOST_TIMES)


def _low_precision(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """Return a context of this precision; TF32 is allowed until the caller's context ends."""
    if precision == "tf32":
        set_fp32_products(allow_tf32=True)
        return contextlib.nullcontext()
    return torch.autocast(device_type, torch.float16 if precision == "fp16" else torch.bfloat16)


def _in_fp32(batch: Batch) -> Batch:
    """Return a batch with its floating-point tensors in fp32: some workloads use the recipe's dtype."""
    return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, batch)


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

    So both batches hold the same samples, and values scaled by the batch's maximum are scaled alike. If any
    output but the second changes, it depends on another sample than its own.
    """
    differences = [relative_error(output, exact[0]) for output in exact]
    other = max(range(1, len(exact)), key=lambda index: differences[index])
    rest = [index for index in range(1, len(exact)) if index != other][: len(exact) - 3]
    before, after = outputs([0, 0, other, *rest]), outputs([0, other, other, *rest])
    changes = [relative_error(b, a) for a, b in zip(before, after, strict=True)]
    replaced_change = changes.pop(1)
    problem = None
    if replaced_change <= limit and differences[other] > DISTINCT * limit:
        problem = "the output of the sample that was replaced did not change"
    return judge("isolation", max(changes), limit, problem)


def _permutation(outputs: Any, exact: torch.Tensor, limit: float) -> Check:
    order = [*range(1, len(exact)), 0]
    before, after = outputs(), outputs(order)
    # Outputs that do not depend on their samples pass a permutation, so require that they change.
    problem = None
    if relative_error(after, before) <= limit and relative_error(exact[order], exact) > DISTINCT * limit:
        problem = "the outputs did not move with the samples"
    return judge("permutation", relative_error(after, before[order]), limit, problem)


def judge(name: str, value: float, limit: float, problem: str | None = None) -> Check:
    """Return the check of the measured `value` and an optional `problem`. A non-finite value fails."""
    if not math.isfinite(value) or not math.isfinite(limit):
        known = limit if math.isfinite(limit) else None
        return Check(name=name, passed=False, limit=known, detail=problem or "not a finite number")
    return Check(
        name=name, passed=value <= limit and problem is None, value=value, limit=limit, detail=problem
    )
