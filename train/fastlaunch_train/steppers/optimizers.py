"""The optimizer that a workload or a recipe names, and fp32 masters for one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fastlaunch_train.recipes.recipe import Recipe, refuse
from fastlaunch_train.recipes.rules import optimizer_problem
from fastlaunch_train.workloads.contract import Workload
from fastlaunch_train.workloads.registry import WorkloadError

#: Keyword arguments for torch's optimizers.
_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def check_optimizer(workload: Workload, recipe: Recipe) -> None:
    """Raise RecipeError if the workload's own optimizer lacks the implementation that the recipe names.

    The recipe's optimizer was checked with the recipe. Call this before building the model.
    """
    name = optimizer_name(workload, recipe)
    problem = optimizer_problem(recipe, name) if workload.trains else None
    if name == "own" and "optimizer_impl" in dict(recipe.overrides):
        problem = (
            f"workload {workload.name} makes its optimizer itself",
            "leave out optimizer_impl, or add --set optimizer=adamw",
        )
    refuse(problem, f"recipe {recipe.label}")


def build_optimizer(
    workload: Workload, recipe: Recipe, parameters: Mapping[str, nn.Parameter], model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Return the workload's optimizer, unless the recipe names another.

    model: its fused blocks' weights are rounded in the optimizer's pass if the recipe says so. Raises
    WorkloadError for a name other than sgd, adamw and adafactor, and if the workload's function returns
    something else.
    """
    name = optimizer_name(workload, recipe)
    rate = workload.learning_rate if recipe.learning_rate is None else recipe.learning_rate
    # DeepSpeed fails on a group without a trained parameter.
    trained = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
    if name == "own":
        assert callable(workload.optimizer)
        made = workload.optimizer(trained, rate)
        if not isinstance(made, torch.optim.Optimizer):
            raise WorkloadError(
                f"workload {workload.name!r}: its optimizer function returned {type(made).__name__}",
                "return a torch.optim.Optimizer",
            )
        return made
    implementation = _IMPLEMENTATIONS[recipe.optimizer_impl]
    groups = list(_groups(trained.values(), workload.weight_decay))
    if name == "sgd" and recipe.weight_cast == "optimizer":
        from fastlaunch_train.models.fp8_fused.weights import CastingSgd, rounded_weights

        assert model is not None
        return CastingSgd(groups, rounded_weights(model), lr=rate, momentum=workload.momentum)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=workload.momentum, **implementation)
    if name == "adamw":
        # A captured step has to count steps on the GPU.
        on_gpu = any(parameter.is_cuda for parameter in parameters.values())
        return torch.optim.AdamW(groups, lr=rate, capturable=recipe.step_graph and on_gpu, **implementation)
    if name == "adafactor":
        from fastlaunch_train.steppers.adafactor import Adafactor

        return Adafactor(
            groups, lr=rate, foreach=recipe.optimizer_impl != "for-loop", capturable=recipe.step_graph
        )
    raise WorkloadError(
        f"workload {workload.name} asks for optimizer {name!r}", "sgd, adamw and adafactor are known"
    )


def _groups(parameters: Iterable[nn.Parameter], decay: float | None) -> Iterator[dict[str, Any]]:
    """Yield the groups of `parameters` that decay alike; None: one group with the optimizer's decay."""
    if decay is None:
        yield {"params": list(parameters)}
        return
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else others).append(parameter)
    for group, rate in ((matrices, decay), (others, 0.0)):
        if group:
            yield {"params": group, "weight_decay": rate}


def optimizer_name(workload: Workload, recipe: Recipe) -> str:
    """Return the name of the optimizer for `workload` and `recipe`; `own` for the workload's own function."""
    return workload.optimizer_name if recipe.optimizer == "workload" else recipe.optimizer


class LearningRates:
    """The original learning rates of `optimizer`, which a schedule scales."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole = [group["lr"] for group in optimizer.param_groups]

    def scale(self, factor: float) -> None:
        """Set every rate to its original value times `factor`."""
        for group, whole in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["lr"] = factor * whole


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> None:
    """Scale the gradients of `parameters` down to the L2 norm `max_norm` if their norm is larger."""
    if max_norm is not None:
        nn.utils.clip_grad_norm_(parameters, max_norm)


class MasterWeights:
    """An optimizer over fp32 copies of bf16 `parameters`, called as torch's optimizers are.

    A step updates the masters and rounds them into the parameters, so that an update too small for bf16 is
    not lost. Gradients are bf16, as the model computes them; the masters' gradients are clipped to
    `max_grad_norm`. Parameters may be sharded (DTensor): the masters are sharded alike.

    exact: the fp32 values from which the parameters were rounded; the masters start there. Masters that
    started at the rounded values would all lie half a rounding step from the next value, and hundreds of
    small updates would move no parameter.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        exact: Iterable[torch.Tensor],
        build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        max_grad_norm: float | None = None,
    ) -> None:
        trained = [pair for pair in zip(parameters, exact, strict=True) if pair[0].requires_grad]
        self._parameters = [parameter for parameter, _ in trained]
        self._masters = [nn.Parameter(value.detach().to(torch.float32, copy=True)) for _, value in trained]
        self.optimizer = build(self._masters)
        self._max_grad_norm = max_grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free or zero the parameters' gradients."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters by the parameters' gradients, and round them into the parameters."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        clip_gradients(self._masters, self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._round()

    def _round(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the masters."""
        masters = [master.detach() for master in self._masters]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, and round the masters into the parameters."""
        self.optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        self._round()
