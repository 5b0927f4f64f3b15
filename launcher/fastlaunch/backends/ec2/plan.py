"""Plan an attempt on EC2: one RunInstances request, whose nodes do the runs together, in order. Pure.

User data is the bootstrap of a node, which fetches and starts the node agent.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fastlaunch.backends.node_agent import Attempt
from fastlaunch.backends.site import Site
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.plan import Plan, PlanObject
from fastlaunch.jobs.job import Job
from fastlaunch_train.node.protocol import attempt_uri

if TYPE_CHECKING:
    from jinja2 import Template

#: Size of the root volume, unless the AMI's own is larger: an image of 20 GB, unpacked, twice, and the AMI.
ROOT_GIB = 200
#: An image of 20 GB is unpacked at what the volume can write; gp3's default of 125 MiB/s takes minutes.
#: Up to 750 MiB/s go with gp3's default of 3,000 operations per second.
ROOT_MIB_PER_S = 500
_ECR_HOST = re.compile(r"[0-9]{12}\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.[a-z0-9.-]+")


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """What a node is told by its user data; the rest stands in the list of runs."""

    token: str
    region: str
    #: After which the machine turns itself off, whatever happens.
    max_minutes: int
    #: Where the attempt writes: `s3://...`.
    output: str
    #: URI and SHA-256 of the node agent, and of the list of runs.
    agent: str
    agent_sha256: str
    run_list: str
    run_list_sha256: str


def render_user_data(bootstrap: Bootstrap) -> str:
    """Return the shell script that does what `bootstrap` says."""
    return _template().render(**vars(bootstrap))


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fastlaunch.backends.ec2")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    return environment.get_template("bootstrap.sh.j2")


def plan_ec2(
    jobs: Mapping[str, Job],
    *,
    attempt: int,
    site: Site,
    max_minutes: int,
    render: Callable[[Bootstrap], str] = render_user_data,
    agent: str | None = None,
) -> Plan:
    """Return the request that carries out `jobs`, by run id, as attempt number `attempt`, from 1.

    max_minutes: what this attempt may take; a capacity block may end sooner, which only the node can tell.
    render: makes the user data, which boto3 encodes. agent: SHA-256 of another node agent than this one's.
    """
    first, job = next(iter(jobs.items()))
    assert len({(spec.instance, spec.num_nodes, spec.terms.purchase) for spec in jobs.values()}) == 1
    output = attempt_uri(site.runs_uri, first, attempt)
    planned = Attempt(
        jobs=jobs, number=attempt, site=site, max_minutes=max_minutes, output=output, agent_sha256=agent
    )
    token, run_list = planned.token, _run_list(planned)
    bootstrap = Bootstrap(
        token=token,
        region=site.region,
        max_minutes=max_minutes,
        output=output,
        agent=planned.agent.uri,
        agent_sha256=planned.agent.sha256,
        run_list=run_list.uri,
        run_list_sha256=run_list.sha256,
    )
    tags = planned.tags(Name=f"fastlaunch {first}")
    request: dict[str, Any] = {
        "ImageId": site.ami,
        "InstanceType": site.instance.name,
        "MinCount": job.num_nodes,
        "MaxCount": job.num_nodes,
        "ClientToken": token,
        **_network(job, site),
        "IamInstanceProfile": {"Arn" if site.role.startswith("arn:") else "Name": site.role},
        "InstanceInitiatedShutdownBehavior": "terminate",
        **_market(job, site),
        # Hop limit 1: the container, a network hop away, gets no credentials. Several nodes' containers are
        # on the host's network, and reach the role at the same limit.
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
                    "VolumeSize": site.volume_gib,
                    "Throughput": ROOT_MIB_PER_S,
                    "Encrypted": True,
                    **({"KmsKeyId": site.volume_kms_key} if site.volume_kms_key else {}),
                    "DeleteOnTermination": True,
                },
            }
        ],
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume", "network-interface")
        ],
        "UserData": render(bootstrap),
    }
    return planned.plan("RunInstances", request, run_list)


def _run_list(attempt: Attempt) -> PlanObject:
    job, site = attempt.job, attempt.site
    registry = _ECR_HOST.fullmatch(site.image.partition("/")[0])
    environment = {"FASTLAUNCH_INSTANCE": site.instance.name, **attempt.environment()}
    if job.num_nodes > 1:
        environment["FASTLAUNCH_NUM_NODES"] = str(job.num_nodes)
    is_in_block, needed = job.terms.purchase == "capacity-block", site.requirements
    return attempt.run_list(
        environment=environment,
        region=site.region,
        output=attempt.output,
        runs_uri=site.runs_uri,
        code_uri=f"s3://{site.bucket}/{site.code.key}" if site.code else None,
        code_sha256=site.code.sha256 if site.code else None,
        image=site.image,
        image_region=registry[1] if registry else site.region,
        max_minutes=attempt.max_minutes,
        has_instance_store=site.instance.local_nvme_gb > 0,
        is_spot=job.terms.purchase == "spot",
        num_nodes=job.num_nodes,
        needs_efa=job.num_nodes > 1 and not job.allow_tcp,
        block_ends_at=site.block.ends_at if is_in_block and site.block else None,
        requirements_uri=f"s3://{site.bucket}/{needed.key}" if needed else None,
    )


def _network(job: Job, site: Site) -> dict[str, Any]:
    """Return the nodes' network. A single node needs no EFA, and its subnet may give it a public address."""
    network: dict[str, Any] = {}
    place = {}
    if job.num_nodes > 1:
        network["NetworkInterfaces"] = interfaces_of(
            site.instance, subnet=site.subnet, groups=site.security_groups
        )
        # A capacity block places its instances itself.
        if site.placement_group and job.terms.purchase != "capacity-block":
            place["GroupName"] = site.placement_group
    else:
        if site.subnet:
            network["SubnetId"] = site.subnet
        if site.security_groups:
            network["SecurityGroupIds"] = list(site.security_groups)
    if site.zone and not site.subnet:
        place["AvailabilityZone"] = site.zone
    if place:
        network["Placement"] = place
    return network


def _market(job: Job, site: Site) -> dict[str, Any]:
    if job.terms.purchase == "capacity-block":
        assert site.block is not None
        target = {"CapacityReservationId": site.block.reservation}
        return {
            "InstanceMarketOptions": {"MarketType": "capacity-block"},
            "CapacityReservationSpecification": {"CapacityReservationTarget": target},
        }
    if job.terms.purchase != "spot":
        return {}
    # One-time: a persistent request would start another machine by itself.
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if site.max_price_usd is not None:
        options["MaxPrice"] = _decimal(site.max_price_usd)
    return {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": options}}


def _decimal(usd: float) -> str:
    """Return `25.5`, in the plain digits that EC2 reads, never rounded up."""
    return f"{int(usd * 1e6 + 1e-6) / 1e6:.6f}".rstrip("0").rstrip(".")


def interfaces_of(
    instance: InstanceType, *, subnet: str | None, groups: Sequence[str]
) -> list[dict[str, Any]]:
    """Return RunInstances' `NetworkInterfaces`: one plain interface, and one for each card with EFA.

    subnet, groups: those of all interfaces; EC2 chooses if they are None or empty. With several interfaces
    EC2 gives no public address and must not be asked for one.
    """
    # Where cards outnumber EFA interfaces, as on p6-b300, card 0 has none.
    first = 0 if instance.num_efa_interfaces >= instance.num_network_cards else 1
    cards = range(first, first + min(instance.num_efa_interfaces, instance.num_network_cards))
    places = [("interface", 0, 0), *(("efa-only", card, 1 if card == 0 else 0) for card in cards)]
    where: dict[str, Any] = {}
    if subnet:
        where["SubnetId"] = subnet
    if groups:
        where["Groups"] = list(groups)
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": device,
            "InterfaceType": kind,
            "DeleteOnTermination": True,
            **where,
        }
        for kind, card, device in places
    ]
