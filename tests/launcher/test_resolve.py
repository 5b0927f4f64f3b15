"""Candidates to sites: what a site holds, how often AWS is asked for it, and what is left out and why."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from ec2_builders import catalogue
from fake_aws_facts import DIGEST, FakeAws, block, denied, fake_aws, settings, usual

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.backends.placements import Ec2Placement
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import BadConfiguration, NoCapacity, NotAuthorised, Unreachable, UserError
from fastlaunch.core.settings import RegionSettings, Settings
from fastlaunch.jobs.build import CloudRequest, build_cloud_request
from fastlaunch.jobs.options import CloudOptions, SubmitOptions
from fastlaunch.placement.aws_lookup import AwsLookup, fitted
from fastlaunch.placement.resolve import Resolution, nowhere, resolve

#: Ten hours before the block of these tests ends.
NOW = datetime(2026, 11, 21, 1, 30, tzinfo=UTC)


class Code:
    """A bundle as far as a site tells of it."""

    sha256 = "c0de"
    commit = "ab" * 20


def request(*instances: str, **terms: Any) -> CloudRequest:
    usually: dict[str, Any] = {"instances": instances or ("p5.48xlarge",), "regions": ("us-east-1",)}
    made = CloudOptions(**{**usually, **terms})
    return build_cloud_request(SubmitOptions(checkpoint_every=9), made, catalogue=catalogue())


def lookup(aws: FakeAws, job: CloudRequest, config: Settings | None = None) -> AwsLookup:
    return AwsLookup(
        aws=aws,  # type: ignore[arg-type]
        settings=config or settings(),
        catalogue=catalogue(),
        now=NOW,
        base=None if job.cloud.image else training_base(None, today=NOW.date()),
        bundle=None if job.cloud.image else Code(),
        ask=CachedCalls(),
    )


def found(
    aws: FakeAws,
    *instances: str,
    regions: Sequence[str] = ("us-east-1",),
    config: Settings | None = None,
    **terms: Any,
) -> Resolution:
    job = request(*instances, regions=tuple(regions), **terms)
    return resolve(job, lookup(aws, job, config))


def sites(*arguments: Any, **terms: Any) -> tuple[Ec2Placement, ...]:
    """The sites, which are EC2's."""
    places = found(*arguments, **terms).placements
    assert all(isinstance(place, Ec2Placement) for place in places)
    return tuple(place for place in places if isinstance(place, Ec2Placement))


def test_a_site_holds_all_that_a_request_names() -> None:
    all_of_them = sites(fake_aws())
    assert [site.name for site in all_of_them] == [f"p5.48xlarge in us-east-1{zone}" for zone in "abc"]
    site = all_of_them[0]
    assert (site.ami, site.root_device, site.root_gib) == ("ami-1", "/dev/sda1", 200)
    assert site.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}"
    assert (site.subnet, site.security_groups, site.bucket) == ("subnet-a", ("sg-1",), "acme")
    assert (site.usd_per_hour, site.price_as_of) == (55.04, "2026-07-20")
    assert site.code is not None and site.code.key == "fastlaunch/code/c0de.tar.gz"
    assert site.placeholders == () and found(fake_aws()).skipped == ()


def test_a_fact_of_a_region_is_asked_for_once() -> None:
    config = settings(us_east_1=usual(), us_west_2=usual("us-west-2", "xyz"))
    aws = fake_aws()
    aws.subnet_zones |= {f"subnet-{letter}": f"us-west-2{letter}" for letter in "xyz"}
    aws.zones = "abcxyz"
    left = found(aws, "p5.48xlarge", "p4d.24xlarge", regions=("us-east-1", "us-west-2"), config=config)
    assert len(left.placements) == 12
    facts = ("parameter", "machine_image", "image_digest", "bucket_exists", "subnets", "security_group_vpcs")
    for region in ("us-east-1", "us-west-2"):
        assert {aws.asked[fact, region] for fact in facts} == {1}
        assert aws.asked["zones_offering", region] == 2  # one for each type
    assert not aws.stored


def test_a_large_machine_image_has_its_own_size() -> None:
    assert sites(fake_aws(root_gib=500))[0].root_gib == 500


def test_without_subnets_ec2_chooses_the_zone() -> None:
    bare = settings(us_east_1=RegionSettings(bucket="acme", instance_profile="node"))
    aws = fake_aws()
    (site,) = sites(aws, config=bare)
    assert (site.zone, site.subnet, site.security_groups) == (None, None, ())
    assert aws.asked["subnets", "us-east-1"] == aws.asked["security_group_vpcs", "us-east-1"] == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"group_vpcs": {"sg-1": "vpc-2"}}, "sg-1 is of vpc-2, and without a subnet EC2 takes default vpc-1"),
        ({"default_vpc_id": None}, "us-east-1 has no default VPC, and no subnet is named"),
    ],
)
def test_without_subnets_the_security_groups_are_the_default_vpcs(changes: dict[str, Any], told: str) -> None:
    config = settings(us_east_1=replace(usual(), subnets={}))
    assert sites(fake_aws(), config=config)[0].security_groups == ("sg-1",)
    unseen = denied("ec2:DescribeVpcs")
    assert found(fake_aws(**changes, refused={"default_vpc": unseen}), config=config).placements
    with pytest.raises(BadConfiguration, match=told):
        found(fake_aws(**changes), config=config)


def test_zones_without_the_type_are_left_out_by_name() -> None:
    left = found(fake_aws(zones="ac"))
    assert [site.zone for site in left.placements] == ["us-east-1a", "us-east-1c"]
    assert left.skipped == (("p5.48xlarge in us-east-1b", "us-east-1b has no p5.48xlarge"),)


def test_a_type_that_is_nowhere_is_no_capacity() -> None:
    with pytest.raises(NoCapacity) as error:
        found(fake_aws(zones=""))
    assert error.value.message == "us-east-1 has no p5.48xlarge"


def test_a_subnet_of_another_zone_is_left_out() -> None:
    aws = fake_aws()
    aws.subnet_zones["subnet-b"] = "us-east-1f"
    left = found(aws)
    assert [site.zone for site in left.placements] == ["us-east-1a", "us-east-1c"]
    assert left.skipped[0][1] == "subnet-b is in us-east-1f, not in us-east-1b"


def test_a_subnet_that_does_not_exist_keeps_the_others() -> None:
    aws = fake_aws()
    del aws.subnet_zones["subnet-a"]
    left = found(aws)
    assert [site.zone for site in left.placements] == ["us-east-1b", "us-east-1c"]
    assert "there is no subnet subnet-a" in left.skipped[0][1]


def test_subnet_and_security_group_are_of_one_vpc() -> None:
    left = found(fake_aws(subnet_vpcs={"subnet-c": "vpc-2"}))
    assert left.skipped[0][1] == "security group sg-1 is of vpc-1, and subnet-c of vpc-2"
    two = settings(us_east_1=replace(usual(), security_groups=("sg-1", "sg-2")))
    with pytest.raises(BadConfiguration, match="different VPCs: sg-1 in vpc-1, sg-2 in vpc-2"):
        found(fake_aws(group_vpcs={"sg-2": "vpc-2"}), config=two)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"digest": None}, "has no image pytorch:2.13-cu133-amzn2023"),
        ({"buckets": frozenset()}, "there is no bucket acme"),
        ({"refused": {"parameter": denied("ssm:GetParameter")}}, "ssm:GetParameter"),
        ({"refused": {"machine_image": BadConfiguration("no such image")}}, "no such image"),
        ({"refused": {"bucket_exists": BadConfiguration("in another region")}}, "another region"),
    ],
)
def test_what_is_missing_in_the_only_region_ends_it(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as error:
        found(fake_aws(**changes))
    # The same reason in three zones is told once.
    assert error.value.message.count(told) == 1 and error.value.exit_code == 3


def test_a_bucket_that_may_not_be_listed_may_be_one_to_write_to() -> None:
    assert len(found(fake_aws(refused={"bucket_exists": denied("s3:ListBucket")})).placements) == 3


def test_a_refusal_too_is_asked_for_once() -> None:
    aws = fake_aws(refused={"parameter": denied("ssm:GetParameter")})
    with pytest.raises(NotAuthorised):
        found(aws)
    assert aws.asked["parameter", "us-east-1"] == 1


def test_a_region_that_does_not_answer_is_left_out() -> None:
    config = settings(us_east_1=usual(), us_west_2=usual("us-west-2", "a"))
    aws = fake_aws(refused={("zones_offering", "us-west-2"): Unreachable("no answer")})
    left = found(aws, regions=("us-west-2", "us-east-1"), config=config)
    assert {site.region for site in left.placements} == {"us-east-1"}
    assert left.skipped == (("p5.48xlarge in us-west-2a", "no answer"),)


def test_without_bucket_or_profile_it_says_what_to_write() -> None:
    for name in ("bucket", "instance_profile"):
        with pytest.raises(UserError) as error:
            found(fake_aws(), config=settings(us_east_1=replace(usual(), **{name: None})))
        assert error.value.exit_code == 2
        assert f"{name}: NAME" in (error.value.hint or "")


def test_spot_is_bounded_by_the_on_demand_price_or_the_limit() -> None:
    assert sites(fake_aws(), purchase="spot")[0].usd_per_hour == 55.04
    limited = sites(fake_aws(), purchase="spot", max_price_usd=20.0)[0]
    assert (limited.usd_per_hour, limited.max_price_usd, limited.price_as_of) == (20.0, 20.0, "2026-11-21")


def test_p5e_needs_a_limit() -> None:
    with pytest.raises(UserError) as error:
        found(fake_aws(), "p5e.48xlarge", purchase="spot")
    assert "--max-price" in (error.value.hint or "")
    assert found(fake_aws(), "p5e.48xlarge", purchase="spot", max_price_usd=30.0).placements


def test_a_price_that_is_not_known_is_no_other_regions() -> None:
    config = settings(us_east_1=usual(), eu_west_3=usual("eu-west-3", "a"))
    left = found(fake_aws(), regions=("eu-west-3", "us-east-1"), config=config)
    assert {site.region for site in left.placements} == {"us-east-1"}
    assert "no ec2 on-demand price of p5.48xlarge in eu-west-3" in left.skipped[0][1]


OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/training@sha256:" + "12" * 32


def test_an_own_image_is_taken_where_it_is_there_or_may_not_be_looked_at() -> None:
    for aws in (fake_aws(), fake_aws(refused={"image_digest": denied("ecr:BatchGetImage")})):
        site = sites(aws, image=OWN)[0]
        assert (site.image, site.code) == (OWN, None)
        assert aws.asked["image_digest", "us-east-1"] == 1


def test_an_own_image_that_is_not_there_ends_it() -> None:
    with pytest.raises(BadConfiguration, match="us-east-1 has no image 123456789012"):
        found(fake_aws(digest=None), image=OWN)


def test_an_own_image_of_another_region_leaves_the_candidate_out() -> None:
    own = "123456789012.dkr.ecr.us-east-2.amazonaws.com/training@sha256:" + "12" * 32
    with pytest.raises(BadConfiguration, match="the image is in us-east-2, and the job in us-east-1"):
        found(fake_aws(), image=own)


def test_none_left_is_the_first_error_with_every_reason() -> None:
    error = nowhere([("a", NoCapacity("nothing", "try b")), ("b", BadConfiguration("wrong", "mend it"))])
    assert type(error) is NoCapacity and error.hint == "try b"
    assert error.message == "none of 2 places can be used: a: nothing; b: wrong"
    alike = nowhere([(name, NoCapacity(why, None)) for name, why in (("a", "x"), ("b", "y"), ("c", "x"))])
    assert alike.message == "none of 3 places can be used: a, c: x; b: y"


# Several nodes

NODES: dict[str, Any] = {"num_nodes": 2}


def test_several_interfaces_want_a_subnet_that_is_named() -> None:
    bare = settings(us_east_1=replace(usual(), subnets={}))
    with pytest.raises(BadConfiguration, match="several network interfaces on 2 nodes") as caught:
        found(fake_aws(), config=bare, **NODES)
    assert "give --subnet ZONE=ID" in str(caught.value.hint)
    assert found(fake_aws(), "g5.xlarge", config=bare, allow_tcp=True, **NODES).placements


def test_several_nodes_are_placed_in_the_zones_group() -> None:
    config = settings(us_east_1=replace(usual(), placement_groups={"us-east-1b": "close"}))
    assert [site.placement_group for site in sites(fake_aws(), config=config, **NODES)] == [
        None,
        "close",
        None,
    ]
    assert {site.placement_group for site in sites(fake_aws(), config=config)} == {None}


# Capacity blocks

BLOCK: dict[str, Any] = {
    "purchase": "capacity-block",
    "reservation": "cr-0a1b2c3d",
    "block_fee_usd": 1887.84,
}


def in_block(told: dict[str, Any] | None, *, config: Settings | None = None, **terms: Any) -> Resolution:
    answers = {"DescribeCapacityReservations": told or {"CapacityReservations": []}}
    return found(fake_aws(answers=answers), config=config, **BLOCK, **terms)


def test_a_block_is_where_it_is_and_costs_what_was_paid() -> None:
    (site,) = in_block(block(), num_nodes=2).placements
    assert isinstance(site, Ec2Placement) and site.block is not None
    assert (site.zone, site.subnet, site.placement_group) == ("us-east-1b", "subnet-b", None)
    assert (site.block.reservation, site.block.ends_at) == ("cr-0a1b2c3d", "2026-11-21T11:30:00+00:00")
    # Known answer: $1,887.84 for two over 24 h.
    assert (site.block.hours, site.block.num_instances) == (24.0, 2)
    assert site.usd_per_hour == pytest.approx(39.33)


@pytest.mark.parametrize(
    ("told", "terms", "kind", "message", "hint"),
    [
        (
            None,
            {},
            BadConfiguration,
            "there is no reservation cr-0a1b2c3d in us-east-1",
            "lists those",
        ),
        (block(ReservationType="default"), {}, BadConfiguration, "is no capacity block", "--purchase on-dem"),
        (block(InstanceType="p5en.48xlarge"), {}, BadConfiguration, "is of p5en", "--instance p5en.48xlarge"),
        (block(State="expired"), {}, BadConfiguration, "cr-0a1b2c3d is expired", "one that is active"),
        (
            block(State="scheduled", StartDate=NOW + timedelta(days=1)),
            {},
            NoCapacity,
            "is scheduled: it starts at 2026-11-22 01:30 UTC",
            "then",
        ),
        (block(), {"num_nodes": 3}, NoCapacity, "has 2 of 2 instances free, and 3 are", "--num-nodes 2"),
        (block(AvailableInstanceCount=0), {}, NoCapacity, "has 0 of 2 instances free", "fastlaunch status"),
        (
            block(EndDate=NOW + timedelta(minutes=59)),
            {},
            NoCapacity,
            "ends at 2026-11-21 02:29 UTC, in 59 min",
            "another block",
        ),
        (
            block(AvailabilityZone="us-east-1f"),
            {},
            BadConfiguration,
            "is in us-east-1f, and no subnet",
            "=ID",
        ),
    ],
)
def test_each_fault_of_a_block_is_an_error_of_its_own(
    told: dict[str, Any] | None, terms: dict[str, Any], kind: type[UserError], message: str, hint: str
) -> None:
    with pytest.raises(UserError) as caught:
        in_block(told, **terms)
    assert type(caught.value) is kind
    assert message in caught.value.message and hint in str(caught.value.hint)


def test_a_reservation_that_ec2_does_not_know_is_none() -> None:
    unknown = BadConfiguration("no such reservation")
    unknown.code = "InvalidCapacityReservationId.NotFound"
    aws = fake_aws(refused={"DescribeCapacityReservations": unknown})
    with pytest.raises(BadConfiguration, match="there is no reservation cr-0a1b2c3d"):
        found(aws, **BLOCK)


def test_without_subnets_a_block_for_one_node_takes_its_zones_default() -> None:
    bare = settings(us_east_1=replace(usual(), subnets={}))
    (site,) = in_block(block(), config=bare).placements
    assert isinstance(site, Ec2Placement) and (site.zone, site.subnet) == ("us-east-1b", None)
    with pytest.raises(BadConfiguration, match="and no subnet there is named"):
        in_block(block(), config=bare, num_nodes=2)


@pytest.mark.parametrize(("minutes_left", "cut"), [(150, None), (149, 119), (60, 30)])
def test_a_longer_limit_than_the_block_is_cut_with_a_word(minutes_left: int, cut: int | None) -> None:
    end = NOW + timedelta(minutes=minutes_left)
    aws = fake_aws(answers={"DescribeCapacityReservations": block(EndDate=end)})
    job = request(**BLOCK)
    asked, told = fitted(job, lookup(aws, job))
    assert asked.cloud.max_minutes == (cut or 120)
    assert told == (
        ()
        if cut is None
        else (
            f"--max-hours is cut from 120 to {cut} min: EC2 begins to end the instances of cr-0a1b2c3d then",
        )
    )


def test_the_price_file_tells_what_a_block_cost_where_nothing_else_does() -> None:
    asked = request(**BLOCK)
    looking = lookup(fake_aws(answers={"DescribeCapacityReservations": block()}), asked)
    price = replace(
        catalogue().price("p5.48xlarge", on=NOW.date()), purchase="capacity-block", usd_per_hour=40.0
    )
    own = replace(catalogue(), prices=(*catalogue().prices, price))
    without_fee = replace(asked, cloud=replace(asked.cloud, block_fee_usd=None))
    (site,) = resolve(without_fee, replace(looking, catalogue=own)).placements
    assert isinstance(site, Ec2Placement) and site.block is not None
    # Known answer: two for 24 h at $40.
    assert (site.usd_per_hour, site.block.fee_usd) == (40.0, 1920.0)
    with pytest.raises(UserError, match="cost is not known"):
        resolve(without_fee, looking)
