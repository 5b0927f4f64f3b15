"""Steps by torch alone: autocast, backward, optimizer, with DDP between the ranks."""

from typing import Any

import torch
from torch import nn

from fastlaunch_train.compile import compile_model
from fastlaunch_train.model_state import load_model_state, model_state
from fastlaunch_train.optimizers import build_optimizer
from fastlaunch_train.parallel import Process, wrap_ddp
from fastlaunch_train.precision import Precision, fp8_recipe
from fastlaunch_train.recipes import Recipe
from fastlaunch_train.workload import Batch, Workload
from fastlaunch_train.workloads import WorkloadError


class TorchStepper:
    """A `Stepper` of torch's own parts."""

    def __init__(
        self, workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
    ) -> None:
        self._workload = workload
        self._recipe = recipe
        self._precision = precision
        self._process = process
        self._native = model
        self.optimizer = build_optimizer(workload, recipe, model.parameters())
        if recipe.compile_mode != "none":
            compile_model(model, workload.blocks(model) if workload.blocks else None, recipe)
        self.model = wrap_ddp(model, recipe, process)

    def step(self, batch: Batch) -> torch.Tensor:
        """The detached loss of `batch`, not waited for, after one optimizer step on it."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._forward_backward(batch)
        scaler = self._precision.scaler
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        return loss

    def _forward_backward(self, batch: Batch) -> torch.Tensor:
        if self._recipe.compile_mode in ("reduce-overhead", "max-autotune"):
            # The CUDA graphs' outputs of the step before may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self._precision.autocast():
            loss = self._workload.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise WorkloadError(
                f"workload {self._workload.name!r}: its loss is {what}",
                "return the batch's mean, a scalar tensor",
            )
        scaler = self._precision.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def compile_ahead(self, batch: Batch) -> None:
        """Compile forward and backward on `batch`; buffers and random generators are put back."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        device = self._process.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self._forward_backward(batch)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def state(self) -> dict[str, Any]:
        """Model, optimizer and loss scaler."""
        scaler = self._precision.scaler
        return {
            "model": model_state(self._native),
            "optimizer": self.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        recipe = fp8_recipe(self._recipe) if self._recipe.precision == "fp8" else None
        load_model_state(self._native, state["model"], fp8_recipe=recipe)
        self.optimizer.load_state_dict(state["optimizer"])
        if self._precision.scaler is not None and state["scaler"] is not None:
            self._precision.scaler.load_state_dict(state["scaler"])

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of parameters and buffers in host memory."""
        return {name: value.detach().cpu().clone() for name, value in self._tensors().items()}

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Put back what `weights` returned."""
        with torch.no_grad():
            for name, value in self._tensors().items():
                value.copy_(weights[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._native.named_parameters()), **dict(self._native.named_buffers())}
