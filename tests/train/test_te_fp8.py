"""Transformer Engine's FP8 through its oldest interface and its newest, without Transformer Engine."""

import contextlib
import pickle
import random
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.models.te_fp8 import fp8_recipe, nested, te_autocast
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe


class Format(Enum):
    E4M3 = 1
    HYBRID = 2


def loading(*, new: bool, log: list[Any]) -> Any:
    """Loads Transformer Engine as of release 2.0, or as of 2.9 and later; `log` keeps what is entered."""

    @contextlib.contextmanager
    def entered(**arguments: Any) -> Iterator[None]:
        log.append(arguments)
        yield
        log.append("left")

    recipes: dict[str, Any] = {
        name: lambda name=name, **arguments: (name, arguments)
        for name in ("DelayedScaling", "MXFP8BlockScaling", "Float8CurrentScaling", "Float8BlockScaling")
    }
    modules = {
        "transformer_engine.common.recipe": SimpleNamespace(Format=Format, **recipes),
        "transformer_engine.pytorch": SimpleNamespace(
            **(
                {"autocast": lambda *, enabled, recipe: entered(enabled=enabled, recipe=recipe)}
                if new
                else {}
            ),
            fp8_autocast=lambda *, enabled, fp8_recipe: entered(enabled=enabled, fp8_recipe=fp8_recipe),
        ),
    }
    return modules.__getitem__


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        (
            "te-fp8",
            [],
            (
                "DelayedScaling",
                {"fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max"},
            ),
        ),
        (
            "te-article-fp8",
            ["amax_history=16", "fp8_format=e4m3"],
            (
                "DelayedScaling",
                {"fp8_format": Format.E4M3, "amax_history_len": 16, "amax_compute_algo": "max"},
            ),
        ),
        ("te-fp8-current", [], ("Float8CurrentScaling", {"fp8_format": Format.HYBRID})),
        ("te-fp8-block", [], ("Float8BlockScaling", {"fp8_format": Format.E4M3})),
        ("te-mxfp8", ["fp8_format=hybrid"], ("MXFP8BlockScaling", {"fp8_format": Format.HYBRID})),
    ],
)
def test_the_recipe_object_says_what_the_recipe_does(
    name: str, overrides: list[str], expected: object
) -> None:
    assert fp8_recipe(resolve_recipe(name, overrides), loading(new=True, log=[])) == expected


def test_other_recipes_do_not_load_transformer_engine() -> None:
    for name in ("bf16", "te-bf16", "ao-fp8", "ao-fp8-rowwise"):
        assert fp8_recipe(RECIPES[name], {}.__getitem__) is None


@pytest.mark.parametrize(("new", "keyword"), [(True, "recipe"), (False, "fp8_recipe")])
def test_autocast_of_old_releases_and_new(new: bool, keyword: str) -> None:
    log: list[Any] = []
    load = loading(new=new, log=log)
    with te_autocast("mine", load=load), te_autocast(None, enabled=False, load=load):
        assert log == [{"enabled": True, keyword: "mine"}, {"enabled": False, keyword: None}]
    assert log[2:] == ["left", "left"]


def test_contexts_are_entered_in_order_and_left() -> None:
    log: list[Any] = []

    @contextlib.contextmanager
    def named(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append(f"{name} left")

    make = nested(lambda: named("outer"), lambda: named("inner"))
    for _ in range(2):  # a fresh one each time
        with make():
            log.append("inside")
    assert log == ["outer", "inner", "inside", "inner left", "outer left"] * 2


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
    model = nn.BatchNorm1d(2)
    drawn, drawn_by_numpy = random.getstate(), pickle.dumps(numpy.random.get_state())
    with pytest.raises(ZeroDivisionError), preserve_state(model):
        model(torch.randn(3, 2))
        random.random()
        numpy.random.random()
        model.eval()
        raise ZeroDivisionError
    assert model.training and model.num_batches_tracked == 0
    assert random.getstate() == drawn
    assert pickle.dumps(numpy.random.get_state()) == drawn_by_numpy


def test_buffers_that_a_pass_makes_are_left_to_it() -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(2))
    model.register_buffer("count", torch.zeros(1))
    with preserve_state(model):
        model.count += 1
        model.cache = torch.ones(4)
        model.register_buffer("made", torch.ones(1))
    assert model.count == 0 and model.cache.sum() == 4 and model.made == 1


def test_a_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with preserve_state(model):
        model.train()
        model(torch.randn(8, 4))
        model.eval()
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
