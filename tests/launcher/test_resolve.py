"""A request -> placements, with and without asking AWS: what they hold, what is left out and why."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import ec2_builders
import pytest
from ec2_builders import IMAGE, catalogue
from fake_aws_facts import (
    BLOCK,
    DIGEST,
    IN_BLOCK,
    NOW,
    ROLE,
    FakeAws,
    denied,
    lookup,
    request,
    settings,
    subnets,
    usual,
    zones,
)
from sagemaker_builders import training_job, training_site

from fastlaunch.aws.ec2 import Reservation
from fastlaunch.aws.types import Identity
from fastlaunch.backends.site import Site
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import BadConfiguration, NoCapacity, NotAuthorised, Unreachable, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.jobs.code_bundle import Bundle
from fastlaunch.jobs.options import Options
from fastlaunch.placement.check import nowhere
from fastlaunch.placement.lookup import Lookup, candidates
from fastlaunch.placement.resolve import Placement, check_plan, checked_sites, fitted, plan_at, resolve

NO_SUBNETS = usual(subnets={})
#: Machines with several network interfaces have no other way out.
BY_NAT = {None: "nat-1"}


def resolved(
    aws: FakeAws | None = None, *instances: str, here: RegionSettings | None = None, **changes: Any
) -> Placement:
    """What comes of a request with AWS asked; `here` is us-east-1 in the config file."""
    regions = {
        "us_east_1": here or usual(),
        "us_west_2": usual("us-west-2", "xyz"),
        "eu_west_3": usual("eu-west-3", "a"),
    }
    own = {"base": None, "bundle": None} if changes.get("image") else {}
    return checked_sites(request(*instances, **changes), lookup(aws, settings=settings(**regions), **own))


def on_ec2(*arguments: Any, **changes: Any) -> tuple[Site, ...]:
    return resolved(*arguments, **changes).sites


# In which order


def test_all_zones_then_the_next_region_then_the_next_type() -> None:
    config = settings(
        us_east_1=RegionSettings(subnets={"us-east-1c": "subnet-c", "us-east-1a": "subnet-a"}),
        us_west_2=RegionSettings(bucket="acme"),
    )
    types = [catalogue().instance(name) for name in ("p5.48xlarge", "p5en.48xlarge")]
    options = Options(instances=(), regions=("us-east-1", "us-west-2", "eu-west-1"))
    found = candidates(types, options, config)
    assert [(one.name, one.subnet) for one in found] == [
        (f"{name} in {place}", subnet)
        for name in ("p5.48xlarge", "p5en.48xlarge")
        for place, subnet in [
            ("us-east-1c", "subnet-c"),
            ("us-east-1a", "subnet-a"),
            ("us-west-2", None),
            ("eu-west-1", None),
        ]
    ]


# With AWS


def test_a_placement_holds_all_that_a_request_names() -> None:
    found = on_ec2()
    assert [one.name for one in found] == [f"p5.48xlarge in us-east-1{zone}" for zone in "abc"]
    one = found[0]
    assert (one.ami, one.root_device, one.volume_gib) == ("ami-1", "/dev/sda1", 200)
    assert one.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}"
    assert (one.subnet, one.security_groups, one.bucket) == ("subnet-a", ("sg-1",), "acme")
    assert one.price == catalogue().price("p5.48xlarge", on=NOW.date())
    assert one.code is not None and one.code.key == "fastlaunch/code/c0de.tar.gz"
    assert one.placeholders == () and resolved().skipped == ()
    large = replace(FakeAws().facts["machine_image"], root_gib=500)
    assert on_ec2(FakeAws(machine_image=large))[0].volume_gib == 500


def test_a_fact_of_a_region_is_asked_for_once() -> None:
    aws = FakeAws(zones_offering=zones("abcxyz"))
    left = resolved(aws, "p5.48xlarge", "p4d.24xlarge", regions=("us-east-1", "us-west-2"))
    assert len(left.sites) == 12
    facts = ("parameter", "machine_image", "image_digest", "bucket_exists", "subnets", "security_group_vpcs")
    for region in ("us-east-1", "us-west-2"):
        assert {aws.asked[fact, region] for fact in facts} == {1}
        assert aws.asked["zones_offering", region] == 2  # one for each type
    assert aws.asked["put_object", "us-east-1"] == 1
    refused = FakeAws(parameter=denied("ssm:GetParameter"))
    with pytest.raises(NotAuthorised):
        resolved(refused)
    assert refused.asked["parameter", "us-east-1"] == 1


def test_without_subnets_ec2_chooses_the_zone() -> None:
    aws = FakeAws()
    (one,) = on_ec2(aws, here=RegionSettings(bucket="acme", instance_profile="node", scheduler_role=ROLE))
    assert (one.zone, one.subnet, one.security_groups) == (None, None, ())
    assert aws.asked["subnets", "us-east-1"] == aws.asked["security_group_vpcs", "us-east-1"] == 0
    assert on_ec2(here=NO_SUBNETS)[0].security_groups == ("sg-1",)
    assert on_ec2(FakeAws(default_vpc=denied("ec2:DescribeVpcs")), here=NO_SUBNETS)


@pytest.mark.parametrize(
    ("facts", "left", "word"),
    [
        ({"zones_offering": zones("ac")}, "ac", "us-east-1b has no p5.48xlarge"),
        ({"subnets": subnets(subnet_b={"zone": "us-east-1f"})}, "ac", "us-east-1f"),
        ({"subnets": subnets(missing="subnet-a")}, "bc", "no subnet subnet-a"),
        ({"subnets": subnets(subnet_c={"vpc": "vpc-2"})}, "ab", "vpc-2"),
    ],
)
def test_a_zone_that_does_not_serve_is_left_out_by_name(facts: dict[str, Any], left: str, word: str) -> None:
    found = resolved(FakeAws(**facts))
    assert [one.zone for one in found.sites] == [f"us-east-1{letter}" for letter in left]
    ((name, why),) = found.skipped
    assert name.startswith("p5.48xlarge in us-east-1") and word in why


def test_a_region_that_does_not_serve_is_left_out() -> None:
    aws = FakeAws(
        zones_offering=lambda region, name: (
            Unreachable("no answer") if region == "us-west-2" else ["us-east-1a"]
        )
    )
    left = resolved(aws, regions=("us-west-2", "us-east-1"))
    assert [one.zone for one in left.sites] == ["us-east-1a"]
    assert ("p5.48xlarge in us-west-2x", "no answer") in left.skipped
    # No other region's price is taken.
    unpriced = resolved(FakeAws(regions={"eu-west-3", "us-east-1"}), regions=("eu-west-3", "us-east-1"))
    assert {one.region for one in unpriced.sites} == {"us-east-1"}
    assert "price of p5.48xlarge in eu-west-3" in unpriced.skipped[0][1]


@pytest.mark.parametrize(
    ("facts", "here", "kind", "word"),
    [
        ({"zones_offering": []}, {}, NoCapacity, "us-east-1 has no p5.48xlarge"),
        ({"bucket_exists": False}, {}, BadConfiguration, "there is no bucket acme"),
        ({}, {"instance_profile": None}, UserError, "no instance profile is named"),
        (
            {"security_group_vpcs": {"sg-1": "vpc-1", "sg-2": "vpc-2"}},
            {"security_groups": ("sg-1", "sg-2")},
            BadConfiguration,
            "different VPCs",
        ),
    ],
)
def test_what_is_missing_in_the_only_region_ends_it(
    facts: dict[str, Any], here: dict[str, Any], kind: type[UserError], word: str
) -> None:
    with pytest.raises(UserError, match=word) as caught:
        resolved(FakeAws(**facts), here=usual(**here))
    # The same reason in three zones is told once.
    assert type(caught.value) is kind and caught.value.message.count(word) == 1


def test_spot_is_bounded_by_the_on_demand_price_or_the_limit() -> None:
    assert on_ec2(purchase="spot")[0].usd_per_hour == 55.04
    limited = on_ec2(purchase="spot", max_price_usd=20.0)[0]
    assert (limited.usd_per_hour, limited.max_price_usd) == (20.0, 20.0)
    assert limited.price is not None and (limited.price.basis, limited.price.as_of) == ("given", NOW.date())
    with pytest.raises(UserError) as caught:
        resolved(None, "p5e.48xlarge", purchase="spot")
    assert "--max-price" in (caught.value.hint or "")


def test_an_image_of_ones_own_brings_the_code_and_has_to_be_there() -> None:
    own = "123456789012.dkr.ecr.us-east-1.amazonaws.com/training@sha256:" + "12" * 32
    for aws in (FakeAws(), FakeAws(image_digest=denied("ecr:BatchGetImage"))):
        one = on_ec2(aws, image=own)[0]
        assert (one.image, one.code) == (own, None)
    with pytest.raises(BadConfiguration, match="us-east-1 has no image 123456789012"):
        resolved(FakeAws(image_digest=None), image=own)
    with pytest.raises(BadConfiguration, match="us-east-2"):
        resolved(image=own.replace("us-east-1", "us-east-2"))


def test_none_left_is_the_first_error_with_every_reason() -> None:
    error = nowhere([("a", NoCapacity("nothing", "try b")), ("b", BadConfiguration("wrong", "mend it"))])
    assert type(error) is NoCapacity and error.hint == "try b"
    assert error.message == "none of 2 places can be used: a: nothing; b: wrong"
    alike = nowhere([(name, NoCapacity(why, None)) for name, why in (("a", "x"), ("b", "y"), ("c", "x"))])
    assert alike.message == "none of 3 places can be used: a, c: x; b: y"


def test_several_nodes_want_a_subnet_by_name_and_stand_in_its_zones_group() -> None:
    with pytest.raises(BadConfiguration, match="no subnet is named"):
        resolved(here=NO_SUBNETS, num_nodes=2)
    assert on_ec2(None, "g5.xlarge", here=NO_SUBNETS, allow_tcp=True, num_nodes=2)
    here = usual(placement_groups={"us-east-1b": "close"})
    assert [
        one.placement_group for one in on_ec2(FakeAws(default_routes=BY_NAT), here=here, num_nodes=2)
    ] == [None, "close", None]
    assert {one.placement_group for one in on_ec2(here=here)} == {None}


# Capacity blocks


def in_block(
    block: Reservation | None = BLOCK, *, here: RegionSettings | None = None, **changes: Any
) -> Site:
    (found,) = on_ec2(FakeAws(reservation=block, default_routes=BY_NAT), here=here, **{**IN_BLOCK, **changes})
    return found


def test_a_block_is_where_it_is_and_costs_what_was_paid() -> None:
    found = in_block(num_nodes=2, here=usual(placement_groups={"us-east-1b": "close"}))
    assert found.block is not None
    assert (found.zone, found.subnet, found.placement_group) == ("us-east-1b", "subnet-b", None)
    assert (found.block.reservation, found.block.ends_at) == ("cr-0a1b2c3d", "2026-11-21T11:30:00+00:00")
    # Known answer: $1,887.84 for two over 24 h.
    assert (found.block.hours, found.block.num_instances) == (24.0, 2)
    assert found.usd_per_hour == pytest.approx(39.33)


#: Of a block that is to come. Nothing of it is free before it begins.
TO_COME: dict[str, Any] = {
    "state": "scheduled",
    "num_free": 0,
    "starts_at": NOW + timedelta(days=1),
    "ends_at": NOW + timedelta(days=2),
}


def test_a_block_that_is_to_come_is_waited_for_and_its_time_counts_from_its_start() -> None:
    placed = in_block(replace(BLOCK, **TO_COME), num_nodes=2)
    assert placed.block is not None and placed.block.begins_after(NOW) == NOW + timedelta(days=1)
    assert placed.block.begins_after(NOW + timedelta(days=1)) is None
    jobs = request(**IN_BLOCK, max_minutes=3 * 24 * 60)
    for detach, word in ((False, "this command waits until then"), (True, "a schedule in the account")):
        detached = replace(jobs, options=replace(jobs.options, detach=detach))
        fit, (begins, cut) = fitted(detached, lookup(FakeAws(reservation=replace(BLOCK, **TO_COME))))
        assert "cr-0a1b2c3d begins at 2026-11-22 01:30 UTC" in begins and word in begins
        assert fit.options.max_minutes == 24 * 60 - 30 and "from 4320 to 1410 min" in cut


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        (None, BadConfiguration, "there is no reservation cr-0a1b2c3d"),
        ({"kind": "default"}, BadConfiguration, "no capacity block"),
        ({"instance_type": "p5en.48xlarge"}, BadConfiguration, "is of p5en"),
        ({"state": "expired"}, BadConfiguration, "expired"),
        ({"state": "payment-failed"}, BadConfiguration, "payment-failed"),
        ({**TO_COME, "num_instances": 1}, NoCapacity, "has 1 of 1"),
        ({"num_free": 1}, NoCapacity, "has 1 of 2"),
        ({"ends_at": NOW + timedelta(minutes=59)}, NoCapacity, "in 59 min"),
        ({"zone": "us-east-1f"}, BadConfiguration, "us-east-1f, and no subnet"),
    ],
)
def test_each_fault_of_a_block_is_an_error_of_its_own(
    changes: dict[str, Any] | None, kind: type[UserError], word: str
) -> None:
    with pytest.raises(UserError, match=word) as caught:
        in_block(None if changes is None else replace(BLOCK, **changes), num_nodes=2)
    assert type(caught.value) is kind


def test_without_subnets_a_block_for_one_node_takes_its_zones_default() -> None:
    found = in_block(here=NO_SUBNETS)
    assert (found.zone, found.subnet) == ("us-east-1b", None)
    with pytest.raises(BadConfiguration, match="no subnet there is named"):
        in_block(here=NO_SUBNETS, num_nodes=2)


@pytest.mark.parametrize(("minutes_left", "minutes"), [(150, 120), (149, 119), (60, 30)])
def test_a_longer_limit_than_the_block_is_cut_and_reported(minutes_left: int, minutes: int) -> None:
    aws = FakeAws(reservation=replace(BLOCK, ends_at=NOW + timedelta(minutes=minutes_left)))
    fit, changes = fitted(request(**IN_BLOCK), lookup(aws))
    assert fit.options.max_minutes == minutes
    assert [f"cut from 120 to {minutes} min" in change for change in changes] == [True] * (minutes < 120)


def test_the_price_file_says_what_a_block_cost_where_nothing_else_does() -> None:
    price = replace(
        catalogue().price("p5.48xlarge", on=NOW.date()), purchase="capacity-block", usd_per_hour=40.0
    )
    own = replace(catalogue(), prices=(*catalogue().prices, price))
    without_fee = request(**{**IN_BLOCK, "block_fee_usd": None})
    (found,) = resolve(without_fee, lookup(catalogue=own)).sites
    assert found.block is not None
    # Known answer: two for 24 h at $40.
    assert (found.usd_per_hour, found.block.fee_usd) == (40.0, 1920.0)
    with pytest.raises(UserError, match="cost is not known"):
        resolve(without_fee, lookup())


# SageMaker


def trains(
    aws: FakeAws | None = None, *instances: str, here: RegionSettings | None = None, **changes: Any
) -> Placement:
    types = instances or ("ml.p5.48xlarge",)
    return resolved(aws, *types, here=here or usual(role=ROLE), backend="sagemaker", **changes)


def test_a_placement_holds_all_that_a_training_job_names() -> None:
    (found,) = trains(num_nodes=2).sites
    assert (found.name, found.region, found.role) == ("ml.p5.48xlarge in us-east-1", "us-east-1", ROLE)
    assert (found.bucket, found.prefix) == ("acme", "fastlaunch")
    # The image of jobs on EC2, in the region, by digest: runs on both can be compared.
    assert found.image == f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@{DIGEST}"
    assert found.code is not None and found.code.key == "fastlaunch/code/c0de.tar.gz"
    assert found.price == catalogue().price("p5.48xlarge", service="sagemaker", on=NOW.date())


IN_VPC = {"sagemaker_subnets": ("subnet-a", "subnet-b"), "sagemaker_security_groups": ("sg-1",)}


def test_a_training_job_stands_where_the_config_says_with_its_keys() -> None:
    here = usual(
        role=ROLE, volume_kms_key="key-v", output_kms_key="key-o", encrypt_between_containers=True, **IN_VPC
    )
    (found,) = trains(here=here, num_nodes=2).sites
    assert (found.subnets, found.security_groups) == (("subnet-a", "subnet-b"), ("sg-1",))
    assert (found.volume_kms_key, found.output_kms_key, found.encrypts_traffic) == ("key-v", "key-o", True)
    assert on_ec2(here=here)[0].volume_kms_key == "key-v"


# Tags


@pytest.mark.parametrize(
    ("arn", "owner", "is_shared"),
    [
        ("arn:aws:iam::123456789012:user/vision/ada", "ada", False),
        ("arn:aws:iam::123456789012:user/lovelace,ada", "lovelace_ada", False),
        ("arn:aws:sts::123456789012:assumed-role/Dev/ada@example.com", "ada@example.com", False),
        ("arn:aws:sts::123456789012:assumed-role/Dev/botocore-session-1763900000", "Dev", True),
        ("arn:aws:sts::123456789012:assumed-role/Dev/AWSCLI-Session", "Dev", True),
        ("arn:aws:sts::123456789012:assumed-role/Notebook/i-0123456789abcdef0", "Notebook", True),
        ("arn:aws:sts::123456789012:federated-user/bob", "bob", False),
        ("arn:aws:iam::123456789012:root", "root", True),
    ],
)
def test_all_that_is_started_says_whose_it_is(arn: str, owner: str, is_shared: bool) -> None:
    identity = Identity(account="123456789012", arn=arn)
    assert identity.is_shared is is_shared
    aws = FakeAws(identity=identity)
    assert on_ec2(aws)[0].tags == {"Owner": owner}
    assert trains(aws).sites[0].tags == {"Owner": owner}


def test_tags_are_the_config_files_and_on_top_those_that_were_typed() -> None:
    config = replace(settings(), tags={"team": "vision", "stage": "test"})
    typed = request(tags=("stage=prod", "note=a=b", "empty="))
    (found, *_) = resolve(typed, lookup(settings=config)).sites
    assert found.tags == {"Owner": "ada", "team": "vision", "stage": "prod", "note": "a=b", "empty": ""}
    # Whoever names an owner, in whatever case, is asked for no other.
    for own in ("Owner=bob", "owner=bob"):
        (found, *_) = resolve(request(tags=(own,)), lookup()).sites
        assert set(found.tags.values()) == {"bob"}
    for number, fits in ((44, True), (45, False)):
        tags = tuple(f"t{n}=x" for n in range(number))
        (found, *_) = resolve(request(tags=tags), lookup()).sites
        job = ec2_builders.job()
        if fits:
            check_plan(found, [job], max_minutes=120)
        else:
            with pytest.raises(UserError, match="has 51 tags, above 50"):
                check_plan(found, [job], max_minutes=120)


def test_a_value_that_was_typed_for_a_secret_is_not_repeated() -> None:
    with pytest.raises(UserError) as caught:
        request(secrets=("HUB=hf_0123",))
    assert "hf_0123" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize("backend", ["ec2", "sagemaker"])
def test_secrets_are_named_where_the_machine_reads_them(backend: str) -> None:
    arns = {
        "HUB": "arn:aws:secretsmanager:eu-west-1:123456789012:secret:team/hub-x1y2z3",
        "KEY": "arn:aws-us-gov:ssm:us-gov-east-1:123456789012:parameter/key",
    }
    secrets = tuple(f"{name}={arn}" for name, arn in arns.items())
    (found, *_) = resolved(here=usual(role=ROLE), backend=backend, secrets=secrets).sites
    assert found.secrets == arns


# Without AWS


def offline(here: RegionSettings | None = None, **changes: Any) -> Placement:
    code = Bundle(data=b"", sha256="<code-sha256>", commit="c0ffee")
    looking = Lookup(
        settings=settings(us_east_1=here or RegionSettings()),
        catalogue=catalogue(),
        now=NOW,
        base=None if changes.get("image") else training_base(None, today=NOW.date()),
        bundle=None if changes.get("image") else code,
    )
    return resolve(request(**changes), looking)


def offline_ec2(here: RegionSettings | None = None, **changes: Any) -> Site:
    (found,) = offline(here, **changes).sites
    return found


def test_without_settings_everything_is_to_be_looked_up() -> None:
    found = offline_ec2()
    assert found.placeholders == (
        *("ami-id", "bucket", "code-sha256", "image-digest", "instance-profile", "owner", "root-device"),
    )
    assert (found.zone, found.subnet, found.security_groups) == (None, None, ())
    assert found.price == catalogue().price("p5.48xlarge", on=NOW.date())
    assert found.code is not None
    assert (found.code.key, found.code.commit) == ("fastlaunch/code/<code-sha256>.tar.gz", "c0ffee")


def test_settings_and_an_own_image_fill_the_placeholders() -> None:
    found = offline_ec2(usual(letters="a", prefix="a/b"))
    assert found.placeholders == ("ami-id", "code-sha256", "image-digest", "owner", "root-device")
    assert (found.bucket, found.prefix, found.role) == ("acme", "a/b", "fastlaunch-node")
    assert (found.zone, found.subnet, found.security_groups) == ("us-east-1a", "subnet-a", ("sg-1",))
    own = offline_ec2(image=IMAGE)
    assert own.code is None and own.image == IMAGE and "code-sha256" not in own.placeholders


def test_offline_a_region_without_a_price_is_left_out() -> None:
    both = offline(regions=("eu-north-1", "us-east-1"))
    assert [one.name for one in both.sites] == ["p5.48xlarge in us-east-1"]
    assert [name for name, _ in both.skipped] == ["p5.48xlarge in eu-north-1"]
    with pytest.raises(UserError, match="in eu-north-1 is known"):
        offline(regions=("eu-north-1",))
    assert offline_ec2(regions=("eu-north-1",), purchase="spot", max_price_usd=20.0).usd_per_hour == 20.0


def test_offline_several_interfaces_name_what_must_be_given() -> None:
    found = offline_ec2(num_nodes=2)
    assert {"subnet-id", "security-group-id"} <= set(found.placeholders)
    check_plan(found, request(num_nodes=2).at(found.instance, found.region), max_minutes=120)
    assert offline_ec2(usual(letters="a"), num_nodes=2).subnet == "subnet-a"


def test_offline_a_block_is_dear_and_never_free() -> None:
    block = {**IN_BLOCK, "block_fee_usd": 944.0}
    found = offline_ec2(usual(letters="a"), **block)
    assert found.block is not None
    # Known answer: of a day, the shortest there is; $944 over 24 h.
    assert (found.usd_per_hour, found.block.fee_usd) == (pytest.approx(39.3333333), 944.0)
    assert "block-end" in found.placeholders and found.zone == "us-east-1a"
    plan = plan_at(
        {"<run-id>": request(**block).at(found.instance, found.region)[0]}, found, attempt=1, max_minutes=120
    )
    assert plan.sunk_usd == 944.0 and plan.max_cost_usd == pytest.approx(85.222222 + 130 / 60 * 31 / 672)
    assert "block-end" in plan.placeholders
    # Only AWS can say which of several subnets is in the block's zone.
    unknown = offline_ec2(usual(), **block)
    assert (unknown.zone, unknown.subnet) == (None, "<subnet-id>")
    with pytest.raises(UserError, match="cost is not known") as caught:
        offline(usual(), **{**IN_BLOCK, "block_fee_usd": None})
    assert "--block-fee USD" in str(caught.value.hint)


def test_a_plan_that_aws_would_refuse_is_refused_before() -> None:
    # The request does not grow with its runs.
    check_plan(ec2_builders.site(), [ec2_builders.job()] * 900, max_minutes=120)
    for site, job, word in (
        (ec2_builders.site(prefix="p" * 250), ec2_builders.job(), "EC2 would refuse"),
        (training_site(prefix="p" * 1000), training_job(), "SageMaker would refuse"),
    ):
        with pytest.raises(UserError, match=word):
            check_plan(site, [job], max_minutes=120)
