"""An AWS that answers what is asked before money is spent, and requests, lookups and checks that use it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from ec2_builders import catalogue

from fastlaunch.aws.account import Role
from fastlaunch.aws.client import Aws, cached
from fastlaunch.aws.ec2 import GroupRules, PlacementGroup, Reservation
from fastlaunch.aws.sagemaker import TrainingPlan
from fastlaunch.aws.types import Identity, MachineImage, Subnet
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.build import Jobs, build_jobs
from fastlaunch.jobs.code_bundle import Bundle
from fastlaunch.jobs.option_rules import check_on_aws
from fastlaunch.jobs.options import Options
from fastlaunch.placement.check import CheckContext
from fastlaunch.placement.lookup import Lookup

#: Ten hours before the capacity block ends.
NOW = datetime(2026, 11, 21, 1, 30, tzinfo=UTC)
DIGEST = "sha256:" + "ab" * 32
ROLE = "arn:aws:iam::123456789012:role/fastlaunch-training"
NODE_ROLE = "arn:aws:iam::123456789012:role/fastlaunch-node"
SERVICES = frozenset({"ec2.amazonaws.com", "sagemaker.amazonaws.com", "scheduler.amazonaws.com"})
#: Two p5.48xlarge for a day.
BLOCK = Reservation(
    id="cr-0a1b2c3d",
    kind="capacity-block",
    instance_type="p5.48xlarge",
    zone="us-east-1b",
    state="active",
    num_instances=2,
    num_free=2,
    starts_at=datetime(2026, 11, 20, 11, 30, tzinfo=UTC),
    ends_at=datetime(2026, 11, 21, 11, 30, tzinfo=UTC),
)
#: Two ml.p5.48xlarge for a day.
PLAN = TrainingPlan(
    name="december",
    status="Active",
    num_instances=2,
    num_free=1,
    starts_at=BLOCK.starts_at,
    ends_at=BLOCK.ends_at,
)
IN_BLOCK: dict[str, Any] = {"purchase": "capacity-block", "reservation": BLOCK.id, "block_fee_usd": 1887.84}


def subnets(
    *, public: bool = True, missing: str = "", **changes: dict[str, str]
) -> Callable[..., list[Subnet] | BadConfiguration]:
    """What `Aws.subnets` answers: subnet-a in us-east-1a, ...; changes: their fields, as `subnet_a={...}`."""
    changed = {name.replace("_", "-"): values for name, values in changes.items()}

    def answer(region: str, ids: tuple[str, ...]) -> list[Subnet] | BadConfiguration:
        if missing in ids:
            return BadConfiguration(f"there is no subnet {missing}")
        return [
            Subnet(
                **{"id": id, "zone": f"{region}{id[-1]}", "vpc": "vpc-1", **changed.get(id, {})},
                maps_public_ip=public,
            )
            for id in ids
        ]

    return answer


def zones(letters: str) -> Callable[[str, str], list[str]]:
    """What `Aws.zones_offering` answers if every type is in these zones."""
    return lambda region, instance_type: [f"{region}{letter}" for letter in letters]


def rules(lets_in: bool = True, lets_out: bool = True) -> dict[str, GroupRules]:
    """What `Aws.group_rules` answers of sg-1, which lets all traffic through from and to itself, or not."""
    itself = frozenset({"sg-1"})
    group = GroupRules(
        id="sg-1", lets_in=itself if lets_in else frozenset(), lets_out=itself if lets_out else frozenset()
    )
    return {"sg-1": group}


#: What is answered, by the name of the method: a value, or a function of the arguments.
_USUAL: dict[str, Any] = {
    "identity": Identity(account="123456789012", arn="arn:aws:iam::123456789012:user/ada"),
    "regions": ["us-east-1", "us-west-2"],
    "role": lambda region, arn: Role(arn=arn, trusts=SERVICES),
    "profile_role": NODE_ROLE,
    "may_pass": True,
    "role_lacks": [],
    "zones_offering": zones("abc"),
    "spot_price_usd": (18.73, "us-east-1a"),
    "machine_image": MachineImage(id="ami-1", root_device="/dev/sda1", root_gib=75),
    "parameter": "ami-1",
    "subnets": subnets(),
    "security_group_vpcs": lambda region, ids: dict.fromkeys(ids, "vpc-1"),
    "group_rules": rules(),
    "placement_group": lambda region, name: PlacementGroup(name=name, strategy="cluster", state="available"),
    "reservation": BLOCK,
    "training_plan": PLAN,
    "default_vpc": "vpc-1",
    "endpoints": frozenset(),
    "default_routes": {None: "igw-1"},
    "quota": 384.0,
    "default_quota": 0.0,
    "running_vcpus": {},
    "quotas_by_name": {},
    "live_training_jobs": [],
    "bucket_exists": True,
    "put_object": True,
    "is_stored": True,
    "image_digest": DIGEST,
}


class FakeAws:
    """Everything is there in every region, unless `facts` say otherwise; an exception is raised.

    asked: how often each method was called with its first argument, which mostly is the region.
    """

    def __init__(self, **facts: Any) -> None:
        assert facts.keys() <= _USUAL.keys(), facts
        self.facts = {**_USUAL, **facts}
        self.asked: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.asked[name, args[0] if args else ""] += 1
            fact = self.facts[name]
            answer = fact(*args) if callable(fact) else fact
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def denied(action: str) -> NotAuthorised:
    """What a right that is missing raises."""
    return NotAuthorised(f"AWS refused {action}: AccessDenied", f"ask for {action} to be allowed")


def usual(region: str = "us-east-1", letters: str = "abc", **changes: Any) -> RegionSettings:
    """A region with everything in the config file but SageMaker's role."""
    here = RegionSettings(
        bucket="acme",
        instance_profile="fastlaunch-node",
        security_groups=("sg-1",),
        subnets={f"{region}{letter}": f"subnet-{letter}" for letter in letters},
        scheduler_role=ROLE,
    )
    return replace(here, **changes)


def settings(**regions: RegionSettings) -> Settings:
    """Settings with these regions, `us_east_1` for us-east-1, which is the usual one if none is given."""
    given = regions or {"us_east_1": usual()}
    return Settings(home=Path("home"), aws={name.replace("_", "-"): one for name, one in given.items()})


def cloud(*instances: str, **changes: Any) -> Options:
    """Options for these types, or p5.48xlarge, in us-east-1."""
    return Options(**{"instances": instances or ("p5.48xlarge",), "regions": ("us-east-1",), **changes})


def request(*instances: str, **changes: Any) -> Jobs:
    """What to train, with these options."""
    options = cloud(*instances, checkpoint_every=9, **changes)
    check_on_aws(options)
    return build_jobs(options, catalogue=catalogue())


def lookup(aws: FakeAws | None = None, **changes: Any) -> Lookup:
    """A lookup that asks `aws` each question once."""
    usually: dict[str, Any] = {
        "aws": cached(cast(Aws, aws or FakeAws())),
        "settings": settings(),
        "catalogue": catalogue(),
        "now": NOW,
        "base": training_base(None, today=NOW.date()),
        "bundle": Bundle(data=b"", sha256="c0de", commit="ab" * 20),
    }
    return Lookup(**{**usually, **changes})


def context(looked_up: Lookup, *instances: str, **changes: Any) -> CheckContext:
    """The context of checks for these types; `changes` are its fields and the options'."""
    names = {field.name for field in fields(Options)} - {field.name for field in fields(CheckContext)}
    options = cloud(*instances, **{name: value for name, value in changes.items() if name in names})
    return CheckContext(
        lookup=looked_up,
        options=options,
        instances=tuple(catalogue().instance(name.removeprefix("ml.")) for name in options.instances),
        **{name: value for name, value in changes.items() if name not in names},
    )
