"""Quantities on the command line, tables, and questions."""

import datetime
import os
from typing import Any

import click
import pytest

from fastlaunch.cli.main import fastlaunch as group
from fastlaunch.cli.options import COUNT, DATE, NAMES, POSITIVE_COUNT, USD, Quantity, profile_option
from fastlaunch.cli.render import table
from fastlaunch.cli.submit import submit
from fastlaunch.cli.sweep import sweep
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.options import OPTIONS

BATCH_SIZE, MINUTES = (Quantity("x", OPTIONS[name].read) for name in ("batch_size", "max_minutes"))


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
        (MINUTES, "4.1", 246),
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


@pytest.mark.parametrize("command", [submit, sweep])
def test_a_profile_with_a_name_is_a_login_and_one_without_is_of_the_steps(
    command: click.Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "before")

    def is_profiled(*argv: str) -> bool:
        return bool(command.make_context("x", [*argv], **group.context_settings).params["step_profile"])

    for argv in (("--step-profile",), ("--profile",), ("--profile", "--local"), ("--profile", "--", "x.sh")):
        assert is_profiled(*argv)
    assert os.environ["AWS_PROFILE"] == "before"
    assert not is_profiled("--profile", "lab")
    assert os.environ["AWS_PROFILE"] == "lab"


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
    assert whole == table(ROWS, HEADERS, terminal=200)
    # Too narrow for words beside the rest: they stand below, unbroken.
    assert table(ROWS, HEADERS, terminal=40).splitlines() == [
        "name  number",
        "one        1",
        "  a rather long sentence of several",
        "  words",
        "two       20",
    ]
    assert table([], HEADERS) == "name  number  words"
    # Words that want more room than there is beside the rest, for which no column is left out.
    below = table(ROWS, HEADERS, terminal=43, droppable=["number"], room=30).splitlines()
    assert below[0].split() == ["name", "number"] and below[2] == "  a rather long sentence of several words"


def test_cells_are_written_as_they_are_typed() -> None:
    rows = [{"of": value} for value in (True, None, (), ("model", "tokenizer"), 21440)]
    lines = table(rows, {"of": "of"}, terminal=0).splitlines()
    assert lines[1:] == ["true", "", "", "model, tokenizer", "21,440"]


@pytest.mark.parametrize("length", [10, 58, 59, 400])
@pytest.mark.parametrize("terminal", [80, 100, 200])
def test_a_table_leaves_columns_out_then_cuts_and_stays_within_the_terminal(
    length: int, terminal: int
) -> None:
    rows = [{"id": "x" * 20, "when": "2026-11-23", "recipe": "y" * length, "loss": 1.5}]
    headers = {"id": "run", "when": "when", "recipe": "recipe", "loss": "loss"}
    heading, line = table(
        rows, headers, terminal=terminal, shrinkable=["recipe"], droppable=["when"]
    ).splitlines()
    assert len(line) <= terminal
    whole = 20 + 2 + 10 + 2 + length + 2 + 4
    assert ("when" in heading) == (whole <= terminal)
    assert ("…" in line) == (whole - 12 > terminal)
    # Where cutting is not enough, all but the first of those that may be cut go, from the last on.
    headings, *_ = table(
        rows, {"id": "run", "recipe": "recipe", "when": "when"}, terminal=30, shrinkable=["recipe", "when"]
    ).splitlines()
    assert headings.split() == ["run", "recipe"]
    # Nothing is lost where nobody looks.
    assert "y" * length in table(rows, headers, terminal=0, shrinkable=["recipe"], droppable=["when"])
