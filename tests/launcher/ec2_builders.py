"""Sites and jobs on EC2 for tests, with the shipped instance types."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from functools import cache
from typing import Any

from fastlaunch.backends.ec2.plan import Bootstrap, plan_ec2
from fastlaunch.backends.site import CapacityBlock, Site
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.plan import CodeBundle, Plan
from fastlaunch.jobs.job import Job, Script, Terms
from fastlaunch.jobs.scripts import script_spec
from fastlaunch.placement.capacity_block import block_price
from fastlaunch_train.node.protocol import program_from_json
from fastlaunch_train.recipes.recipes import resolve_recipe

RUN_ID = "20261121-090312-k3f9"
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4

#: What a script needs besides its code.
NEEDS: dict[str, Any] = {
    "variables": {"HF_HUB_OFFLINE": "1"},
    "inputs": {"images": "s3://acme-data/imagenet/", "val-set": "s3://acme-data/val/"},
    "requirements": CodeBundle.under("fastlaunch", sha256="ee" * 32, commit=None),
}


@cache
def catalogue() -> Catalogue:
    """The shipped one."""
    return load_catalogue()


def site(instance: str = "p5.48xlarge", *, usd_per_hour: float | None = None, **changes: Any) -> Site:
    """A site in us-east-1a with everything looked up, its volume free; p5e at $30, others at their price."""
    day = date(2026, 11, 21)
    if (price := catalogue().find_price(instance, region="us-east-1", on=day)) is None:
        price = Price(
            instance=instance, service="ec2", region="us-east-1", usd_per_hour=30.0, as_of=day, source="x"
        )
    usual = Site(
        backend="ec2",
        instance=catalogue().instance(instance),
        region="us-east-1",
        zone="us-east-1a",
        subnets=("subnet-0a1b2c3d",),
        security_groups=("sg-0123abcd",),
        role="fastlaunch-node",
        bucket="acme-training",
        prefix="fastlaunch",
        ami="ami-0123456789abcdef0",
        root_device="/dev/sda1",
        volume_gib=200,
        image=IMAGE,
        code=CodeBundle(key="fastlaunch/code/c0de.tar.gz", sha256="c0de", commit="ab" * 20),
        price=price if usd_per_hour is None else replace(price, usd_per_hour=usd_per_hour),
        volume_usd_per_hour=0.0,
    )
    return replace(usual, **changes)


def job(recipe: str = "bf16", overrides: tuple[str, ...] = (), **changes: Any) -> Job:
    """A job of 200 steps of vit-huge on one p5.48xlarge. changes: as its plain data have them."""
    usual = {
        "workload": "vit-huge",
        "recipe": resolve_recipe(recipe, overrides).to_record(),
        "batch_size": 64,
        "steps": 200,
        "num_gpus": 8,
        "backend": "ec2",
        "instance": "p5.48xlarge",
        "max_minutes": 120,
        "image": IMAGE,
    }
    return Job.from_json({**usual, **changes})


#: Of a job on text, by the names of the hub, for five epochs.
LANGUAGE: dict[str, Any] = {
    "workload": "gpt2-xsmall",
    "batch_size": 4,
    "steps": None,
    "epochs": 5,
    "eval_every": 100,
    "model": "rinna/japanese-gpt2-xsmall",
    "tokenizer": "rinna/japanese-gpt2-xsmall",
    "sequence_length": 512,
}
#: Four instances for a day.
BLOCK = CapacityBlock(
    reservation="cr-0a1b2c3d4e5f60718",
    ends_at="2026-11-22T11:30:00+00:00",
    fee_usd=3840.0,
    hours=24.0,
    num_instances=4,
)


#: Two variants of a command.
SCRIPTS = tuple(
    Script(command=("python", "train.py", "--amp={amp}"), variant=(("amp", amp),), hang_timeout_s=600)
    for amp in ("bf16", "fp32")
)


def script_job(script: Script, backend: str = "ec2", **changes: Any) -> Job:
    """The script's job on one p5.48xlarge."""
    where: dict[str, Any] = {"instance": "p5.48xlarge", "image": IMAGE, "terms": Terms(max_minutes=120)}
    return script_spec(script, backend=backend, **{**where, **changes})


def block_site(instance: str = "p5.48xlarge", block: CapacityBlock = BLOCK, **changes: Any) -> Site:
    """The site in a capacity block, at what an hour of it costs effectively."""
    place = site(instance, block=block, **changes)
    return replace(place, price=block_price(block, place.instance, place.region, date(2026, 11, 21)))


#: Of no node agent, so that golden plans outlive changes of ours.
AGENT = "a9e7" * 16


def bootstrap_as_text(bootstrap: Bootstrap) -> str:
    """Instead of a node's user data: what it is made of, to be read in a golden plan."""
    return "#!/bin/bash\n" + json.dumps(asdict(bootstrap), indent=1) + "\n"


def program_of(plan: Plan) -> dict[str, Any]:
    """What the nodes are to do, by the plan's list of runs."""
    (text,) = (one.text for one in plan.objects if one.text is not None)
    data: dict[str, Any] = json.loads(json.dumps(asdict(program_from_json(text))))
    return data


def plan(
    *jobs: Job,
    at: Site | None = None,
    attempt: int = 1,
    max_minutes: int = 120,
    render: Callable[[Bootstrap], str] = bootstrap_as_text,
) -> Plan:
    """The plan of these jobs (by default one), without the shell script unless asked for."""
    at = at or site()
    run_ids = [RUN_ID, *(f"20261121-09031{number}-k3f9" for number in range(3, 9))]
    return plan_ec2(
        dict(zip(run_ids, jobs or (job(),), strict=False)),
        attempt=attempt,
        site=at,
        max_minutes=max_minutes,
        render=render,
        agent=AGENT,
    )
