"""Transformer Engine's FP8 through its oldest interface and its newest, without Transformer Engine."""

import contextlib
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

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
    te = SimpleNamespace(
        fp8_autocast=lambda *, enabled, fp8_recipe: entered(enabled=enabled, fp8_recipe=fp8_recipe)
    )
    if new:
        te.autocast = lambda *, enabled, recipe: entered(enabled=enabled, recipe=recipe)
    modules = {
        "transformer_engine.common.recipe": SimpleNamespace(Format=Format, **recipes),
        "transformer_engine.pytorch": te,
    }
    return modules.__getitem__


DELAYED = {"amax_history_len": 1024, "amax_compute_algo": "max"}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("te-fp8", ("DelayedScaling", DELAYED | {"fp8_format": Format.HYBRID})),
        (
            "te-article-fp8 amax_history=16 fp8_format=e4m3",
            ("DelayedScaling", DELAYED | {"fp8_format": Format.E4M3, "amax_history_len": 16}),
        ),
        ("te-fp8-current", ("Float8CurrentScaling", {"fp8_format": Format.HYBRID})),
        ("te-fp8-block", ("Float8BlockScaling", {"fp8_format": Format.E4M3})),
        ("te-mxfp8 fp8_format=hybrid", ("MXFP8BlockScaling", {"fp8_format": Format.HYBRID})),
    ],
)
def test_the_recipe_object_says_what_the_recipe_does(label: str, expected: object) -> None:
    name, *overrides = label.split()
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
