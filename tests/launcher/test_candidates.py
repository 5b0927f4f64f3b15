"""In which order instance types, regions and zones are tried."""

from pathlib import Path

from ec2_builders import catalogue

from fastlaunch.candidates import candidates
from fastlaunch.settings import RegionSettings, Settings

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
