"""An attempt on EC2 as one RunInstances request: nodes that do their runs together, in order. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastlaunch.backends.ec2.user_data import Bootstrap, render_user_data
from fastlaunch.backends.node_agent import agent_object, agent_sha256, run_list_object
from fastlaunch.backends.placements import CapacityBlock, Ec2Placement
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.rates import max_cost_usd
from fastlaunch.core.conventions import ATTEMPT_TAG, MAX_MINUTES_TAG, OUTPUT_TAG, RUN_TAG
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Plan, placeholders_in
from fastlaunch.jobs.spec import JobSpec, entrypoint_arguments
from fastlaunch_train.node.protocol import NodeProgram, NodeRun

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
    site: Ec2Placement,
    max_minutes: int,
    render: Callable[[Bootstrap], str] = render_user_data,
    agent: str | None = None,
) -> Plan:
    """The request that carries out `jobs`, by run id, on `site`, as its attempt number `attempt`, from 1.

    All jobs share instance type, number of nodes and purchase option. max_minutes: what this attempt may
    take; a capacity block may end sooner, which only the node can tell. render: what makes user data of the
    node's bootstrap; it stays raw, boto3 encodes it. agent: SHA-256 of another node agent than this one's.
    Raises UserError for what EC2 would refuse or start in
    vain: several nodes that cannot reach each other or the bucket, a block that is not this site's.
    """
    first, job = next(iter(jobs.items()))
    assert len({(one.instance, one.num_nodes, one.terms.purchase) for one in jobs.values()}) == 1
    _check_place(job, site)
    block = _block(job, site)
    token = f"{first}-a{attempt}"
    output = output_uri(site, first, attempt)
    program = _program(jobs, token=token, attempt=attempt, site=site, output=output, max_minutes=max_minutes)
    stored = agent_object(site.bucket, site.prefix, agent or agent_sha256())
    run_list = run_list_object(program, output, _names(site, jobs))
    bootstrap = Bootstrap(
        token=token,
        region=site.region,
        max_minutes=max_minutes,
        output=output,
        agent=stored.uri,
        agent_sha256=stored.sha256,
        run_list=run_list.uri,
        run_list_sha256=run_list.sha256,
    )
    tags = {
        "Name": f"fastlaunch {first}",
        RUN_TAG: first,
        ATTEMPT_TAG: str(attempt),
        MAX_MINUTES_TAG: str(max_minutes),
        OUTPUT_TAG: output,
    }
    request: dict[str, Any] = {
        "ImageId": site.ami,
        "InstanceType": site.instance.name,
        "MinCount": job.num_nodes,
        "MaxCount": job.num_nodes,
        "ClientToken": token,
        **_network(job, site),
        "IamInstanceProfile": _profile(site.instance_profile),
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
        "UserData": render(bootstrap),
    }
    return Plan(
        backend="ec2",
        operation="RunInstances",
        request=request,
        placeholders=placeholders_in(request, run_list, _names(site, jobs)),
        max_cost_usd=_max_cost_usd(job, site, max_minutes),
        usd_per_hour=site.usd_per_hour,
        price_as_of=site.price_as_of,
        region=site.region,
        sunk_usd=block.fee_usd if block else None,
        objects=(stored, run_list),
    )


def has_nvswitch(instance: InstanceType) -> bool:
    """Whether its GPUs are joined by NVSwitch, and wait for a fabric manager."""
    return instance.accelerator in _NVSWITCH_GPUS and instance.num_accelerators == 8


def runs_uri(site: Ec2Placement) -> str:
    """`s3://bucket/prefix/runs`: what all runs of the site's region write lies under it."""
    return "s3://" + "/".join(filter(None, (site.bucket, site.prefix, "runs")))


def output_uri(site: Ec2Placement, first_run_id: str, attempt: int) -> str:
    """Where an attempt writes, by the first of its runs."""
    return f"{runs_uri(site)}/{first_run_id}/attempt-{attempt}"


def _program(
    jobs: Mapping[str, JobSpec],
    *,
    token: str,
    attempt: int,
    site: Ec2Placement,
    output: str,
    max_minutes: int,
) -> NodeProgram:
    job = next(iter(jobs.values()))
    block = _block(job, site)
    host, digest = site.image.partition("/")[0], site.image.rpartition("@")[2]
    registry = _ECR_HOST.fullmatch(host)
    environment = {
        "FASTLAUNCH_ATTEMPT": str(attempt),
        "FASTLAUNCH_INSTANCE": site.instance.name,
        "FASTLAUNCH_IMAGE_DIGEST": digest,
        "FASTLAUNCH_NPROC": str(job.num_gpus // job.num_nodes),
        "FASTLAUNCH_STOP_GRACE_S": str(_STOP_GRACE_S),
    }
    if job.num_nodes > 1:
        environment["FASTLAUNCH_NUM_NODES"] = str(job.num_nodes)
        environment["FASTLAUNCH_FABRIC"] = "any" if job.allow_tcp else "efa"
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
        is_spot=job.terms.purchase == "spot",
        num_nodes=job.num_nodes,
        needs_efa=job.num_nodes > 1 and not job.allow_tcp,
        block_ends_at=block.ends_at if block else None,
        # The node itself tells every container its run's id.
        runs=tuple(
            NodeRun(run_id=run_id, arguments=entrypoint_arguments(one), environment=_ranks_of(one, job))
            for run_id, one in jobs.items()
        ),
        environment=environment,
    )


def _ranks_of(job: JobSpec, usual: JobSpec) -> dict[str, str]:
    """What a run's container is told of its number of ranks, where that is not the usual one."""
    if job.num_gpus == usual.num_gpus:
        return {}
    return {"FASTLAUNCH_NPROC": str(job.num_gpus // job.num_nodes)}


def _block(job: JobSpec, site: Ec2Placement) -> CapacityBlock | None:
    """The capacity block that the job runs in, if it does."""
    return site.block if job.terms.purchase == "capacity-block" else None


def _max_cost_usd(job: JobSpec, site: Ec2Placement, max_minutes: int) -> float:
    """The most that the attempt costs; of a capacity block, no more than was paid for all of it."""
    usd = max_cost_usd(num_nodes=job.num_nodes, max_minutes=max_minutes, usd_per_hour=site.usd_per_hour)
    block = _block(job, site)
    return min(usd, block.fee_usd) if block else usd


def _check_place(job: JobSpec, site: Ec2Placement) -> None:
    """Nothing, if the site can carry the job's nodes; else UserError."""
    if job.terms.purchase == "capacity-block":
        if site.block is None:
            raise UserError(
                f"no capacity block is named at {site.name}",
                "give the one that was bought: --reservation cr-...",
            )
        if job.num_nodes > site.block.num_instances:
            raise UserError(
                f"{site.block.reservation} holds {site.block.num_instances} {site.instance.name}, "
                f"and {job.num_nodes} are asked for",
                f"give --num-nodes {site.block.num_instances}, or another --reservation",
            )
    if job.num_nodes == 1:
        return
    if not has_efa(site.instance) and not job.allow_tcp:
        raise UserError(
            f"{site.instance.name} has no EFA for {job.num_nodes} nodes to train over",
            "choose an instance type that has, or accept slower steps with --allow-tcp",
        )
    # Of the default subnets every one relies on public addresses, which several interfaces do not get, and
    # the default group lets nodes that speak EFA not reach each other.
    if has_efa(site.instance) and not (site.subnet and site.security_groups):
        lacks = "subnet" if not site.subnet else "security group"
        raise UserError(
            f"nodes with EFA have no public address, and {site.name} has no {lacks} of its own for them",
            "set `subnets` (private, with NAT or endpoints) and `security_groups` (all traffic to and from "
            "itself) in the config file: see `fastlaunch iam print --cloudformation`",
        )


def _network(job: JobSpec, site: Ec2Placement) -> dict[str, Any]:
    """Where the nodes are. One alone needs no EFA, and a subnet may give its interface a public address."""
    network: dict[str, Any] = {}
    placement = {}
    if job.num_nodes > 1:
        network["NetworkInterfaces"] = interfaces_of(
            site.instance, subnet=site.subnet, groups=site.security_groups
        )
        # A capacity block places its instances itself.
        if site.placement_group and job.terms.purchase != "capacity-block":
            placement["GroupName"] = site.placement_group
    else:
        if site.subnet:
            network["SubnetId"] = site.subnet
        if site.security_groups:
            network["SecurityGroupIds"] = list(site.security_groups)
    if site.zone and not site.subnet:
        placement["AvailabilityZone"] = site.zone
    if placement:
        network["Placement"] = placement
    return network


def _profile(name: str) -> dict[str, str]:
    return {"Arn": name} if name.startswith("arn:") else {"Name": name}


def _market(job: JobSpec, site: Ec2Placement) -> dict[str, Any]:
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
    """`25.5`, in the plain digits that EC2 reads, never rounded up."""
    return f"{int(usd * 1e6 + 1e-6) / 1e6:.6f}".rstrip("0").rstrip(".")


def _names(site: Ec2Placement, jobs: Mapping[str, JobSpec]) -> set[str]:
    """Names of what is not known yet, without the brackets."""
    known = list(jobs) if site.block is None else [*jobs, site.block.reservation, site.block.ends_at]
    return {*site.placeholders, *(text[1:-1] for text in known if text.startswith("<"))}


def has_efa(instance: InstanceType) -> bool:
    """Whether nodes of this type can speak EFA to each other."""
    return instance.num_efa_interfaces > 0


def first_efa_card(instance: InstanceType) -> int:
    """The lowest card with EFA: 1 where cards outnumber EFA interfaces, as p6-b300's card 0 has none."""
    return 0 if instance.num_efa_interfaces >= instance.num_network_cards else 1


def interfaces_of(
    instance: InstanceType, *, subnet: str | None, groups: Sequence[str]
) -> list[dict[str, Any]]:
    """What `NetworkInterfaces` of RunInstances takes: one plain interface, and one for every card with EFA.

    subnet, groups: of all of them; left to EC2 where they are None or empty. With more than one interface
    EC2 gives no public address, and must not be asked for one.
    """
    efa = [(card, 1 if card == 0 else 0) for card in _efa_cards(instance)]
    places = [("interface", 0, 0), *(("efa-only", card, device) for card, device in efa)]
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


def _efa_cards(instance: InstanceType) -> range:
    first = first_efa_card(instance)
    return range(first, first + min(instance.num_efa_interfaces, instance.num_network_cards))
