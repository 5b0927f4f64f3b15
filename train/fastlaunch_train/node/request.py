"""What a training job asks of its containers: the runs, the hosts, and who of them this one is."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RUN_KEY = re.compile(r"run-\d{3}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
#: Longer than every legal limit of a training's end: SageMaker kills a container 120 s after its SIGTERM.
_DEFAULT_STOP_GRACE_S = 60.0
#: How often what is new is left for SageMaker to copy.
_DEFAULT_SHIP_EVERY_S = 20.0


class BadRequest(Exception):
    """The job's request cannot be carried out. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class AskedRun:
    """A run's id, and the arguments of the training entrypoint without --output and --resume."""

    run_id: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the containers of a job are to do.

    token: the job's name. hosts: names of all, in order of rank. rank: this one's. instance: its type as EC2
    names it, "" if that is not known. checkpoints: the folder that SageMaker copies to S3. attempt: least
    attempt number of records. stop_grace_s: that training has to end after SIGTERM. ship_every_s: between two
    times that what is new is left for SageMaker to copy.
    """

    token: str
    runs: tuple[AskedRun, ...]
    hosts: tuple[str, ...]
    rank: int
    instance: str
    checkpoints: Path
    attempt: int = 1
    stop_grace_s: float = _DEFAULT_STOP_GRACE_S
    ship_every_s: float = _DEFAULT_SHIP_EVERY_S

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)


def read_request(opt_ml: Path, environment: Mapping[str, str]) -> Request:
    """The request, by SageMaker's files below `opt_ml` and the environment. Raises BadRequest."""
    config = opt_ml / "input" / "config"
    resources = _read(config / "resourceconfig.json")
    hosts, current = resources.get("hosts"), resources.get("current_host")
    if (
        not isinstance(hosts, list)
        or not all(isinstance(host, str) for host in hosts)
        or current not in hosts
    ):
        raise BadRequest("resourceconfig.json does not say which of which hosts this is")
    # As run_train.sh orders them.
    ordered = sorted(hosts)
    token = environment.get("FASTLAUNCH_TOKEN") or environment.get("TRAINING_JOB_NAME") or ""
    if not _NAME.fullmatch(token):
        raise BadRequest(f"FASTLAUNCH_TOKEN is {token!r}, not the job's name")
    told = str(resources.get("current_instance_type") or "").removeprefix("ml.")
    folder = environment.get("FASTLAUNCH_CHECKPOINT_FOLDER")
    return Request(
        token=token,
        runs=_runs(_read(config / "hyperparameters.json")),
        hosts=tuple(ordered),
        rank=ordered.index(current),
        instance=environment.get("FASTLAUNCH_INSTANCE", told),
        checkpoints=Path(folder) if folder else opt_ml / "checkpoints",
        attempt=int(_number(environment, "FASTLAUNCH_ATTEMPT", 1)),
        stop_grace_s=_number(environment, "FASTLAUNCH_STOP_GRACE_S", _DEFAULT_STOP_GRACE_S),
        ship_every_s=_number(environment, "FASTLAUNCH_SHIP_EVERY_S", _DEFAULT_SHIP_EVERY_S),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadRequest(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise BadRequest(f"{path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise BadRequest(f"{path.name} is no JSON object")
    return data


def _runs(parameters: Mapping[str, Any]) -> tuple[AskedRun, ...]:
    """The runs of `run-001`, `run-002`, ...; what else stands among the hyperparameters is not ours."""
    keys = sorted(key for key in parameters if _RUN_KEY.fullmatch(key))
    if not keys:
        raise BadRequest("hyperparameters.json names no run: there is no run-001")
    runs = tuple(_run(key, parameters[key]) for key in keys)
    if len({run.run_id for run in runs}) < len(runs):
        raise BadRequest("hyperparameters.json names a run twice")
    return runs


def _run(key: str, value: Any) -> AskedRun:
    try:
        run_id, *arguments = shlex.split(value)
    except (AttributeError, TypeError, ValueError):
        raise BadRequest(f"hyperparameters.json: {key} is not `<run id> <arguments>`") from None
    if not _NAME.fullmatch(run_id):
        raise BadRequest(f"hyperparameters.json: {key} begins with {run_id!r}, which is no run id")
    return AskedRun(run_id=run_id, arguments=tuple(arguments))


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise BadRequest(f"{name} is {text!r}, not a number above 0")
    return value
