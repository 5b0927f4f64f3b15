"""What trials submit, by kind, and the account in which they do so."""

from datetime import UTC, datetime, timedelta
from typing import Any

from moto_nodes import Block
from moto_server import MotoServer, backend
from sagemaker_builders import training_site

_MACHINES = (
    "p5.48xlarge/us-east-1/us-east-1a",
    "p5.48xlarge/us-east-1/us-east-1b",
    "p4d.24xlarge/us-west-2/us-west-2a",
)
#: Two types in one request, and another region.
_JOBS = ("ml.p5.48xlarge/us-east-1", "ml.p4d.24xlarge/us-west-2")
#: What is submitted, by kind. A detached one is left to itself, with a timer in the account.
SUBMISSIONS = {
    "machine": _MACHINES,
    "nodes": ("--nodes=2", *_MACHINES),
    "block": (
        "p5.48xlarge/us-east-1/us-east-1a/cr-0a1b2c3d4e5f60718",
        "p5.48xlarge/us-east-1/us-east-1b/cr-0a1b2c3d4e5f60719",
    ),
    "detached": ("--detach", *_MACHINES),
    "detached-nodes": ("--detach", "--nodes=2", *_MACHINES),
    "spot": ("--spot", *_MACHINES),
    "detached-spot": ("--detach", "--spot", *_MACHINES),
    # It begins in ten minutes, by schedules in the account.
    "detached-block": ("--detach", "p5.48xlarge/us-east-1/us-east-1a/cr-0a1b2c3d4e5f60718/600"),
    "job": _JOBS,
    # Through a queue of AWS Batch.
    "queued-job": ("ml.p5.48xlarge/us-east-1/team", "ml.p4d.24xlarge/us-west-2/team"),
    "spot-job": ("--spot", "ml.p5.48xlarge/us-east-1", "ml.p4d.24xlarge/us-west-2"),
}
REGIONS = ("us-east-1", "us-west-2")


def begins_s(kind: str) -> float:
    """In how many seconds the block of this kind begins; 0 for one that has begun, and for all else."""
    return 600.0 if kind == "detached-block" else 0.0


def launch_of(kind: str) -> str:
    """The request that starts what a submission of this kind asks for."""
    if begins_s(kind):
        return "CreateSchedule"
    if kind == "queued-job":
        return "SubmitServiceJob"
    return "CreateTrainingJob" if kind.endswith("job") else "RunInstances"


def num_nodes_of(kind: str) -> int:
    """How many machines one request of this kind starts."""
    return 2 if "--nodes=2" in SUBMISSIONS[kind] else 1


def saves(kind: str) -> bool:
    """Whether machines of this kind save checkpoints, for others to go on from."""
    return kind in ("spot", "detached-spot")


def furnish(server: MotoServer) -> dict[str, Any]:
    """The `aws` part of a config file for the server's account, in which all is there that a trial needs."""
    server.reset()
    config = {}
    for region in REGIONS:
        own = server.set_up_region(region)
        server.queues.add("team", region, num_instances=100)
        assert own.bucket and own.subnets
        config[region] = {
            "bucket": own.bucket,
            "instance_profile": own.instance_profile,
            "security_groups": list(own.security_groups),
            "subnets": dict(own.subnets),
            "role": server.training_jobs.role(),
            "scheduler_role": "arn:aws:iam::123456789012:role/fastlaunch-scheduler",
        }
        if code := training_site().code:
            backend("s3", "aws").put_object(own.bucket, code.key, b"code")
    for place in _MACHINES:
        instance, region, zone = place.split("/")
        server.spot_prices[region, instance, zone] = 20.0
    _add_blocks(server)
    return config


def _add_blocks(server: MotoServer) -> None:
    now = datetime.now(UTC)
    for place in SUBMISSIONS["block"]:
        instance, region, zone, id = place.split("/")
        server.blocks[id] = Block(
            id=id,
            region=region,
            zone=zone,
            instance_type=instance,
            num_instances=1,
            starts_at=now - timedelta(hours=2),
            ends_at=now + timedelta(hours=22),
        )
