"""A submission as the task file of another engine: fastlaunch sees nothing of what that starts.

The file runs each job by `run_train.sh` of an image that `fastlaunch build` made, in order, and copies the
records to the bucket. Comments say what of fastlaunch is lost, and how the records come back.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlaunch.backends.site import Site
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.job import Job, node_arguments, run_environment
from fastlaunch.lifecycle.announcement import as_yaml

_NAME = "fastlaunch"
_LOST = (
    "fastlaunch sees nothing of what this starts: no ceiling on its cost, no timer, no `reap`.",
    "The time limit is the engine's, and so are secrets.",
)


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    """What an engine tells each node of its job, in shell.

    session: unique to each submission of the file, the same on all nodes. files: where the user's files are;
    None where none travel. in_bucket: whether what a node writes is gone with it.
    """

    session: str
    num_nodes: str
    rank: str
    master: str
    files: str | None = "."
    in_bucket: bool = True


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Jobs that a site would run one after another."""

    jobs: Sequence[Job]
    site: Site

    @property
    def first(self) -> Job:
        return self.jobs[0]

    @property
    def minutes(self) -> int:
        return self.first.terms.max_minutes or 0

    @property
    def num_nodes(self) -> int:
        return self.first.num_nodes

    @property
    def needs_efa(self) -> bool:
        return self.num_nodes > 1 and not self.first.allow_tcp

    @property
    def is_spot(self) -> bool:
        return self.first.terms.purchase == "spot"


def task_file(engine: str, jobs: Sequence[Job], site: Site) -> str:
    """Return the file of one of `ENGINES` that runs the jobs on the site's instance type.

    Raises UserError for what it cannot hand over: an image without the training code, a service's own
    purchase, data that fastlaunch would bring.
    """
    given = Submission(jobs=jobs, site=site)
    _check(engine, given)
    text = ENGINES[engine](given)
    if not text.replace("\n", "").replace("\t", "").isprintable():
        raise UserError(
            "an argument or a variable has an invisible character, which is lost where the file is printed",
            "leave it out, or read it from a file",
        )
    return text


def _check(engine: str, given: Submission) -> None:
    site = given.site
    if "<" in site.image or "@sha256:" not in site.image:
        raise UserError(
            f"{engine} needs an image that holds the training code",
            "fastlaunch build --push, and then --image with what it prints",
        )
    if engine != "sbatch" and "<" in site.bucket:
        raise UserError(
            f"{engine}'s machines are gone with their records", "name a bucket for them: --bucket"
        )
    if site.inputs or site.requirements:
        raise UserError(
            f"{engine} gets no inputs and no requirements from fastlaunch",
            "leave out --input and --requirements: build them in (build --with), or mount them there",
        )
    if site.secrets:
        raise UserError(
            f"{engine} gets no secrets from fastlaunch",
            f"leave out --secret, and have {engine} set {' and '.join(site.secrets)}",
        )
    if site.backend == "sagemaker":
        raise UserError(f"{engine} runs nothing on SageMaker", "give the instance type without ml.")
    check_purchase(engine, given.first.terms.purchase)
    if engine == "batch" and given.first.script:
        raise UserError(
            "AWS Batch has nothing but the image, and no script of yours", "build the script into an image"
        )


def check_purchase(engine: str, purchase: str) -> None:
    """Raise UserError if the engine does not buy so."""
    if purchase not in ("on-demand", "spot"):
        raise UserError(
            f"what is bought as a {purchase} is handed over to no engine, and {engine} would buy on demand",
            "leave out --purchase, or submit without --emit",
        )
    if engine in ("sbatch", "batch") and purchase == "spot":
        raise UserError(
            f"{engine} starts no spot machines: how its nodes are bought is the cluster's",
            "leave out --purchase, or give --emit skypilot or dstack",
        )


def _shell(given: Submission, cluster: _Cluster) -> Iterator[str]:
    """Yield the lines that run all jobs on a node, one after another.

    When the engine's time limit comes, the run of that moment ends early, none follows, and what is recorded
    goes to the bucket all the same.
    """
    site, variables = (
        given.site,
        {
            "FASTLAUNCH_INSTANCE": given.site.instance.name,
            "FASTLAUNCH_IMAGE_DIGEST": given.site.image.rpartition("@")[2],
            "FASTLAUNCH_NPROC": str(given.first.num_gpus // given.num_nodes),
            **given.site.variables,
        },
    )
    yield "set -u -o pipefail"
    yield f"export FASTLAUNCH_SESSION={cluster.session}"
    if given.num_nodes > 1:
        variables["FASTLAUNCH_FABRIC"] = "efa" if given.needs_efa else "any"
        yield f"export FASTLAUNCH_NUM_NODES={cluster.num_nodes} FASTLAUNCH_NODE_RANK={cluster.rank}"
        yield f"export FASTLAUNCH_MASTER_ADDR={cluster.master}"
    yield from (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    yield "out=${FASTLAUNCH_RECORDS:-$PWD/fastlaunch-records} status=0 stopped="
    yield """trap 'status=1 stopped=1; kill -s TERM "${!-}" 2>/dev/null' TERM"""
    if given.first.script and cluster.files:
        yield f"cp -R {cluster.files}/. /fastlaunch/user/"
    yield "run() { # NAME VARIABLE=VALUE... run_train.sh's ARGUMENTS"
    yield "  local name=${FASTLAUNCH_SESSION//[^A-Za-z0-9]/-}-$1"
    yield "  shift"
    yield '  [ -z "$stopped" ] || return'
    yield '  env FASTLAUNCH_RUN_ID="$name" "$@" </dev/null &'
    yield "  while kill -0 $! 2>/dev/null; do wait $!; done # a signal ends the wait, not the run"
    yield "  wait $! || status=1"
    yield "}"
    for number, job in enumerate(given.jobs, 1):
        known = {name: value for name, value in run_environment(job).items() if name != "FASTLAUNCH_SESSION"}
        words = [*(f"{name}={value}" for name, value in known.items()), "bash", "/fastlaunch/run_train.sh"]
        folder = f'"$out/$FASTLAUNCH_SESSION-{number}"'
        yield f"run {number} {shlex.join(words)} --output {folder} {shlex.join(node_arguments(job))}"
    if cluster.in_bucket:
        yield f'aws s3 cp --recursive --only-show-errors "$out" {shlex.quote(_records(site))} || status=1'
    yield "exit $status"


def _here_document(lines: Iterable[str]) -> str:
    """Return `<<'END'` and the lines as what a command reads; no line of an argument ends it."""
    text, end = "\n".join(lines), "END"
    while end in text.split("\n"):
        end += "_"
    return f"<<'{end}'\n{text}\n{end}\n"


def _records(site: Site) -> str:
    return f"s3://{site.bucket}/fastlaunch-records/"


def _head(given: Submission, start: str, cluster: _Cluster) -> Iterator[str]:
    """Yield the comments at the top. start: the command that runs the file."""
    yield f"# {start}"
    if cluster.in_bucket:
        yield f"# aws s3 cp --recursive {_records(given.site)} records && fastlaunch runs import records"
    else:
        yield "# fastlaunch runs import fastlaunch-records"
    yield from (f"# {line}" for line in _LOST)


def _yaml(given: Submission, start: str, cluster: _Cluster, task: Mapping[str, Any]) -> str:
    return "\n".join([*_head(given, start, cluster), *as_yaml(task, indent="")]) + "\n"


def _skypilot(given: Submission) -> str:
    """Return a task of SkyPilot, which has no time limit: `timeout` is one."""
    cluster = _Cluster(
        session="$SKYPILOT_TASK_ID",
        num_nodes="$SKYPILOT_NUM_NODES",
        rank="$SKYPILOT_NODE_RANK",
        master='$(head -n 1 <<<"$SKYPILOT_NODE_IPS")',
    )
    task = {
        "name": _NAME,
        "resources": {
            "infra": f"aws/{given.site.region}",
            "instance_type": given.site.instance.name,
            "use_spot": given.is_spot,
            "image_id": f"docker:{given.site.image}",
            "autostop": {"idle_minutes": 5, "down": True},
            # SkyPilot's word for EFA on AWS.
            **({"network_tier": "best"} if given.needs_efa else {}),
        },
        "num_nodes": given.num_nodes,
        **({"workdir": "."} if given.first.script else {}),
        "run": f"timeout --foreground --kill-after 10m {given.minutes}m bash "
        + _here_document(_shell(given, cluster)),
    }
    return _yaml(given, f"sky launch --down -c {_NAME} task.yaml", cluster, task)


def _dstack(given: Submission) -> str:
    cluster = _Cluster(
        session="$DSTACK_RUN_NAME-$DSTACK_RUN_ID",
        num_nodes="$DSTACK_NODES_NUM",
        rank="$DSTACK_NODE_RANK",
        master="$DSTACK_MASTER_NODE_IP",
    )
    task = {
        "type": "task",
        "name": _NAME,
        "image": given.site.image,
        "nodes": given.num_nodes,
        "backends": ["aws"],
        "regions": [given.site.region],
        "instance_types": [given.site.instance.name],
        "resources": {"gpu": given.site.instance.num_accelerators},
        "spot_policy": "spot" if given.is_spot else "on-demand",
        "max_duration": f"{given.minutes}m",
        **({"repos": ["."]} if given.first.script else {}),
        "commands": ["\n".join(_shell(given, cluster)) + "\n"],
    }
    return _yaml(given, "dstack apply -f task.dstack.yml", cluster, task)


def _sbatch(given: Submission) -> str:
    """Return a script of Slurm's, for nodes of this instance type with Pyxis."""
    cluster = _Cluster(
        # A job that is requeued keeps its id, and the next cluster counts from 1 again.
        session="$SLURM_JOB_ID-$STARTED_AT",
        num_nodes="$SLURM_JOB_NUM_NODES",
        rank="$SLURM_PROCID",
        master="$FIRST_NODE",
        files='"$SLURM_SUBMIT_DIR"',
        in_bucket=False,
    )
    hours, minutes = divmod(given.minutes, 60)
    directives = {
        "job-name": _NAME,
        "nodes": given.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": given.site.instance.num_accelerators,
        "exclusive": None,
        "time": f"{hours:02}:{minutes:02}:00",
    }
    # The image is a registry's name with "#" before the repository, for Enroot.
    host, _, repository = given.site.image.partition("/")
    start = "srun --container-image " + shlex.quote(f"{host}#{repository}")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in directives.items()),
        *_head(given, "sbatch task.sh, where Slurm has NVIDIA's Pyxis", cluster),
        "export STARTED_AT=$(date +%s)",
        'export FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export FASTLAUNCH_RECORDS=$SLURM_SUBMIT_DIR/fastlaunch-records",
        f"""{start} --container-mounts "$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR" bash -s """
        + _here_document(_shell(given, cluster)),
    ]
    return "\n".join(lines)


def _batch(given: Submission) -> str:
    """Return two requests to AWS Batch as JSON: the job's definition, and the job."""
    main = "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i)}"
    cluster = _Cluster(
        session="${AWS_BATCH_JOB_ID%%#*}",
        num_nodes="$AWS_BATCH_JOB_NUM_NODES",
        rank="$AWS_BATCH_JOB_NODE_INDEX",
        master=main,
        files=None,
    )
    instance = given.site.instance
    container: dict[str, Any] = {
        "image": given.site.image,
        "command": ["bash", "-c", "\n".join(_shell(given, cluster))],
        "resourceRequirements": [
            {"type": "VCPU", "value": str(instance.vcpus)},
            # The agent and the system need some of it.
            {"type": "MEMORY", "value": str(int(instance.memory_gib * 0.9 * 1024))},
            {"type": "GPU", "value": str(instance.num_accelerators)},
        ],
        "linuxParameters": {"sharedMemorySize": 65536},
    }
    if given.needs_efa:
        # docs.aws.amazon.com/batch/latest/userguide/efa.html
        paths = [f"/dev/infiniband/uverbs{number}" for number in range(instance.num_efa_interfaces)]
        container["linuxParameters"]["devices"] = [
            {"hostPath": path, "containerPath": path, "permissions": ["READ", "WRITE", "MKNOD"]}
            for path in paths
        ]
        container["ulimits"] = [{"name": "memlock", "softLimit": -1, "hardLimit": -1}]
    definition: dict[str, Any] = {
        "jobDefinitionName": _NAME,
        "timeout": {"attemptDurationSeconds": 60 * given.minutes},
        "retryStrategy": {"attempts": 1},
    }
    if given.num_nodes == 1:
        definition |= {"type": "container", "containerProperties": container}
    else:
        nodes = {"targetNodes": "0:", "container": {**container, "instanceType": instance.name}}
        definition |= {
            "type": "multinode",
            "nodeProperties": {"numNodes": given.num_nodes, "mainNode": 0, "nodeRangeProperties": [nodes]},
        }
    job = {"jobName": _NAME, "jobQueue": "<job-queue>", "jobDefinition": _NAME}
    # JSON has no comments: a docs page says what is lost.
    return json.dumps({"RegisterJobDefinition": definition, "SubmitJob": job}, indent=2) + "\n"


#: Writers of task files, by the name of the engine.
ENGINES: Mapping[str, Callable[[Submission], str]] = {
    "skypilot": _skypilot,
    "dstack": _dstack,
    "sbatch": _sbatch,
    "batch": _batch,
}
