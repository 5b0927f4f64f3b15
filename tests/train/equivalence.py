"""How far a recipe's outputs and gradients are from those of the eager float64 model with the same weights.

The gradients are read off the weights: a step of SGD with a rate of 1 and no momentum subtracts them. So what
is measured is the recipe as it trains, with its blocks, compiler, wrapper and optimizer.
"""

import copy
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.checks.equivalence import Reference, relative_error, run_checks
from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import Process, start_process, stop_process
from fastlaunch_train.loop.batch_size import probe_request
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.models.te_blocks import TE_NAMES, native_name
from fastlaunch_train.recipes.recipe import TE_SCALINGS, Recipe
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.stepping import build_stepper
from fastlaunch_train.workloads.contract import Batch, Workload, load_workload
from fastlaunch_train.workloads.vit import _vision_transformer

#: Sizes of the ViTs that recipes are tried on.
TINY = {"img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 10}
#: For what is compiled as a whole, which takes as long as it is deep.
SHALLOW = {**TINY, "depth": 2}
#: As wide as ViT-Huge, so that torchao's rowwise FP8 takes a layer, and on five tokens.
WIDE = {"img_size": 32, "patch_size": 16, "embed_dim": 1280, "depth": 1, "num_heads": 16, "num_classes": 10}
#: As ViT-Huge but for its depth.
HUGE = {
    "img_size": 224,
    "patch_size": 16,
    "embed_dim": 1280,
    "depth": 4,
    "num_heads": 16,
    "num_classes": 1000,
}


SIZES = {"tiny": TINY, "shallow": SHALLOW, "wide": WIDE, "huge": HUGE}


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative to the float64 model's: outputs, all weights' gradients together, and the worst weight's."""

    outputs: float
    gradients: float
    worst: float
    worst_name: str

    def within(self, recipe: Recipe) -> bool:
        """Whether they are what the recipe's precision explains."""
        outputs, gradients, worst = limits(recipe)
        return self.outputs <= outputs and self.gradients <= gradients and self.worst <= worst


#: Limits on the errors of outputs, of all gradients, and of the worst weight's. About three times what was
#: measured on a CPU (torch 2.13, ViTs of width 64 and 1280): bf16 8.9e-3, 8.4e-3, 9.2e-3; fp16 5.5e-4,
#: 5.5e-4, 1.1e-3; FP8 by torchao, emulated, 0.091, 0.12, 0.19; fp32 2.8e-7, 2.9e-7, and 2.7e-5 of a weight of
#: 1 that a small gradient is read off. TF32 rounds as fp16 does. Transformer Engine's are expected to be off
#: by 3.2 times as much in bf16, and 1.6 times in FP8, as in `fastlaunch_train.checks.equivalence`.
LIMITS = {
    "fp32": (1e-5, 1e-5, 1e-3),
    "tf32": (2e-3, 2e-3, 5e-3),
    "fp16": (2e-3, 2e-3, 5e-3),
    "bf16": (3e-2, 3e-2, 3e-2),
    "fp8": (0.25, 0.36, 0.6),
    "te bf16": (5e-2, 6e-2, 0.12),
    "te fp8": (0.25, 0.4, 0.7),
}
#: FSDP2 holds norms in bf16 too where it computes, and sums up their gradients in it: 0.20 was measured.
WORST_LIMITS = {"fsdp2": 0.6}


def limits(recipe: Recipe) -> tuple[float, float, float]:
    """On outputs, all gradients, and the worst weight's."""
    kind = recipe.precision if recipe.blocks == "native" else f"te {recipe.precision}"
    outputs, gradients, worst = LIMITS[kind]
    return outputs, gradients, WORST_LIMITS.get(recipe.name, worst)


def gelu_error(recipe: Recipe, device: torch.device) -> float:
    """The error of the workload gelu's outputs relative to the exact GELU in float64."""
    workload = load_workload("gelu:64x48")
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    process = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=device)
    request = probe_request(process, seed=0, batch_size=3, dtype=dtype)
    batch = next(workload.batches(request))
    model = workload.build_model().to(device)
    assert workload.outputs is not None
    exact = nn.functional.gelu(workload.outputs(nn.Identity(), batch).double())
    convert_model(model, workload, recipe)
    with torch.no_grad(), setup_precision(recipe, device).autocast():
        return relative_error(workload.outputs(model, batch).double(), exact)


def judge(recipe: Recipe, errors: Errors, checks: list[Check]) -> None:
    """Print what was measured beside its limits, and hold it to them."""
    print(recipe.label, errors, f"limits {limits(recipe)}", *checks, sep="\n  ")
    without_fp8 = ["without-fp8"] if recipe.fp8_scaling in TE_SCALINGS else []
    assert [check.name for check in checks] == ["equivalence", *without_fp8, "isolation", "permutation"]
    if recipe.blocks == "te-article":
        assert not any(check.passed for check in checks)
        return
    assert all(check.passed for check in checks)
    assert errors.within(recipe)
    # No recipe is as exact as one of higher precision: it was really computed in its own.
    least = {"fp8": 2e-2, "bf16": 1e-3, "fp16": 1e-4, "tf32": 1e-5}.get(recipe.precision, 0.0)
    assert errors.outputs > least


def alone(sizes: str, batch_size: int, label: str, cwd: Path, **environ: str) -> tuple[Errors, list[Check]]:
    """What `measure` returns, from a process of its own. label: RECIPE[,FIELD=VALUE...]."""
    done = subprocess.run(
        [sys.executable, __file__, sizes, str(batch_size), label],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LOCAL_RANK": "0", **environ},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    return Errors(**told["errors"]), [Check(**check) for check in told["checks"]]


def vit(sizes: dict[str, int]) -> Workload:
    """The ViT of `sizes` as a workload whose optimizer subtracts gradients."""
    return dataclasses.replace(
        load_workload("vit-tiny"),
        name="vit-tried",
        build_model=functools.partial(_vision_transformer, **sizes),
        optimizer="sgd",
        learning_rate=1.0,
        momentum=0.0,
    )


def images(sizes: dict[str, int], batch_size: int, device: torch.device) -> Batch:
    """Random images and labels, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch_size, 3, sizes["img_size"], sizes["img_size"], generator=generator)
    labels = torch.randint(sizes["num_classes"], (batch_size,), generator=generator)
    return pixels.to(device), labels.to(device)


def measure(
    recipe: Recipe, process: Process, sizes: dict[str, int], batch_size: int
) -> tuple[Errors, list[Check]]:
    """The errors of `recipe` on the ViT of `sizes`, and the checks of the model as it is trained.

    Of a recipe that begins with other weights the gradients mean nothing, and are infinitely wrong here.
    """
    workload = vit(sizes)
    batch = images(sizes, batch_size, process.device)
    torch.manual_seed(0)
    model = workload.build_model().to(process.device).train()
    weights = {name: value.detach().double() for name, value in copy.deepcopy(model).named_parameters()}
    outputs, exact = exactly(workload, copy.deepcopy(model), batch)
    convert_model(model, workload, recipe)
    precision = setup_precision(recipe, process.device)
    stepper = build_stepper(workload, recipe, precision, process, model)
    if recipe.fp8_scaling == "delayed":
        stepper.compile_ahead(batch)  # scales are known from the second pass on
    checks = run_checks(workload, recipe, precision, stepper.model, batch, Reference(outputs=outputs.float()))
    off = next(check.value for check in checks if check.name == "equivalence")
    assert off is not None
    if recipe.blocks == "te-article":
        return Errors(outputs=off, gradients=math.inf, worst=math.inf, worst_name=""), checks
    if recipe.fp8_scaling == "delayed":
        stepper.compile_ahead(batch)  # which the checks have put back
    stepped = after_a_step(stepper, batch, weights)
    found = {name: weights[name] - stepped[name] for name in exact}
    errors = {name: relative_error(found[name], exact[name]) for name in exact}
    worst = max(errors, key=errors.__getitem__)
    together = relative_error(*(torch.cat([g[name].flatten() for name in exact]) for g in (found, exact)))
    return Errors(outputs=off, gradients=together, worst=errors[worst], worst_name=worst), checks


def exactly(
    workload: Workload, model: nn.Module, batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs and weights' gradients of `model`, eager, in float64."""
    assert workload.outputs is not None
    exact_batch = (batch[0].double(), batch[1])
    model.double()
    workload.loss(model, exact_batch).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return workload.outputs(model.eval(), exact_batch), gradients


def timm_weights_from_te(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state of a timm block for that of a TransformerLayer, without FP8 scales."""
    return {name: weights[te_name] for name, te_name in TE_NAMES.items()}


def native_state_from_te(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a model with timm's blocks for one with Transformer Engine's; no FP8 scales."""
    return {
        native_name(name): weight
        for name, weight in weights.items()
        if name.rpartition(".")[2] != "_extra_state"
    }


def after_a_step(stepper: Stepper, batch: Batch, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after one step, in float64 and under the native model's names."""
    for _ in range(20):  # loss scaling skips steps until its scale is small enough
        train_step(stepper, batch)
        values = fsdp.whole(native_state_from_te(stepper.state()["model"]), keep=True)
        after = {name: value.to(before[name]) for name, value in values.items() if name in before}
        if not all(torch.equal(after[name], before[name]) for name in before):
            return after
    raise AssertionError("no step changed the weights")


def main() -> None:
    """As a process of its own: `equivalence.py SIZES BATCH_SIZE RECIPE[,FIELD=VALUE...]`, JSON on stdout."""
    sizes, batch_size, label = sys.argv[1:]
    name, *overrides = label.split(",")
    process = start_process()
    errors, checks = measure(resolve_recipe(name, overrides), process, SIZES[sizes], int(batch_size))
    told = {"errors": dataclasses.asdict(errors), "checks": [dataclasses.asdict(check) for check in checks]}
    print(f"\n{json.dumps(told)}", flush=True)
    stop_process()


if __name__ == "__main__":
    main()
