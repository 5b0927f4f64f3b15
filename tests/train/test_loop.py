"""What the loop does between the records: compiling ahead leaves no trace, and a lone rank stops at once."""

import contextlib
import math
import signal
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from data_requests import request
from toy import ALONE, CPU, Lines

sys.path.insert(0, str(Path(__file__).parent / "workloads"))
import tiny

from fastlaunch_train.loop.evaluation import evaluate
from fastlaunch_train.loop.recorder import Recorder
from fastlaunch_train.loop.train import TrainingLoop
from fastlaunch_train.loop.training import PhaseClock, Saves, Training
from fastlaunch_train.models.precision import Precision
from fastlaunch_train.process.failures import InterruptedRun, NanLossError
from fastlaunch_train.process.interrupts import Interrupts
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Block, Check, RecordWriter, Step
from fastlaunch_train.steppers.stepping import build_stepper
from fastlaunch_train.workloads.causal_lm import next_token_score


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    torch.manual_seed(0)
    workload = tiny.build()
    recipe = resolve_recipe("fp32", ["compile_mode=default", "compile_backend=eager", "compile_scope=model"])
    precision = Precision(autocast=contextlib.nullcontext, scaler=None)
    data = request()
    writer = RecordWriter(tmp_path / "rank-00000-attempt-1.jsonl")
    yield Training(
        workload=workload,
        recipe=recipe,
        process=ALONE,
        precision=precision,
        stepper=build_stepper(workload, recipe, precision, ALONE, workload.build_model().train()),
        batches=workload.batches(data),
        request=data,
        last_step=100,
        checkpoint_every=0,
        checkpoints=Saves(),
        phase=PhaseClock(writer, CPU),
        writer=writer,
        interrupts=Interrupts(),
    )
    writer.close()


@dataclass
class Slow:
    """A clock that only tests move on, and what looks at the first passes for a minute."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s

    def check(self) -> Check:
        self.now_s += 60
        return Check(name="as-trained", passed=True)


def step(loop: TrainingLoop) -> torch.Tensor:
    batch = loop.fetch()
    loop.after_step(loop.step(batch))
    return batch[0]


def test_a_short_batch_counts_as_it_came(training: Training, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="fastlaunch_train")
    lines, size = Lines(), training.request.batch_size
    whole = next(training.batches)
    batches = [tuple(part[: 1 if number == 4 else size] for part in whole) for number in range(20)]
    workload = replace(training.workload, tokens_per_sample=3)
    loop = TrainingLoop(
        replace(
            training, workload=workload, batches=iter(batches), writer=lines, last_step=20, print_metrics=True
        )  # type: ignore[arg-type]
    )
    loop.begin()
    while not loop.finished:
        loop.fetch()
        loop.after_step(torch.tensor(1.0))
    steps, blocks = ([line for line in lines if isinstance(line, kind)] for kind in (Step, Block))
    samples = [1 if number == 5 else size for number in range(1, 21)]
    assert [(line.num_samples, line.num_tokens) for line in steps] == [(n, 3 * n) for n in samples]
    block = next(each for each in blocks if each.first_step <= 5 <= each.last_step)
    rate = sum(samples[block.first_step - 1 : block.last_step]) / block.wall_s
    assert any(
        f"step={block.last_step} " in line and f"samples_per_s={rate:.2f}" in line for line in caplog.messages
    )


class Coin(torch.nn.Module):
    """Gives token 0 a quarter, and token 1 the rest, whatever was before."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.25, 0.75]).log().expand(*tokens.shape, 2)


def test_the_held_out_loss_is_of_a_token_in_batches_of_any_size(training: Training) -> None:
    texts = [[[0, 1, 1, 1, 1]], [[0, 0], [-100, -100]]]  # the second batch is filled up
    batches = [{"tokens": torch.tensor(text).clamp(min=0), "labels": torch.tensor(text)} for text in texts]
    workload = replace(
        training.workload, held_out=lambda request, split: iter(batches), score=next_token_score
    )
    stepper: Any = SimpleNamespace(model=Coin())
    found = evaluate(replace(training, workload=workload, stepper=stepper), "validation", step=1)
    # Four tokens of the first sequence and one of the second follow another.
    assert found.loss == pytest.approx(-(4 * math.log(0.75) + math.log(0.25)) / 5)
    assert found.num_samples == 2


def test_compiling_ahead_trains_nothing_draws_nothing_and_takes_no_batch(training: Training) -> None:
    model = training.stepper.model
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert "1.running_mean" in state, "the model has buffers that a forward pass changes"
    generator = torch.get_rng_state()
    loop = TrainingLoop(training)
    loop.begin()
    after = model.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())
    first = next(training.workload.batches(training.request))
    assert torch.equal(step(loop), first[0])


def test_a_lone_rank_does_not_finish_its_block_when_asked_to_stop(training: Training) -> None:
    loop = TrainingLoop(training)
    loop.begin()
    for _ in range(3):
        step(loop)
    training.interrupts._handle(signal.SIGTERM, None)
    with pytest.raises(InterruptedRun):
        step(loop)
    assert loop.last_done == 4, "the second block would end with step 10"


def test_a_loss_that_is_not_finite_ends_the_training_with_its_block(training: Training) -> None:
    clock, lines = Slow(), Lines()
    loop = TrainingLoop(replace(training, writer=lines), clock=clock)  # type: ignore[arg-type]
    loop.begin()
    with pytest.raises(NanLossError, match="between steps 2 and 10"):
        for number in range(1, 100):
            loop.fetch()
            clock.now_s += 0.01
            loop.after_step(torch.tensor(float("nan") if number == 4 else 1.0))
    losses = [line.loss for line in lines if isinstance(line, Step)]
    assert losses == [None if number == 4 else 1.0 for number in range(1, 11)]


def test_no_step_counts_the_check_of_the_model_as_trained(training: Training) -> None:
    clock, lines = Slow(), Lines()
    training = replace(training, model_check=clock, writer=lines, last_step=3)  # type: ignore[arg-type]
    loop = TrainingLoop(training, clock=clock)
    loop.begin()
    while not loop.finished:
        batch = loop.fetch()
        loss = loop.step(batch)
        clock.now_s += 1
        loop.after_step(loss)
    assert clock.now_s == 163
    assert [line.step_time_s for line in lines if isinstance(line, Step)] == [1, 1, 1]
    assert [line.wall_s for line in lines if isinstance(line, Block)] == [1, 1, 1]


def test_a_batch_is_let_go_once_it_was_trained_on(training: Training) -> None:
    """The first too, which is put back after the model was compiled on it."""
    loop = TrainingLoop(training)
    loop.begin()
    batches = [weakref.ref(step(loop)) for _ in range(3)]
    assert [batch() for batch in batches] == [None, None, None]


def test_threads_are_chosen_before_anything_is_compiled(training: Training) -> None:
    """Dynamo compiles again once their number is another."""
    done: list[Any] = []
    loop = TrainingLoop(training, choose_threads=done.append)
    loop.begin(lambda batch: done.append("compiled"))
    assert done == [CPU, "compiled"]


def test_what_a_pause_compiles_is_not_the_steps(tmp_path: Path) -> None:
    graphs = torch._dynamo.utils.counters["stats"]
    detail = {"num_samples": 1, "num_tokens": None}
    written: list[Any] = []
    writer = SimpleNamespace(add=written.append, flush=lambda: None)
    blocks = Recorder(cast(RecordWriter, writer), None, lambda: None)
    blocks.restart()
    for number in range(4):
        graphs["unique_graphs"] += number == 1
        blocks.step(None, 0.0)
    graphs["unique_graphs"] += 1
    blocks.close_at_last_step(lambda: [detail] * 4)
    blocks.step(None, 0.0)
    blocks.close(lambda: [detail])
    graphs["unique_graphs"] += 1
    blocks.close_at_last_step(lambda: [])
    blocks.step(None, 0.0)
    blocks.close(lambda: [detail])
    before = graphs["unique_graphs"] - 3
    assert [line.num_compiles - before for line in written if isinstance(line, Block)] == [1, 1, 1]
