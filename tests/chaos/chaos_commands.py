"""The command line as a trial runs it: the real one, over AWS on loopback and a clock that runs fast."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Protocol

import ec2_builders
import sagemaker_builders
from moto_gaps import machine_image_id

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.backends.site import CapacityBlock, Queue, Site
from fastlaunch.cli.main import run
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import Options
from fastlaunch.lifecycle.world import World

#: Machine time of a trial's submission.
MAX_MINUTES = 60
CPU = Machine(devices=(), num_cores=2, modules=frozenset())


class Clock(Protocol):
    """The three things that a command asks of time."""

    def sleep(self, seconds: float) -> None: ...
    def now(self) -> datetime: ...
    def monotonic_s(self) -> float: ...


def fastlaunch(argv: Sequence[str], clock: Clock) -> int:
    """Exit code of `fastlaunch ARGV` in this process."""
    settings, aws = load_settings(), Aws(connect=connect, sleep=clock.sleep)
    how: Any = {"aws": aws, "home": settings.home, "sleep": clock.sleep, "now": clock.now}
    context = World(
        settings=settings,
        find_machine=lambda: CPU,
        backends={"ec2": Ec2Backend(**how), "sagemaker": SageMakerBackend(**how)},
        argv=tuple(argv),
        monotonic_s=clock.monotonic_s,
        sleep=clock.sleep,
        connect=lambda: aws,
        now=clock.now,
    )
    if argv[0] == "start":
        return start(context, argv[1:])
    return run(list(argv), context)


def start(context: World, words: Sequence[str]) -> int:
    """Exit code of a submission of two runs that has been resolved to places.

    words: options (`--nodes=N`, `--detach`, `--spot`) and places, in the order to try: `TYPE/REGION/ZONE`,
    also with a capacity block, `TYPE/REGION/ZONE/cr-...`, and in how many seconds it begins,
    `TYPE/REGION/ZONE/cr-.../SECONDS`; `ml.TYPE/REGION`, or `ml.TYPE/REGION/QUEUE`.
    As `submit` does once it has looked everything up, for which no trial needs to ask AWS again and again.
    """
    from fastlaunch.core.errors import UserError
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.lifecycle.display import make_display
    from fastlaunch.lifecycle.launcher import Launcher, Submission
    from fastlaunch.lifecycle.world import StopRequest

    num_nodes = max((int(word.partition("=")[2]) for word in words if word.startswith("--nodes=")), default=1)
    submission = Submission(
        placements=tuple(_place(name, context) for name in words if not name.startswith("--")),
        jobs_at=lambda place: _jobs_at(place, num_nodes, is_spot="--spot" in words),
        options=Options(max_minutes=MAX_MINUTES, detach="--detach" in words),
    )
    with open_ledger(context.settings) as ledger, StopRequest() as stop:
        launcher = Launcher(
            backends=context.cloud_backends,
            ledger=ledger,
            settings=context.settings,
            display=make_display(sys.stderr, context.monotonic_s),
            stop=stop,
        )
        try:
            launcher.submit(submission, command="fastlaunch submit")
        except UserError as error:
            print(f"error: {error.message}", file=sys.stderr)
            return error.exit_code
    return 0


def _place(name: str, context: World) -> Site:
    instance, region, *rest = name.split("/")
    own = context.settings.aws[region]
    assert own.bucket and own.instance_profile
    if instance.startswith("ml."):
        queue = Queue(name=rest[0]) if rest else None
        return sagemaker_builders.training_site(
            instance.removeprefix("ml."), region=region, bucket=own.bucket, role=own.role, queue=queue
        )
    changes: dict[str, Any] = {
        "region": region,
        "zone": rest[0],
        "subnets": (own.subnets[rest[0]],),
        "security_groups": own.security_groups,
        "role": own.instance_profile,
        "bucket": own.bucket,
        "ami": machine_image_id(region),
    }
    if len(rest) == 1:
        return ec2_builders.site(instance, **changes)
    # In the account it ends a few hours later than here.
    ends_at = (context.now() + timedelta(hours=20)).isoformat(timespec="seconds")
    block = CapacityBlock(reservation=rest[1], ends_at=ends_at, fee_usd=720.0, hours=24.0, num_instances=1)
    if len(rest) > 2:
        begins_at = context.now() + timedelta(seconds=float(rest[2]))
        block = replace(block, starts_at=begins_at.isoformat(timespec="seconds"))
    return ec2_builders.block_site(instance, block, **changes)


def _jobs_at(place: Site, num_nodes: int, *, is_spot: bool) -> tuple[Job, ...]:
    changes: dict[str, Any] = {
        "backend": place.backend,
        "instance": place.instance.name,
        "region": place.region,
        "max_minutes": MAX_MINUTES,
        "num_nodes": num_nodes,
        "num_gpus": 8 * num_nodes,
    }
    if is_spot:
        changes["purchase"] = "spot"
        if place.backend == "ec2":
            changes |= {"steps": 40, "checkpoint_every": 10}
    if place.block:
        changes |= {"purchase": "capacity-block", "reservation": place.block.reservation}
    return tuple(ec2_builders.job(recipe, **changes) for recipe in ("bf16", "fp32"))


def connect(service: str, region: str, endpoint: str | None = None) -> Any:
    """A client as `Aws` makes them, of a session that has read what botocore knows of the services."""
    from botocore.config import Config

    return _session().client(
        "service-quotas" if service == "servicequotas" else service,
        region_name=region,
        endpoint_url=endpoint or os.environ["AWS_ENDPOINT_URL"],
        aws_access_key_id=os.environ.get("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
        aws_secret_access_key="secret",
        config=Config(retries={"mode": "standard", "total_max_attempts": 1}),
    )


@cache
def _session() -> Any:
    import boto3

    return boto3.Session()


def warm_up() -> None:
    """Import and read what every command needs, so that its forks have it."""

    ec2_builders.catalogue()
    for service in ("batch", "ec2", "s3", "sagemaker", "scheduler"):
        connect(service, "us-east-1", "http://127.0.0.1:1")
