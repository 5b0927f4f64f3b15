"""Errors say what happened and what to type, and carry their exit code."""

from pathlib import Path

import pytest

from fastlaunch.core import errors
from fastlaunch.core.errors import BadFile, CloudRefused, JobFailed, UnknownName, UserError


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UserError("no"), 2),
        (UnknownName("recipe", "x", ["y"]), 2),
        (BadFile("a.csv", "empty"), 2),
        (JobFailed("out of memory"), 1),
        (CloudRefused("no capacity"), 3),
    ],
)
def test_exit_codes(error: UserError, exit_code: int) -> None:
    assert isinstance(error, UserError)
    assert error.exit_code == exit_code
    assert str(error) == error.message


def test_the_exit_codes_are_distinct() -> None:
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    assert sorted(codes) == [0, 1, 2, 3, 70, 130]


def test_an_unknown_name_comes_with_the_nearest_and_all() -> None:
    error = UnknownName("instance", "p5.48xlrage", ["p5.48xlarge", "p5.4xlarge", "g6.xlarge"])
    assert error.message == "unknown instance 'p5.48xlrage'"
    assert error.hint is not None
    assert error.hint.startswith("did you mean p5.48xlarge or p5.4xlarge")
    assert error.hint.endswith("? known: g6.xlarge, p5.48xlarge, p5.4xlarge")
    assert error.name == "p5.48xlrage"


def test_an_unknown_name_far_from_all_suggests_none() -> None:
    assert UnknownName("recipe", "zzz", ["bf16", "fp8", "bf16"]).hint == "known: bf16, fp8"


def test_an_unknown_name_where_there_is_none_says_so() -> None:
    assert UnknownName("run", "r1", []).hint == "there is no run yet"
    assert UnknownName("run", "r1", [], hint="fastlaunch submit").hint == "fastlaunch submit"


def test_a_bad_file_names_its_line() -> None:
    assert BadFile(Path("prices.yaml"), "a price of 0", line=12).message == "prices.yaml:12: a price of 0"
    assert BadFile("prices.yaml", "empty").message == "prices.yaml: empty"
    assert BadFile("prices.yaml", "empty").line is None
