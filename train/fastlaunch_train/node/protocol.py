"""What a node and the launcher agree on: objects and their names, last words, exit codes, the list of runs.

The launcher imports this module and nothing else of the agent. Below an attempt's output lie

    boot.json                              of node 0; node-<k>/boot.json of the others
    runs-<sha256>.json                     what the nodes are to do
    node-<k>/log.txt.<offset>              what the agent prints
    node-<k>/gpu-use.txt.<offset>          how busy the GPUs are, a line for each sample
    node-<k>/<run id>/<file>.<offset>      log.txt, records, tracebacks and NCCL's log
    node-<k>/<run id>/output/<file>.<offset>      what a script left in $FASTLAUNCH_OUTPUT, once it has ended
    node-<k>/<run id>/model/<file>.<offset>       what was trained, as its library reads it
    node-<k>/<run id>/ended.json           SageMaker: the run need not be done again
    node-<k>/status.json                   the last word
    abort                                  why all nodes are to stop, in a line
    skip/<run id>                          this run is settled: do not begin it
    rank0                                  several nodes on EC2: where rank 0 is
    ready/<n>/<address>                    a node is about to begin run number n (`0`: is up; `end`: is done)
    ready/<n>.<k>/<address>                the same for a later start of it
    abort-<n>                              run number n failed on some node
    abort-<n>.<k>                          start k of it, from 0, failed, and another may follow

Files that grow are there as immutable segments, named after the byte at which they start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

SCHEMA = 1

#: How a run, or all of them, ended.
COMPLETED, INTERRUPTED, FAILED = "completed", "interrupted", "failed"
NOT_STARTED = "not-started"
#: The machine, or its configuration, can carry out none of the runs.
CONFIGURATION = "configuration"
#: A GPU of the machine, or what joins its GPUs, is faulty: another machine can carry them out.
HARDWARE = "hardware"
#: Why a node was interrupted: the launcher asked it to stop, another node stopped, EC2 takes it, its time is
#: nearly up, or its capacity block's time is.
STOP, PEER, SPOT, WATCHDOG, BLOCK = "stop", "peer", "spot", "watchdog", "block"

#: Training's exit code for a network that is not the required one.
FABRIC_CODE = 78
#: Training's exit code for a GPU that slows itself down under load.
HARDWARE_CODE = 79
#: The agent's exit code for a run that it ended since it idled, and what that means.
IDLE_CODE = 80
#: Codes of what would end a training again: a bad request, a full disk, the machine, a script that makes no
#: step, that was asked to stop, or that is not there.
LASTING_CODES = (2, 28, FABRIC_CODE, HARDWARE_CODE, IDLE_CODE, 124, 125, 126, 127, 130)
#: Use of all GPUs together below which they do nothing: one that only holds memory shows 0 or 1%.
LEAST_USE = 0.02
IDLE = "ended by --idle-timeout: its GPUs did nothing, and it recorded no step"
#: Exit codes of docker, or of a shell without a program to run: the next run would fail, too.
CONTAINER_CODES = (125, 126, 127)

ABORT, RANK_0 = "abort", "rank0"
LOG = "log.txt"
#: The use of a node's GPUs in percent, a line for each sample; and the command that queries it.
GPU_USE = "gpu-use.txt"
GPU_USE_QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
_ID = r"[A-Za-z0-9][A-Za-z0-9-]*"
_RECORD = r"rank-\d{5}-attempt-(?P<attempt>\d{1,6})\.jsonl"
_OUTPUT = rf"{_RECORD}|traceback-rank-\d{{5}}-attempt-\d+\.txt|nccl-node-\d+\.txt"
RUN_ID = re.compile(_ID)
RECORD = re.compile(_RECORD)
#: The files of a run's output to upload, besides its checkpoints.
OUTPUT = re.compile(_OUTPUT)
MODEL = "model"
#: The folders of what a run leaves for the user: a script's $FASTLAUNCH_OUTPUT, and the trained model.
OUTPUT_FOLDERS = ("output", MODEL)
#: The folder of its attempt, and a path in it; see `is_output_file`.
MAX_OUTPUT_DEPTH = 16
_OUTPUT_FILE = re.compile(
    rf"({'|'.join(OUTPUT_FOLDERS)})(-attempt-\d{{1,6}})?"
    rf"(/(?!\.{{1,2}}(/|$))[^/\\\x00-\x1f\x7f]{{1,200}}){{1,{MAX_OUTPUT_DEPTH}}}"
)
#: The most bytes of a name and of a path. A disk takes names of 255 bytes, a segment's ending included; S3
#: takes keys of 1,024, the prefix included.
_MAX_PART_BYTES, _MAX_PATH_BYTES = 240, 700
#: The most bytes of such a file, and the most bytes and files of a run on a node; the rest stays there.
MAX_OUTPUT_FILE_BYTES, MAX_OUTPUT_BYTES, MAX_OUTPUT_FILES = 2**30, 200 * 2**30, 10_000
#: The most links, pipes and the like that the last word names.
MAX_NAMES_LEFT_OUT = 20
#: A checkpoint of a training, or of a script; or rank 0's file of one with a further file for each rank.
CHECKPOINT = re.compile(r"step-(?P<step>\d{8,})(-a(?P<attempt>\d{1,6})-of-(?P<shards>\d{5}))?\.(pt|tar)")
_SHARD = re.compile(
    r"step-(?P<step>\d{8,})-a(?P<attempt>\d{1,6})\.(?P<rank>\d{5})-of-(?P<shards>\d{5})\.distcp"
)
SEGMENT = re.compile(r"(?P<name>.+)\.(?P<offset>\d{12})")
#: Where a job finds each of its inputs, in a folder of the input's name.
INPUTS = "/opt/ml/input/data"
MAX_SEGMENT_BYTES = 64 * 2**20

#: Torch's and NCCL's words in the messages of ranks whose peer is gone; NCCL's watchdog ends them by SIGABRT.
_ECHO = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|DistBackendError|DistNetworkError|"
    r"TCPStore|remote process|process group|rendezvous|by a peer|SIGABRT|Fatal Python error: Aborted",
    re.IGNORECASE,
)
#: Words of training's check of the network, which name NCCL although no peer has failed.
_NO_ECHO = re.compile(r"has to use EFA|did not connect the nodes")


def is_echo(message: str) -> bool:
    """Return whether a rank that ended with this message failed because one elsewhere did."""
    return _ECHO.search(message) is not None and _NO_ECHO.search(message) is None


# Names of objects


def boot_name(node: int) -> str:
    """Return where a node says that it has booted."""
    return "boot.json" if node == 0 else f"node-{node}/boot.json"


def status_name(node: int) -> str:
    """Return where a node leaves its last word."""
    return f"node-{node}/status.json"


def segment_name(file: str, offset: int) -> str:
    """Return the name of the segment of `file` that starts at the byte `offset`."""
    return f"{file}.{offset:012d}"


def mean_gpu_use(answer: str) -> float | None:
    """Return the mean use in the output of `GPU_USE_QUERY`, from 0 to 1; None if a GPU reports none."""
    try:
        percent = [int(line) for line in answer.split("\n") if line.strip()]
    except ValueError:
        return None
    is_sound = bool(percent) and all(0 <= value <= 100 for value in percent)
    return sum(percent) / len(percent) / 100 if is_sound else None


def is_output_file(name: str) -> bool:
    """Return whether the name of a file for the user is valid for an object in S3 and for a local file."""
    try:
        path = name.encode()
    except UnicodeEncodeError:
        # A disk takes any bytes; S3 takes UTF-8 only.
        return False
    is_short = len(path) <= _MAX_PATH_BYTES and all(len(part) <= _MAX_PART_BYTES for part in path.split(b"/"))
    return is_short and _OUTPUT_FILE.fullmatch(name) is not None


def attempt_uri(runs_uri: str, first: str, attempt: int) -> str:
    """Return the URI under which an attempt writes. first: the id of its first run."""
    return f"{runs_uri}/{first}/attempt-{attempt}"


def output_folder(name: str, attempt: int) -> str:
    """Return the local folder for one of `OUTPUT_FOLDERS`: each attempt has its own."""
    return name if attempt == 1 else f"{name}-attempt-{attempt}"


def checkpoint_key(name: str) -> tuple[int, int] | None:
    """Return the step and attempt of a checkpoint's file; None for others. A lone file's attempt is 0."""
    match = CHECKPOINT.fullmatch(name) or _SHARD.fullmatch(name)
    return (int(match["step"]), int(match["attempt"] or 0)) if match else None


def missing_files(name: str, names: Iterable[str]) -> set[str]:
    """Return the files of the checkpoint whose first file is `name` that are not among `names`."""
    match = CHECKPOINT.fullmatch(name)
    first, num = name.partition("-of-")[0], match and match["shards"]
    files = {name, *(f"{first}.{rank:05d}-of-{num}.distcp" for rank in range(int(num or 0)))}
    return files.difference(names)


def newest_checkpoint(names: Iterable[str]) -> list[str]:
    """Return the files of the newest checkpoint that is complete among `names`, the first one first."""
    names = set(names)
    whole = [name for name in names if CHECKPOINT.fullmatch(name) and not missing_files(name, names)]
    key = max((checkpoint_key(name) or (0, 0) for name in whole), default=None)
    # The first file sorts before those of the ranks.
    return sorted(name for name in names if key and checkpoint_key(name) == key)


def last_attempt(names: Iterable[str]) -> int:
    """Return the highest attempt number among the names of segments of records; 0 without records."""
    segments = filter(None, map(SEGMENT.fullmatch, names))
    records = filter(None, (RECORD.fullmatch(segment["name"]) for segment in segments))
    return max((int(record["attempt"]) for record in records), default=0)


def after_restart(first: str | None, last: str) -> str:
    """Return why a run failed. first: why its start before the last one did, if there was one."""
    if not first:
        return last
    return f"{first}, and again after a restart" if last == first else f"{first}; after a restart: {last}"


def input_environment(names: Iterable[str]) -> dict[str, str]:
    """Return the variables by which a job finds its inputs: `FASTLAUNCH_INPUT_<NAME>`."""
    return {f"FASTLAUNCH_INPUT_{name.upper().replace('-', '_')}": f"{INPUTS}/{name}" for name in names}


def ready_name(step: str, address: str = "") -> str:
    """Return where a node says that it has reached `step`; without an address, the common prefix."""
    return f"ready/{step}/{address}"


def run_abort_name(step: str) -> str:
    """Return where a node says that a run has failed on it: `1`, or `1.0` if only this start of it has."""
    return f"{ABORT}-{step}"


def skip_name(run_id: str) -> str:
    """Return where the launcher says that a run is settled."""
    return f"skip/{run_id}"


def agent_name(sha256: str) -> str:
    """Return the name of the agent whose bytes have this digest."""
    return f"agent-{sha256}.pyz"


def run_list_name(sha256: str) -> str:
    """Return the name of the list of runs whose bytes have this digest."""
    return f"runs-{sha256}.json"


# What the nodes are to do


class BadRunList(ValueError):
    """A list of runs that cannot be carried out. The message is one line."""


@dataclass(frozen=True)
class NodeRun:
    """One run to do."""

    run_id: str
    #: Arguments of the training entrypoint, without --output and --resume.
    arguments: tuple[str, ...]
    #: Environment variables of this run's container, on top of the program's.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_script(self) -> bool:
        """Return whether it is a user's command, whose exit code says nothing about the machine."""
        return "FASTLAUNCH_SCRIPT" in self.environment


@dataclass(frozen=True)
class NodeProgram:
    """What the nodes of an attempt do: the runs, one after another, together.

    SageMaker uses the token, the attempt, the runs, what they need and the GPUs; the rest is for EC2 alone.
    """

    token: str
    #: From 1; the least attempt number of records.
    attempt: int
    runs: tuple[NodeRun, ...]
    #: Environment variables of every container.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: ARNs of secrets and parameters, by the container variable that gets the value.
    secrets: Mapping[str, str] = field(default_factory=dict)
    #: URIs of folders in S3, by the name of the input.
    inputs: Mapping[str, str] = field(default_factory=dict)
    #: What pip installs for the runs, as `install` of run_train.sh reads it; None for nothing.
    requirements_uri: str | None = None
    requirements_sha256: str | None = None
    num_nodes: int = 1
    region: str = ""
    #: Where this attempt writes: see `attempt_uri`.
    output: str = ""
    #: The URI under which every run's checkpoints lie, as `<run id>/checkpoints/step-*`.
    runs_uri: str = ""
    #: The code bundle; None if the image holds the code.
    code_uri: str | None = None
    code_sha256: str | None = None
    #: The container image, by digest.
    image: str = ""
    #: The region of the image's registry, if that is ECR.
    image_region: str = ""
    #: Minutes after which the machine turns itself off, whatever happens.
    max_minutes: int = 0
    #: 0 for a machine without.
    num_gpus: int = 0
    #: How long a run may idle, in seconds: neither its GPUs do anything, nor is a step recorded.
    idle_timeout_s: float | None = None
    has_instance_store: bool = False
    has_nvswitch: bool = False
    is_spot: bool = False
    #: Whether training over several nodes must end if it does not use EFA.
    needs_efa: bool = False
    #: ISO 8601, UTC: the end of the capacity block that the machine runs in.
    block_ends_at: str | None = None

    def to_json(self) -> str:
        """Return the text that `program_from_json` reads; equal programs give equal texts."""
        usual = asdict(NodeProgram(token="", attempt=0, runs=()))
        data = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return json.dumps({"schema": SCHEMA, **data}, sort_keys=True, separators=(",", ":"))


def program_from_json(text: str) -> NodeProgram:
    """Return the program that `NodeProgram.to_json` wrote; raise BadRunList if it cannot be read."""
    try:
        data = json.loads(text)
        if data.pop("schema") != SCHEMA:
            raise BadRunList("the list of runs is of another version of fastlaunch")
        runs = tuple(NodeRun(**{**run, "arguments": tuple(run["arguments"])}) for run in data.pop("runs"))
        program = NodeProgram(runs=runs, **data)
    except BadRunList:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRunList(f"the list of runs cannot be read: {error}") from None
    names = [program.token, *(run.run_id for run in runs)]
    if not runs or len(set(names[1:])) < len(runs):
        raise BadRunList("the list of runs names none, or one twice")
    if not all(RUN_ID.fullmatch(name) for name in names):
        raise BadRunList("the list of runs names one that is no run id")
    return program


def stop_lead_s(max_minutes: int) -> int:
    """Return how many seconds training is asked to stop before the machine turns itself off.

    These are six minutes: 100 s for the container to end, the rest to send what it leaves. For a time limit
    under 24 minutes they are a quarter of it.
    """
    return min(360, max_minutes * 60 // 4)


# What a node says


@dataclass(frozen=True)
class Identity:
    """The sender of a message. instance_id, zone: None on SageMaker, which hides them; host: None on EC2."""

    token: str
    node: int
    instance_id: str | None
    instance_type: str | None
    zone: str | None
    host: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that boot.json and status.json begin with."""
        data = {"schema": SCHEMA, **asdict(self)}
        return {name: value for name, value in data.items() if name != "host" or value is not None}


@dataclass(frozen=True)
class RunEnd:
    """How a run ended on this node; times in seconds since boot."""

    run_id: str
    state: str = NOT_STARTED
    exit_code: int | None = None
    started_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How all runs ended. name: COMPLETED, INTERRUPTED, FAILED, CONFIGURATION or HARDWARE."""

    name: str
    #: None if completed.
    reason: str | None = None


def status(
    identity: Identity,
    outcome: Outcome,
    runs: Sequence[RunEnd],
    *,
    uptime_s: float,
    boot_s: float | None = None,
    pull_s: float | None = None,
    billed_until: str | None = None,
    phases: Sequence[Mapping[str, Any]] = (),
    gpu_notes: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Return status.json, the last word.

    boot_s, pull_s: when the machine's program began, and when everything that the runs need was there, in
    seconds since boot. phases: the parts of that time with a name, seconds and bytes; see `Machine.phase`.
    billed_until: when EC2 takes a spot machine; None for now. gpu_notes: observations of the GPUs, faults or
    not. left_out: training's files that are not regular, and so were not sent.
    """
    return {
        **identity.to_json(),
        "outcome": outcome.name,
        "reason": outcome.reason,
        "boot_s": boot_s,
        "pull_s": pull_s,
        "phases": list(phases),
        "uptime_s": uptime_s,
        "billed_until": billed_until or now(),
        "gpu_notes": list(gpu_notes),
        "left_out": list(left_out),
        "runs": [asdict(run) for run in runs],
    }


def outcome_of(
    ends: Sequence[RunEnd],
    *,
    skipped: Sequence[str] = (),
    stop: str | None = None,
    problem: Outcome | None = None,
) -> Outcome:
    """Return the outcome of all runs together. stop, problem: why no more runs were done, if so."""
    if all(end.state == COMPLETED or end.run_id in skipped for end in ends):
        return Outcome(COMPLETED)
    if stop:
        return Outcome(INTERRUPTED, stop)
    if problem:
        return problem
    failed = [end for end in ends if end.state == FAILED]
    if failed:
        return Outcome(FAILED, f"run {failed[0].run_id}: exit code {failed[0].exit_code}")
    return Outcome(INTERRUPTED, PEER)


def now() -> str:
    """Return the current time in the format of a node's objects: `2026-11-21T15:30:04Z`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
