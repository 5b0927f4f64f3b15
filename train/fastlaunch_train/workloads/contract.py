"""`Workload`: what to train, as a few functions; and how to load it by its name."""

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.records.data_identity import DataIdentity
from fastlaunch_train.records.records import MAX_INTEGER
from fastlaunch_train.workloads.registry import Scalar, WorkloadError, workload_info

#: Model inputs and targets on the training device: tensors in a tuple, list or mapping, whose first dimension
#: counts the samples.
Batch = Any
#: Makes an optimizer from a model's parameters, by name, and a learning rate.
OptimizerFactory = Callable[[Mapping[str, nn.Parameter], float], torch.optim.Optimizer]
#: The learning rate after the warm-up stays, or falls to 0 at the run's end.
LR_SCHEDULES = ("constant", "linear", "cosine")
#: The label of samples that fill up a batch, which torch's cross entropy ignores (its `ignore_index`).
NO_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """The batches that one rank needs of a workload."""

    source: str  #: `synthetic`, `loader` (synthetic, by worker processes), `folder:PATH` or `file:PATH`
    batch_size: int  #: samples per rank and step; a shorter batch counts as it is
    seed: int
    rank: int
    world_size: int
    device: torch.device
    num_workers: int
    #: 1, or the step after the checkpoint that was resumed: step n's batch is the same either way.
    first_step: int
    dtype: torch.dtype = torch.float32  #: the recipe's, if the inputs' dtype is all that sets it


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What the user may choose in a workload; None: the workload's default."""

    model: str | None = None  #: a folder, or a name on the Hugging Face hub
    tokenizer: str | None = None  #: likewise
    sequence_length: int | None = None  #: in tokens


@dataclass(frozen=True, kw_only=True)
class BatchCount:
    """The tokens of a batch, and how many of them are padding."""

    num_tokens: int
    num_padding: int | torch.Tensor = 0  #: may be a scalar tensor on the device, which is read later

    def __post_init__(self) -> None:
        if type(self.num_tokens) is not int or not 0 <= self.num_tokens <= MAX_INTEGER:
            raise WorkloadError(
                f"{self.num_tokens!r} is no number of tokens", "give BatchCount a whole number from 0 on"
            )


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sums over a held-out batch, as scalar tensors, which are added up over batches and ranks."""

    loss_sum: torch.Tensor
    weight: torch.Tensor  #: loss_sum / weight is the mean loss, metric_sum / weight the workload's metric
    metric_sum: torch.Tensor | None = None
    num_samples: torch.Tensor | None = None  #: without those that fill up the batch; None: all

    @classmethod
    def of_classes(cls, logits: torch.Tensor, labels: torch.Tensor) -> "Score":
        """Return the sums of cross entropy and right answers, for logits (samples, classes) and labels."""
        num_samples = (labels != NO_LABEL).sum()
        return cls(
            loss_sum=nn.functional.cross_entropy(logits, labels, reduction="sum"),
            weight=num_samples,
            metric_sum=(logits.argmax(1) == labels).sum(),
            num_samples=num_samples,
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What to train."""

    name: str
    sample_unit: str  #: such as `images`
    #: Builds a model on the CPU in fp32, with weights from torch's default generator.
    build_model: Callable[[], nn.Module]
    #: Makes endless batches on the requested device, from `first_step` on.
    batches: Callable[[DataRequest], Iterator[Batch]]
    #: Returns the scalar mean loss of a batch, given the (wrapped, compiled) model.
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    #: Returns the model's transformer blocks in order, in their parent module, to be compiled or replaced.
    blocks: Callable[[nn.Module], nn.ModuleList | nn.Sequential] | None = None
    #: FLOPs of a training step, forward and backward, without recomputation; None: unknown.
    flops_per_sample: int | None = None
    tokens_per_sample: int = 0
    optimizer: str | OptimizerFactory = "sgd"  #: `sgd`, `adamw`, `adafactor`, or a function that makes one
    learning_rate: float = 1e-3  #: after the warm-up; a recipe may replace it, and the optimizer
    momentum: float = 0.9  #: of sgd
    #: Applies to parameters with two dimensions or more, and so not to biases and norms. None: the
    #: optimizer's default, which is 0.01 for every parameter with adamw, and 0 otherwise.
    weight_decay: float | None = None
    max_grad_norm: float | None = None  #: gradients with a larger L2 norm are scaled down to it; None: never
    lr_schedule: str = "constant"  #: one of LR_SCHEDULES
    warmup_steps: int = 0  #: steps in which the learning rate rises to `learning_rate`
    #: Returns the model's output for each sample of a batch, (samples, ...), to check what a recipe computes.
    outputs: Callable[[nn.Module, Batch], torch.Tensor] | None = None
    #: Counts a batch's tokens; None: every sample has `tokens_per_sample`.
    count: Callable[[Batch], BatchCount] | None = None
    #: Makes this rank's share of the batches of `validation` or `test`: finite, not trained on, and with the
    #: same samples for every seed, recipe and batch size.
    held_out: Callable[[DataRequest, str], Iterator[Batch]] | None = None
    score: Callable[[nn.Module, Batch], Score] | None = None  #: scores a held-out batch
    metric: str | None = None  #: the name of what Score.metric_sum counts; higher is better
    #: Returns the number of a data source's samples, over all ranks; None: it has no end.
    samples_per_epoch: Callable[[str], int | None] | None = None
    #: Replaces a model's pointwise functions by those that a recipe names; None: there is no choice.
    pointwise: Callable[[nn.Module, str], None] | None = None
    #: False: a step is a forward pass of `loss`, whose value is not a loss, and no optimizer runs.
    trains: bool = True
    sequence_length: int | None = None  #: tokens of a sample, padding included
    #: Identifies the samples of a data source; may reuse what was read. None: unknown.
    data_identity: Callable[[str], DataIdentity] | None = None
    #: Whether `build_model` builds on torch's default device instead, as a model of many parameters should.
    builds_on_device: bool = False
    #: Returns modules beside the blocks that are worth compiling by themselves, as the head with its loss is.
    regions: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    #: Whether frozen parameters are held in the recipe's precision, since no small update of them is lost.
    rounds_frozen: bool = False
    #: Makes a workload of the same layers, few of them and with short samples, on which recipes are checked
    #: against fp32; None: the whole model is.
    sample: "Callable[[], Workload] | None" = None
    #: Replaces a model's functions by those of the library that a recipe names as its kernels.
    use_kernels: Callable[[nn.Module, str], None] | None = None
    #: Writes a model, given its whole state dict, into a folder, as the model's library reads it.
    save: Callable[[nn.Module, Mapping[str, Any], Path], None] | None = None
    #: The model whose weights `build_model` loads: a folder, or a name on the Hugging Face hub.
    weights: str | None = None
    #: Identifies a published model, as `language_models.model_identity` does; None: its name is enough.
    model_identity: Callable[[], Mapping[str, str | None]] | None = None

    def __post_init__(self) -> None:
        # A record would refuse the same values, but only after the run.
        problem = None
        for field in ("name", "sample_unit", "optimizer"):
            value = getattr(self, field)
            if not isinstance(value, str) and not (field == "optimizer" and callable(value)):
                problem = field, "give text" if field != "optimizer" else "give a name or a function"
        if self.lr_schedule not in LR_SCHEDULES:
            problem = "lr_schedule", f"give one of {', '.join(LR_SCHEDULES)}"
        for field, least in (("flops_per_sample", 1), ("tokens_per_sample", 0), ("warmup_steps", 0)):
            value = getattr(self, field)
            is_count = type(value) is int and least <= value <= MAX_INTEGER
            if not is_count and not (value is None and field == "flops_per_sample"):
                problem = field, f"give a whole number from {least} on"
        for field, may_be_zero in (("learning_rate", True), ("weight_decay", True), ("max_grad_norm", False)):
            value = getattr(self, field)
            is_number = type(value) in (int, float) and 0 <= value < math.inf and (value or may_be_zero)
            if not is_number and not (value is None and field != "learning_rate"):
                problem = field, f"give a number {'from 0 on' if may_be_zero else 'above 0'}"
        if self.weight_decay is not None and not isinstance(self.optimizer, str):
            problem = "weight_decay", "give it in the function that makes the optimizer"
        for field in ("build_model", "batches", "loss"):
            if not callable(getattr(self, field)):
                problem = field, "give a function"
        if problem is not None:
            field, hint = problem
            raise WorkloadError(f"workload {self.name!r}: {field} is {getattr(self, field)!r}", hint)

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer; `own` for a function that makes one."""
        return self.optimizer if isinstance(self.optimizer, str) else "own"

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate changes from step to step."""
        return self.lr_schedule != "constant" or self.warmup_steps > 0

    def learning_rate_factor(self, step: int, last_step: int) -> float:
        """Return the factor of the learning rate by `lr_schedule` and warm-up. step: of the run, from 1.

        The factor rises in equal parts, to 1 in the step after the warm-up, and falls to 0 in the step that
        would follow the last.
        """
        if step <= self.warmup_steps:
            return step / (self.warmup_steps + 1)
        if self.lr_schedule == "constant":
            return 1.0
        done = (step - 1 - self.warmup_steps) / (last_step - self.warmup_steps)
        return 1 - done if self.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


def next_batch(workload: Workload, batches: Iterator[Batch]) -> Batch:
    """Return the workload's next batch. Raises WorkloadError if there is none."""
    if not isinstance(batches, Iterator):
        raise WorkloadError(
            f"workload {workload.name!r}: batches returned {type(batches).__name__}, no iterator",
            "yield batch after batch, without end",
        )
    batch = next(batches, None)
    if batch is None:
        raise WorkloadError(
            f"workload {workload.name!r}: its batches have ended", "start over at the end of the data"
        )
    return batch


def prepend(first: Batch, rest: Iterator[Batch]) -> Iterator[Batch]:
    """Yield `first` and then the `rest`, without keeping `first` in memory as itertools.chain does."""
    held = [first]
    del first
    yield held.pop()
    yield from rest


def load_workload(
    name: str, options: ModelOptions | None = None, arguments: Mapping[str, Scalar] | None = None
) -> Workload:
    """Build the workload called `name`: built in, `timm:MODEL`, `hf-clm:MODEL` or `./file.py:function`.

    arguments: as `function_arguments` returns them.
    Raises WorkloadError if there is no such workload, or if the user's function does not return one.
    """
    info = workload_info(name)
    options = options or ModelOptions()
    for field, value in vars(options).items():
        if value is not None and field not in info.takes:
            option = "--" + field.replace("_", "-")
            raise WorkloadError(f"workload {name!r} takes no {option}", f"leave out {option}")
    if ".py:" in name:
        return _load_users(name, arguments or {})
    module = importlib.import_module(info.module)
    given = (options,) if info.takes else ()
    built = module.build(name, *given, **(arguments or {}))
    assert isinstance(built, Workload)
    return built


def _load_users(name: str, arguments: Mapping[str, Scalar]) -> Workload:
    path_text, _, function_name = name.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise WorkloadError(
            f"workload {name!r}: there is no file {path}", "give its path, as in ./my.py:build"
        )
    loaded = getattr(sys.modules.get(path.stem), "__file__", str(path.resolve()))
    if path.stem in sys.builtin_module_names or loaded != str(path.resolve()):
        raise WorkloadError(
            f"workload {name!r}: {path} has the name of a loaded module",
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
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise WorkloadError(
            f"workload {name!r}: {function_name}: {error}", "--set-workload KEY=VALUE gives its arguments"
        ) from None
    built = function(**arguments)
    if not isinstance(built, Workload):
        raise WorkloadError(
            f"workload {name!r}: {function_name}() returned {type(built).__name__}",
            "return a fastlaunch_train.Workload",
        )
    return built


def own_hook(error: BaseException, name: str, workload: Workload | None) -> str | None:
    """Return the place in the user's file where an error arose: `loss (./my.py, line 31)`.

    name: the workload's. workload: None if it could not be built. Return None for an error from elsewhere.
    """
    path, separator, _ = name.rpartition(".py:")
    file = str(Path(f"{path}.py").resolve())
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if separator and frame.f_code.co_filename == file
    ]
    if isinstance(error, SyntaxError) and separator and error.filename == file:
        return f"{path}.py, line {error.lineno}"
    if not frames:
        return None
    called = frames[0][0]
    hooks = (
        {getattr(value, "__code__", None): field for field, value in vars(workload).items()}
        if workload
        else {}
    )
    place = f"{path}.py, line {frames[-1][1]}"
    return place if called.co_name == "<module>" else f"{hooks.get(called, called.co_name)} ({place})"
