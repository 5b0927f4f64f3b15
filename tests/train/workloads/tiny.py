"""Workloads that train in milliseconds without timm, and some that fail on purpose."""

import ctypes
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fastlaunch_train.workloads.contract import Batch, BatchCount, DataRequest, Score, Workload

NUM_FEATURES = 16
NUM_CLASSES = 4


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, NUM_CLASSES)
    )


def batches(request: DataRequest) -> Iterator[Batch]:
    prototypes = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=torch.Generator().manual_seed(request.seed))
    for step in itertools.count(request.first_step):
        generator = torch.Generator().manual_seed(1000 * step + request.rank + 7 * request.seed)
        labels = torch.randint(NUM_CLASSES, (request.batch_size,), generator=generator)
        noise = torch.randn(request.batch_size, NUM_FEATURES, generator=generator)
        yield (prototypes[labels] + 0.5 * noise).to(request.device), labels.to(request.device)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def workload(**changes: object) -> Workload:
    parts: dict[str, object] = {
        "name": "tiny",
        "sample_unit": "samples",
        "build_model": build_model,
        "batches": batches,
        "loss": loss,
        "flops_per_sample": 6 * (NUM_FEATURES * 32 + 32 * NUM_CLASSES),
        "learning_rate": 0.05,
    }
    return Workload(**(parts | changes))  # type: ignore[arg-type]


def build() -> Workload:
    return workload()


def held_out(request: DataRequest, split: str) -> Iterator[Batch]:
    """Five batches of 6 samples of validation and three of test, dealt out to the ranks in turn."""
    whole = replace(request, seed=1 if split == "validation" else 2, rank=0, batch_size=6, first_step=1)
    count = 5 if split == "validation" else 3
    return itertools.islice(batches(whole), request.rank, count, request.world_size)


def score(model: nn.Module, batch: Batch) -> Score:
    """Draws too, as a user's may: that must not change the training."""
    answers = model(batch[0] + 0 * torch.rand(1))
    return Score(
        loss_sum=nn.functional.cross_entropy(answers, batch[1], reduction="sum"),
        weight=torch.tensor(len(batch[1])),
        metric_sum=(answers.argmax(1) == batch[1]).sum(),
    )


def evaluated(**changes: object) -> Workload:
    """With held-out data, an end of its data (50 samples), and padding: a token for each feature."""
    parts: dict[str, object] = {
        "held_out": held_out,
        "score": score,
        "metric": "accuracy",
        "samples_per_epoch": lambda data: 50,
        "count": lambda batch: BatchCount(num_tokens=batch[0].numel(), num_padding=(batch[0] < 0).sum()),
        "sequence_length": NUM_FEATURES,
    }
    return workload(**(parts | changes))


def sized(width: int, rate: float = 0.05) -> Workload:
    model = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES))
    return workload(build_model=lambda: model, learning_rate=rate, flops_per_sample=None)


def pretraining() -> Workload:
    """As `evaluated`, with all that a step of pretraining has; clipping is active in every step."""
    return evaluated(
        optimizer="adamw", weight_decay=0.1, max_grad_norm=0.2, lr_schedule="cosine", warmup_steps=3
    )


def untrained() -> Workload:
    """As `evaluated`, and its weights stay what they are: ranks of any number score alike."""
    return evaluated(learning_rate=0.0, build_model=lambda: nn.Linear(NUM_FEATURES, NUM_CLASSES))


def best_at_first() -> Workload:
    """As `evaluated`, by a metric that falls each time."""
    return evaluated(score=_falling(score))


def stopped_at_17() -> Workload:
    """As `evaluated`; asked to stop in step 17."""
    return evaluated(loss=_after(lambda step: step == 17 and _signal(signal.SIGTERM)))


def stopped_in_pretraining() -> Workload:
    """As `pretraining`; asked to stop in step 9."""
    return replace(pretraining(), loss=_after(lambda step: step == 9 and _signal(signal.SIGTERM)))


def stopped_at_micro_batch_34() -> Workload:
    """As `evaluated`; asked to stop in step 17 of two micro-batches each."""
    return evaluated(loss=_after(lambda step: step == 34 and _signal(signal.SIGTERM)))


def untrainable() -> Workload:
    """A step is a forward pass alone."""
    return workload(trains=False)


def stopped_in_evaluation() -> Workload:
    """As `evaluated`; asked to stop in the second batch of the first evaluation of the first attempt."""
    return evaluated(score=_once(lambda: _signal(signal.SIGTERM), at=2))


def stopped_in_the_last_test() -> Workload:
    """As `best_at_first`; asked to stop in the first attempt's second batch of test with the best weights."""
    return evaluated(score=_falling(_once(lambda: _signal(signal.SIGTERM), at=25)))


def killed_in_test() -> Workload:
    """As `evaluated`; killed in the first attempt's first batch of test, after four times five others."""
    return evaluated(score=_once(lambda: _signal(signal.SIGKILL), at=21))


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)


def _falling(of):  # type: ignore[no-untyped-def]
    """The score `of` gives, with a metric that falls each time."""
    count = itertools.count(1)
    return lambda model, batch: replace(of(model, batch), metric_sum=torch.tensor(1 / next(count)))


def _once(effect, at):  # type: ignore[no-untyped-def]
    """`score`, after calling `effect` the `at`-th time; never where RESUMED is set."""
    count = itertools.count(1)

    def with_effect(model: nn.Module, batch: Batch) -> Score:
        if next(count) == at and "RESUMED" not in os.environ:
            effect()
        return score(model, batch)

    return with_effect


class Classifier(nn.Module):
    """A module of our own, which torch.compile does not take for one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 32)
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(x)))  # type: ignore[no-any-return]


def compiled() -> Workload:
    """With held-out data, and a model that torch.compile compiles."""
    return evaluated(build_model=Classifier)


class WrongWhenCompiled(nn.Linear):
    """Half as large again once it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return 1.5 * y if torch.compiler.is_compiling() else y


def compiled_wrong() -> Workload:
    """A model that a compiler gets wrong, as far as its outputs tell."""
    return workload(build_model=lambda: WrongWhenCompiled(NUM_FEATURES, NUM_CLASSES))


def no_held_out_batch() -> Workload:
    return evaluated(held_out=lambda request, split: iter(()))


def mixing() -> Workload:
    """What it says of a sample depends on the others of its batch."""

    def outputs(model: nn.Module, batch: Batch) -> torch.Tensor:
        answers = model(batch[0])
        return answers + answers.mean(0)  # type: ignore[no-any-return]

    return workload(outputs=outputs)


def in_bf16() -> Workload:
    """Its batches are in the dtype that the recipe computes in, which has to be bf16."""

    def checked_batches(request: DataRequest) -> Iterator[Batch]:
        assert request.dtype == torch.bfloat16, request.dtype
        return batches(request)

    return evaluated(batches=checked_batches)


def batches_noted() -> Workload:
    """Writes the size of all batches that are requested to the file that BATCHES_NOTED names."""

    def noted(request: DataRequest) -> Iterator[Batch]:
        with Path(os.environ["BATCHES_NOTED"]).open("a") as file:
            file.write(f"{request.batch_size}\n")
        return batches(request)

    return workload(batches=noted, outputs=lambda model, batch: model(batch[0]))


def slow() -> Workload:
    """About 20 ms a step, so that a test can interrupt it."""
    return workload(loss=_after(lambda step: time.sleep(0.02)))


class SlowState(nn.Module):
    """Changes nothing; its state takes as many seconds as CHECKPOINT_S says, as much of it would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> torch.Tensor:
        time.sleep(float(os.environ.get("CHECKPOINT_S", "0")))
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.numel() == 0


def slow_checkpoint() -> Workload:
    """As `slow`, and a checkpoint takes the seconds of CHECKPOINT_S."""
    return workload(
        build_model=lambda: nn.Sequential(*build_model(), SlowState()),  # type: ignore[misc]
        loss=_after(lambda step: time.sleep(0.02)),
    )


def hanging() -> Workload:
    """Step 3 blocks outside Python's reach, as a collective without its peers does."""

    def hang(step: int) -> None:
        if step == 3:
            # A mutex locked twice waits for ever, and no signal wakes it.
            mutex, libc = ctypes.create_string_buffer(128), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)

    return workload(loss=_after(hang))


def nan() -> Workload:
    """The loss of step 15 is not a number."""
    return workload(loss=_changed(lambda step, value: value * float("nan") if step == 15 else value))


class _NotWaitedFor(TorchFunctionMode):
    """Lets nobody ask whether a scalar that is being trained on is a number."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert function not in (torch.isnan, torch.isinf, torch.isfinite), "a loss is waited for"
        return function(*args, **(kwargs or {}))


def not_waited_for() -> Workload:
    """As `evaluated`; from the first step's loss on nobody may look at whether a loss is a number."""
    mode = _NotWaitedFor()
    return evaluated(loss=_after(lambda step: mode.__enter__() if step == 1 else None))


def infinite_gradients() -> Workload:
    """As `evaluated`; the loss of step 15 is finite, and its gradients are not."""

    def steep(step: int, value: torch.Tensor) -> torch.Tensor:
        return value + (value - value.detach()) * 1e38 * 10 if step == 15 else value

    return evaluated(loss=_changed(steep))


class LastBias(nn.Module):
    """The gradient of its last bias alone is too large by far, and finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.shift = nn.Parameter(torch.zeros(2 * NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.shift[-1]
        steep = (last - last.detach()) * 1e15
        return self.linear(x) + self.shift.sum() + nn.functional.pad(steep[None], (NUM_CLASSES - 1, 0))  # type: ignore[no-any-return]


def infinite_last_weight() -> Workload:
    """As `evaluated`; in the first step the optimizer makes one weight infinite, the last rank's."""
    return evaluated(build_model=LastBias, learning_rate=1e30)


def out_of_memory() -> Workload:
    return workload(loss=_after(lambda step: step == 5 and torch.empty(2**58)))


def failing_rank() -> Workload:
    """Rank 1 raises at step 12; its peers must not wait for it for ever."""

    def fail(step: int) -> None:
        if step == 12 and os.environ.get("RANK") == "1":
            raise ValueError("rank 1 had enough")

    return workload(loss=_after(fail))


def kill_itself() -> Workload:
    """SIGKILL in step 25."""
    return workload(loss=_after(lambda step: step == 25 and _signal(signal.SIGKILL)))


def ending_batches() -> Workload:
    return workload(batches=lambda request: itertools.islice(batches(request), 3))


def no_model() -> Workload:
    """Nobody may build its model."""

    def build_none() -> nn.Module:
        raise AssertionError("a model is built")

    return workload(build_model=build_none)


def wrong_shapes() -> Workload:
    return workload(loss=lambda model, batch: loss(model, (batch[0][:, 1:], batch[1])))


def without_outputs() -> Workload:
    def outputs(model: nn.Module, batch: Batch) -> torch.Tensor:
        raise RuntimeError("these outputs are for a recipe that was refused")

    return workload(outputs=outputs)


def without_a_loss() -> Workload:
    return Workload(name="tiny", sample_unit="rows", build_model=build_model, batches=batches)  # type: ignore[call-arg]


def listed_batches() -> Workload:
    return workload(batches=lambda request: list(itertools.islice(batches(request), 3)))


def no_parameters() -> Workload:
    return workload(build_model=nn.Identity)


def loss_of_each_sample() -> Workload:
    return workload(loss=lambda model, batch: loss(model, batch).expand(len(batch[1])))


def _after(effect):  # type: ignore[no-untyped-def]
    """`loss`, after calling `effect` with the number of the step."""
    return _changed(lambda step, value: value, effect)


def _changed(change, effect=lambda step: None):  # type: ignore[no-untyped-def]
    """`loss`, and what `change` makes of it with the step's number; without gradients it is a probe's.

    So is the first with gradients, by which the attention kernel is named: step 0.
    """
    count = itertools.count()

    def changed_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return loss(model, batch)
        step = next(count)
        effect(step)
        return change(step, loss(model, batch))  # type: ignore[no-any-return]

    return changed_loss
