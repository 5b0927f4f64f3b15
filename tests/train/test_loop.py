"""What the loop does between the records: compiling ahead leaves no trace, and a lone rank stops at once."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "workloads"))
import tiny

from fastlaunch_train.interrupts import Interrupts
from fastlaunch_train.loop import Training, _run_block, compile_ahead
from fastlaunch_train.parallel import Process
from fastlaunch_train.precision import Precision
from fastlaunch_train.recipes import resolve_recipe
from fastlaunch_train.records import RecordWriter
from fastlaunch_train.timing import BlockTimer
from fastlaunch_train.workload import DataRequest

CPU = torch.device("cpu")
ALONE = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=CPU)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    torch.manual_seed(0)
    workload = tiny.build()
    model = workload.build_model().train()
    request = DataRequest(
        arm="synthetic",
        batch_size=4,
        seed=0,
        rank=0,
        world_size=1,
        device=CPU,
        num_workers=0,
        first_step=1,
    )
    writer = RecordWriter(tmp_path / "rank-00000-attempt-1.jsonl")
    yield Training(
        workload=workload,
        recipe=resolve_recipe("fp32"),
        process=ALONE,
        precision=Precision(autocast=contextlib.nullcontext, scaler=None),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batches=workload.batches(request),
        batch_size=4,
        first_step=1,
        last_step=100,
        checkpoint_every=0,
        save_checkpoint=lambda step: None,
        writer=writer,
        interrupts=Interrupts(),
        num_compiles=lambda: 0,
    )
    writer.close()


def test_compiling_ahead_trains_nothing_and_draws_nothing(training: Training) -> None:
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    assert "1.running_mean" in state, "the model has buffers that a forward pass changes"
    generator = torch.get_rng_state()
    compile_ahead(training, next(training.batches))
    after = training.model.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in training.model.parameters())


def test_a_lone_rank_does_not_finish_its_block_when_asked_to_stop(training: Training) -> None:
    timer = BlockTimer(CPU)
    timer.restart(lambda: None)
    assert _run_block(training, timer, 5) == 5
    timer.close(lambda: None)
    training.interrupts._handle(signal.SIGTERM, None)
    assert _run_block(training, timer, 5) == 1
