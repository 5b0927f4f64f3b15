"""Read what the starter of a training passes on in environment variables. No torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlaunch_train.recipes.recipe import RecipeError

#: Default seconds for a run to end in; plain torchrun kills its workers after 30.
DEFAULT_STOP_GRACE_S = 25.0


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How this process was started."""

    #: The least number of this attempt, from 1: a new machine has no records of earlier attempts.
    attempt: int = 1
    round: int | None = None  #: this run's round in the submission, from 1
    max_rounds: int | None = None  #: rounds that the submission planned; it ends earlier once all is settled
    stop_grace_s: float = DEFAULT_STOP_GRACE_S  #: seconds that a rank may take to end after a signal
    fabric: str = "any"  #: network between nodes; `efa` requires EFA
    #: Bus bandwidth between nodes over EFA in GB/s, below which an all-reduce is suspect
    all_reduce_floor_gb_per_s: float = 0.0
    is_on_aws: bool = False  #: whether this runs on an instance, which may be faulty
    print_metrics: bool = False  #: whether rank 0 prints a line for programs at the end of each block


def launch_header(launch: LaunchSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a record's header that describe the launch."""
    return {
        "session": environment.get("FASTLAUNCH_SESSION") or None,
        "round": launch.round,
        "max_rounds": launch.max_rounds,
        "instance": environment.get("FASTLAUNCH_INSTANCE") or None,
        "image_digest": environment.get("FASTLAUNCH_IMAGE_DIGEST") or None,
        "commit": environment.get("FASTLAUNCH_COMMIT") or None,
        "restarted_after": environment.get("FASTLAUNCH_RESTARTED_AFTER") or None,
    }


def read_launch_settings(environment: Mapping[str, str]) -> LaunchSettings:
    """Read FASTLAUNCH_ATTEMPT, _ROUND, _MAX_ROUNDS, _STOP_GRACE_S, _FABRIC (`efa` or `any`),
    _ALL_REDUCE_FLOOR_GB_PER_S, _INSTANCE and _PRINT_METRICS (1).

    An empty variable counts as unset. Raises RecipeError for an invalid value.
    """
    # More digits would make file names too long for any disk.
    attempt = _value(environment, "FASTLAUNCH_ATTEMPT", "1", "[1-9][0-9]{0,5}", "a whole number from 1")
    number, at_most = (
        _value(environment, name, "none", "none|[1-9][0-9]{0,5}", "a whole number from 1")
        for name in ("FASTLAUNCH_ROUND", "FASTLAUNCH_MAX_ROUNDS")
    )
    seconds, default = r"(?!0+(\.0+)?$)[0-9]{1,5}(\.[0-9]+)?", f"{DEFAULT_STOP_GRACE_S:g}"
    grace = _value(environment, "FASTLAUNCH_STOP_GRACE_S", default, seconds, "a number of seconds above 0")
    floor = _value(
        environment, "FASTLAUNCH_ALL_REDUCE_FLOOR_GB_PER_S", "0", r"[0-9]{1,5}(\.[0-9]+)?", "a number of GB/s"
    )
    return LaunchSettings(
        attempt=int(attempt),
        round=None if number == "none" else int(number),
        max_rounds=None if at_most == "none" else int(at_most),
        stop_grace_s=float(grace),
        fabric=_value(environment, "FASTLAUNCH_FABRIC", "any", "any|efa", "any or efa"),
        all_reduce_floor_gb_per_s=float(floor),
        is_on_aws=bool(environment.get("FASTLAUNCH_INSTANCE")),
        print_metrics=_value(environment, "FASTLAUNCH_PRINT_METRICS", "0", "0|1", "0 or 1") == "1",
    )


#: Variables with the number of ranks on this machine, by launcher: torchrun, DeepSpeed, Open MPI, MVAPICH,
#: MPICH.
_LOCAL_SIZES = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "MPI_LOCALNRANKS",
)
#: Slurm's variables, those of a step before those of the whole job.
_SLURM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_SLURM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def num_nodes(environment: Mapping[str, str], world_size: int) -> int:
    """Return the number of machines of the ranks, by their launcher's variables; 1 if none is set."""

    def first(names: Sequence[str]) -> int | None:
        texts = (environment.get(name, "") for name in names)
        return next((int(text) for text in texts if re.fullmatch("[1-9][0-9]{0,8}", text)), None)

    if local_size := first(_LOCAL_SIZES):
        return -(-world_size // local_size)
    # A script in an allocation of several nodes may start its ranks itself, on one node.
    if first(_SLURM_TASKS) not in (None, world_size):
        return 1
    if nodes := first(_SLURM_NODES):
        return min(nodes, world_size)
    return -(-world_size // (first(("SLURM_NTASKS_PER_NODE",)) or world_size))


def _value(environment: Mapping[str, str], name: str, default: str, pattern: str, form: str) -> str:
    text = environment.get(name) or default
    if not re.fullmatch(pattern, text):
        raise RecipeError(f"{name} is {text!r}, not {form}", f"unset it for {default}, or give {form}")
    return text
