"""fp32 masters: updates too small for bf16 add up, and come back from a checkpoint."""

import functools
import io

import pytest
import torch
from torch import nn

from fastlaunch_train.steppers.optimizers import MasterWeights

SGD = functools.partial(torch.optim.SGD, lr=1e-4, momentum=0.5)


def weights() -> list[nn.Parameter]:
    frozen = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    return [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), frozen, unused]


def steps(optimizer: MasterWeights, parameter: nn.Parameter, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_small_updates_are_not_lost() -> None:
    plain, (mine, *others) = weights()[0], weights()
    alone = SGD([plain])
    for _ in range(100):
        plain.grad = torch.ones_like(plain)
        alone.step()
    # 2e-4 is less than half of bf16's step below 1, 3.9e-3.
    assert plain.tolist() == [1.0, 1.0]
    optimizer = MasterWeights([mine, *others], SGD)
    steps(optimizer, mine, 100)
    assert mine.dtype == torch.bfloat16
    assert mine.tolist() == pytest.approx([0.98, 0.98], abs=2e-3)
    assert all(torch.equal(other, torch.ones_like(other)) for other in others)


def test_masters_come_back_from_a_file() -> None:
    mine, *others = weights()
    optimizer = MasterWeights([mine, *others], SGD)
    steps(optimizer, mine, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again, *rest = weights()
    other = MasterWeights([again, *rest], SGD)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again, mine)
    steps(optimizer, mine, 30)
    steps(other, again, 30)
    assert torch.equal(again, mine)
    saved, loaded = optimizer.state_dict()["masters"], other.state_dict()["masters"]
    assert all(torch.equal(one, two) for one, two in zip(saved, loaded, strict=True))


def test_gradients_are_freed_or_zeroed() -> None:
    mine, *_ = weights()
    optimizer = MasterWeights([mine], SGD)
    mine.grad = torch.ones_like(mine)
    optimizer.zero_grad(set_to_none=False)
    assert mine.grad.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    assert mine.grad is None
