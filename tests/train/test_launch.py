"""What the environment says about a process's circumstances."""

import pytest

from fastlaunch_train.process.launch import LaunchSettings, num_nodes, read_launch_settings
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.script.settings import read_settings


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


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NNODES": "4"}, 2),
        ({"LOCAL_SIZE": "8"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "12"}, 2),
        ({"MPI_LOCALNRANKS": "4"}, 4),
        ({"SLURM_NNODES": "2", "SLURM_NTASKS": "16"}, 2),
        ({"SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 2),
        ({"SLURM_NNODES": "64"}, 16),
        # The script started its ranks itself, on the node where it is.
        ({"SLURM_NNODES": "2", "SLURM_NTASKS": "2"}, 1),
        *(({"LOCAL_WORLD_SIZE": text}, 1) for text in ("", "0", "64", "eight", "9" * 5000)),
    ],
)
def test_nodes_are_counted_by_what_started_the_ranks(environment: dict[str, str], nodes: int) -> None:
    assert num_nodes(environment, 16) == nodes
    ranks = {"RANK": "3", "WORLD_SIZE": "16", "FASTLAUNCH_OUTPUT": "out"}
    settings = read_settings({**environment, **ranks}, script="train.py", command=())
    assert settings is not None and settings.num_nodes == nodes
