"""Workloads are found by name: built in, timm's, or the user's own file."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlaunch_train.workloads.contract import ModelOptions, load_workload
from fastlaunch_train.workloads.registry import WORKLOADS, WorkloadError, function_arguments, workload_info

OWN = """
from fastlaunch_train.workloads.contract import Workload

def build():
    return Workload(name="own", sample_unit="rows", build_model=print, batches=print, loss=print)

def number():
    return 7

constant = 7
"""


ARGUMENTS = """
import functools
from fastlaunch_train.workloads.contract import Workload

def sized(
    depth: int, width: "int | None" = None, rate: float = 1.0, name: str = "x", *, norm: bool = True, other=0
):
    given = (depth, width, rate, name, norm, other)
    return Workload(name=repr(given), sample_unit="rows", build_model=print, batches=print, loss=print)

def anything(**given):
    return sized(**given)

def nothing():
    return sized(1)

@functools.cache
def cached(depth):
    return sized(depth)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    """A workload file of the user's; its module is forgotten afterwards."""
    path = tmp_path / "own_workload.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop("own_workload", None)


def test_the_built_in_workloads_are_known() -> None:
    assert {"vit-huge", "vit-tiny", "gpt2-xsmall", "distilbert-imdb", "gelu"} <= set(WORKLOADS)
    for name, info in WORKLOADS.items():
        assert info.name == name
        assert info is workload_info(name)
        assert info.description
        assert info.batch_size >= 1
        assert workload_info(info.small).small == info.small


def test_the_users_function_is_called(own: Path) -> None:
    workload = load_workload(f"{own}:build")
    assert (workload.name, workload.sample_unit) == ("own", "rows")
    assert sys.modules["own_workload"].__file__ == str(own)
    own.write_text(OWN.replace("rows", "lines"))
    assert load_workload(f"{own}:build").sample_unit == "lines"


@pytest.mark.parametrize(
    ("name", "small", "batch_size"),
    [
        ("vit-huge", "vit-wide", 64),
        ("timm:vit_base_patch16_224", "vit-wide", 64),
        ("hf-clm:EleutherAI/gpt-neo-2.7B", "gpt2-tiny", 4),
        ("hf-clm:./folder", "gpt2-tiny", 4),
        ("gelu:8x4", "gelu:8x4", 8),
        ("./my.py:build", "./my.py:build", 8),
    ],
)
def test_kinds_of_workloads_have_names(name: str, small: str, batch_size: int) -> None:
    info = workload_info(name)
    assert (info.name, info.small, info.batch_size) == (name, small, batch_size)


@pytest.mark.parametrize("name", ["", "vit-hug", "timm:", "hf-clm:", "my.py"])
def test_an_unknown_workload_is_refused(name: str) -> None:
    with pytest.raises(WorkloadError, match="unknown workload") as caught:
        workload_info(name)
    assert "vit-huge" in (caught.value.hint or "")


def test_an_option_that_a_workload_does_not_take_is_refused() -> None:
    for options, option in (
        (ModelOptions(model="org/name"), "--model"),
        (ModelOptions(sequence_length=7), "--sequence-length"),
    ):
        with pytest.raises(WorkloadError, match=f"{option}$"):
            load_workload("vit-tiny", options)


@pytest.mark.parametrize(
    ("function", "message"),
    [("absent", "no function"), ("constant", "no function"), ("number", "returned int")],
)
def test_a_function_that_returns_no_workload_is_refused(own: Path, function: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load_workload(f"{own}:{function}")


@pytest.mark.parametrize("stem", ["json", "torch", "sys", "test_workload_names"])
def test_a_file_never_takes_a_modules_place(tmp_path: Path, stem: str) -> None:
    (tmp_path / f"{stem}.py").write_text(OWN)
    before = sys.modules.get(stem)
    with pytest.raises(WorkloadError, match="loaded module"):
        load_workload(f"{tmp_path}/{stem}.py:build")
    assert sys.modules.get(stem) is before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", None),
        ("loss", None),
        ("batches", 3),
        ("learning_rate", float("nan")),
        ("learning_rate", -0.1),
        ("tokens_per_sample", 1.5),
    ],
)
def test_what_no_record_would_take_is_refused_at_once(own: Path, field: str, value: Any) -> None:
    with pytest.raises(WorkloadError, match=f"{field} is {value}"):
        replace(load_workload(f"{own}:build"), **{field: value})


@pytest.fixture
def with_arguments(own: Path) -> str:
    own.write_text(ARGUMENTS)
    return str(own)


@pytest.mark.parametrize(
    ("function", "texts", "expected"),
    [
        ("sized", ["depth=3"], (3, None, 1.0, "x", True, 0)),
        ("sized", ["depth=3", "width=null", "rate=2", "name='7'", "norm=false"], (3, None, 2, "7", False, 0)),
        (
            "sized",
            ["depth=3", "width=4", "rate=1e-3", "name=a=b", "other=0.5"],
            (3, 4, 1e-3, "a=b", True, 0.5),
        ),
        ("sized", ["depth=3", "other=gelu"], (3, None, 1.0, "x", True, "gelu")),
        ("sized", ["depth=3", "other=nan"], (3, None, 1.0, "x", True, "nan")),
        ("anything", ["depth=3", "other=True"], (3, None, 1.0, "x", True, True)),
        ("cached", ["depth=3"], (3, None, 1.0, "x", True, 0)),
    ],
)
def test_arguments_are_the_scalars_that_yaml_makes_of_them(
    with_arguments: str, function: str, texts: list[str], expected: tuple[Any, ...]
) -> None:
    name = f"{with_arguments}:{function}"
    assert load_workload(name, arguments=function_arguments(name, texts)).name == repr(expected)


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        ("sized", ["depth=3", "widht=4"]),
        ("sized", []),
        ("sized", ["depth"]),
        ("sized", ["=3"]),
        ("sized", ["depth=3", "depth=4"]),
        ("nothing", ["depth=3"]),
    ],
)
def test_arguments_that_the_function_does_not_take_are_refused_unrun(
    with_arguments: str, function: str, texts: list[str]
) -> None:
    with pytest.raises(WorkloadError):
        function_arguments(f"{with_arguments}:{function}", texts)
    assert "own_workload" not in sys.modules


def test_arguments_that_only_the_call_can_refuse(with_arguments: str) -> None:
    with pytest.raises(WorkloadError, match="unexpected keyword argument 'width'"):
        load_workload(f"{with_arguments}:cached", arguments={"depth": 1, "width": 2})


def test_built_in_workloads_take_no_arguments() -> None:
    with pytest.raises(WorkloadError, match="takes no --set-workload"):
        function_arguments("vit-tiny", ["depth=3"])
    assert function_arguments("vit-tiny", []) == {}
