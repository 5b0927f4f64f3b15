"""`Workload`: what to train, as a few functions; and where the named ones are found."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fastlaunch_train.record_lines import MAX_INTEGER
from fastlaunch_train.workloads import WorkloadError, workload_info

#: Model inputs and their targets, on the training device.
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Which batches one rank asks a workload for.

    arm: `synthetic` (made on the device), `loader` (through worker processes) or `folder:PATH`.
    batch_size: samples per rank and step. first_step: 1, or the step after the checkpoint resumed from;
    the batch of step n is the same whether or not training was interrupted before n.
    """

    arm: str
    batch_size: int
    seed: int
    rank: int
    world_size: int
    device: torch.device
    num_workers: int
    first_step: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to train.

    build_model: a model on the CPU in fp32, its weights drawn from torch's default generator.
    batches: an endless iterator of batches on the requested device, from `first_step` on.
    loss: scalar mean loss of a batch, given the (wrapped, compiled) model.
    blocks: the model's transformer blocks, in order, inside their parent module (for compiling or
        replacing one by one); None if the model has none.
    flops_per_sample: of one training step, forward and backward, without recomputation; None if unknown.
    """

    name: str
    sample_unit: str
    build_model: Callable[[], nn.Module]
    batches: Callable[[DataRequest], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    blocks: Callable[[nn.Module], nn.ModuleList | nn.Sequential] | None = None
    flops_per_sample: int | None = None
    tokens_per_sample: int = 0
    optimizer: str = "sgd"
    learning_rate: float = 1e-3
    momentum: float = 0.9

    def __post_init__(self) -> None:
        # What a record would refuse, before anything is trained for it.
        for field in ("name", "sample_unit"):
            if not isinstance(getattr(self, field), str):
                raise WorkloadError(
                    f"workload {self.name!r}: {field} is {getattr(self, field)!r}", "give text"
                )
        for field, least in (("flops_per_sample", 1), ("tokens_per_sample", 0)):
            value = getattr(self, field)
            if value is None and field == "flops_per_sample":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_INTEGER:
                raise WorkloadError(
                    f"workload {self.name!r}: {field} is {value!r}", f"give a whole number from {least} on"
                )


def next_batch(workload: Workload, batches: Iterator[Batch]) -> Batch:
    """The next of the workload's `batches`. Raises WorkloadError if they have ended."""
    batch = next(batches, None)
    if batch is None:
        raise WorkloadError(
            f"workload {workload.name!r}: its batches have ended",
            "start over at the end of the data, for ever",
        )
    return batch


def load_workload(name: str) -> Workload:
    """The workload called `name`: built in, `timm:MODEL` or `./file.py:function`.

    Raises WorkloadError if there is none such, or if the user's file or function does not yield a Workload.
    """
    info = workload_info(name)
    if ".py:" in name:
        return _load_own(name)
    module = importlib.import_module(info.module)
    built = module.build(name)
    assert isinstance(built, Workload)
    return built


def _load_own(name: str) -> Workload:
    path_text, _, function_name = name.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise WorkloadError(
            f"workload {name!r}: there is no file {path}", "give its path, as in ./my.py:build"
        )
    loaded = getattr(sys.modules.get(path.stem), "__file__", str(path.resolve()))
    if path.stem in sys.builtin_module_names or loaded != str(path.resolve()):
        raise WorkloadError(
            f"workload {name!r}: {path} has the name of a module that is in use",
            f"rename the file: `import {path.stem}` would find it instead",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered first, so that loader workers can unpickle what the file defines.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise WorkloadError(f"workload {name!r}: {path} has no function {function_name!r}", None)
    built = function()
    if not isinstance(built, Workload):
        raise WorkloadError(
            f"workload {name!r}: {function_name}() returned {type(built).__name__}",
            "it returns a fastlaunch_train.workload.Workload",
        )
    return built
