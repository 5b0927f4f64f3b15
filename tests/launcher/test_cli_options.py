"""Quantities on the command line, tables, and questions."""

import datetime

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.cli.options import (
    COUNT,
    DATE,
    DURATION,
    MINUTES,
    POSITIVE_COUNT,
    SIZE,
    USD,
    confirm,
    recipe_named,
    workload_named,
)
from fastlaunch.cli.render import fitted, table
from fastlaunch.core.errors import UserError


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (COUNT, "0", 0),
        (COUNT, "1.5M", 1_500_000),
        (POSITIVE_COUNT, "200", 200),
        (DURATION, "48h", 172_800),
        (SIZE, "2GiB", 2 * 2**30),
        (DATE, "2023-11-15", datetime.date(2023, 11, 15)),
        (MINUTES, "2", 120),
        (MINUTES, "1.51", 90),
        (MINUTES, "90min", 90),
        (MINUTES, "1h30m", 90),
        (USD, "25.50", 25.5),
        (USD, "$100", 100.0),
    ],
)
def test_quantities_parse_as_people_write_them(kind: click.ParamType, text: str, value: object) -> None:
    assert kind.convert(text, None, None) == value
    assert kind.convert(value, None, None) == value


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (COUNT, "many", "'many' is not a count"),
        (POSITIVE_COUNT, "0", "'0' is not above 0"),
        (DURATION, "48", "'48' is not a duration"),
        (DURATION, "0s", "'0s' is not above 0"),
        (SIZE, "2 apples", "'2 apples' is not a size"),
        (DATE, "15.11.2023", "'15.11.2023' is not a date"),
        (MINUTES, "30s", "'30s' is not above 0"),
        (MINUTES, "inf", "'inf' is not a time"),
        (USD, "1,000", "'1,000' is not an amount of USD"),
        (USD, "nan", "'nan' is not an amount of USD"),
        (USD, "0", "'0' is not above 0"),
    ],
)
def test_what_is_wrong_with_a_quantity_is_said_with_the_option(
    kind: click.ParamType, text: str, problem: str
) -> None:
    @click.command()
    @click.option("--much", type=kind)
    def command(much: object) -> None:
        """Never called."""

    with pytest.raises(UserError, match=rf"^--much: {problem}") as error:
        command.main(["--much", text], standalone_mode=False)
    assert error.value.hint


def test_a_recipe_with_overrides_or_a_user_error() -> None:
    found = recipe_named("bf16", ["optimizer=adamw", "compile-mode=default"])
    assert found.label == "bf16 compile_mode=default optimizer=adamw"
    with pytest.raises(UserError, match="a recipe has no field 'optimiser'") as error:
        recipe_named("bf16", ["optimiser=adamw"])
    assert error.value.hint is not None and "did you mean optimizer" in error.value.hint


def test_an_unknown_workload_is_a_user_error() -> None:
    with pytest.raises(UserError, match="unknown workload 'vit-small'"):
        workload_named("vit-small")


def test_yes_is_an_answer() -> None:
    confirm("Spend it?", yes=True)


def test_numbers_stand_right_and_text_left() -> None:
    rows = [{"a": "x", "n": 5, "t": "5 ms"}, {"a": "longer", "n": 1234.5, "t": None}]
    assert table(rows, {"a": "name", "n": "n", "t": "time"}).splitlines() == [
        "name         n  time",
        "x            5  5 ms",
        "longer  1234.5",
    ]


def test_a_table_without_rows_is_its_heading() -> None:
    assert table([], {"a": "name", "n": "n"}) == "name  n"


@given(
    rows=st.lists(
        st.fixed_dictionaries({"id": st.just("x" * 40), "recipe": st.text(max_size=90)}), min_size=1
    )
)
def test_a_fitted_table_is_at_most_100_wide(rows: list[dict[str, str]]) -> None:
    headers = {"id": "run", "recipe": "recipe"}
    cut = fitted(rows, headers)
    for before, after in zip(rows, cut, strict=True):
        assert after["id"] == before["id"]
        assert len(after["recipe"]) <= 58
        assert after["recipe"] == before["recipe"] or before["recipe"].startswith(after["recipe"][:-1])
        assert len(before["recipe"]) > 58 or after["recipe"] == before["recipe"]


def test_words_that_a_terminal_has_no_room_for_go_on_below() -> None:
    rows = [
        {"name": "one", "number": 1, "words": "a rather long sentence of several words"},
        {"name": "two", "number": 20, "words": "short"},
    ]
    headers = {"name": "name", "number": "number", "words": "words"}
    assert table(rows, headers, terminal=44).splitlines() == [
        "name  number  words",
        "one        1  a rather long sentence of",
        "              several words",
        "two       20  short",
    ]
    whole = table(rows, headers, terminal=0)
    assert len(whole.splitlines()) == 3
    # Too narrow for words to be read in: the terminal may as well wrap it.
    assert table(rows, headers, terminal=40) == whole == table(rows, headers, terminal=200)


def test_cells_are_written_as_they_are_typed() -> None:
    rows = [{"of": value} for value in (True, False, None, (), ("model", "tokenizer"), 12)]
    assert table([{"": None}], {"": ""}).strip() == ""
    lines = table(rows, {"of": "of"}, terminal=0).splitlines()
    assert lines[1:] == ["true", "false", "", "", "model, tokenizer", "12"]
