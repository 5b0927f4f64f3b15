"""A model's state in a checkpoint: Transformer Engine's scales are kept, and no pickle is in the file."""

import os
import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fastlaunch_train.models.model_state import (
    ALLOW_PICKLES,
    load_model_state,
    model_state,
    plain,
    preserve_state,
)
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


@pytest.mark.parametrize("allowed", [None, "0"])
def test_scales_come_back_through_a_file_without_pickles(
    tmp_path: Path, allowed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW_PICKLES, raising=False)
    if allowed is not None:
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
    load_model_state(restored, model_state(saved))
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


# What a trial run leaves of a model.


class Delayed(nn.Module):
    """Remembers maxima from its first pass on, as Transformer Engine's modules do: beside its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"recipe": "delayed"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = SimpleNamespace(amax_history=torch.zeros(2), scale=torch.ones(1))
        state = self.fp8_meta.setdefault("scaling_fwd", new)
        state.amax_history[0] = state.scale[0] = x.abs().max()
        return x

    def reset_fp8_meta_tensors(self) -> None:
        self.fp8_meta["scaling_fwd"].amax_history.zero_()
        self.fp8_meta["scaling_fwd"].scale.fill_(1)

    def remembered(self) -> list[float]:
        state = self.fp8_meta["scaling_fwd"]
        return [*state.amax_history.tolist(), *state.scale.tolist()]


def test_scales_that_were_there_come_back_and_new_ones_are_reset() -> None:
    trained, new = Delayed(), Delayed()
    trained(torch.tensor([2.0]))
    for _ in range(2):
        with preserve_state(nn.Sequential(trained, new)):
            new(trained(torch.tensor([-7.0])))
            assert trained.remembered() == new.remembered() == [7, 0, 7]
        assert trained.remembered() == [2, 0, 2]
        assert new.remembered() == [0, 0, 1]


def test_a_model_is_left_as_it_was_by_what_fails_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn, drawn_by_numpy = random.getstate(), pickle.dumps(numpy.random.get_state())
    drawn_by_torch = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), preserve_state(model):
        model.train()
        model(torch.randn(8, 4))
        random.random()
        numpy.random.random()
        model.eval()
        raise ZeroDivisionError
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert random.getstate() == drawn
    assert pickle.dumps(numpy.random.get_state()) == drawn_by_numpy
    assert torch.equal(torch.get_rng_state(), drawn_by_torch)


def test_buffers_that_a_pass_makes_are_left_to_it() -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2))
    model.register_buffer("count", torch.zeros(1))
    with preserve_state(model):
        model.count += 1
        model.cache = torch.ones(4)
        model.register_buffer("made", torch.ones(1))
    assert model.count == 0 and model.cache.sum() == 4 and model.made == 1


def test_a_state_holds_plain_values_alone() -> None:
    weight = torch.ones(2)
    state = plain({"a": [weight, (1, "x")], "b": object(), "c": [object()], "d": {"e": None, 0: 1.5}})
    assert state == {"a": [weight, [1, "x"]], "d": {"e": None, 0: 1.5}}
