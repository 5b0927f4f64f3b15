"""Read a script's run from the environment, and make the header of its record. No torch."""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch_train.process.launch import LaunchSettings, launch_header, num_nodes, read_launch_settings
from fastlaunch_train.process.machine import machine, num_data_workers, versions
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.records.contents import files_here, path_of

if TYPE_CHECKING:
    import torch

#: The recipe of every script, and its label without a variant.
RECIPE, AS_IS = "script", "as is"


@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """A script's run as its environment describes it."""

    records: Path  # the folder of the record files
    name: str
    run_id: str
    command: tuple[str, ...] = ()
    variant: Mapping[str, str] = field(default_factory=dict)
    attempt: int | None = None  # None: the next one of this rank
    steps_done: int = 0  # in earlier attempts, by what this one begins with
    launch: LaunchSettings = field(default_factory=LaunchSettings)
    rank: int = 0
    world_size: int = 1
    num_nodes: int = 1
    started_at: str = ""  # ISO 8601, UTC

    @property
    def label(self) -> str:
        """The variant in words, such as `amp=bf16 batch=32`."""
        return " ".join(f"{name}={text}" for name, text in self.variant.items()) or AS_IS


def read_settings(
    environment: Mapping[str, str], *, script: str, command: Sequence[str]
) -> ScriptSettings | None:
    """Read FASTLAUNCH_RECORDS, or else _OUTPUT, and related variables; None if neither is set.

    script, command: the script's path and argv, used where the environment has none. Raises RecipeError for
    an invalid value.
    """
    folder = environment.get("FASTLAUNCH_RECORDS") or environment.get("FASTLAUNCH_OUTPUT")
    if not folder:
        return None
    launch = read_launch_settings(environment)
    records = Path(folder).absolute()
    world_size = _number(environment, "WORLD_SIZE", 1)
    return ScriptSettings(
        records=records,
        name=environment.get("FASTLAUNCH_SCRIPT") or (path_of(script) if script else RECIPE),
        run_id=environment.get("FASTLAUNCH_RUN_ID") or records.name,
        command=_command(environment.get("FASTLAUNCH_COMMAND")) or tuple(command),
        variant=_variant(environment.get("FASTLAUNCH_VARIANT") or "{}"),
        attempt=launch.attempt if environment.get("FASTLAUNCH_ATTEMPT") else None,
        steps_done=_number(environment, "FASTLAUNCH_STEPS_DONE", 0),
        launch=launch,
        rank=_number(environment, "RANK", 0),
        world_size=world_size,
        num_nodes=num_nodes(environment, world_size),
        # Not datetime.UTC: AWS's image of PyTorch 2.1 has Python 3.10.
        started_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017
    )


def header(
    settings: ScriptSettings,
    device: "torch.device | None",
    *,
    attempt: int,
    batch_size: int | None = None,
    warnings: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the header of this rank's record.

    batch_size: samples of a step of this rank, None if unknown. device: None for a CPU.
    """
    return {
        "run_id": settings.run_id,
        "attempt": attempt,
        "rank": settings.rank,
        "world_size": settings.world_size,
        "num_nodes": settings.num_nodes,
        "started_at": settings.started_at,
        "workload": {
            "name": settings.name,
            "sample_unit": "samples",
            "flops_per_sample": None,
            "num_parameters": None,
        },
        "recipe": {"name": RECIPE, "label": settings.label, "precision": "unknown"},
        "batch_size_per_gpu": batch_size,
        "steps": None,
        "first_step": settings.steps_done + 1,
        "seed": None,
        "data": "script",
        "num_data_workers": num_data_workers(),
        **launch_header(settings.launch, os.environ),
        "machine": machine(device),
        "versions": versions(None),
        "attention_backend": None,
        "warnings": list(warnings),
        "files": files_here(os.environ),
        "script": {"command": list(settings.command), "variant": dict(settings.variant)},
    }


def _variant(text: str) -> dict[str, str]:
    try:
        # Numbers stay as they are written.
        variant = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        variant = None
    if not isinstance(variant, dict) or not all(isinstance(value, str) for value in variant.values()):
        raise RecipeError(
            f"FASTLAUNCH_VARIANT is {text!r}, not a JSON object of strings",
            'give one, such as {"amp": "bf16"}',
        )
    return variant


def _command(text: str | None) -> tuple[str, ...]:
    """Return the argv that the wrapper left in the environment; empty if it is not valid."""
    try:
        words = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return ()
    return tuple(str(word) for word in words) if isinstance(words, list) else ()


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return torchrun's variable, at least 1 if the default is; the default if it is not a number."""
    text = environment.get(name, "")
    return max(int(text), min(default, 1)) if text.isascii() and text.isdigit() else default
