"""Quantities on the command line, tables, and questions."""

import datetime
import os
from typing import Any

import click
import pytest

from fastlaunch.cli.options import (
    BATCH_SIZE,
    COUNT,
    DATE,
    MINUTES,
    NAMES,
    POSITIVE_COUNT,
    USD,
    confirm,
    profile_option,
)
from fastlaunch.cli.render import fitted, table
from fastlaunch.core.errors import UserError


def parsed(kind: click.ParamType, text: str) -> Any:
    """What a command gets for `--much TEXT`."""

    @click.command()
    @click.option("--much", type=kind)
    def command(much: object) -> object:
        return much

    return command.main(["--much", text], standalone_mode=False)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (COUNT, "0", 0),
        (COUNT, "1.5M", 1_500_000),
        (POSITIVE_COUNT, "200", 200),
        (BATCH_SIZE, "auto", "auto"),
        (BATCH_SIZE, "64", 64),
        (DATE, "2023-11-15", datetime.date(2023, 11, 15)),
        (MINUTES, "2", 120),
        (MINUTES, "1.51", 90),
        (MINUTES, "1h30m", 90),
        (USD, "25.50", 25.5),
        (USD, "$100", 100.0),
        (NAMES, "a, b,", ("a", "b")),
    ],
)
def test_quantities_are_read_as_people_write_them(kind: click.ParamType, text: str, value: object) -> None:
    assert parsed(kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (COUNT, "many"),
        (POSITIVE_COUNT, "0"),
        (BATCH_SIZE, "big"),
        (DATE, "15.11.2023"),
        (MINUTES, "30s"),
        (MINUTES, "inf"),
        (USD, "1,000"),
        (USD, "nan"),
        (USD, "0"),
    ],
)
def test_a_wrong_quantity_is_refused_with_its_option(kind: click.ParamType, text: str) -> None:
    with pytest.raises(UserError, match=rf"^--much: '{text}' is not") as error:
        parsed(kind, text)
    assert error.value.hint


def test_a_profile_counts_before_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of another account")

    @click.command()
    @profile_option
    def command() -> None:
        assert os.environ["AWS_PROFILE"] == "lab" and "AWS_ACCESS_KEY_ID" not in os.environ

    command.main(["--profile", "lab"], standalone_mode=False)


def test_yes_is_an_answer() -> None:
    confirm("Spend it?", yes=True)


ROWS = [
    {"name": "one", "number": 1, "words": "a rather long sentence of several words"},
    {"name": "two", "number": 20, "words": None},
]
HEADERS = {"name": "name", "number": "number", "words": "words"}


def test_numbers_stand_right_and_words_wrap_where_a_terminal_has_no_room() -> None:
    assert table(ROWS, HEADERS, terminal=44).splitlines() == [
        "name  number  words",
        "one        1  a rather long sentence of",
        "              several words",
        "two       20",
    ]
    whole = table(ROWS, HEADERS, terminal=0)
    assert len(whole.splitlines()) == 3
    # Too narrow for words to be read in: the terminal may as well wrap it.
    assert table(ROWS, HEADERS, terminal=40) == whole == table(ROWS, HEADERS, terminal=200)
    assert table([], HEADERS) == "name  number  words"


def test_cells_are_written_as_they_are_typed() -> None:
    rows = [{"of": value} for value in (True, None, (), ("model", "tokenizer"), 12)]
    lines = table(rows, {"of": "of"}, terminal=0).splitlines()
    assert lines[1:] == ["true", "", "", "model, tokenizer", "12"]


@pytest.mark.parametrize(("length", "left"), [(58, 58), (59, 58), (400, 58)])
def test_a_fitted_table_is_at_most_100_wide(length: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (row,) = fitted(
        [{"id": "x" * 40, "recipe": "y" * length}], {"id": "run", "recipe": "recipe"}, shrinkable=("recipe",)
    )
    assert row["id"] == "x" * 40
    assert row["recipe"] == ("y" * length if length == left else "y" * (left - 1) + "…")
