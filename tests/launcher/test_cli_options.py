"""Quantities on the command line, tables, and questions."""

import datetime
import os
from typing import Any

import click
import pytest

from fastlaunch.cli.main import fastlaunch as group
from fastlaunch.cli.options import COUNT, DATE, NAMES, POSITIVE_COUNT, USD, Quantity, profile_option
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
    # What was set is put back afterwards.
    monkeypatch.setenv("AWS_PROFILE", "before")
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
