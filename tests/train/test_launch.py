"""What the environment says about a process's circumstances."""

import pytest

from fastlaunch_train.process.launch import LaunchSettings, read_launch_settings
from fastlaunch_train.recipes.recipe import RecipeError


def test_nothing_said_is_a_first_attempt_with_the_default_grace() -> None:
    assert read_launch_settings({}) == LaunchSettings(attempt=1, stop_grace_s=25.0)
    assert read_launch_settings({"FASTLAUNCH_ATTEMPT": "", "FASTLAUNCH_STOP_GRACE_S": ""}) == LaunchSettings()


def test_what_is_said_is_taken() -> None:
    values = {"ATTEMPT": "12", "STOP_GRACE_S": "90", "FABRIC": "efa", "PRINT_METRICS": "1"}
    values |= {"ROUND": "3", "ALL_REDUCE_FLOOR_GB_PER_S": "12.5", "INSTANCE": "p4d.24xlarge"}
    settings = read_launch_settings({f"FASTLAUNCH_{name}": text for name, text in values.items()})
    assert settings == LaunchSettings(
        attempt=12,
        round=3,
        stop_grace_s=90.0,
        fabric="efa",
        all_reduce_floor_gb_per_s=12.5,
        is_on_aws=True,
        print_metrics=True,
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("FABRIC", "EFA"), ("PRINT_METRICS", "yes")),
        *(("ROUND", text) for text in ("-1", "0")),
        *(("ATTEMPT", text) for text in ("0", "1.5", "1000000")),
        ("ALL_REDUCE_FLOOR_GB_PER_S", "low"),
        *(("STOP_GRACE_S", text) for text in ("0", "nan", "soon")),
    ],
)
def test_other_values_are_refused(name: str, text: str) -> None:
    with pytest.raises(RecipeError, match=f"FASTLAUNCH_{name} is "):
        read_launch_settings({f"FASTLAUNCH_{name}": text})
