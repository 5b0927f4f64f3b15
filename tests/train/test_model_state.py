"""A model's state in a checkpoint: Transformer Engine's scales are kept, and no pickle is in the file."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastlaunch_train.models.model_state import ALLOW_PICKLES, load_model_state, model_state
from fastlaunch_train.recipes.recipe import RecipeError


class Scaling:
    """Stands for Transformer Engine's recipe object, which torch does not load from a file."""


class ScaledLinear(nn.Linear):
    """Keeps and refuses its extra state as Transformer Engine's modules do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = torch.ones(3)
        self.recipe: Any = Scaling()
        self.has_run = False

    def get_extra_state(self) -> torch.Tensor:
        if not self.has_run:
            return torch.empty(0, dtype=torch.uint8)
        # The attention's modules list their recipes among the variables.
        extra = {"num_gemms": 1, "local_recipes": [self.recipe]}
        state = {"recipe": self.recipe, "scale_fwd": self.scale, "extra_fp8_variables": extra}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel() == 0:
            return
        if os.environ.get(ALLOW_PICKLES) != "1":
            raise RuntimeError("Refusing to load pickled extra state")
        opened = pickle.loads(state.numpy().tobytes())
        assert opened["extra_fp8_variables"] == {"num_gemms": 1}
        self.scale = opened["scale_fwd"]
        self.recipe = opened["recipe"]


def models() -> tuple[Any, Any]:
    pair: list[Any] = [nn.Sequential(nn.BatchNorm1d(2), ScaledLinear()) for _ in range(2)]
    saved, restored = pair
    saved[1].scale = torch.tensor([2.0, 4.0, 8.0])
    saved[1].has_run = True
    return saved, restored


@pytest.mark.parametrize("allowed", [None, "0", "1"])
def test_scales_come_back_through_a_file_without_pickles(
    tmp_path: Path, allowed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if allowed is None:
        monkeypatch.delenv(ALLOW_PICKLES, raising=False)
    else:
        monkeypatch.setenv(ALLOW_PICKLES, allowed)
    saved, restored = models()
    torch.save(model_state(saved), tmp_path / "state.pt")
    recipe = Scaling()
    load_model_state(restored, torch.load(tmp_path / "state.pt", weights_only=True), fp8_recipe=recipe)
    assert restored[1].scale.tolist() == [2.0, 4.0, 8.0]
    assert isinstance(restored[1].recipe, Scaling)
    assert torch.equal(restored[1].weight, saved[1].weight)
    assert os.environ.get(ALLOW_PICKLES) == allowed


def test_a_model_that_has_not_run_in_fp8_has_nothing_to_open() -> None:
    saved, restored = models()
    saved[1].has_run = False
    state = model_state(saved)
    assert state["1._extra_state"].numel() == 0
    load_model_state(restored, state)
    assert restored[1].scale.tolist() == [1.0, 1.0, 1.0]


class Bomb:
    def __reduce__(self) -> Any:
        return os.putenv, ("FASTLAUNCH_BOMB", "1")


def test_a_pickle_in_the_file_is_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    # Even where the user has allowed Transformer Engine to open one.
    monkeypatch.setenv(ALLOW_PICKLES, "1")
    saved, restored = models()
    state = model_state(saved)
    state["1._extra_state"] = torch.frombuffer(bytearray(pickle.dumps({"recipe": Bomb()})), dtype=torch.uint8)
    with pytest.raises(RecipeError, match=r"1\._extra_state is of another version"):
        load_model_state(restored, state, fp8_recipe=Scaling())
    assert restored[1].scale.tolist() == [1.0, 1.0, 1.0]
