"""Candidates to sites: what a site holds, how often AWS is asked for it, and what is left out and why."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from ec2_builders import catalogue
from fake_aws_facts import DIGEST, FakeAws, denied, fake_aws, settings, usual

from fastlaunch.candidates import candidates
from fastlaunch.errors import BadConfiguration, NoCapacity, NotAuthorised, Unreachable, UserError
from fastlaunch.images import find_base_image
from fastlaunch.resolve import Resolved, nowhere, resolve
from fastlaunch.settings import RegionSettings, Settings

TODAY = date(2026, 11, 21)


class Code:
    """A bundle as far as a site tells of it."""

    sha256 = "c0de"
    commit = "ab" * 20


def resolved(
    aws: FakeAws,
    *instances: str,
    regions: Sequence[str] = ("us-east-1",),
    config: Settings | None = None,
    **changes: Any,
) -> Resolved:
    config = config or settings()
    types = [catalogue().instance(name) for name in instances or ("p5.48xlarge",)]
    usually: dict[str, Any] = {
        "purchase": "on-demand",
        "max_price_usd": None,
        "base": find_base_image(None, flavour="ec2", today=TODAY),
        "bundle": Code(),
        "today": TODAY,
    }
    return resolve(
        candidates(types, regions, config),
        aws=aws,  # type: ignore[arg-type]
        settings=config,
        catalogue=catalogue(),
        **{**usually, **changes},
    )


def test_a_site_holds_all_that_a_request_names() -> None:
    found = resolved(fake_aws())
    assert [site.name for site in found.sites] == [f"p5.48xlarge in us-east-1{zone}" for zone in "abc"]
    site = found.sites[0]
    assert (site.ami, site.root_device, site.root_gib) == ("ami-1", "/dev/sda1", 200)
    assert site.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}"
    assert (site.subnet, site.security_groups, site.bucket) == ("subnet-a", ("sg-1",), "acme")
    assert (site.usd_per_hour, site.price_as_of) == (55.04, "2026-07-20")
    assert site.code is not None and site.code.key == "fastlaunch/code/c0de.tar.gz"
    assert site.placeholders == () and found.skipped == ()


def test_a_fact_of_a_region_is_asked_for_once() -> None:
    config = settings(us_east_1=usual(), us_west_2=usual("us-west-2", "xyz"))
    aws = fake_aws()
    aws.subnet_zones |= {f"subnet-{letter}": f"us-west-2{letter}" for letter in "xyz"}
    aws.zones = "abcxyz"
    found = resolved(aws, "p5.48xlarge", "p4d.24xlarge", regions=("us-east-1", "us-west-2"), config=config)
    assert len(found.sites) == 12
    facts = ("parameter", "machine_image", "image_digest", "bucket_exists", "subnets", "security_group_vpcs")
    for region in ("us-east-1", "us-west-2"):
        assert {aws.asked[fact, region] for fact in facts} == {1}
        assert aws.asked["zones_offering", region] == 2  # one for each type
    assert not aws.stored


def test_a_large_machine_image_has_its_own_size() -> None:
    assert resolved(fake_aws(root_gib=500)).sites[0].root_gib == 500


def test_without_subnets_ec2_chooses_the_zone() -> None:
    bare = settings(us_east_1=RegionSettings(bucket="acme", instance_profile="node"))
    aws = fake_aws()
    (site,) = resolved(aws, config=bare).sites
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
    assert resolved(fake_aws(), config=config).sites[0].security_groups == ("sg-1",)
    unseen = denied("ec2:DescribeVpcs")
    assert resolved(fake_aws(**changes, refused={"default_vpc": unseen}), config=config).sites
    with pytest.raises(BadConfiguration, match=told):
        resolved(fake_aws(**changes), config=config)


def test_zones_without_the_type_are_left_out_by_name() -> None:
    found = resolved(fake_aws(zones="ac"))
    assert [site.zone for site in found.sites] == ["us-east-1a", "us-east-1c"]
    assert found.skipped == (("p5.48xlarge in us-east-1b", "us-east-1b has no p5.48xlarge"),)


def test_a_type_that_is_nowhere_is_no_capacity() -> None:
    with pytest.raises(NoCapacity) as error:
        resolved(fake_aws(zones=""))
    assert error.value.message == "us-east-1 has no p5.48xlarge"


def test_a_subnet_of_another_zone_is_left_out() -> None:
    aws = fake_aws()
    aws.subnet_zones["subnet-b"] = "us-east-1f"
    found = resolved(aws)
    assert [site.zone for site in found.sites] == ["us-east-1a", "us-east-1c"]
    assert found.skipped[0][1] == "subnet-b is in us-east-1f, not in us-east-1b"


def test_a_subnet_that_does_not_exist_keeps_the_others() -> None:
    aws = fake_aws()
    del aws.subnet_zones["subnet-a"]
    found = resolved(aws)
    assert [site.zone for site in found.sites] == ["us-east-1b", "us-east-1c"]
    assert "there is no subnet subnet-a" in found.skipped[0][1]


def test_subnet_and_security_group_are_of_one_vpc() -> None:
    found = resolved(fake_aws(subnet_vpcs={"subnet-c": "vpc-2"}))
    assert found.skipped[0][1] == "security group sg-1 is of vpc-1, and subnet-c of vpc-2"
    two = settings(us_east_1=replace(usual(), security_groups=("sg-1", "sg-2")))
    with pytest.raises(BadConfiguration, match="different VPCs: sg-1 in vpc-1, sg-2 in vpc-2"):
        resolved(fake_aws(group_vpcs={"sg-2": "vpc-2"}), config=two)


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
        resolved(fake_aws(**changes))
    # The same reason in three zones is told once.
    assert error.value.message.count(told) == 1 and error.value.exit_code == 3


def test_a_bucket_that_may_not_be_listed_may_be_one_to_write_to() -> None:
    assert len(resolved(fake_aws(refused={"bucket_exists": denied("s3:ListBucket")})).sites) == 3


def test_a_refusal_too_is_asked_for_once() -> None:
    aws = fake_aws(refused={"parameter": denied("ssm:GetParameter")})
    with pytest.raises(NotAuthorised):
        resolved(aws)
    assert aws.asked["parameter", "us-east-1"] == 1


def test_a_region_that_does_not_answer_is_left_out() -> None:
    config = settings(us_east_1=usual(), us_west_2=usual("us-west-2", "a"))
    aws = fake_aws(refused={("zones_offering", "us-west-2"): Unreachable("no answer")})
    found = resolved(aws, regions=("us-west-2", "us-east-1"), config=config)
    assert {site.region for site in found.sites} == {"us-east-1"}
    assert found.skipped == (("p5.48xlarge in us-west-2a", "no answer"),)


def test_without_bucket_or_profile_it_says_what_to_write() -> None:
    for name in ("bucket", "instance_profile"):
        with pytest.raises(UserError) as error:
            resolved(fake_aws(), config=settings(us_east_1=replace(usual(), **{name: None})))
        assert error.value.exit_code == 2
        assert f"{name}: NAME" in (error.value.hint or "")


def test_spot_is_bounded_by_the_on_demand_price_or_the_limit() -> None:
    assert resolved(fake_aws(), purchase="spot").sites[0].usd_per_hour == 55.04
    limited = resolved(fake_aws(), purchase="spot", max_price_usd=20.0).sites[0]
    assert (limited.usd_per_hour, limited.max_price_usd, limited.price_as_of) == (20.0, 20.0, "2026-11-21")


def test_p5e_needs_a_limit() -> None:
    with pytest.raises(UserError) as error:
        resolved(fake_aws(), "p5e.48xlarge", purchase="spot")
    assert "--max-price" in (error.value.hint or "")
    assert resolved(fake_aws(), "p5e.48xlarge", purchase="spot", max_price_usd=30.0).sites


def test_a_price_that_is_not_known_is_no_other_regions() -> None:
    config = settings(us_east_1=usual(), eu_west_3=usual("eu-west-3", "a"))
    found = resolved(fake_aws(), regions=("eu-west-3", "us-east-1"), config=config)
    assert {site.region for site in found.sites} == {"us-east-1"}
    assert "no ec2 on-demand price of p5.48xlarge in eu-west-3" in found.skipped[0][1]


OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/training@sha256:" + "12" * 32


def test_an_own_image_is_taken_where_it_is_there_or_may_not_be_looked_at() -> None:
    for aws in (fake_aws(), fake_aws(refused={"image_digest": denied("ecr:BatchGetImage")})):
        site = resolved(aws, base=None, bundle=None, image=OWN).sites[0]
        assert (site.image, site.code) == (OWN, None)
        assert aws.asked["image_digest", "us-east-1"] == 1


def test_an_own_image_that_is_not_there_ends_it() -> None:
    with pytest.raises(BadConfiguration, match="us-east-1 has no image 123456789012"):
        resolved(fake_aws(digest=None), base=None, bundle=None, image=OWN)


def test_an_own_image_of_another_region_leaves_the_candidate_out() -> None:
    own = "123456789012.dkr.ecr.us-east-2.amazonaws.com/training@sha256:" + "12" * 32
    with pytest.raises(BadConfiguration, match="the image is in us-east-2, and the job in us-east-1"):
        resolved(fake_aws(), base=None, bundle=None, image=own)


def test_none_left_is_the_first_error_with_every_reason() -> None:
    error = nowhere([("a", NoCapacity("nothing", "try b")), ("b", BadConfiguration("wrong", "mend it"))])
    assert type(error) is NoCapacity and error.hint == "try b"
    assert error.message == "none of 2 places can be used: a: nothing; b: wrong"
