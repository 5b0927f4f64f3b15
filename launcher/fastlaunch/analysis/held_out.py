"""What runs score on held-out data: the curve of one run, and the figures at the end of a row of runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastlaunch.measure.summarize import RunSummary
    from fastlaunch_train.records.records import Eval

#: No loss that was computed in fp32 is larger. What a foreign record holds beyond it would overflow in sums.
_MOST = 3.5e38

COMPLETED, NAN_LOSS = "completed", "nan_loss"
VALIDATION, TEST = "validation", "test"
CURRENT, BEST = "current", "best"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out figures at the end of training, means over the runs of a row that have them.

    loss: None where that of some run was not finite. metric: its name, higher is better; the values are those
    of the last weights on validation data, of the last on test data, and of the best on test data.
    """

    num_runs: int
    loss: float | None
    metric: str | None = None
    metric_value: float | None = None
    test_metric_value: float | None = None
    best_test_metric_value: float | None = None


def curve(run: "RunSummary") -> Mapping[int, "Eval"]:
    """The evaluations on validation data of the weights as they were, by step, in order."""
    found = [e for e in run.evals if e.split == VALIDATION and e.weights == CURRENT]
    return {e.step: e for e in sorted(found, key=lambda e: e.step)}


def at_end(run: "RunSummary") -> "Eval | None":
    """The evaluation at the end of a run that got there; None of another run, and where there is none."""
    evals = curve(run)
    return evals[max(evals)] if evals and run.status == COMPLETED else None


def diverged(run: "RunSummary") -> bool:
    """Whether the run's loss stopped being a number: in training, or on held-out data at the end."""
    end = at_end(run)
    return run.status == NAN_LOSS or (end is not None and not is_finite(end.loss))


def is_finite(loss: float | None) -> bool:
    return loss is not None and abs(loss) < _MOST


def held_out(runs: Sequence["RunSummary"]) -> HeldOut | None:
    """The figures at the end of runs that are repeats of each other; None if none of them was evaluated."""
    ends = [end for run in runs if (end := at_end(run)) is not None]
    if not ends:
        return None
    metric = next((end.metric for end in ends if end.metric is not None), None)
    return HeldOut(
        num_runs=len(ends),
        loss=_mean_if_all(end.loss if is_finite(end.loss) else None for end in ends),
        metric=metric,
        metric_value=_mean_if_all(end.metric_value for end in ends),
        test_metric_value=_mean_if_all(_of_test(run, CURRENT) for run in runs if at_end(run)),
        best_test_metric_value=_mean_if_all(_of_test(run, BEST) for run in runs if at_end(run)),
    )


def _of_test(run: "RunSummary", weights: str) -> float | None:
    found = [e for e in run.evals if e.split == TEST and e.weights == weights]
    return max(found, key=lambda e: e.step).metric_value if found else None


def _mean_if_all(values: Iterable[float | None]) -> float | None:
    """The mean; None where one of the values is unknown or no number, since a mean of others is another's."""
    known = list(values)
    finite = [value for value in known if value is not None and math.isfinite(value)]
    mean = sum(finite) / len(finite) if finite and len(finite) == len(known) else math.inf
    return mean if math.isfinite(mean) else None
