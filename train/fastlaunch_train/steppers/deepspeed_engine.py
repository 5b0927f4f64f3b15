"""Steps by DeepSpeed: ZeRO-1 shards the optimizer's state over the ranks, ZeRO-2 also the gradients."""

import contextlib
import fcntl
import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastlaunch_train.data.batches import map_tensors, split_batch
from fastlaunch_train.distributed.parallel import Process, gather_object, join_group
from fastlaunch_train.models.model_state import model_state, plain
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.models.prepare import prepare_model
from fastlaunch_train.recipes.recipe import Recipe, RecipeError, refuse
from fastlaunch_train.recipes.requirements import parse_version
from fastlaunch_train.recipes.rules import steps_problem
from fastlaunch_train.steppers.optimizers import LearningRates, build_optimizer, optimizer_name
from fastlaunch_train.steppers.phases import phase
from fastlaunch_train.steppers.stepper import Stepper, check_loss
from fastlaunch_train.workloads.contract import Batch, Workload

#: Key under which DeepSpeed's optimizers save their loss scaler, an object.
_SCALER = "loss_scaler"

log = logging.getLogger("fastlaunch_train")
#: The oldest DeepSpeed that may overlap. Older releases sent gradients before they were written, or overwrote
#: them during the exchange, which trains another model, or NaN (deepspeedai/DeepSpeed issues 5545, 7188 and
#: 8061, pull requests 7898 and 7965). This release is the oldest with the last of these fixes.
OVERLAP_RELEASE = (0, 19, 8)
#: Number of gradient values to exchange together: as many as fill DDP's 160 MB in fp32. DeepSpeed's default
#: of 500 million covers most of ViT-Huge: the exchange could begin only when nearly all are computed, and two
#: buffers would take 4 GB.
BUCKET_ELEMENTS = 160 * 2**20 // 4


class DeepSpeedStepper(Stepper):
    """Steps by DeepSpeed's engine, with the recipe's optimizer.

    The recipe decides the dtypes:
    * fp32, tf32: as without DeepSpeed.
    * bf16: fp32 parameters under bf16 autocast, as with DDP.
    * bf16 with parameter_dtype=bf16-master: DeepSpeed's bf16 mode. Parameters, gradients and messages are
      bf16, fp32 masters are sharded with the optimizer's state; operators compute as under autocast.
    * fp16: DeepSpeed's fp16 mode, likewise in fp16, with its own dynamic loss scaling, which skips steps that
      overflow; the scaler of Precision is not used.
    DeepSpeed accumulates micro-batches in its gradients' dtype. It exchanges gradients in buckets of
    BUCKET_ELEMENTS, while others are computed unless overlap_comm=false.
    """

    def __init__(
        self, workload: Workload, recipe: Recipe, precision: Precision, process: Process, model: nn.Module
    ) -> None:
        check_recipe(workload, recipe)
        self._workload = workload
        self.recipe = recipe
        self._precision = precision
        self._process = process
        self._native = model
        if recipe.engine == "torch":
            # Autocast has to be inside: DeepSpeed's engine switches off the autocast around its call.
            model.__dict__["forward"] = _under(precision.autocast, model.forward)
        # DeepSpeed makes the masters, and holds the parameters in the dtype of its mode.
        prepared = prepare_model(workload, recipe, model)
        optimizer = build_optimizer(workload, recipe, dict(model.named_parameters()))
        self._rates = LearningRates(optimizer)
        config = engine_config(recipe, process.world_size, workload.max_grad_norm)
        self.model = self._engine = initialize(prepared, optimizer, config, recipe, process)
        if recipe.compile_mode != "none" and recipe.compile_scope == "wrapped":
            self._engine.compile(backend=recipe.compile_backend)

    def zero_grad(self) -> None:
        """Note the loss scale of the new step; DeepSpeed frees the gradients itself."""
        if self.recipe.precision == "fp16":
            self._loss_scale = float(self._engine.optimizer.loss_scaler.cur_scale)

    def forward_backward(self, batch: Batch, *, last: bool) -> torch.Tensor:
        """Hand a micro-batch to DeepSpeed, which counts them and updates after the last; return its loss."""
        with phase("forward"), self._precision.autocast():
            loss = self._workload.loss(self.model, batch)
        check_loss(self._workload, loss)
        before = loss.detach().clone()
        with phase("backward"):
            self._engine.backward(loss)
        with phase("optimizer"):
            self._engine.step()
        return before

    def update(self) -> None:
        """Do nothing: DeepSpeed has clipped the gradients and updated the parameters."""

    def loss_scaling(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.recipe.precision != "fp16":
            return None
        return torch.tensor(self._loss_scale), torch.tensor(not self._engine.was_step_applied())

    def compile_ahead(self, batch: Batch) -> None:
        """Compile by doing a step on `batch` and undoing it."""
        before = {**own_state(self._engine), "model": _on_cpu(model_state(self._native))}
        device = self._process.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.zero_grad()
            for micro_batch in split_batch(batch, self.recipe.grad_accumulation):
                self.forward_backward(micro_batch, last=False)
        restore(self._engine, self._native, before)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def state(self) -> dict[str, Any]:
        """Return the whole model, and each rank's share of masters, optimizer state and loss scale."""
        shares = gather_object(self._process, own_state(self._engine))
        if self._process.rank != 0:
            return {}
        return {"model": _on_cpu(model_state(self._native)), "deepspeed": shares}

    def load_state(self, state: dict[str, Any]) -> None:
        share = state["deepspeed"][self._process.rank]
        restore(self._engine, self._native, {**share, "model": state["model"]})


def check_recipe(workload: Workload, recipe: Recipe) -> None:
    """Raise RecipeError if DeepSpeed does not compute what the recipe says."""
    if optimizer_name(workload, recipe) == "adafactor":
        raise RecipeError(
            f"recipe {recipe.label}: DeepSpeed flattens what it shards, and adafactor needs rows and columns",
            "add --set optimizer=adamw, or --set parallelism=fsdp2",
        )
    refuse(steps_problem(recipe), f"recipe {recipe.label}")
    check_overlap(recipe, importlib.metadata.version("deepspeed"))


def check_overlap(recipe: Recipe, release: str) -> None:
    """Raise RecipeError if this `release` of DeepSpeed can corrupt gradients as `recipe` exchanges them."""
    if recipe.overlap_comm and parse_version(release) < OVERLAP_RELEASE:
        needed = ".".join(map(str, OVERLAP_RELEASE))
        raise RecipeError(
            f"recipe {recipe.label}: DeepSpeed {release} can corrupt gradients that it overlaps",
            f"install deepspeed {needed} or newer, or add --set overlap_comm=false",
        )


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    recipe: Recipe,
    process: Process,
) -> Any:
    """Return DeepSpeed's engine around `model`, which updates it by `optimizer`."""
    os.environ.setdefault("DS_ACCELERATOR", process.device.type)
    # DeepSpeed reads it there even if torchrun did not start the process.
    os.environ.setdefault("LOCAL_RANK", str(process.local_rank))
    join_group(process)
    import deepspeed

    for handler in deepspeed.utils.logger.handlers:
        # DeepSpeed writes to standard output, where only data belong.
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    log.info("starting DeepSpeed; on a new machine it first compiles for minutes")
    try:
        with without_stale_locks(_extensions_folder()):
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=dict(config), dist_init_required=False
            )
    except ValueError as error:
        if "not supported on your device" not in str(error):
            raise
        raise RecipeError(
            f"recipe {recipe.label}: DeepSpeed has no {recipe.precision} on this device",
            "add --set precision=bf16, or --set precision=fp32",
        ) from error
    return engine


def _extensions_folder() -> Path:
    """Return the folder in which torch compiles extensions: one folder each, at most two levels down."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


@contextlib.contextmanager
def without_stale_locks(folder: Path) -> Iterator[None]:
    """Remove the locks of dead processes from the extensions in `folder`, then compile there in the context.

    torch locks an extension by a file `lock`, which stays when its process is killed while it compiles, and
    others wait for it for ever (torch.utils.file_baton of torch 2.13). A lock of the kernel's ends with its
    process, here and over NFS: whoever holds this one alone knows that no other training of ours compiles.
    Other programs' compilers hold their lock's file open. Where that cannot be told, or the folder cannot be
    written, all stays as it is: the extensions may be compiled already.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Over NFS a folder cannot be locked, nor a file that is open for reading alone.
            ours = stack.enter_context((folder / ".fastlaunch-lock").open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for stale in _stale_locks(folder):
                    log.info("removing %s, left by a process that was killed while it compiled", stale)
                    stale.unlink(missing_ok=True)
            fcntl.flock(ours, fcntl.LOCK_SH)
        except OSError as error:
            log.warning("warning: locks that killed compilers left in %s stay there: %s", folder, error)
        yield


def _stale_locks(folder: Path) -> list[Path]:
    """Return the user's own locks below `folder` that no process holds open; none without /proc."""
    locks = {
        os.path.realpath(lock): lock
        for lock in (*folder.glob("*/lock"), *folder.glob("*/*/lock"))
        if lock.is_file() and lock.stat().st_uid == os.geteuid()
    }
    if not locks or not Path("/proc/self/fd").is_dir():
        return []
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # A process may end meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            locks.pop(str(descriptor.readlink()), None)
    return [*locks.values()]


def engine_config(recipe: Recipe, world_size: int, max_grad_norm: float | None) -> dict[str, Any]:
    """Return DeepSpeed's configuration for `recipe`. max_grad_norm: norm to clip gradients to, if given.

    Its batch sizes serve only DeepSpeed's own reports, which are off: a micro-batch counts as one sample.
    """
    half = recipe.precision == "fp16"
    bf16 = recipe.parameter_dtype == "bf16-master"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": recipe.grad_accumulation,
        "train_batch_size": recipe.grad_accumulation * world_size,
        "zero_optimization": {
            "stage": int(recipe.parallelism.removeprefix("zero")),
            "overlap_comm": recipe.overlap_comm,
            "reduce_bucket_size": BUCKET_ELEMENTS,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed clips gradients to a norm of 1 by default (seen in 0.19.8).
        "gradient_clipping": max_grad_norm or 0.0,
        "steps_per_print": 10**9,
        # Its reports would wait for the device twice in every micro-batch (seen in 0.19.8).
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


def own_state(engine: Any) -> dict[str, Any]:
    """Return this rank's share of the optimizer's state and the loss scale of `engine`, on the CPU."""
    optimizer = engine.optimizer.state_dict()
    scaler = vars(optimizer.pop(_SCALER))
    return {"optimizer": _on_cpu(optimizer), "scaler": _on_cpu(scaler)}


def restore(engine: Any, model: nn.Module, state: dict[str, Any]) -> None:
    """Load what `own_state` returned on this rank, and the `model`'s state dict."""
    model.load_state_dict(state["model"])
    scaler = engine.optimizer.loss_scaler
    vars(scaler).update(state["scaler"])
    # DeepSpeed takes this rank's state from a list of all ranks' states.
    listed: list[Any] = [None] * dist.get_world_size()
    listed[dist.get_rank()] = {**state["optimizer"], _SCALER: scaler}
    engine.optimizer.load_state_dict(listed, load_from_fp32_weights=True)


def _on_cpu(state: Any) -> Any:
    """Return the plain values of a nest, with tensors copied to the CPU."""
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), plain(state))
