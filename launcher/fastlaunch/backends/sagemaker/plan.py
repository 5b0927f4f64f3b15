"""An attempt on SageMaker as one CreateTrainingJob request: one job that does its runs one after another.

Pure. All hosts of a job, and all attempts at the same runs, share one folder of checkpoints in S3; what one
attempt writes lies under its token there.
"""

import re
from collections.abc import Mapping
from typing import Any

from fastlaunch.backends.node_agent import agent_object, agent_sha256, run_list_object
from fastlaunch.backends.site import Site
from fastlaunch.catalog.rates import max_cost_usd
from fastlaunch.core.ownership import ATTEMPT_TAG, MAX_MINUTES_TAG, OUTPUT_TAG, RUN_TAG
from fastlaunch.core.plan import Plan, PlanObject, placeholders_in
from fastlaunch.jobs.spec import JobSpec, node_arguments, run_environment
from fastlaunch_train.node.protocol import NodeProgram, NodeRun, input_environment

#: Where the container finds what earlier attempts left, and from where SageMaker copies what it writes.
CHECKPOINTS = "/opt/ml/checkpoints"
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
    site: Site,
    max_minutes: int,
    root: str | None = None,
    agent: str | None = None,
) -> Plan:
    """Return the request that carries out `jobs`, by run id, as attempt number `attempt`, from 1.

    All jobs share number of nodes, GPUs and purchase option. max_minutes: what this attempt may run, from
    when its machines are there. root: id of the run under which earlier attempts at these runs wrote, by
    default the first of them. agent: SHA-256 of another node agent than this one's.
    """
    first, job = next(iter(jobs.items()))
    kinds = {(each.num_nodes, each.num_gpus, each.terms.purchase, each.allow_tcp) for each in jobs.values()}
    assert len(kinds) == 1
    token = f"{first}-a{attempt}"
    checkpoints = f"{site.runs_uri}/{root or first}"
    output = f"{checkpoints}/{token}"
    unknown = site.unknown_names([*jobs, *([root] if root else [])])
    stored = agent_object(site.bucket, site.prefix, agent or agent_sha256())
    run_list = run_list_object(_node_program(jobs, token, attempt, site), output, unknown)
    tags = {
        **site.tags,
        RUN_TAG: first,
        ATTEMPT_TAG: str(attempt),
        MAX_MINUTES_TAG: str(max_minutes),
        OUTPUT_TAG: output,
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
        "Environment": {
            **_environment(job, site, token, attempt),
            "FASTLAUNCH_AGENT_SHA256": stored.sha256,
            "FASTLAUNCH_RUNS_SHA256": run_list.sha256,
        },
        "RoleArn": site.role,
        "InputDataConfig": _channels(site, agent=stored, runs=run_list),
        # SageMaker puts what the container leaves in /opt/ml/model and output here, in the end; not among
        # the checkpoints, all of which the next attempt has to fetch.
        "OutputDataConfig": {
            "S3OutputPath": f"{site.runs_uri}/sagemaker-output",
            **({"KmsKeyId": site.output_kms_key} if site.output_kms_key else {}),
        },
        "CheckpointConfig": {"S3Uri": checkpoints, "LocalPath": CHECKPOINTS},
        "ResourceConfig": _resources(job, site),
        "StoppingCondition": _stopping(job, site, max_minutes),
        # The container uploads nothing itself, but a workload of the user's may fetch its data.
        "EnableNetworkIsolation": False,
        **_network(site),
        **({"EnableManagedSpotTraining": True} if job.terms.purchase == "spot" else {}),
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }
    return Plan(
        backend="sagemaker",
        operation="CreateTrainingJob",
        request=request,
        placeholders=placeholders_in(request, run_list, unknown),
        max_cost_usd=max_cost_usd(
            num_nodes=job.num_nodes,
            max_minutes=max_minutes,
            usd_per_hour=site.usd_per_hour,
            volume_usd_per_hour=site.volume_usd_per_hour,
        ),
        usd_per_hour=site.usd_per_hour,
        price_as_of=site.price.as_of.isoformat() if site.price else None,
        region=site.region,
        objects=(stored, run_list),
    )


def is_accelerated(ml_type: str) -> bool:
    """Return whether SageMaker lets the type (`ml.p5.48xlarge`) wait for capacity, as accelerated ones."""
    return re.match(r"ml\.(p|g|trn)[0-9]", ml_type) is not None


def _program(site: Site) -> dict[str, list[str]]:
    """Return what is run instead of the image's own entrypoint, which would be AWS's toolkit."""
    script = [_RUN] if site.code is None else ["-c", _UNPACK, "fastlaunch", site.code.sha256]
    return {"ContainerEntrypoint": ["/bin/bash"], "ContainerArguments": script}


def _node_program(jobs: Mapping[str, JobSpec], token: str, attempt: int, site: Site) -> NodeProgram:
    runs = tuple(
        NodeRun(run_id=run_id, arguments=node_arguments(job), environment=run_environment(job))
        for run_id, job in jobs.items()
    )
    instance, needed = site.instance, site.requirements
    return NodeProgram(
        token=token,
        attempt=attempt,
        runs=runs,
        num_gpus=instance.num_accelerators,
        has_nvswitch=instance.has_nvswitch,
        environment={**site.variables, **input_environment(site.inputs)},
        secrets=site.secrets,
        inputs=site.inputs,
        requirements_sha256=needed.sha256 if needed else None,
    )


def _environment(job: JobSpec, site: Site, token: str, attempt: int) -> dict[str, str]:
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
        if not job.allow_tcp:
            floor = site.instance.all_reduce_floor_gb_per_s
            environment["FASTLAUNCH_ALL_REDUCE_FLOOR_GB_PER_S"] = f"{floor:g}"
    return environment


def _channels(site: Site, **objects: PlanObject) -> list[dict[str, Any]]:
    """Return what SageMaker brings to /opt/ml/input/data/<name>: `objects`, inputs, and the bundles."""
    uris = {name: one.uri for name, one in objects.items()} | dict(site.inputs)
    for name, bundle in (("code", site.code), ("requirements", site.requirements)):
        if bundle:
            uris[name] = f"s3://{site.bucket}/{bundle.key}"
    return [
        {
            "ChannelName": name,
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": uri,
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
        }
        for name, uri in sorted(uris.items())
    ]


def _resources(job: JobSpec, site: Site) -> dict[str, Any]:
    # Types with local NVMe have that, and no volume of this size.
    resources: dict[str, Any] = {
        "InstanceType": f"ml.{site.instance.name}",
        "InstanceCount": job.num_nodes,
        "VolumeSizeInGB": site.volume_gib,
    }
    # Local disks are encrypted by the machine itself, and SageMaker refuses a key for them.
    if site.volume_kms_key and not site.instance.local_nvme_gb:
        resources["VolumeKmsKeyId"] = site.volume_kms_key
    if site.training_plan:
        resources["TrainingPlanArn"] = site.training_plan
    return resources


def _network(site: Site) -> dict[str, Any]:
    network: dict[str, Any] = {}
    if site.subnets:
        network["VpcConfig"] = {
            "Subnets": list(site.subnets),
            "SecurityGroupIds": list(site.security_groups),
        }
    # Also of one node: rules of an account look for it in every request.
    if site.encrypts_traffic:
        network["EnableInterContainerTrafficEncryption"] = True
    return network


def _stopping(job: JobSpec, site: Site, max_minutes: int) -> dict[str, int]:
    run_s = max_minutes * 60
    if job.terms.purchase == "spot":
        return {"MaxRuntimeInSeconds": run_s, "MaxWaitTimeInSeconds": run_s + SPOT_WAIT_S}
    if is_accelerated(f"ml.{site.instance.name}"):
        return {"MaxRuntimeInSeconds": run_s, "MaxPendingTimeInSeconds": MAX_PENDING_S}
    return {"MaxRuntimeInSeconds": run_s}
