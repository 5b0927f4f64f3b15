"""An attempt on SageMaker as one CreateTrainingJob request: one job that does its runs one after another.

Pure. All hosts of a job, and all attempts at the same runs, share one folder of checkpoints in S3; what one
attempt writes lies under its token there. Limits that a request may break stand in `sagemaker_rules`.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fastlaunch.backends import Plan
from fastlaunch.backends.entrypoint_arguments import entrypoint_arguments
from fastlaunch.backends.placeholders import placeholders_in
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.placement.cost_ceiling import max_cost_usd

#: Where the container finds what earlier attempts left, and from where SageMaker copies what it writes.
CHECKPOINTS = "/opt/ml/checkpoints"
#: Hyperparameters of a job, and characters of one. botocore 1.44.5, CreateTrainingJob.
MAX_RUNS, MAX_VALUE = 100, 2_500
#: Instance types in one request. botocore 1.44.5, InstancePreferences.
MAX_TYPES = 5
#: How long an on-demand job may wait for machines, unbilled: the least that SageMaker takes.
MAX_PENDING_S = 1_800
#: How long a spot job may wait for machines, unbilled, at its start and after interruptions together.
SPOT_WAIT_S = 3_600
#: How long a rank may take to end after SIGTERM, within the 120 s that SageMaker gives the container.
_STOP_GRACE_S = 90
#: Fetched as a channel, by a name that holds its digest. In one line of at most 256 characters, as SageMaker
#: takes arguments; the digest is the script's own argument.
_UNPACK = (
    'cd /opt/ml/input/data/code&&f=$1.tar.gz&&echo "$1  $f"|sha256sum -c&&mkdir -p /fastlaunch'
    "&&tar xzf $f -C /fastlaunch --no-same-owner&&exec /bin/bash /fastlaunch/run_sagemaker.sh;"
    "echo code bundle not usable|tee /opt/ml/output/failure;exit 1"
)
_RUN = "/fastlaunch/run_sagemaker.sh"

#: For the console's graphs: what rank 0 prints with FASTLAUNCH_PRINT_METRICS, such as
#: `fastlaunch: step=40 loss=2.314500 step_time_s=0.103400 samples_per_s=652.10`.
_METRICS = ("loss", "step_time_s", "samples_per_s")
_NUMBER = "([-+]?[0-9][0-9.e+-]*)"


def plan_sagemaker(
    jobs: Mapping[str, JobSpec],
    *,
    attempt: int,
    site: TrainingSite,
    max_minutes: int,
    root: str | None = None,
) -> Plan:
    """The request that carries out `jobs`, by run id, on `site`, as its attempt number `attempt`, from 1.

    All jobs share number of nodes, GPUs and purchase option. max_minutes: what this attempt may run, from
    when its machines are there. root: id of the run under which earlier attempts at these runs wrote, by
    default the first of them. Raises UserError for what cannot be asked of SageMaker.
    """
    first, job = next(iter(jobs.items()))
    assert len({(one.num_nodes, one.num_gpus, one.purchase, one.allow_tcp) for one in jobs.values()}) == 1
    _check(job, site, jobs)
    token = f"{first}-a{attempt}"
    checkpoints = f"{runs_uri(site)}/{root or first}"
    tags = {
        "fastlaunch:run": first,
        "fastlaunch:attempt": str(attempt),
        "fastlaunch:max-minutes": str(max_minutes),
        "fastlaunch:output": f"{checkpoints}/{token}",
    }
    request: dict[str, Any] = {
        "TrainingJobName": token,
        "AlgorithmSpecification": {
            "TrainingImage": site.image,
            "TrainingInputMode": "File",
            **_program(site),
            "MetricDefinitions": [
                {"Name": name, "Regex": f"fastlaunch: .* {name}={_NUMBER}"} for name in _METRICS
            ],
        },
        "HyperParameters": _hyperparameters(jobs),
        "Environment": _environment(job, site, token, attempt),
        "RoleArn": site.role,
        **_code_channel(site),
        # SageMaker puts what the container leaves in /opt/ml/model and output here, in the end; not among
        # the checkpoints, all of which the next attempt has to fetch.
        "OutputDataConfig": {"S3OutputPath": f"{runs_uri(site)}/sagemaker-output"},
        "CheckpointConfig": {"S3Uri": checkpoints, "LocalPath": CHECKPOINTS},
        "ResourceConfig": _resources(job, site),
        "StoppingCondition": _stopping(job, site, max_minutes),
        # The container uploads nothing itself, but a workload of the user's may fetch its data.
        "EnableNetworkIsolation": False,
        **({"EnableManagedSpotTraining": True} if job.purchase == "spot" else {}),
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }
    return Plan(
        backend="sagemaker",
        operation="CreateTrainingJob",
        request=request,
        placeholders=_placeholders(request, site, [*jobs, *([root] if root else [])]),
        max_cost_usd=max_cost_usd(
            num_nodes=job.num_nodes,
            max_minutes=max_minutes,
            usd_per_hour=site.usd_per_hour,
            idle_minutes=site.keep_alive_minutes,
        ),
        usd_per_hour=site.usd_per_hour,
        price_as_of=site.price_as_of,
        region=site.region,
    )


def runs_uri(site: TrainingSite) -> str:
    """`s3://bucket/prefix/runs`: what all runs of the site's region write lies under it."""
    return "s3://" + "/".join(filter(None, (site.bucket, site.prefix, "runs")))


def is_accelerated(ml_type: str) -> bool:
    """Whether SageMaker calls the type (`ml.p5.48xlarge`) accelerated, so that it can wait for capacity."""
    return re.match(r"ml\.(p|g|trn)[0-9]", ml_type) is not None


def _check(job: JobSpec, site: TrainingSite, jobs: Mapping[str, JobSpec]) -> None:
    """Nothing, or UserError for what SageMaker does not do, or does not do together."""
    is_spot, types = job.purchase == "spot", (site.instance, *site.others)
    assert len({one.num_accelerators for one in types}) == 1, "each type has as many GPUs"
    without_efa = [one.name for one in types if not one.num_efa_interfaces]
    refused = (
        (
            job.purchase == "capacity-block",
            "SageMaker takes no capacity block of EC2's",
            "give --training-plan ARN, which is SageMaker's own, or --backend ec2",
        ),
        (
            is_spot and bool(site.others),
            "SageMaker does not choose among several instance types for spot",
            "name one --instance, or leave --purchase spot out",
        ),
        (
            len(types) > MAX_TYPES,
            f"SageMaker chooses among {MAX_TYPES} instance types at most, not {len(types)}",
            "name fewer with --instance",
        ),
        (
            is_spot and bool(site.keep_alive_minutes),
            "SageMaker keeps no spot machines for the next job",
            "leave --keep-alive or --purchase spot out",
        ),
        (
            is_spot and bool(site.training_plan),
            "a training plan has machines of its own, which are not spot",
            "leave --purchase spot or --training-plan out",
        ),
        (
            bool(site.others) and bool(site.training_plan),
            "a training plan is for one instance type",
            "name it alone with --instance",
        ),
        (
            job.max_price_usd is not None,
            "SageMaker's spot has no limit for its price: it costs a part of the on-demand price",
            "leave --max-price out",
        ),
        (
            job.num_nodes > 1 and bool(without_efa) and not job.allow_tcp,
            f"{', '.join(without_efa)} has no EFA, which several nodes need",
            "choose a larger instance type, or give --allow-tcp",
        ),
        (
            len(jobs) > MAX_RUNS,
            f"{len(jobs)} runs in one job, and SageMaker takes {MAX_RUNS}",
            "submit fewer recipes or repeats at a time",
        ),
    )
    for holds, message, hint in refused:
        if holds:
            raise UserError(message, hint)


def _program(site: TrainingSite) -> dict[str, list[str]]:
    """What is run instead of the image's own entrypoint, which would be AWS's toolkit."""
    script = [_RUN] if site.code is None else ["-c", _UNPACK, "fastlaunch", site.code.sha256]
    return {"ContainerEntrypoint": ["/bin/bash"], "ContainerArguments": script}


def _hyperparameters(jobs: Mapping[str, JobSpec]) -> dict[str, str]:
    """`run-001`: run id and arguments of the entrypoint, in order; the container adds where it writes."""
    values = {
        f"run-{number:03d}": f"{run_id} {shlex.join(entrypoint_arguments(job))}"
        for number, (run_id, job) in enumerate(jobs.items(), 1)
    }
    for value in values.values():
        if len(value) > MAX_VALUE:
            raise UserError(
                f"the options of a run have {len(value):,} characters, and SageMaker takes {MAX_VALUE:,}",
                "submit it with fewer --set",
            )
    return values


def _environment(job: JobSpec, site: TrainingSite, token: str, attempt: int) -> dict[str, str]:
    environment = {
        "FASTLAUNCH_TOKEN": token,
        "FASTLAUNCH_ATTEMPT": str(attempt),
        "FASTLAUNCH_IMAGE_DIGEST": site.image.rpartition("@")[2],
        "FASTLAUNCH_NPROC": str(job.num_gpus // job.num_nodes),
        "FASTLAUNCH_STOP_GRACE_S": str(_STOP_GRACE_S),
        "FASTLAUNCH_PRINT_METRICS": "1",
    }
    if site.code and site.code.commit:
        environment["FASTLAUNCH_COMMIT"] = site.code.commit
    if job.num_nodes > 1:
        environment["FASTLAUNCH_FABRIC"] = "any" if job.allow_tcp else "efa"
    return environment


def _code_channel(site: TrainingSite) -> dict[str, Any]:
    if site.code is None:
        return {}
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"s3://{site.bucket}/{site.code.key}",
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"InputDataConfig": [{"ChannelName": "code", "DataSource": {"S3DataSource": source}}]}


def _resources(job: JobSpec, site: TrainingSite) -> dict[str, Any]:
    names = [f"ml.{one.name}" for one in (site.instance, *site.others)]
    chosen: dict[str, Any] = (
        {"InstanceType": names[0]}
        if len(names) == 1
        else {"InstancePreferences": [{"InstanceType": name} for name in names]}
    )
    # Types with local NVMe have that, and no volume of this size.
    resources = {**chosen, "InstanceCount": job.num_nodes, "VolumeSizeInGB": site.volume_gib}
    if site.keep_alive_minutes:
        resources["KeepAlivePeriodInSeconds"] = site.keep_alive_minutes * 60
    if site.training_plan:
        resources["TrainingPlanArn"] = site.training_plan
    return resources


def _stopping(job: JobSpec, site: TrainingSite, max_minutes: int) -> dict[str, int]:
    run_s = max_minutes * 60
    if job.purchase == "spot":
        return {"MaxRuntimeInSeconds": run_s, "MaxWaitTimeInSeconds": run_s + SPOT_WAIT_S}
    if any(is_accelerated(f"ml.{one.name}") for one in (site.instance, *site.others)):
        return {"MaxRuntimeInSeconds": run_s, "MaxPendingTimeInSeconds": MAX_PENDING_S}
    return {"MaxRuntimeInSeconds": run_s}


def _placeholders(request: Mapping[str, Any], site: TrainingSite, run_ids: Sequence[str]) -> tuple[str, ...]:
    """Names of what is not known yet, without the brackets, sorted: of the site's, and ids of runs."""
    given = [getattr(site, entry.name) for entry in fields(site)]
    given += [site.code.key, site.code.sha256] if site.code else []
    names = {name for text in given if isinstance(text, str) for name in re.findall(r"<([a-z0-9-]+)>", text)}
    names |= {run_id[1:-1] for run_id in run_ids if run_id.startswith("<")}
    return placeholders_in(request, names)
