"""Score the model on held-out data during training, and keep the best weights."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process, agree
from fastlaunch_train.loop.counting import SampleCounter, rows_of
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.models.ort import unwrap_ort
from fastlaunch_train.process.failures import InterruptedRun
from fastlaunch_train.records.records import Eval
from fastlaunch_train.workloads.contract import Batch, DataRequest, Score, Workload, next_batch
from fastlaunch_train.workloads.registry import WorkloadError


@dataclass(frozen=True, kw_only=True)
class Best:
    """The weights that scored best on validation."""

    score: Eval
    #: Weights and buffers in host memory.
    weights: dict[str, Any]


class Evaluations:
    """Evaluates a model when due, and keeps its best weights.

    It evaluates on `validation` every `every` steps and after the last, then on `test`, if there is one, with
    the weights of the last step and with the best.
    """

    def __init__(self, *, every: int, last_step: int, keep_best: bool) -> None:
        self.every = every
        #: Whether to keep the best weights, for `test`.
        self.keep_best = keep_best
        self.best: Best | None = None
        self._last_step = last_step
        #: The step of the latest evaluation.
        self._evaluated = 0

    def due(self, step: int) -> bool:
        """Return whether the model after `step` still has to be evaluated."""
        return step > self._evaluated and (step % self.every == 0 or step == self._last_step)

    def owed(self, last_step: int) -> bool:
        """Return whether an evaluation is left to do after the last step."""
        return self.keep_best or self.due(last_step)

    def validate(self, training: Training, step: int) -> None:
        """Record the score on `validation` of the model after `step`. Raises what `evaluate` does."""
        _record(training, "validation", step, then=lambda score: self._keep(training, score))
        self._evaluated = step

    def _keep(self, training: Training, score: Eval) -> None:
        if self.keep_best and (self.best is None or is_better(score, self.best.score)):
            self.best = Best(score=score, weights=training.stepper.weights())

    def test(self, training: Training, step: int) -> None:
        """Record the scores on `test`, if there is one, of the weights after `step` and of the best.

        Raises what `evaluate` does.
        """
        if not self.keep_best:
            return
        _record(training, "test", step)
        best, stepper = self.best, training.stepper
        assert best is not None, "validation came first"
        current = stepper.weights()
        try:
            stepper.load_weights(best.weights)
            _record(training, "test", best.score.step, weights="best", after=step)
        finally:
            # A rank that is asked to stop meanwhile saves a checkpoint, which has to hold the last step.
            stepper.load_weights(current)

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint."""
        best = self.best
        return {
            "evaluated": self._evaluated,
            "best": None if best is None else {"score": dict(vars(best.score)), "weights": best.weights},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        best = state["best"]
        if best is not None and self.keep_best:
            weights = {name: value.to("cpu") for name, value in best["weights"].items()}
            self.best = Best(score=Eval(**best["score"]), weights=weights)
        # If the best weights are needed and the checkpoint has none, repeat the last evaluation.
        if self.best is not None or not self.keep_best:
            self._evaluated = state["evaluated"]


def plan_evaluations(
    workload: Workload, request: DataRequest, process: Process, *, every: int, last_step: int
) -> Evaluations | None:
    """Return the evaluations of a training, `every` so many steps; None for 0.

    Raises WorkloadError if the workload holds no data out.
    """
    if not every:
        return None
    if (
        workload.held_out is None
        or workload.score is None
        or not _has_data(workload, request, process, "validation")
    ):
        raise WorkloadError(
            f"workload {workload.name!r} has no held-out data to evaluate on", "leave out --eval-every"
        )
    keep_best = _has_data(workload, request, process, "test")
    return Evaluations(every=every, last_step=last_step, keep_best=keep_best)


def is_better(score: Eval, than: Eval) -> bool:
    """Return whether `score` beats `than`, by a higher metric if both have one, else by a lower loss."""
    if score.loss is None:
        return False
    if than.loss is None:
        return True
    if score.metric_value is not None and than.metric_value is not None:
        return score.metric_value > than.metric_value
    return score.loss < than.loss


def evaluate(training: Training, split: str, step: int, weights: str = "current") -> Eval:
    """Return the present model's score on `split` over all ranks; its loss is None if not finite.

    step, weights: of the model, for the record. Model, buffers, FP8 scales and random generators are left as
    they were. Raises InterruptedRun within a batch when a rank is asked to stop.
    """
    started = time.perf_counter()
    metric = training.workload.metric
    totals = _score_batches(training, split).cpu()
    if training.process.world_size > 1:
        torch.distributed.all_reduce(totals)
    loss_sum, weight, metric_sum, num_samples = totals.tolist()
    loss = loss_sum / weight if weight else math.nan
    metric_value = metric_sum / weight if weight and metric else math.nan
    return Eval(
        step=step,
        split=split,
        loss=loss if math.isfinite(loss) else None,
        num_samples=round(num_samples),
        seconds=time.perf_counter() - started,
        weights=weights,
        metric=metric,
        metric_value=metric_value if math.isfinite(metric_value) else None,
    )


def rehearse(training: Training) -> None:
    """Score one batch of validation and forget it, so that evaluation compiles now."""
    _score_batches(training, "validation", most=1)


def _score_batches(training: Training, split: str, most: int | None = None) -> torch.Tensor:
    """Return the sums of `_vector` over this rank's batches of `split`, or over the first `most` of them."""
    workload, model, device = training.workload, _unwrapped_model(training), training.process.device
    assert workload.held_out is not None and workload.score is not None
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    batches = itertools.islice(workload.held_out(training.request, split), most)
    with preserve_state(model), torch.no_grad():
        model.eval()
        if training.process.world_size > 1:
            # As DDP does before a training step, so that all ranks evaluate one model. With shards, too,
            # where each rank has its own statistics: checkpoints hold rank 0's.
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)
        for batch, counts in _lockstep(training, batches):
            with training.precision.autocast():
                score = workload.score(model, batch)
            if counts:
                totals += _vector(score, batch, device)
    return totals


def _lockstep(training: Training, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield this rank's batches and whether they count; every rank gets as many as the longest.

    A sharded model meets its peers in each forward pass. Raises InterruptedRun when a rank is asked to stop.
    """
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        any_left, stop = agree(
            training.process, [float(batch is not None), float(training.interrupts.requested)]
        )
        if stop:
            raise InterruptedRun(training.interrupts.message)
        if not any_left:
            return
        if batch is None and last is None:
            # With fewer batches than ranks, any batch serves to keep the ranks together.
            last = next_batch(training.workload, training.workload.batches(training.request))
        last = last if batch is None else batch
        yield last, batch is not None


def _unwrapped_model(training: Training) -> nn.Module:
    """Return the model without DDP, which would not share buffers in the step after an evaluation."""
    model = training.stepper.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        model = inner
    # When ONNX Runtime 1.19.2 exports for evaluation, it merges parameters of equal values for good, and
    # biases start equal. So its graph trains, and the module inside evaluates with the same parameters.
    return unwrap_ort(model) if training.recipe.engine == "ort" else model


def _record(
    training: Training,
    split: str,
    step: int,
    *,
    weights: str = "current",
    after: int | None = None,
    then: Callable[[Eval], None] | None = None,
) -> None:
    """Evaluate the model of `step`, `after` that step or a later one; record the score and its phase.

    then: called with the score, within the phase.
    """
    scores: list[Eval] = []

    def work() -> str:
        score = evaluate(training, split, step, weights)
        if then is not None:
            then(score)
        scores.append(score)
        return _describe(score)

    training.phase("eval", work, step=step if after is None else after)
    training.writer.add(scores[0])
    training.writer.flush()


def _describe(score: Eval) -> str:
    loss = "not finite" if score.loss is None else f"{score.loss:.4f}"
    metric = f", {score.metric} {score.metric_value:.4f}" if score.metric_value is not None else ""
    best = f" with the weights of step {score.step}" if score.weights == "best" else ""
    return f"{score.split}{best}: loss {loss}{metric}"


def _has_data(workload: Workload, request: DataRequest, process: Process, split: str) -> bool:
    assert workload.held_out is not None
    batches = workload.held_out(request, split)
    return agree(process, [float(next(batches, None) is not None)])[0] > 0


def _vector(score: Score, batch: Batch, device: torch.device) -> torch.Tensor:
    """Return the sum of the loss, its weight, the sum of the metric, and the samples: (4,), float64."""
    nothing = torch.zeros((), device=device)
    counted = rows_of(batch) or SampleCounter().count(batch) or 0
    num_samples = nothing + counted if score.num_samples is None else score.num_samples
    metric_sum = nothing if score.metric_sum is None else score.metric_sum
    parts = [score.loss_sum, score.weight, metric_sum, num_samples]
    return torch.stack([part.detach().to(device, torch.float64) for part in parts])
