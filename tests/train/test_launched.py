"""What the environment says about a process's circumstances."""

import pytest

from fastlaunch_train.process.launch import Launched, read_launched
from fastlaunch_train.recipes.recipes import RecipeError


def test_nothing_said_is_a_first_attempt_with_the_default_grace() -> None:
    assert read_launched({}) == Launched(attempt=1, stop_grace_s=25.0)
    assert read_launched({"FASTLAUNCH_ATTEMPT": "", "FASTLAUNCH_STOP_GRACE_S": ""}) == Launched()


def test_what_is_said_is_taken() -> None:
    told = read_launched({"FASTLAUNCH_ATTEMPT": "12", "FASTLAUNCH_STOP_GRACE_S": "90"})
    assert told == Launched(attempt=12, stop_grace_s=90.0)
    told = read_launched({"FASTLAUNCH_FABRIC": "efa", "FASTLAUNCH_PRINT_METRICS": "1"})
    assert told == Launched(fabric="efa", print_metrics=True)
    assert read_launched({"FASTLAUNCH_FABRIC": "any", "FASTLAUNCH_PRINT_METRICS": "0"}) == Launched()


@pytest.mark.parametrize(("name", "text"), [("FABRIC", "EFA"), ("FABRIC", "tcp"), ("PRINT_METRICS", "yes")])
def test_other_words_mean_nothing(name: str, text: str) -> None:
    with pytest.raises(RecipeError, match=f"FASTLAUNCH_{name} is "):
        read_launched({f"FASTLAUNCH_{name}": text})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "٣", " 1", "1000000"])
def test_an_attempt_is_a_whole_number_from_1(text: str) -> None:
    with pytest.raises(RecipeError, match="FASTLAUNCH_ATTEMPT is "):
        read_launched({"FASTLAUNCH_ATTEMPT": text})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "86401"])
def test_a_grace_is_some_time_up_to_a_day(text: str) -> None:
    with pytest.raises(RecipeError, match="FASTLAUNCH_STOP_GRACE_S is "):
        read_launched({"FASTLAUNCH_STOP_GRACE_S": text})
