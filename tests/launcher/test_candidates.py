"""In which order instance types, regions and zones are tried."""

from pathlib import Path

from ec2_builders import catalogue

from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.placement.resolve import (
    UNKNOWN_SUBNET,
    Candidate,
    candidates,
    unresolved,
)

SETTINGS = Settings(
    home=Path("home"),
    aws={
        "us-east-1": RegionSettings(subnets={"us-east-1c": "subnet-c", "us-east-1a": "subnet-a"}),
        "us-west-2": RegionSettings(bucket="acme"),
    },
)


def names(instances: list[str], regions: list[str]) -> list[str]:
    found = candidates([catalogue().instance(name) for name in instances], regions, SETTINGS)
    return [f"{candidate.name} {candidate.subnet}" for candidate in found]


def test_all_zones_then_the_next_region_then_the_next_type() -> None:
    assert names(["p5.48xlarge", "p5en.48xlarge"], ["us-east-1", "us-west-2"]) == [
        "p5.48xlarge in us-east-1c subnet-c",
        "p5.48xlarge in us-east-1a subnet-a",
        "p5.48xlarge in us-west-2 None",
        "p5en.48xlarge in us-east-1c subnet-c",
        "p5en.48xlarge in us-east-1a subnet-a",
        "p5en.48xlarge in us-west-2 None",
    ]


def test_a_region_that_is_not_configured_leaves_the_zone_to_ec2() -> None:
    (candidate,) = candidates([catalogue().instance("g5.xlarge")], ["eu-west-1"], SETTINGS)
    assert (candidate.region, candidate.zone, candidate.subnet) == ("eu-west-1", None, None)


def found(*instances: str, regions: tuple[str, ...] = ("us-east-1",)) -> tuple[Candidate, ...]:
    return candidates([catalogue().instance(name) for name in instances], regions, SETTINGS)


def test_one_of_several_subnets_is_in_a_blocks_zone_and_only_aws_tells_which() -> None:
    (one,) = unresolved(found("p5.48xlarge"), num_nodes=1, reservation="cr-1")
    assert (one.zone, one.subnet) == (None, UNKNOWN_SUBNET)
    (only,) = found("p5.48xlarge")[:1]
    assert unresolved([only], num_nodes=1, reservation="cr-1") == (only,)


def test_several_interfaces_need_a_subnet_that_is_named() -> None:
    bare = found("p5.48xlarge", "g5.xlarge", regions=("us-west-2",))
    assert [one.subnet for one in unresolved(bare, num_nodes=2, reservation=None)] == [UNKNOWN_SUBNET, None]
    assert unresolved(bare, num_nodes=1, reservation=None) == bare
    assert unresolved(found("p5.48xlarge"), num_nodes=2, reservation=None) == found("p5.48xlarge")
