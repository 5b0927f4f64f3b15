"""Steps by DeepSpeed: ZeRO-1 shards the optimizer's state over the ranks, 2 also gradients, 3 parameters."""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastlaunch_train.checks.runs_here import parse_version
from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.deepspeed_state import gather_states, own_state, restore, whole_model
from fastlaunch_train.deterministic import without_deterministic
from fastlaunch_train.distributed.parallel import Process, join_group
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.models.prepare import prepare_model
from fastlaunch_train.recipes.recipes import Recipe, RecipeError, refuse
from fastlaunch_train.recipes.rules import steps_problem
from fastlaunch_train.steppers.optimizers import build_optimizer
from fastlaunch_train.steppers.torch_stepper import check_loss
from fastlaunch_train.workloads.contract import Batch, Workload

log = logging.getLogger("fastlaunch_train")
#: The oldest DeepSpeed that may overlap. Older ones sent gradients that were not written yet, or overwrote
#: them on their way: another model, or NaN (deepspeedai/DeepSpeed issues 5545, 7188 and 8061, pull requests
#: 7898 and 7965). This is the oldest whose source was seen to have the last of these mended.
OVERLAP_RELEASE = (0, 19, 8)
#: Gradients that are exchanged together: as many as fill DDP's 160 MB in fp32. DeepSpeed's own 500 million
#: are most of ViT-Huge: their exchange could begin only when nearly all was computed, and two buffers of them
#: take 4 GB.
BUCKET_ELEMENTS = 160 * 2**20 // 4


class DeepSpeedStepper:
    """A `Stepper` around DeepSpeed's engine, with the optimizer of the recipe.

    What it computes in, by recipe:
    * fp32, tf32: as without DeepSpeed.
    * bf16: fp32 parameters under bf16 autocast, as with DDP. A layer's weights in bf16 are kept from its
      forward to its backward pass: with zero3 that is most of what is to be saved, so add
      parameter_dtype=bf16-master where memory matters.
    * bf16 with parameter_dtype=bf16-master: DeepSpeed's bf16 mode. Parameters, gradients and what travels are
      bf16, fp32 masters are sharded with the optimizer's state; operators compute as autocast has them.
    * fp16: DeepSpeed's fp16 mode, likewise in fp16, with its own dynamic loss scaling, which skips steps that
      overflow; the scaler of Precision is not used.
    Micro-batches are accumulated by DeepSpeed, in its gradients' dtype. Gradients are exchanged while others
    are computed unless overlap_comm=false, in buckets of BUCKET_ELEMENTS.
    """

    def __init__(
        self, workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
    ) -> None:
        check_recipe(workload, recipe)
        self._workload = workload
        self._recipe = recipe
        self._precision = precision
        self._process = process
        self._native = model
        if recipe.engine == "torch":
            # Inside, since DeepSpeed's engine switches off the autocast that it is called in.
            model.__dict__["forward"] = _under(precision.autocast, model.forward)
        # DeepSpeed holds the parameters in the dtype of its mode, and the masters.
        prepared = prepare_model(workload, recipe, model)
        self.model = self._engine = initialize(
            prepared, build_optimizer(workload, recipe, model.parameters()), recipe, process
        )
        if recipe.compile_mode != "none" and recipe.compile_scope == "wrapped":
            self._engine.compile(backend=recipe.compile_backend)

    def step(self, batch: Batch) -> torch.Tensor:
        """The detached loss of `batch`, not waited for, after one optimizer step on it."""
        losses = []
        try:
            for micro_batch in split_batch(batch, self._recipe.grad_accumulation):
                with self._precision.autocast():
                    loss = self._workload.loss(self.model, micro_batch)
                check_loss(self._workload, loss)
                losses.append(loss.detach().clone())
                self._engine.backward(loss)
                self._engine.step()
        except RuntimeError as error:
            told = without_deterministic(error, self._recipe)
            if told is None:
                raise
            raise told from error
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def compile_ahead(self, batch: Batch) -> None:
        """Compile what a step on `batch` needs: a step is done and undone, with the random generators."""
        before = own_state(self._engine, self._native)
        device = self._process.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.step(batch)
        restore(self._engine, self._native, before)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def state(self) -> dict[str, Any]:
        """The whole model, and each rank's share of masters, optimizer state and loss scale."""
        model = whole_model(self._native, keep=self._process.rank == 0)
        shares = gather_states(own_state(self._engine, self._native, weights=False), self._process)
        return {"model": model, "deepspeed": shares} if self._process.rank == 0 else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned on rank 0."""
        share = state["deepspeed"][self._process.rank]
        restore(self._engine, self._native, {**share, "model": state["model"]})

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of parameters and buffers, or of this rank's shards of them, in host memory."""
        return {name: value.detach().to("cpu", copy=True) for name, value in self._tensors().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Put back what `weights` returned; masters stay as they are, and come back with the next step."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        for parameter in self._native.parameters():
            # Small parameters stay gathered between steps: gathered anew, they have what is put back here.
            if getattr(parameter, "ds_status", None) == ZeroParamStatus.AVAILABLE:
                parameter.partition()  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, value in self._tensors().items():
                value.copy_(weights[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        parameters = {
            name: getattr(parameter, "ds_tensor", parameter).detach()
            for name, parameter in self._native.named_parameters()
        }
        return {**parameters, **dict(self._native.named_buffers())}


def check_recipe(workload: Workload, recipe: Recipe) -> None:
    """Returns if DeepSpeed is installed and computes what the recipe says with it; else RecipeError."""
    if importlib.util.find_spec("deepspeed") is None:
        raise RecipeError(
            f"recipe {recipe.label} needs DeepSpeed, which is not installed",
            "install the extra `deepspeed`, or add --set parallelism=fsdp2",
        )
    if "adafactor" in (recipe.optimizer, workload.optimizer if recipe.optimizer == "workload" else ""):
        raise RecipeError(
            f"recipe {recipe.label}: DeepSpeed flattens what it shards, and adafactor needs rows and columns",
            "add --set optimizer=adamw, or --set parallelism=fsdp2",
        )
    refuse(steps_problem(recipe), f"recipe {recipe.label}")
    check_overlap(recipe, importlib.metadata.version("deepspeed"))


def check_overlap(recipe: Recipe, release: str) -> None:
    """Returns if this `release` of DeepSpeed exchanges gradients as `recipe` says; else RecipeError."""
    if recipe.overlap_comm and parse_version(release) < OVERLAP_RELEASE:
        needed = ".".join(map(str, OVERLAP_RELEASE))
        raise RecipeError(
            f"recipe {recipe.label}: DeepSpeed {release} can corrupt gradients that it overlaps",
            f"install deepspeed {needed} or newer, or add --set overlap_comm=false",
        )


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, process: Process) -> Any:
    """DeepSpeed's engine around `model`, which updates it by `optimizer`."""
    os.environ.setdefault("DS_ACCELERATOR", process.device.type)
    # Of a process that torchrun did not start, too, DeepSpeed wants to read it there.
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    join_group(process)
    import deepspeed

    for handler in deepspeed.utils.logger.handlers:
        # It writes to standard output, where nothing but data belongs.
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    log.info("DeepSpeed starts; at its first time on a machine it compiles for minutes")
    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=engine_config(recipe, process.world_size),
            dist_init_required=False,
        )
    except ValueError as error:
        if "not supported on your device" not in str(error):
            raise
        raise RecipeError(
            f"recipe {recipe.label}: DeepSpeed has no {recipe.precision} on this device",
            "add --set precision=bf16, or --set precision=fp32",
        ) from error
    return engine


def engine_config(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for `recipe`.

    Its batch sizes are for its own reports, which nobody reads here: a micro-batch counts as one sample.
    """
    half = recipe.precision == "fp16"
    bf16 = recipe.parameter_dtype == "bf16-master"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": recipe.grad_accumulation,
        "train_batch_size": recipe.grad_accumulation * world_size,
        "zero_optimization": {
            "stage": int(recipe.parallelism.removeprefix("zero")),
            # Left out, it is true for ZeRO-3 alone (seen in 0.19.8).
            "overlap_comm": recipe.overlap_comm,
            "reduce_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed clips gradients to a norm of 1 unless it is told not to (seen in 0.19.8).
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        # For those reports it would wait for the device twice in every micro-batch (seen in 0.19.8).
        "timers": {"throughput": {"enabled": False}},
        "fp16": {"enabled": half, "auto_cast": half and recipe.engine == "ort"},
        "bf16": {"enabled": bf16},
    }
    if recipe.wire_dtype == "bf16":
        config["communication_data_type"] = "bf16"
    elif half or bf16:
        config["communication_data_type"] = "fp32"
    return config


def _under(autocast: Callable[[], Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return forward(*args, **kwargs)

    return call
