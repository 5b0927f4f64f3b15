"""Steps by torch alone: autocast, backward and optimizer, with DDP or FSDP2 between the ranks."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastlaunch_train.data.batches import split_batch
from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import Process, wrap_ddp
from fastlaunch_train.models.model_state import load_model_state, model_state
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.models.prepare import compile_model, prepare_model
from fastlaunch_train.models.te_fp8 import fp8_recipe
from fastlaunch_train.recipes.recipe import CUDA_GRAPH_MODES, Recipe
from fastlaunch_train.steppers.optimizers import LearningRates, MasterWeights, build_optimizer, clip_gradients
from fastlaunch_train.steppers.phases import phase
from fastlaunch_train.steppers.stepper import Stepper, check_loss
from fastlaunch_train.workloads.contract import Batch, Workload

if TYPE_CHECKING:
    from fastlaunch_train.models.fp8_fused.delayed_scaling import DelayedScaling

#: Passes that find the first scales: the third has those of gradients that were no longer rounded with 1.
NUM_CALIBRATION_PASSES = 3


class TorchStepper(Stepper):
    """Steps by torch's own parts. `optimizer` updates the model's parameters, or their masters."""

    optimizer: torch.optim.Optimizer | MasterWeights

    def __init__(
        self, workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
    ) -> None:
        self._workload = workload
        self.recipe = recipe
        self._precision = precision
        self._process = process
        self._native = model
        masters = recipe.parameter_dtype == "bf16-master"
        # Rounding gives a parameter other storage, and leaves this.
        exact = {name: parameter.detach() for name, parameter in model.named_parameters() if masters}
        prepared = prepare_model(workload, recipe, model)
        scalings = delayed_scalings(model, recipe) if process.world_size > 1 else []
        #: The magnitudes, as this rank has recorded them, that FP8 scales will follow.
        self._magnitudes: list[Any] = [scaling.amax for scaling in scalings]
        if recipe.parallelism == "fsdp2":
            blocks = workload.blocks(model) if workload.blocks else None
            self.model = fsdp.shard(prepared, blocks, recipe, process)
        else:
            self.model = wrap_ddp(prepared, recipe, process)
        if recipe.compile_mode != "none" and recipe.compile_scope == "wrapped":
            compile_model(self.model, None, recipe)
        #: After the last step; None before the first.
        self._loss_scale: torch.Tensor | None = None
        # Build it after sharding, which replaces the model's parameters.
        parameters = dict(model.named_parameters())
        if masters:
            trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
            self.optimizer = MasterWeights(
                parameters.values(),
                [fsdp.shard_like(exact[name], parameter) for name, parameter in parameters.items()],
                lambda masters: build_optimizer(workload, recipe, dict(zip(trained, masters, strict=True))),
                workload.max_grad_norm,
            )
            self._rates = LearningRates(self.optimizer.optimizer)
        else:
            self.optimizer = build_optimizer(workload, recipe, parameters, model)
            self._rates = LearningRates(self.optimizer)

    def update(self) -> None:
        scaler, max_norm = self._precision.scaler, self._workload.max_grad_norm
        with phase("optimizer"):
            if isinstance(self.optimizer, MasterWeights):
                assert scaler is None
                self.optimizer.step()
                return
            if scaler is not None and max_norm is not None:
                scaler.unscale_(self.optimizer)
            clip_gradients(self._native.parameters(), max_norm)
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()

    def loss_scaling(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the last step's loss scale and whether the step was skipped, in our loop or a Trainer's."""
        scaler = self._precision.scaler
        if scaler is None or scaler._scale is None:
            return None
        before = self._loss_scale
        if before is None:
            before = torch.full_like(scaler._scale, scaler._init_scale)
        self._loss_scale = after = scaler._scale.clone()
        # A skipped step lowers the scale, at last to 0.
        return before, (after < before) | (after == 0)

    def zero_grad(self) -> None:
        """Free the gradients, or zero them if the recipe says so."""
        # Gradients that a CUDA graph returned are lost when it runs again, for the next micro-batch or step.
        # So they need other tensors to be added to.
        graphs = self.recipe.compile_mode in CUDA_GRAPH_MODES
        kept = graphs and (self.recipe.grad_accumulation > 1 or not self.recipe.set_to_none)
        with phase("optimizer"):
            self.optimizer.zero_grad(set_to_none=self.recipe.set_to_none and not kept)
            for parameter in self._native.parameters() if kept else ():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Add a micro-batch's gradients, exchanged between ranks if it is the `last`; return its loss.

        With fused blocks in FP8 the ranks meet after each micro-batch.
        """
        if self.recipe.compile_mode in CUDA_GRAPH_MODES:
            # From here on the CUDA graphs may overwrite the outputs of the step before.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self._exchange(last):
            with phase("forward"), self._precision.autocast():
                loss = self._workload.loss(self.model, batch)
            check_loss(self._workload, loss)
            scaler = self._precision.scaler
            with phase("backward"):
                share = loss if self.recipe.grad_accumulation == 1 else loss / self.recipe.grad_accumulation
                (share if scaler is None else scaler.scale(share)).backward()  # type: ignore[no-untyped-call]
                for magnitudes in self._magnitudes:
                    # Scales follow the largest value of any rank, as in Transformer Engine. The next forward
                    # pass, even of a micro-batch, sets them.
                    torch.distributed.all_reduce(magnitudes, torch.distributed.ReduceOp.MAX)
        # A copy: the next micro-batch overwrites what a CUDA graph returned.
        return loss.detach() if self.recipe.grad_accumulation == 1 else loss.detach().clone()

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        if self.recipe.grad_accumulation == 1:
            return nullcontext()
        if self.recipe.parallelism == "fsdp2":
            # This holds until the next call.
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        if last or not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    def compile_ahead(self, batch: Batch) -> None:
        """Compile forward and backward on `batch`; restore generators and buffers but for new FP8 scales."""
        new_scales = fresh_scales(self._native, self.recipe)
        buffers = {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if id(buffer) not in new_scales
        }
        device = self._process.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for _ in range(NUM_CALIBRATION_PASSES if new_scales else 1):
                self.zero_grad()
                self.forward_backward(split_batch(batch, self.recipe.grad_accumulation)[0], last=True)
        self.zero_grad()
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def state(self) -> dict[str, Any]:
        scaler = self._precision.scaler
        return {
            "model": model_state(self._native),
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        load_model_state(self._native, state["model"], fp8_recipe=fp8_recipe(self.recipe))
        self.optimizer.load_state_dict(state["optimizer"])
        if self._precision.scaler is not None and state["scaler"] is not None:
            self._precision.scaler.load_state_dict(state["scaler"])
            self._loss_scale = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        if self.recipe.parallelism == "fsdp2":
            fsdp.reshard(self.model)
        return super()._tensors()


def fresh_scales(model: nn.Module, recipe: Recipe) -> set[int]:
    """Return the ids of delayed scaling's buffers without records, which the first passes calibrate.

    This is for fused blocks; Transformer Engine's scales are not buffers.
    """
    fresh = (scaling for scaling in delayed_scalings(model, recipe) if scaling.is_fresh)
    return {id(buffer) for scaling in fresh for buffer in scaling.buffers()}


def delayed_scalings(model: nn.Module, recipe: Recipe) -> "list[DelayedScaling]":
    """Return the holders of the scales of the model's fused blocks."""
    if recipe.blocks != "fused":
        return []
    # An old torch without FP8 cannot import this module.
    from fastlaunch_train.models.fp8_fused.delayed_scaling import DelayedScaling

    return [module for module in model.modules() if isinstance(module, DelayedScaling)]
