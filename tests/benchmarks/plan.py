"""The plan of measurements: which runs make up each folder of train/measurements, in order of importance."""

import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAN = Path(__file__).with_name("measurements.toml")
_ARM = re.compile(
    r"(?P<workload>[^/]+)/(?P<recipe>[^,:]+)(?P<sets>(,[^,]+?)*):(?P<batch>\d+)(@(?P<steps>\d+))?"
)
#: What a table of the plan must say, and what it may.
_NEEDED = {"folder": str, "arms": list, "rounds": list, "seconds_per_run": (int, float)}
_OPTIONAL = {
    "later_rounds": list,
    "num_gpus": int,
    "steps": int,
    "arguments": list,
    "device_name": str,
    "suffix": str,
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one run trains; overrides: of the recipe, FIELD=VALUE each."""

    text: str
    workload: str
    recipe: str
    overrides: tuple[str, ...]
    batch_size_per_gpu: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of an arm. round: also its seed. arguments: more of them for the entrypoint.

    device_name: of the GPUs that it is meant for, as a record's header has it; None for any. suffix: of its
    id, which tells it from the same run on other GPUs.
    """

    folder: str
    arm: Arm
    round: int
    num_gpus: int
    arguments: tuple[str, ...]
    seconds_per_run: float
    device_name: str | None = None
    suffix: str = ""

    @property
    def run_id(self) -> str:
        name = f"{self.arm.text}-x{self.num_gpus}-r{self.round}"
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{self.suffix}" if self.suffix else name)


def training_command(arm: Arm, num_gpus: int, *entrypoint: str) -> list[str]:
    """The command that trains `arm`, by a process for each GPU. entrypoint: words before the arm's."""
    command = [sys.executable]
    if num_gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]
    command += [*entrypoint, "--workload", arm.workload, "--recipe", arm.recipe]
    command += [word for override in arm.overrides for word in ("--set", override)]
    return [*command, "--batch-size", str(arm.batch_size_per_gpu), "--steps", str(arm.steps)]


def read_arm(text: str, steps: int | None = None) -> Arm:
    """The arm that WORKLOAD/RECIPE[,FIELD=VALUE...]:BATCH[@STEPS] names. Raises ValueError.

    steps: of an arm that names none.
    """
    match = _ARM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not WORKLOAD/RECIPE[,FIELD=VALUE...]:BATCH[@STEPS]")
    steps = int(match["steps"]) if match["steps"] else steps
    if not steps:
        raise ValueError(f"{text!r}: of how many steps?")
    return Arm(
        text=text,
        workload=match["workload"],
        recipe=match["recipe"],
        overrides=tuple(match["sets"].split(",")[1:]),
        batch_size_per_gpu=int(match["batch"]),
        steps=steps,
    )


def read_plan(path: Path = PLAN) -> tuple[tuple[PlannedRun, ...], ...]:
    """The rounds of `path`, most important first, each the runs that one set of GPUs does one after another.

    Even rounds are turned round (A B B A), so that a slow drift of a machine falls on all arms alike. Raises
    ValueError for a plan that says too little, something unknown, or two runs of one id.
    """
    plan = tomllib.loads(path.read_text(encoding="utf-8"))
    tables, device_name = plan.get("runs", []), plan.get("device_name")
    for table in tables:
        _check(table)
    rounds = tuple(
        _round(table, number, device_name)
        for when in ("rounds", "later_rounds")
        for table in tables
        for number in table.get(when, ())
    )
    run_ids = [run.run_id for of in rounds for run in of]
    twice = sorted({run_id for run_id in run_ids if run_ids.count(run_id) > 1})
    if twice or not rounds:
        raise ValueError(f"{path}: {', '.join(twice)} twice" if twice else f"{path}: no [[runs]]")
    return rounds


def _check(table: dict[str, Any]) -> None:
    wrong = [name for name in _NEEDED if name not in table]
    wrong += [name for name, of in table.items() if not isinstance(of, (_NEEDED | _OPTIONAL).get(name, ()))]
    if wrong:
        raise ValueError(f"[[runs]] {table.get('folder', '')}: missing or wrong: {', '.join(wrong)}")


def _round(table: dict[str, Any], number: int, device_name: str | None) -> tuple[PlannedRun, ...]:
    runs = [
        PlannedRun(
            folder=table["folder"],
            arm=read_arm(text, table.get("steps")),
            round=number,
            num_gpus=table.get("num_gpus", 1),
            arguments=tuple(table.get("arguments", ())),
            seconds_per_run=table["seconds_per_run"],
            device_name=table.get("device_name", device_name),
            suffix=table.get("suffix", ""),
        )
        for text in table["arms"]
    ]
    return tuple(runs if number % 2 else reversed(runs))
