"""Workloads are found by name: built in, timm's, or the user's own file."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastlaunch_train.workloads import WORKLOADS, WorkloadError, workload_info
from fastlaunch_train.workloads.contract import Asked, load_workload

OWN = """
from fastlaunch_train.workloads.contract import Workload

def build():
    return Workload(name="own", sample_unit="rows", build_model=None, batches=None, loss=None)

def number():
    return 7

constant = 7
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


def test_vit_huge_is_the_published_one() -> None:
    info = workload_info("vit-huge")
    assert (info.num_parameters, info.flops_per_sample) == (632_199_400, 763_504_000_000)
    assert (info.batch_size, info.small, info.sample_unit) == (64, "vit-tiny", "images")


def test_any_timm_model_has_a_name() -> None:
    info = workload_info("timm:vit_base_patch16_224")
    assert (info.name, info.flops_per_sample, info.small) == ("timm:vit_base_patch16_224", None, "vit-tiny")


def test_any_causal_language_model_has_a_name() -> None:
    for model in ("EleutherAI/gpt-neo-2.7B", "./folder"):
        info = workload_info(f"hf-clm:{model}")
        assert (info.name, info.module) == (f"hf-clm:{model}", "fastlaunch_train.workloads.causal_lm")
        assert (info.batch_size, info.small, info.num_parameters) == (4, "gpt2-tiny", None)
        assert info.takes == ("model", "tokenizer", "sequence_length")


def test_what_a_workload_does_not_heed_is_refused() -> None:
    for asked, option in (
        (Asked(model="org/name"), "--model"),
        (Asked(tokenizer="folder"), "--tokenizer"),
        (Asked(sequence_length=7), "--sequence-length"),
    ):
        with pytest.raises(WorkloadError, match=f"'vit-tiny' takes no {option}$") as caught:
            load_workload("vit-tiny", asked)
        assert caught.value.hint == f"leave out {option}"


def test_a_file_of_the_users_has_a_name() -> None:
    info = workload_info("./my.py:build")
    assert (info.name, info.small) == ("./my.py:build", "./my.py:build")


@pytest.mark.parametrize("name", ["", "vit-hug", "timm:", "hf-clm:", "my.py", "VIT-HUGE"])
def test_an_unknown_workload_names_what_exists(name: str) -> None:
    with pytest.raises(WorkloadError, match="unknown workload") as caught:
        workload_info(name)
    assert caught.value.hint is not None
    assert "known: vit-huge" in caught.value.hint
    if name == "vit-hug":
        assert caught.value.hint.startswith("did you mean vit-huge")


def test_the_users_function_is_called(own: Path) -> None:
    workload = load_workload(f"{own}:build")
    assert (workload.name, workload.sample_unit) == ("own", "rows")
    assert sys.modules["own_workload"].__file__ == str(own)
    own.write_text(OWN.replace("rows", "lines"))
    assert load_workload(f"{own}:build").sample_unit == "lines"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "has no function 'absent'"),
        ("constant", "has no function 'constant'"),
        ("", "has no function ''"),
        ("number", "number\\(\\) returned int"),
    ],
)
def test_a_function_that_is_none_is_named(own: Path, function: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load_workload(f"{own}:{function}")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkloadError, match=r"there is no file absent\.py") as caught:
        load_workload("./absent.py:build")
    assert caught.value.hint


@pytest.mark.parametrize("stem", ["json", "torch", "sys", "test_workload_names"])
def test_a_file_never_takes_a_modules_place(tmp_path: Path, stem: str) -> None:
    (tmp_path / f"{stem}.py").write_text(OWN)
    before = sys.modules.get(stem)
    with pytest.raises(WorkloadError, match="has the name of a module that is in use") as caught:
        load_workload(f"{tmp_path}/{stem}.py:build")
    assert caught.value.hint
    assert sys.modules.get(stem) is before


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("optimizer", None, "optimizer is None"),
        ("learning_rate", "0.1", "learning_rate is '0.1'"),
        ("learning_rate", float("nan"), "learning_rate is nan"),
        ("learning_rate", -0.1, "learning_rate is -0.1"),
        ("tokens_per_sample", 1.5, "tokens_per_sample is 1.5"),
    ],
)
def test_what_no_record_would_take_is_refused_at_once(
    own: Path, field: str, value: Any, message: str
) -> None:
    with pytest.raises(WorkloadError, match=f"workload 'own': {message}$") as caught:
        replace(load_workload(f"{own}:build"), **{field: value})
    assert caught.value.hint
