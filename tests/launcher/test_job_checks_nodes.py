"""Checks of what several nodes and capacity blocks need: a way out, a group that names itself, closeness."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from ec2_builders import catalogue, site
from fake_aws_facts import FakeAws, block, check_context, denied, fake_aws, group, settings, usual

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import BadConfiguration, NoCapacity, QuotaExceeded
from fastlaunch.core.settings import RegionSettings
from fastlaunch.placement.aws_lookup import AwsLookup
from fastlaunch.placement.check import Check, CheckContext, Result
from fastlaunch.placement.checks import checks, usable

NOW = datetime(2026, 11, 21, 1, 30, tzinfo=UTC)
CLOSE = {"PlacementGroups": [{"GroupName": "close", "Strategy": "cluster", "State": "available"}]}
NAT: dict[str | None, str] = {None: "nat-1"}


def lookup(aws: FakeAws, here: RegionSettings | None = None) -> AwsLookup:
    return AwsLookup(
        aws=aws,  # type: ignore[arg-type]
        settings=settings(us_east_1=here or usual()),
        catalogue=catalogue(),
        now=NOW,
        base=training_base(None, today=NOW.date()),
        ask=CachedCalls(),
    )


def nodes(instance: str = "p5.48xlarge", **changes: Any) -> CheckContext:
    return check_context(lookup(fake_aws()), (instance,), **{"num_nodes": 2, **changes})


def made(aws: FakeAws, job: CheckContext | None = None, **here: Any) -> dict[str, Check]:
    """The first check of every name."""
    groups = {f"us-east-1{letter}": "close" for letter in "abc"}
    looked_up = lookup(aws, replace(usual(), **{"placement_groups": groups, **here}))
    found = checks(replace(job or nodes(), lookup=looked_up))
    return {check.name: check for check in reversed(found)}


def furnished(**changes: Any) -> FakeAws:
    """All that two nodes need."""
    answers = {"DescribeSecurityGroups": group(), "DescribePlacementGroups": CLOSE}
    answers |= changes.pop("answers", {})
    return fake_aws(**{"routes": NAT, "applied": 400.0, "answers": answers, **changes})


def test_where_all_is_well_two_nodes_may_start() -> None:
    found = made(furnished())
    assert {check.result for check in found.values()} == {Result.OK}
    assert {"between nodes", "placement group", "quota"} <= found.keys()
    assert "needs 384 vCPUs" in found["quota"].message


@pytest.mark.parametrize(
    ("changes", "told", "hint"),
    [
        ({"routes": {None: "igw-1"}}, "machines with several network interfaces get no public", "NAT"),
        ({"routes": {None: ""}}, "has no route to the internet", "NAT"),
        (
            {"routes": {None: "igw-1"}, "services": frozenset({"s3"})},
            "vpc-1 has no endpoint for ecr.api and ecr.dkr",
            "com.amazonaws.us-east-1.ecr.dkr",
        ),
    ],
)
def test_a_public_subnet_is_no_way_out_for_several_interfaces(
    changes: dict[str, Any], told: str, hint: str
) -> None:
    check = made(furnished(**changes))["subnet"]
    assert type(check.error) is BadConfiguration
    assert told in check.message and hint in str(check.hint)
    # A type without EFA has one interface, which may have a public address.
    assert made(furnished(routes={None: "igw-1"}), nodes("g5.xlarge"))["subnet"].ok


def test_routes_that_may_not_be_looked_at_are_a_warning() -> None:
    check = made(furnished(refused={"default_routes": denied("ec2:DescribeRouteTables")}))["subnet"]
    assert check.result is Result.WARNING


def test_endpoints_are_a_way_out() -> None:
    services = frozenset({"s3", "ecr.api", "ecr.dkr"})
    assert made(furnished(routes={None: ""}, services=services))["subnet"].result is Result.OK


@pytest.mark.parametrize(
    ("lets_in", "lets_out", "lacking"),
    [(True, False, "egress"), (False, True, "ingress"), (False, False, "ingress")],
)
def test_efa_wants_a_group_that_names_itself_both_ways(lets_in: bool, lets_out: bool, lacking: str) -> None:
    aws = furnished(answers={"DescribeSecurityGroups": group(lets_in, lets_out)})
    check = made(aws)["between nodes"]
    assert type(check.error) is BadConfiguration
    assert f"sg-1 has no {lacking}" in check.message
    assert f"aws ec2 authorize-security-group-{lacking} --region us-east-1 --group-id sg-1" in str(check.hint)
    assert ("egress --region" in str(check.hint)) is not lets_out


def test_efa_wants_a_group_that_is_named() -> None:
    check = made(furnished(), security_groups=())["between nodes"]
    assert type(check.error) is BadConfiguration and "no security group is named" in check.message


def test_over_tcp_a_closed_group_is_a_warning() -> None:
    closed = furnished(answers={"DescribeSecurityGroups": group(False, False)})
    check = made(closed, nodes("g5.xlarge"))["between nodes"]
    assert check.result is Result.WARNING and "--source-group sg-1" in str(check.hint)
    assert made(furnished(), nodes("g5.xlarge"))["between nodes"].result is Result.OK
    assert made(furnished(), nodes("g5.xlarge"), security_groups=())["between nodes"].ok


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"PlacementGroups": []}, "us-east-1 has no placement group close"),
        (
            {"PlacementGroups": [{"GroupName": "close", "Strategy": "spread", "State": "available"}]},
            "placement group close is of the strategy spread, not cluster",
        ),
    ],
)
def test_a_placement_group_is_there_and_a_cluster(told: dict[str, Any], message: str) -> None:
    check = made(furnished(answers={"DescribePlacementGroups": told}))["placement group"]
    assert type(check.error) is BadConfiguration and check.message == message
    assert "aws ec2 create-placement-group --region us-east-1 --strategy cluster" in str(check.hint)


def test_a_zone_without_a_group_is_warned_of_with_the_command() -> None:
    check = made(furnished(), placement_groups={})["placement group"]
    assert check.result is Result.WARNING
    assert "--group-name fastlaunch-us-east-1a" in str(check.hint)
    assert "placement_groups: {us-east-1a: fastlaunch-us-east-1a}" in str(check.hint)


def test_one_node_needs_none_of_it() -> None:
    found = made(furnished(), nodes(num_nodes=1))
    assert {"between nodes", "placement group"}.isdisjoint(found)


def test_several_interfaces_without_a_subnet_fail() -> None:
    check = made(furnished(), subnets={})["subnet"]
    assert type(check.error) is BadConfiguration and "several network interfaces" in check.message


# Capacity blocks


def in_block(aws: FakeAws, **changes: Any) -> dict[str, Check]:
    usually = {"purchase": "capacity-block", "reservation": "cr-0a1b2c3d", "block_fee_usd": 1887.84}
    return made(aws, nodes(**{**usually, **changes}), placement_groups={})


def test_a_block_needs_no_quota_and_no_placement_group() -> None:
    aws = furnished(answers={"DescribeCapacityReservations": block()}, applied=0.0)
    found = in_block(aws)
    assert {check.result for check in found.values()} == {Result.OK}
    assert {"quota", "placement group"}.isdisjoint(found)
    assert found["capacity block"].message == (
        "cr-0a1b2c3d in us-east-1b: 2 of 2 instances free, 10 h 0 min left"
    )
    assert found["price"].message == "$1,887.84 paid up front"
    assert type(made(furnished(applied=0.0))["quota"].error) is QuotaExceeded


def test_a_full_block_leaves_no_site() -> None:
    aws = furnished(answers={"DescribeCapacityReservations": block(AvailableInstanceCount=1)})
    check = in_block(aws)["capacity block"]
    assert type(check.error) is NoCapacity
    with pytest.raises(NoCapacity, match="has 1 of 2 instances free"):
        usable([site()], [check])


def test_a_block_whose_cost_is_not_known_fails() -> None:
    aws = furnished(answers={"DescribeCapacityReservations": block()})
    check = in_block(aws, block_fee_usd=None)["price"]
    assert check.result is Result.FAILED and "--block-fee USD" in str(check.hint)
