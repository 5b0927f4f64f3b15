"""Held-out data: what the model scores on them while it trains, and the weights that scored best."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed.parallel import Process, agree
from fastlaunch_train.loop.training import Training
from fastlaunch_train.models.ort import inside_ort
from fastlaunch_train.process.failures import InterruptedRun
from fastlaunch_train.records.records import Eval
from fastlaunch_train.undisturbed import left_as_it_was
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.contract import Batch, DataRequest, Score, Workload, next_batch


@dataclass(frozen=True, kw_only=True)
class Best:
    """The weights, in host memory, that scored best on validation, and what they scored."""

    score: Eval
    weights: dict[str, Any]


class Evaluations:
    """When a model is evaluated, up to which step it was, and its best weights where `keep_best`.

    `validation` comes every `every` steps and after the last; `test` after it all, with the weights of the
    last step and with the best ones.
    """

    def __init__(self, *, every: int, last_step: int, keep_best: bool) -> None:
        self.every = every
        self.keep_best = keep_best
        self.best: Best | None = None
        self._last_step = last_step
        self._evaluated = 0

    def due(self, step: int) -> bool:
        """Whether the model after `step` is to be evaluated, and was not."""
        return step > self._evaluated and (step % self.every == 0 or step == self._last_step)

    def owed(self, last_step: int) -> bool:
        """Whether there is something to evaluate after the last step is done, and recorded."""
        return self.keep_best or self.due(last_step)

    def validate(self, training: Training, step: int) -> Eval:
        """What the model after `step` scores on `validation`, recorded. Raises what `evaluate` does."""
        found = _record(training, "validation", step, then=lambda found: self._keep(training, found))
        self._evaluated = step
        return found

    def _keep(self, training: Training, found: Eval) -> None:
        if self.keep_best and (self.best is None or is_better(found, self.best.score)):
            self.best = Best(score=found, weights=training.stepper.weights())

    def test(self, training: Training, step: int) -> None:
        """Record what the weights after `step` and the best score on `test`. Raises what `evaluate` does."""
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
            # Who is asked to stop meanwhile saves a checkpoint, which is of the last step.
            stepper.load_weights(current)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors."""
        best = self.best
        return {
            "evaluated": self._evaluated,
            "best": None if best is None else {"score": dict(vars(best.score)), "weights": best.weights},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        best = state["best"]
        if best is not None and self.keep_best:
            self.best = Best(score=Eval(**best["score"]), weights=best["weights"])
        # Where best weights are wanted and none were kept, the last evaluation has to be done again.
        if self.best is not None or not self.keep_best:
            self._evaluated = state["evaluated"]


def plan_evaluations(
    workload: Workload, request: DataRequest, process: Process, *, every: int, last_step: int
) -> Evaluations | None:
    """The Evaluations of a training of which `every` steps were asked for; None for 0.

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


def is_better(found: Eval, than: Eval) -> bool:
    """Whether `found` beats `than`: by the metric, higher is better, else by the loss; a draw does not."""
    if found.loss is None:
        return False
    if than.loss is None:
        return True
    if found.metric_value is not None and than.metric_value is not None:
        return found.metric_value > than.metric_value
    return found.loss < than.loss


def evaluate(training: Training, split: str, step: int, weights: str = "current") -> Eval:
    """What the model as it is scores on `split`, all ranks together; loss None where it is not finite.

    step, weights: of the model, for the record. Training goes on after it as if it had not been: model,
    buffers, FP8 scales and random generators are left as they were. Raises InterruptedRun, within a batch,
    when a rank was asked to stop.
    """
    workload, model, device = training.workload, _model_to_ask(training), training.process.device
    assert workload.held_out is not None and workload.score is not None
    started = time.perf_counter()
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    with left_as_it_was(model), torch.no_grad():
        model.eval()
        _share_buffers(training, model)
        for batch, counts in _in_step(training, workload.held_out(training.request, split)):
            with training.precision.autocast():
                score = workload.score(model, batch)
            if counts:
                totals += _vector(score, batch, device)
    loss_sum, weight, metric_sum, num_samples = _add_up(training.process, totals)
    loss = loss_sum / weight if weight else math.nan
    metric_value = metric_sum / weight if weight and workload.metric else math.nan
    return Eval(
        step=step,
        split=split,
        loss=loss if math.isfinite(loss) else None,
        num_samples=round(num_samples),
        seconds=time.perf_counter() - started,
        weights=weights,
        metric=workload.metric,
        metric_value=metric_value if math.isfinite(metric_value) else None,
    )


def rehearse(training: Training) -> None:
    """Score one batch of validation and forget it, so that what evaluation compiles is compiled."""
    workload, model = training.workload, _model_to_ask(training)
    assert workload.held_out is not None and workload.score is not None
    batches = itertools.islice(workload.held_out(training.request, "validation"), 1)
    with left_as_it_was(model), torch.no_grad():
        model.eval()
        for batch, _ in _in_step(training, batches):
            with training.precision.autocast():
                workload.score(model, batch)


def _in_step(training: Training, batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each of this rank's batches, and whether it counts: every rank gets as many as the one with most.

    A sharded or wrapped model meets its peers in each forward pass. Raises InterruptedRun when asked to stop.
    """
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        any_left, asked = agree(
            training.process, [float(batch is not None), float(training.interrupts.requested)]
        )
        if asked:
            raise InterruptedRun(training.interrupts.message)
        if not any_left:
            return
        if batch is None and last is None:
            # Fewer batches than ranks: any other does to keep them company.
            last = next_batch(training.workload, training.workload.batches(training.request))
        last = last if batch is None else batch
        yield last, batch is not None


def _model_to_ask(training: Training) -> nn.Module:
    """The model without DDP, which would skip what it shares in the training step after an evaluation."""
    model = training.stepper.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        model = inner
    # Exported for evaluation, parameters of equal values, as biases have at first, are one for good (ONNX
    # Runtime 1.19.2): the graph that trains is ONNX Runtime's, its parameters are the module's.
    return inside_ort(model) if training.recipe.engine == "ort" else model


def _share_buffers(training: Training, model: nn.Module) -> None:
    """Give every rank rank 0's buffers, as DDP does before a training step: all ask one model.

    With shards too, where each rank keeps statistics of its own: checkpoints hold rank 0's.
    """
    if training.process.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def _record(
    training: Training,
    split: str,
    step: int,
    *,
    weights: str = "current",
    after: int | None = None,
    then: Callable[[Eval], None] | None = None,
) -> Eval:
    """Evaluate, and record it and its phase, in which `then` is done after it."""
    found: list[Eval] = []

    def work() -> str:
        found.append(evaluate(training, split, step, weights))
        if then is not None:
            then(found[0])
        return _told(found[0])

    training.phase("eval", work, step=step if after is None else after)
    training.writer.add(found[0])
    training.writer.flush()
    return found[0]


def _told(found: Eval) -> str:
    loss = "not finite" if found.loss is None else f"{found.loss:.4f}"
    metric = f", {found.metric} {found.metric_value:.4f}" if found.metric_value is not None else ""
    best = f" with the weights of step {found.step}" if found.weights == "best" else ""
    return f"{found.split}{best}: loss {loss}{metric}"


def _has_data(workload: Workload, request: DataRequest, process: Process, split: str) -> bool:
    assert workload.held_out is not None
    batches = workload.held_out(request, split)
    return agree(process, [float(next(batches, None) is not None)])[0] > 0


def _vector(score: Score, batch: Batch, device: torch.device) -> torch.Tensor:
    nothing = torch.zeros((), device=device)
    num_samples = nothing + _num_samples(batch) if score.num_samples is None else score.num_samples
    metric_sum = nothing if score.metric_sum is None else score.metric_sum
    parts = [score.loss_sum, score.weight, metric_sum, num_samples]
    return torch.stack([part.detach().to(device, torch.float64) for part in parts])


def _num_samples(batch: Batch) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return next(_num_samples(part) for part in parts)


def _add_up(process: Process, values: torch.Tensor) -> list[float]:
    message = values.cpu()
    if process.world_size > 1:
        torch.distributed.all_reduce(message)
    return [float(value) for value in message]
