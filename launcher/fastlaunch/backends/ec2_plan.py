"""An attempt on EC2 as one RunInstances request: one node that does its runs one after another. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastlaunch.backends import Plan
from fastlaunch.backends.ec2_site import Site
from fastlaunch.backends.entrypoint_arguments import entrypoint_arguments
from fastlaunch.backends.user_data import NodeProgram, NodeRun, render_user_data
from fastlaunch.cost_ceiling import max_cost_usd
from fastlaunch.errors import UserError
from fastlaunch.hardware import InstanceType
from fastlaunch.job import JobSpec

#: Size of the root volume, unless the AMI's own is larger: an image of 20 GB, unpacked, twice, and the AMI.
ROOT_GIB = 200
#: An image of 20 GB is unpacked at what the volume can write; gp3's default of 125 MiB/s takes minutes.
#: Up to 750 MiB/s go with gp3's default of 3,000 operations per second.
_ROOT_MIB_PER_S = 500
#: How long a rank may take to end after SIGTERM, within the 100 s that the node gives the container.
_STOP_GRACE_S = 90
#: GPUs that EC2 joins by NVSwitch wherever there are eight of them: p4d, p4de, p5.48xlarge, p5e, p5en,
#: p6-b200 and p6-b300, but not p5.4xlarge. CUDA answers with error 802 until their fabric manager is up.
_NVSWITCH_GPUS = ("A100 40GB", "A100 80GB", "H100", "H200", "B200", "B300")
_ECR_HOST = re.compile(r"[0-9]{12}\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.[a-z0-9.-]+")


def plan_ec2(
    jobs: Mapping[str, JobSpec],
    *,
    attempt: int,
    site: Site,
    max_minutes: int,
    render: Callable[[NodeProgram], str] = render_user_data,
) -> Plan:
    """The request that carries out `jobs`, by run id, on `site`, as its attempt number `attempt`, from 1.

    All jobs share instance type, number of nodes and purchase option. max_minutes: what this attempt may
    take. render: what makes user data of the node's program; it stays raw, boto3 encodes it. Raises UserError
    for what cannot be asked of EC2 (yet).
    """
    first, job = next(iter(jobs.items()))
    assert len({(one.instance, one.num_nodes, one.purchase) for one in jobs.values()}) == 1
    if job.purchase == "capacity-block":
        raise UserError(
            "buying a capacity block comes with the next release",
            "choose --purchase on-demand or --purchase spot",
        )
    if job.num_nodes > 1:
        raise UserError("training on several nodes comes with the next release", "ask for one node")
    token = f"{first}-a{attempt}"
    output = output_uri(site, first, attempt)
    program = _program(jobs, token=token, attempt=attempt, site=site, output=output, max_minutes=max_minutes)
    tags = {
        "Name": f"fastlaunch {first}",
        "fastlaunch:run": first,
        "fastlaunch:attempt": str(attempt),
        "fastlaunch:max-minutes": str(max_minutes),
        "fastlaunch:output": output,
    }
    request: dict[str, Any] = {
        "ImageId": site.ami,
        "InstanceType": site.instance.name,
        "MinCount": job.num_nodes,
        "MaxCount": job.num_nodes,
        "ClientToken": token,
        **_network(site),
        "IamInstanceProfile": _profile(site.instance_profile),
        "InstanceInitiatedShutdownBehavior": "terminate",
        **_market(job, site),
        # Hop limit 1: the container, a network hop away, gets no credentials.
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "disabled",
        },
        "BlockDeviceMappings": [
            {
                "DeviceName": site.root_device,
                "Ebs": {
                    "VolumeType": "gp3",
                    "VolumeSize": site.root_gib,
                    "Throughput": _ROOT_MIB_PER_S,
                    "Encrypted": True,
                    "DeleteOnTermination": True,
                },
            }
        ],
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
            for kind in ("instance", "volume")
        ],
        "UserData": render(program),
    }
    return Plan(
        backend="ec2",
        operation="RunInstances",
        request=request,
        placeholders=_placeholders(request, site, jobs),
        max_cost_usd=max_cost_usd(
            num_nodes=job.num_nodes, max_minutes=max_minutes, usd_per_hour=site.usd_per_hour
        ),
        usd_per_hour=site.usd_per_hour,
        price_as_of=site.price_as_of,
        region=site.region,
    )


def has_nvswitch(instance: InstanceType) -> bool:
    """Whether its GPUs are joined by NVSwitch, and wait for a fabric manager."""
    return instance.accelerator in _NVSWITCH_GPUS and instance.num_accelerators == 8


def runs_uri(site: Site) -> str:
    """`s3://bucket/prefix/runs`: what all runs of the site's region write lies under it."""
    return "s3://" + "/".join(filter(None, (site.bucket, site.prefix, "runs")))


def output_uri(site: Site, first_run_id: str, attempt: int) -> str:
    """Where an attempt writes, by the first of its runs."""
    return f"{runs_uri(site)}/{first_run_id}/attempt-{attempt}"


def _program(
    jobs: Mapping[str, JobSpec], *, token: str, attempt: int, site: Site, output: str, max_minutes: int
) -> NodeProgram:
    job = next(iter(jobs.values()))
    host, digest = site.image.partition("/")[0], site.image.rpartition("@")[2]
    registry = _ECR_HOST.fullmatch(host)
    environment = {
        "FASTLAUNCH_ATTEMPT": str(attempt),
        "FASTLAUNCH_INSTANCE": site.instance.name,
        "FASTLAUNCH_IMAGE_DIGEST": digest,
        "FASTLAUNCH_NPROC": str(job.num_gpus // job.num_nodes),
        "FASTLAUNCH_STOP_GRACE_S": str(_STOP_GRACE_S),
    }
    if site.code and site.code.commit:
        environment["FASTLAUNCH_COMMIT"] = site.code.commit
    return NodeProgram(
        token=token,
        attempt=attempt,
        region=site.region,
        output=output,
        runs_uri=runs_uri(site),
        code_uri=f"s3://{site.bucket}/{site.code.key}" if site.code else None,
        code_sha256=site.code.sha256 if site.code else None,
        image=site.image,
        image_region=registry[1] if registry else site.region,
        max_minutes=max_minutes,
        num_gpus=site.instance.num_accelerators,
        has_instance_store=site.instance.local_nvme_gb > 0,
        has_nvswitch=has_nvswitch(site.instance),
        is_spot=job.purchase == "spot",
        # The node itself tells every container its run's id.
        runs=tuple(
            NodeRun(run_id=run_id, arguments=entrypoint_arguments(one), environment={})
            for run_id, one in jobs.items()
        ),
        environment=environment,
    )


def _network(site: Site) -> dict[str, Any]:
    """Subnet and groups at the top: one node needs no EFA, and with one interface a subnet may give it a
    public address.
    """
    network: dict[str, Any] = {}
    if site.subnet:
        network["SubnetId"] = site.subnet
    elif site.zone:
        network["Placement"] = {"AvailabilityZone": site.zone}
    if site.security_groups:
        network["SecurityGroupIds"] = list(site.security_groups)
    return network


def _profile(name: str) -> dict[str, str]:
    return {"Arn": name} if name.startswith("arn:") else {"Name": name}


def _market(job: JobSpec, site: Site) -> dict[str, Any]:
    if job.purchase != "spot":
        return {}
    # One-time: a persistent request would start another machine by itself.
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if site.max_price_usd is not None:
        options["MaxPrice"] = _decimal(site.max_price_usd)
    return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}


def _decimal(usd: float) -> str:
    """`25.5`, in the plain digits that EC2 reads, never rounded up."""
    return f"{int(usd * 1e6 + 1e-6) / 1e6:.6f}".rstrip("0").rstrip(".")


def _placeholders(request: Mapping[str, Any], site: Site, jobs: Mapping[str, JobSpec]) -> tuple[str, ...]:
    run_ids = [run_id[1:-1] for run_id in jobs if run_id.startswith("<")]
    texts = list(_texts(request))
    return tuple(
        sorted(name for name in {*site.placeholders, *run_ids} if any(f"<{name}>" in text for text in texts))
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)
