"""`Training`: everything that a loop needs, built."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.phases import PhaseClock
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.recipes.recipes import Recipe
from fastlaunch_train.records.records import RecordWriter
from fastlaunch_train.workloads.contract import Batch, DataRequest, Workload

if TYPE_CHECKING:
    from fastlaunch_train.checks.compiled_model import AsTrained
    from fastlaunch_train.loop.evaluation import Evaluations
    from fastlaunch_train.steppers.stepping import Stepper


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the loops share.

    stepper: the model, wrapped and compiled as the recipe says, and what makes a step of it. In the loops of
        other libraries they wrap the model themselves, and make the steps.
    request: what `batches` were asked for with; held-out data are asked for likewise.
    as_trained: what looks at the first passes of the model; None where an earlier attempt did.
    evaluations: when and on what the model is evaluated; None for never.
    save_checkpoint: of the step that it is given.
    """

    workload: Workload
    recipe: Recipe
    process: Process
    precision: Precision
    stepper: "Stepper"
    batches: Iterator[Batch]
    request: DataRequest
    first_step: int
    last_step: int
    checkpoint_every: int
    save_checkpoint: Callable[[int], None]
    evaluations: "Evaluations | None"
    phase: PhaseClock
    writer: RecordWriter
    interrupts: Interrupts
    num_compiles: Callable[[], int]
    print_metrics: bool = False
    as_trained: "AsTrained | None" = None
