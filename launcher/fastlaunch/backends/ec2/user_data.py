"""The program that a node runs by itself: user data, made from a template. Pure."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING

from fastlaunch.core.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template

#: EC2's limit, before base64. docs.aws.amazon.com/AWSEC2, "Run commands when you launch an EC2 instance".
MAX_USER_DATA_BYTES = 16_384
#: A private registry of ECR wants a login; any other host is taken to be open.
_ECR_HOST = re.compile(r"\.dkr\.ecr(-fips)?\.")


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """One run to do: arguments of the entrypoint after `--output DIR`, which the node adds itself.

    environment: for this run's container, on top of the program's.
    """

    run_id: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class NodeProgram:
    """What one node does: pull an image, train the runs one after another, upload everything, shut down.

    runs_uri: `s3://bucket/prefix/runs`, under which every run's checkpoints lie as
    `<run id>/checkpoints/step-*.pt`. output: `<runs_uri>/<first run id>/attempt-<n>`, where this attempt
    writes; a stop is asked for by an object `abort` there.
    code_uri, code_sha256: the code bundle, None if the image holds the code.
    image: by digest; its registry host is what stands before the first slash, and image_region is ECR's.
    max_minutes: after which the machine turns itself off, whatever happens.
    num_gpus: 0 for a machine without. environment: for every container. num_nodes: machines that run this
    program together. needs_efa: whether training ends without it. block_ends_at: ISO 8601, UTC, when the
    capacity block ends that the machine runs in.
    """

    token: str
    attempt: int
    region: str
    output: str
    runs_uri: str
    code_uri: str | None
    code_sha256: str | None
    image: str
    image_region: str
    max_minutes: int
    num_gpus: int
    has_instance_store: bool
    has_nvswitch: bool
    is_spot: bool
    runs: tuple[NodeRun, ...]
    environment: Mapping[str, str]
    num_nodes: int = 1
    needs_efa: bool = False
    block_ends_at: str | None = None


def render_user_data(program: NodeProgram) -> str:
    """The shell script of `program`. Raises UserError if it, or its next attempt's, is larger than EC2 takes.

    It ends with `node-<k>/status.json`, in which boot_s is when the script began, pull_s when code and image
    were there, in seconds since boot; billed_until is when it was written, or when EC2 takes a spot machine.
    A node that stops because another one did says outcome `interrupted`, reason `peer`.

    Several nodes find each other through objects under the output: `rank0` has the address of rank 0,
    `ready/<n>/<address>` says that a node is about to begin run number n (from 1; `0`: has booted; `end`: has
    done the last),
    `abort-<n>` that run n failed somewhere, `abort` in a line why all are to stop.
    """
    script = _script(program)
    # An attempt that goes on with the runs has a checkpoint to fetch, and more to say.
    next_one = _script(replace(program, attempt=program.attempt + 1))
    size = max(len(script.encode()), len(next_one.encode()))
    if size > MAX_USER_DATA_BYTES:
        raise UserError(
            f"the program for {len(program.runs)} runs has {size:,} bytes, and EC2 takes "
            f"{MAX_USER_DATA_BYTES:,}",
            "submit fewer recipes or repeats at a time",
        )
    return script


def stop_lead_s(max_minutes: int) -> int:
    """Seconds before the machine turns itself off at which training is asked to stop.

    Six minutes: 100 s for the container to end, the rest to send what it leaves; a quarter of a time limit
    under 24 minutes.
    """
    return min(360, max_minutes * 60 // 4)


def _script(program: NodeProgram) -> str:
    # What repeats share is written once, and so is what the runs' ids begin with.
    jobs = list(dict.fromkeys(_job(run) for run in program.runs))
    num_first, num_last = _num_shared([arguments for _, arguments in jobs])
    shared = _shared_start([run.run_id for run in program.runs])
    several = program.num_nodes > 1
    return _template(several).render(
        **vars(program),
        several=several,
        lead_s=stop_lead_s(program.max_minutes),
        is_ecr=_ECR_HOST.search(program.image.partition("/")[0]) is not None,
        container_environment=_options(program.environment),
        with_environments=any(environment for environment, _ in jobs),
        first_arguments=shlex.join(jobs[0][1][:num_first]),
        last_arguments=shlex.join(jobs[0][1][len(jobs[0][1]) - num_last :]),
        jobs=[
            {"environment": environment, "arguments": shlex.join(own[num_first : len(own) - num_last])}
            for environment, own in jobs
        ],
        shared=shared,
        numbered=[
            f"{1 + jobs.index(_job(run))}:{shlex.quote(run.run_id[len(shared) :])}" for run in program.runs
        ],
    )


@cache
def _template(is_short: bool) -> "Template":
    """The script's template; short, it is without comments and indentation, which the node can do without."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fastlaunch.backends")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    source = loader.get_source(environment, "user_data.sh.j2")[0]
    if is_short:
        # What is put into the template stays as it is: an argument may hold lines of its own.
        head, *lines = source.splitlines(keepends=True)
        kept = [line.lstrip(" ") for line in lines if not re.match(r" *#(?! shellcheck)", line)]
        source = head + "".join(line if line[0] == "#" else re.sub(r" +# .*", "", line) for line in kept)
    return environment.from_string(source)


def _job(run: NodeRun) -> tuple[str, tuple[str, ...]]:
    """What the run adds to its container's environment, as shell words, and its arguments."""
    # The node gives every container its run's id.
    added = {name: value for name, value in run.environment.items() if name != "FASTLAUNCH_RUN_ID"}
    return _options(added), run.arguments


def _num_shared(jobs: Sequence[Sequence[str]]) -> tuple[int, int]:
    """How many arguments all jobs begin with, and how many of the others all end with; 0 for one job."""
    if len(jobs) == 1:
        return 0, 0
    first = _num_alike(zip(*jobs, strict=False))
    return first, _num_alike(
        zip(*(job[: first - 1 : -1] if first else job[::-1] for job in jobs), strict=False)
    )


def _num_alike(rows: Iterable[Sequence[str]]) -> int:
    """How many rows, from the first on, hold one value alone."""
    return sum(1 for _ in takewhile(lambda row: len(set(row)) == 1, rows))


def _shared_start(names: Sequence[str]) -> str:
    """What all of `names` begin with, up to a dash; nothing if there is only one, or they stand for ids."""
    least, greatest = min(names), max(names)
    if len(names) == 1 or least.startswith("<"):
        return ""
    length = 0
    while length < len(least) and least[length] == greatest[length]:
        length += 1
    return least[: least.rfind("-", 0, length) + 1]


def _options(environment: Mapping[str, str]) -> str:
    return " ".join(f"-e {shlex.quote(f'{name}={value}')}" for name, value in environment.items())
