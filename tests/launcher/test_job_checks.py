"""The checks before money is spent: each one fails where it must, and holds up nothing that it need not."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time
from typing import Any

import pytest
from ec2_builders import catalogue, site
from fake_aws_facts import ROLE, FakeAws, check_context, denied, fake_aws, settings, trusting, usual

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.backends.placements import Placement
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import (
    BadConfiguration,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.core.settings import RegionSettings
from fastlaunch.placement.aws_lookup import AwsLookup
from fastlaunch.placement.check import Check, CheckContext, Result
from fastlaunch.placement.checks import DOCTOR_KEY, checks, usable

TODAY = date(2026, 11, 21)


def wanted(*instances: str, **changes: Any) -> CheckContext:
    return check_context(lookup(), instances or ("p5.48xlarge",), **changes)


def lookup(**changes: Any) -> AwsLookup:
    usually: dict[str, Any] = {
        "aws": fake_aws(),
        "settings": settings(),
        "catalogue": catalogue(),
        "now": datetime.combine(TODAY, time(12), tzinfo=UTC),
        "base": training_base(None, today=TODAY),
        "ask": CachedCalls(),
    }
    return AwsLookup(**{**usually, **changes})


def made(
    aws: FakeAws | None = None,
    job: CheckContext | None = None,
    today: date = TODAY,
    sites: Sequence[Placement] = (),
    **changes: Any,
) -> list[Check]:
    now = datetime.combine(today, time(12), tzinfo=UTC)
    looked_up = lookup(aws=aws or fake_aws(), now=now, **changes)
    return checks(replace(job or wanted(), lookup=looked_up), sites)


def named(name: str, found: list[Check]) -> Check:
    """The first check of this name."""
    return next(check for check in found if check.name == name)


def results(found: list[Check]) -> dict[str, str]:
    """Result by name, of those that are not ok."""
    return {check.name: str(check.result) for check in found if check.result is not Result.OK}


def test_where_all_is_well_every_check_says_so() -> None:
    aws = fake_aws()
    found = made(aws, wanted(max_minutes=120, max_cost_usd=200.0), sites=[site()])
    assert results(found) == {}
    names = [check.name for check in found]
    assert names == [
        *("login", "config", "region", "machine image", "container image", "instance profile", "bucket"),
        *("security group", "subnet", "subnet", "subnet", "offered", "quota", "price file", "price", "cost"),
    ]
    assert named("login", found).message == "arn:aws:iam::123456789012:user/ada (account 123456789012)"
    assert aws.stored == [("us-east-1", "acme", f"fastlaunch/{DOCTOR_KEY}")]


def test_no_fact_is_asked_for_twice() -> None:
    aws = fake_aws()
    made(aws, wanted("p5.48xlarge", "p4d.24xlarge"))
    assert {fact: count for fact, count in aws.asked.items() if count > 1} == {
        ("zones_offering", "us-east-1"): 2  # one for each type
    }


def test_what_resolving_asked_is_not_asked_again() -> None:
    aws, ask = fake_aws(), CachedCalls()
    made(aws, ask=ask)
    before = aws.asked.total()
    made(aws, ask=ask)
    assert aws.asked.total() == before


@pytest.mark.parametrize(
    ("changes", "name", "kind", "told"),
    [
        ({"refused": {"identity": denied("sts:GetCallerIdentity")}}, "login", NotAuthorised, "AccessDenied"),
        ({"digest": None}, "container image", BadConfiguration, "has no image pytorch:2.13"),
        ({"refused": {"parameter": BadConfiguration("no such parameter")}}, "machine image", None, "no such"),
        ({"unpassable": "may not pass it"}, "instance profile", NotAuthorised, "may not pass it"),
        ({"buckets": frozenset()}, "bucket", BadConfiguration, "there is no bucket acme"),
        ({"refused": {"put_object": denied("s3:PutObject")}}, "bucket", NotAuthorised, "s3:PutObject"),
        ({"refused": {"bucket_exists": BadConfiguration("elsewhere")}}, "bucket", None, "elsewhere"),
        ({"group_vpcs": {"sg-1": "vpc-9"}}, "subnet", BadConfiguration, "sg-1 is of vpc-9"),
        ({"subnet_zones": {}}, "subnet", BadConfiguration, "there is no subnet subnet-a"),
        ({"zones": "xyz"}, "offered", NoCapacity, "us-east-1a has no p5.48xlarge"),
        ({"applied": 100.0}, "quota", QuotaExceeded, "needs 192 vCPUs, 0 of 100"),
        ({"refused": {"machine_image": Throttled("too fast")}}, "machine image", Throttled, "too fast"),
    ],
)
def test_a_check_fails_with_its_own_kind_of_error(
    changes: dict[str, Any], name: str, kind: type[UserError] | None, told: str
) -> None:
    check = named(name, made(fake_aws(**changes)))
    assert (check.result, check.ok) == (Result.FAILED, False)
    assert told in check.message and type(check.error) is (kind or BadConfiguration)
    with pytest.raises(UserError, match=told):
        usable([site()], [check])


def test_without_a_login_nothing_else_is_asked() -> None:
    aws = fake_aws(refused={"identity": NotAuthorised("no credentials", "aws configure")})
    found = made(aws)
    assert set(aws.asked) == {("identity", "")}
    left = {name: result for name, result in results(found).items() if name != "login"}
    assert set(left.values()) == {"not checked"} and "bucket" in left
    # What needs no AWS is told all the same.
    assert named("price", found).ok and named("config", found).ok


def test_a_region_that_is_not_there_is_not_asked() -> None:
    found = made(fake_aws(), wanted(regions=("eu-west-9",)), settings=settings(eu_west_9=usual("eu-west-9")))
    assert "eu-west-9 does not exist" in named("region", found).message
    assert named("bucket", found).message == "eu-west-9 cannot be used"


@pytest.mark.parametrize(
    ("refused", "name"),
    [
        ("regions", "region"),
        ("quota", "quota"),
        ("running_vcpus", "quota"),
        ("spot_price_usd", "spot price"),
    ],
)
def test_a_right_that_the_job_does_not_need_fails_nothing(refused: str, name: str) -> None:
    aws = fake_aws(refused={refused: denied("what it takes")})
    found = made(aws, wanted(purchase="spot", checkpoint_every=50))
    assert named(name, found).result is Result.NOT_CHECKED and named(name, found).result is Result.NOT_CHECKED
    assert results(found) == {name: "not checked"}
    assert usable([site()], found).placements == (site(),)


def test_routes_that_may_not_be_looked_at_leave_the_public_address() -> None:
    refused = {"default_routes": denied("ec2:DescribeRouteTables")}
    assert named("subnet", made(fake_aws(refused=refused))).ok
    private = named("subnet", made(fake_aws(refused=refused, public=False)))
    assert private.result is Result.WARNING and "may not be looked at" in private.message


def test_a_bucket_that_can_be_written_need_not_be_listed() -> None:
    assert named("bucket", made(fake_aws(refused={"bucket_exists": denied("s3:ListBucket")}))).ok


def test_quota_that_cannot_be_known_is_said_to_be() -> None:
    check = named("quota", made(job=wanted("p6-b200.48xlarge", purchase="spot", checkpoint_every=9)))
    assert check.result is Result.NOT_CHECKED and "is not published" in check.message


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"routes": {None: ""}}, "neither S3 nor ECR"),
        ({"routes": {}}, "neither S3 nor ECR"),
        ({"public": False}, "its machines get no public address"),
        (
            {"routes": {None: ""}, "services": frozenset({"s3", "ecr.api"})},
            "has no route to the internet, and vpc-1 has no endpoint for ecr.dkr",
        ),
        ({"routes": {None: ""}, "refused": {"endpoints": denied("it")}}, "may not be looked at"),
        ({"routes": {None: "igw-1", "subnet-a": ""}}, "neither S3 nor ECR"),
    ],
)
def test_a_subnet_without_a_way_out_is_warned_of(changes: dict[str, Any], told: str) -> None:
    check = named("subnet", made(fake_aws(**changes)))
    assert check.result is Result.WARNING and check.ok and told in check.message and check.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"public": False, "routes": {None: "nat-1"}},
        {"public": False, "routes": {"subnet-a": "tgw-1"}},
        {"public": False, "routes": {None: ""}, "services": frozenset({"s3", "ecr.api", "ecr.dkr", "logs"})},
        {},
    ],
)
def test_a_way_out_is_seen(changes: dict[str, Any]) -> None:
    assert named("subnet", made(fake_aws(**changes))).result is Result.OK


def test_without_subnets_it_warns_that_ec2_chooses() -> None:
    bare = settings(us_east_1=RegionSettings(bucket="acme", instance_profile="node"))
    found = made(settings=bare)
    assert results(found) == {"subnet": "warning"}
    assert "the default VPC, vpc-1," in named("subnet", found).message
    assert named("subnet", made(fake_aws(default_vpc_id=None), settings=bare)).result is Result.FAILED


def test_an_empty_config_says_what_to_write_and_is_a_fault_of_ours() -> None:
    check = named("config", made(settings=settings(us_west_2=usual("us-west-2"))))
    assert check.error is not None and check.error.exit_code == 2
    assert "neither bucket nor instance profile is named for us-east-1" in check.message
    one = settings(us_east_1=replace(usual(), instance_profile=None))
    found = made(settings=one)
    assert "no instance profile is named" in named("config", found).message
    assert named("instance profile", found).result is Result.NOT_CHECKED
    assert named("bucket", found).ok


def test_some_zones_without_the_type_are_a_warning() -> None:
    check = named("offered", made(fake_aws(zones="ac")))
    assert check.result is Result.WARNING and check.message.endswith("us-east-1b will be left out")


def test_a_wrong_subnet_concerns_its_zone_alone() -> None:
    aws = fake_aws()
    aws.subnet_zones["subnet-a"] = "us-east-1f"
    found = made(aws)
    sites = [site(), site(zone="us-east-1b", subnet="subnet-b")]
    left = usable(sites, found)
    assert left.placements == (sites[1],)
    assert left.skipped == (("p5.48xlarge in us-east-1a", "subnet-a is in us-east-1f, not in us-east-1a"),)


def test_quota_concerns_its_type_alone() -> None:
    found = made(fake_aws(applied=100.0), wanted("p5.48xlarge", "p4d.24xlarge"))
    left = usable([site(), site("p4d.24xlarge")], found)
    assert [one.instance.name for one in left.placements] == ["p4d.24xlarge"]
    assert left.skipped[0][0] == "p5.48xlarge in us-east-1a"


def test_a_regions_fault_concerns_that_region_alone() -> None:
    both = settings(us_east_1=usual(), us_west_2=usual("us-west-2", ""))
    aws = fake_aws(refused={("put_object", "us-west-2"): denied("s3:PutObject")})
    found = made(aws, wanted(regions=("us-west-2", "us-east-1")), settings=both)
    left = usable([site(region="us-west-2", zone=None), site()], found)
    assert [one.region for one in left.placements] == ["us-east-1"]


@pytest.mark.parametrize(
    ("today", "result"), [(date(2027, 1, 16), Result.OK), (date(2027, 1, 17), Result.WARNING)]
)
def test_an_old_price_is_a_warning(today: date, result: Result) -> None:
    check = named("price", made(today=today))
    assert check.result is result and "as of 2026-07-20" in check.message
    assert ("181 days ago" in check.message) is (result is Result.WARNING)


def test_an_old_price_file_is_a_warning() -> None:
    newest = max(price.as_of for price in catalogue().prices if price.service == "ec2")
    assert str(newest) in named("price file", made()).message
    assert named("price file", made(today=date(newest.year + 1, 12, 31))).result is Result.WARNING


def test_a_price_that_is_not_known_fails() -> None:
    check = named("price", made(job=wanted("p5e.48xlarge", purchase="spot", checkpoint_every=9)))
    assert check.result is Result.FAILED and "--max-price" in (check.hint or "")
    limited = wanted("p5e.48xlarge", purchase="spot", checkpoint_every=9, max_price_usd=30.0)
    assert named("price", made(job=limited)).message == "at most $30/h, as of 2026-11-21"


def test_spot_wants_checkpoints() -> None:
    check = named("checkpoints", made(job=wanted(purchase="spot", checkpoint_every=0)))
    assert check.result is Result.FAILED and "--checkpoint-every" in (check.hint or "")
    assert named("checkpoints", made(job=wanted(purchase="spot", checkpoint_every=50))).ok
    assert "checkpoints" not in {check.name for check in made(job=wanted(purchase="spot"))}
    assert "checkpoints" not in {check.name for check in made(job=wanted(checkpoint_every=0))}


def test_spot_above_the_limit_is_a_warning() -> None:
    job = wanted(purchase="spot", checkpoint_every=50, max_price_usd=10.0)
    check = named("spot price", made(job=job))
    assert check.result is Result.WARNING and "above --max-price 10" in check.message
    unlimited = wanted(purchase="spot", checkpoint_every=50)
    assert named("spot price", made(job=unlimited)).ok
    assert named("spot price", made(fake_aws(spot=None), job)).result is Result.NOT_CHECKED


def test_a_cost_above_the_budget_fails_for_every_site() -> None:
    found = made(job=wanted(max_minutes=120, max_cost_usd=100.0), sites=[site()])
    check = named("cost", found)
    assert check.result is Result.FAILED and "--max-cost 120" in (check.hint or "")
    with pytest.raises(UserError, match="above --max-cost 100"):
        usable([site()], found)


def test_an_image_of_ones_own_is_looked_up_as_far_as_that_is_allowed() -> None:
    own = wanted(image="123456789012.dkr.ecr.us-east-1.amazonaws.com/training@sha256:" + "12" * 32)
    assert named("container image", made(fake_aws(), own)).result is Result.OK
    assert named("container image", made(fake_aws(digest=None), own)).result is Result.FAILED
    unseen = named("container image", made(fake_aws(refused={"image_digest": denied("it")}), own))
    assert unseen.result is Result.NOT_CHECKED and "may not be looked at" in unseen.message


def test_a_machine_that_could_not_upload_is_warned_of() -> None:
    check = named("instance profile", made(fake_aws(lacking=("s3:PutObject",))))
    assert check.result is Result.WARNING and check.error is None
    assert (
        "do not give s3:PutObject on arn:PARTITION:s3:::acme/fastlaunch/runs/RUN/boot.json" in check.message
    )
    assert named("instance profile", made(fake_aws(refused={"node_lacks": denied("it")}))).ok


def test_a_role_of_which_iam_does_not_tell_is_not_said_to_pass() -> None:
    check = named(
        "instance profile", made(fake_aws(refused={"may_pass_role": denied("iam:GetInstanceProfile")}))
    )
    assert check.result is Result.NOT_CHECKED and "iam:GetInstanceProfile" in check.message


def test_a_base_image_past_its_end_or_not_certain_is_a_warning() -> None:
    for tag, told in (("2.9.0", "AWS has not patched it since 2026-10-15"), ("2.14", "follow from 2.13")):
        found = made(base=training_base(tag, today=TODAY))
        check = named("container image", found)
        assert check.result is Result.WARNING and told in check.message


def test_no_answer_is_not_a_right_that_is_lacking() -> None:
    found = made(fake_aws(refused={"quota": Unreachable("no answer")}))
    assert named("quota", found).message == "no answer"
    assert named("quota", found).result is Result.NOT_CHECKED


def test_without_an_instance_type_the_account_is_checked() -> None:
    found = made(job=replace(wanted(), instances=()))
    assert {"offered", "quota", "price"}.isdisjoint(check.name for check in found)
    assert results(found) == {}


def test_what_only_looks_is_not_said_to_have_started_something() -> None:
    from fastlaunch.aws.errors import ApiCall, unanswered

    looked = unanswered(
        ApiCall(service="sts", action="GetCallerIdentity", region="r"), ("ConnectionError",), ""
    )
    started = unanswered(ApiCall(service="ec2", action="RunInstances", region="r"), ("ConnectionError",), "")
    assert looked is not None and "status" not in (looked.hint or "")
    assert started is not None and "the same token" in (started.hint or "")


def test_a_detached_jobs_timer_is_looked_at_and_holds_up_nothing() -> None:
    def told(aws: FakeAws, **here: Any) -> Check:
        config = settings(us_east_1=replace(usual(), **{"scheduler_role": ROLE, **here}))
        return named("scheduler role", made(aws, wanted(is_unfollowed=True), settings=config))

    answers = {"GetRole": trusting("scheduler.amazonaws.com")}
    assert told(fake_aws(answers=answers)).result is Result.OK
    none = told(fake_aws(), scheduler_role=None)
    assert none.result is Result.NOT_CHECKED and "aws cloudformation deploy" in str(none.hint)
    other = told(fake_aws(answers={"GetRole": trusting("ec2.amazonaws.com")}))
    assert other.result is Result.WARNING and "does not let EventBridge Scheduler take it on" in other.message
    unpassed = told(fake_aws(answers=answers, untrusted=("scheduler.amazonaws.com",)))
    assert unpassed.result is Result.WARNING and "may not pass" in unpassed.message
    # A job that is followed has no such timer.
    assert "scheduler role" not in {check.name for check in made()}
