"""Plan an attempt on SageMaker: one CreateTrainingJob request, whose job does the runs one after another.

With a queue the same request is the payload of one SubmitServiceJob request to AWS Batch.

Pure. All hosts of a job, and all attempts at the same runs, share one folder of checkpoints in S3; what one
attempt writes lies under its token there.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastlaunch.backends.node_agent import Attempt
from fastlaunch.backends.site import Queue, Site
from fastlaunch.core.ownership import make_token
from fastlaunch.core.plan import PAYLOAD, Plan, PlanObject
from fastlaunch.jobs.job import Job

#: Where the container finds what earlier attempts left, and from where SageMaker copies what it writes.
CHECKPOINTS = "/opt/ml/checkpoints"
#: How long an on-demand job may wait for machines, unbilled: the least that SageMaker takes.
MAX_PENDING_S = 1_800
#: How long a spot job may wait for machines, unbilled, at its start and after interruptions together.
SPOT_WAIT_S = 3_600
#: What Batch says of a job that ended by a fault of SageMaker's own.
SAGEMAKER_FAULT = "Received status from SageMaker: InternalServerError*"
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
    jobs: Mapping[str, Job],
    *,
    attempt: int,
    site: Site,
    max_minutes: int,
    root: str | None = None,
    agent: str | None = None,
) -> Plan:
    """Return the request that carries out `jobs`, by run id, as attempt number `attempt`, from 1.

    max_minutes: what this attempt may run, from when its machines are there. root: id of the run under which
    earlier attempts at these runs wrote, by default the first of them. agent: SHA-256 of another node agent
    than this one's.
    """
    first, job = next(iter(jobs.items()))
    kinds = {(spec.num_nodes, spec.num_gpus, spec.terms.purchase, spec.allow_tcp) for spec in jobs.values()}
    assert len(kinds) == 1
    checkpoints = f"{site.runs_uri}/{root or first}"
    planned = Attempt(
        jobs=jobs,
        number=attempt,
        site=site,
        max_minutes=max_minutes,
        output=f"{checkpoints}/{make_token(first, attempt)}",
        agent_sha256=agent,
        root=root,
    )
    token, run_list = planned.token, planned.run_list(environment={})
    request: dict[str, Any] = {
        "TrainingJobName": token,
        "AlgorithmSpecification": {
            "TrainingImage": site.image,
            "TrainingInputMode": "File",
            # Instead of the image's own entrypoint, which would be AWS's toolkit.
            "ContainerEntrypoint": ["/bin/bash"],
            "ContainerArguments": ["-c", _UNPACK, "fastlaunch", site.code.sha256] if site.code else [_RUN],
            "MetricDefinitions": [
                {"Name": name, "Regex": f"fastlaunch: .* {name}={_NUMBER}"} for name in _METRICS
            ],
        },
        "Environment": {
            **planned.environment(),
            "FASTLAUNCH_TOKEN": token,
            "FASTLAUNCH_PRINT_METRICS": "1",
            "FASTLAUNCH_AGENT_SHA256": planned.agent.sha256,
            "FASTLAUNCH_RUNS_SHA256": run_list.sha256,
        },
        "RoleArn": site.role,
        "InputDataConfig": _channels(site, agent=planned.agent, runs=run_list),
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
        "Tags": planned.tags(),
    }
    if site.queue is None:
        return planned.plan("CreateTrainingJob", request, run_list)
    return planned.plan("SubmitServiceJob", _queued(request, site.queue), run_list)


def _queued(request: Mapping[str, Any], queue: Queue) -> dict[str, Any]:
    """Return the request that puts a training job into the queue."""
    token = request["TrainingJobName"]
    retry: dict[str, Any] = {"attempts": queue.num_starts}
    if queue.retries:
        # The program would fail again, and what somebody stopped is to stay so. For want of capacity Batch
        # tries again by itself, and counts no attempt.
        retry["evaluateOnExit"] = [
            {"action": "RETRY", "onStatusReason": SAGEMAKER_FAULT},
            {"action": "EXIT", "onStatusReason": "*"},
        ]
    return {
        "jobName": token,
        "jobQueue": queue.name,
        "serviceJobType": "SAGEMAKER_TRAINING",
        PAYLOAD: json.dumps(request),
        "retryStrategy": retry,
        **({} if queue.priority is None else {"schedulingPriority": queue.priority}),
        **({} if queue.share is None else {"shareIdentifier": queue.share}),
        # No `timeoutConfig`: SageMaker keeps the time limit, from when the job has its machines.
        "tags": {tag["Key"]: tag["Value"] for tag in request["Tags"]},
        "clientToken": token,
    }


def _channels(site: Site, **objects: PlanObject) -> list[dict[str, Any]]:
    """Return what SageMaker brings to /opt/ml/input/data/<name>: `objects`, inputs, and the bundles."""
    uris = {name: stored.uri for name, stored in objects.items()} | dict(site.inputs)
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


def _resources(job: Job, site: Site) -> dict[str, Any]:
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
        network["VpcConfig"] = {"Subnets": list(site.subnets), "SecurityGroupIds": list(site.security_groups)}
    # A job on one node asks for it, too: rules of an account look for it in every request.
    if site.encrypts_traffic:
        network["EnableInterContainerTrafficEncryption"] = True
    return network


def _stopping(job: Job, site: Site, max_minutes: int) -> dict[str, int]:
    run_s = max_minutes * 60
    if job.terms.purchase == "spot":
        return {"MaxRuntimeInSeconds": run_s, "MaxWaitTimeInSeconds": run_s + SPOT_WAIT_S}
    # SageMaker takes a limit for the waiting of accelerated types alone.
    if re.match("(p|g|trn)[0-9]", site.instance.name):
        return {"MaxRuntimeInSeconds": run_s, "MaxPendingTimeInSeconds": MAX_PENDING_S}
    return {"MaxRuntimeInSeconds": run_s}
