"""`Workload`: what to train, as a few functions; and where the named ones are found."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.record_lines import MAX_INTEGER
from fastlaunch_train.records.data_identity import DataIdentity
from fastlaunch_train.workloads import WorkloadError, workload_info

#: Model inputs and their targets, on the training device: tensors in a tuple, a list or a mapping, the first
#: dimension of each the sample's.
Batch = Any


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Which batches one rank asks a workload for.

    arm: `synthetic` (made up as it goes), `loader` (through worker processes), `folder:PATH` or `file:PATH`.
    batch_size: samples per rank and step. first_step: 1, or the step after the checkpoint resumed from;
    the batch of step n is the same whether or not training was interrupted before n.
    dtype: what the recipe computes in, for a workload whose inputs alone decide that.
    """

    arm: str
    batch_size: int
    seed: int
    rank: int
    world_size: int
    device: torch.device
    num_workers: int
    first_step: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of a workload the user may choose: None for its own.

    model, tokenizer: a folder, or a name on the Hugging Face hub. sequence_length: tokens.
    """

    model: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchCount:
    """Tokens of a batch, of which num_padding mean nothing.

    num_padding may be a scalar tensor on the device: it is read when the steps are waited for anyway.
    """

    num_tokens: int
    num_padding: int | torch.Tensor = 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one held-out batch, as scalar tensors, which add up over batches and ranks.

    loss_sum / weight is the mean loss, metric_sum / weight the workload's `metric`. num_samples: of the batch
    those that count, where it was filled up; None for all of them.
    """

    loss_sum: torch.Tensor
    weight: torch.Tensor
    metric_sum: torch.Tensor | None = None
    num_samples: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to train.

    build_model: a model on the CPU in fp32, its weights drawn from torch's default generator.
    batches: an endless iterator of batches on the requested device, from `first_step` on.
    loss: scalar mean loss of a batch, given the (wrapped, compiled) model.
    blocks: the model's transformer blocks, in order, inside their parent module (for compiling or
        replacing one by one); None if the model has none.
    flops_per_sample: of one training step, forward and backward, without recomputation; None if unknown.
    outputs: what the model says of each sample of a batch, (samples, ...), for the checks that a recipe
        computes what the model does, each sample by itself; None if there is no such thing.
    count: tokens of a batch; None where every sample has `tokens_per_sample`.
    held_out: batches that are not trained on, of `validation` or `test`, the same for every seed, recipe and
        batch size: finite, each rank its share; None if there are none. score: of one such batch.
    metric: the name of what Score.metric_sum counts, such as accuracy: higher is better.
    samples_per_epoch: of a source of data, over all ranks; None where it has no end.
    pointwise: puts the pointwise functions of a model in place that a recipe names; None if it has no choice.
    trains: whether a step is an optimizer step; else it is a forward pass alone, of `loss`, whose value
        stands for a loss and is none.
    sequence_length: tokens of a sample, padding counted; None where that means nothing.
    data_identity: what the samples of a source of data are; it may read what was read before. None if that
        is not said, as by a workload of the user's own.
    model_identity: of a published model, as `language_models.model_identity`; None where the name says it.
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
    outputs: Callable[[nn.Module, Batch], torch.Tensor] | None = None
    count: Callable[[Batch], BatchCount] | None = None
    held_out: Callable[[DataRequest, str], Iterator[Batch]] | None = None
    score: Callable[[nn.Module, Batch], Score] | None = None
    metric: str | None = None
    samples_per_epoch: Callable[[str], int | None] | None = None
    pointwise: Callable[[nn.Module, str], None] | None = None
    trains: bool = True
    sequence_length: int | None = None
    data_identity: Callable[[str], DataIdentity] | None = None
    model_identity: Callable[[], Mapping[str, str | None]] | None = None

    def __post_init__(self) -> None:
        # What a record would refuse, before anything is trained for it.
        for field in ("name", "sample_unit", "optimizer"):
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
        rate = self.learning_rate
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate < math.inf:
            raise WorkloadError(
                f"workload {self.name!r}: learning_rate is {rate!r}", "give a number from 0 on"
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


def put_back(first: Batch, rest: Iterator[Batch]) -> Iterator[Batch]:
    """`first` and then the `rest`. itertools.chain would hold on to the first as long as there are others."""
    held = [first]
    del first
    yield held.pop()
    yield from rest


def load_workload(name: str, asked: Asked | None = None) -> Workload:
    """The workload called `name`: built in, `timm:MODEL`, `hf-clm:MODEL` or `./file.py:function`.

    Raises WorkloadError if there is none such, or if the user's file or function does not yield a Workload.
    """
    info = workload_info(name)
    asked = asked or Asked()
    given = [field for field, value in vars(asked).items() if value is not None]
    refused = [field for field in given if field not in info.takes]
    if refused:
        option = "--" + refused[0].replace("_", "-")
        raise WorkloadError(f"workload {name!r} takes no {option}", f"leave out {option}")
    if ".py:" in name:
        return _load_own(name)
    module = importlib.import_module(info.module)
    built = module.build(name, asked) if info.takes else module.build(name)
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
            "it returns a fastlaunch_train.workloads.contract.Workload",
        )
    return built
