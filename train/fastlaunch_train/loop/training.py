"""`Training`: everything that a loop needs, built."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastlaunch_train.checks.compiled_model import CompiledModelCheck
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.loop.timing import PhaseClock
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.records.records import RecordWriter
from fastlaunch_train.steppers.stepping import Stepper
from fastlaunch_train.workloads.contract import Batch, DataRequest, Workload


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, the data, the length and the records of a training."""

    workload: Workload
    recipe: Recipe
    process: Process
    precision: Precision
    #: The model, wrapped and compiled as the recipe says, and what makes a step of it. Another library's
    #: Trainer takes its model and optimizer, wraps the model itself and makes the steps.
    stepper: Stepper
    #: What `batches` were requested with, from the first step on; held-out data are requested likewise.
    request: DataRequest
    batches: Iterator[Batch]
    last_step: int
    #: Steps; 0 for never.
    checkpoint_every: int
    #: Saves the checkpoint of a step.
    save_checkpoint: Callable[[int], None]
    phase: PhaseClock
    writer: RecordWriter
    interrupts: Interrupts
    #: Whether to log a line a block for programs.
    print_metrics: bool = False
    #: Checks the first passes of the model; None if an earlier attempt did.
    model_check: CompiledModelCheck | None = None
    #: Whether to profile a few steps after the last.
    step_profile: bool = False

    @property
    def first_step(self) -> int:
        """1, or the step after the checkpoint that was resumed."""
        return self.request.first_step
