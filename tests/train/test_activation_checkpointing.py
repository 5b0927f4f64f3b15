"""Blocks that keep their inputs alone: called again in backward, with the same result."""

import pytest
import torch
from torch import nn

from fastlaunch_train.models.prepare import checkpoint_blocks
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe

RECIPE = resolve_recipe("fp32", ["activation_checkpointing=block"])


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = scale * self.dropout(self.linear(x).relu())
        return y


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counted(), Counted())


def gradients(model: nn.Sequential) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 4)
    for block in model:
        x = block(x, scale=2.0)
    x.sum().backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_the_same_and_each_block_runs_twice() -> None:
    plain, checkpointed = blocks(), blocks()
    checkpoint_blocks(checkpointed, RECIPE)
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    for one, other in zip(gradients(plain), gradients(checkpointed), strict=True):
        assert torch.equal(one, other)
    assert [block.calls for block in plain] == [1, 1]
    assert [block.calls for block in checkpointed] == [2, 2]


def test_without_gradients_nothing_is_computed_again() -> None:
    model = blocks()
    checkpoint_blocks(model, RECIPE)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert [block.calls for block in model] == [1, 1]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RecipeError, match="recomputes each transformer block, and the model has none"):
        checkpoint_blocks(None, RECIPE)
