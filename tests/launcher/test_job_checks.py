"""The checks before money is spent: each one fails where it must, and holds up nothing that it need not."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pytest
from ec2_builders import IMAGE, catalogue, site
from fake_aws_facts import (
    BLOCK,
    IN_BLOCK,
    NOW,
    PLAN,
    ROLE,
    FakeAws,
    context,
    denied,
    lookup,
    rules,
    settings,
    subnets,
    usual,
    zones,
)
from sagemaker_builders import TRAINING_PLAN, training_site

from fastlaunch.aws.account import Quota, Role
from fastlaunch.aws.ec2 import PlacementGroup
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
from fastlaunch.placement.check import Check, Result
from fastlaunch.placement.checks import DOCTOR_KEY, checks
from fastlaunch.placement.resolve import usable

#: As after an update on the day before.
FRESH = replace(
    catalogue(),
    prices=tuple(
        replace(price, as_of=NOW.date() - timedelta(days=1)) if price.as_of.year == 2026 else price
        for price in catalogue().prices
    ),
)
SPOT: dict[str, Any] = {"purchase": "spot"}


#: Of a block or a plan that is to come.
LATER: dict[str, Any] = {"starts_at": NOW + timedelta(days=1), "ends_at": NOW + timedelta(days=2)}


def run(
    aws: FakeAws | None = None,
    *instances: str,
    here: RegionSettings | None = None,
    looked_up: dict[str, Any] | None = None,
    **changes: Any,
) -> list[Check]:
    """Every check of a job in us-east-1, whose part of the config file is `here`."""
    config = {"settings": settings(us_east_1=here)} if here else {}
    found = lookup(aws, **{"catalogue": FRESH, **config, **(looked_up or {})})
    return checks(context(found, *instances, **changes))


def first(name: str, found: list[Check]) -> Check:
    """The first check of this name."""
    return next(check for check in found if check.name == name)


def check(name: str, *arguments: Any, **changes: Any) -> Check:
    return first(name, run(*arguments, **changes))


def results(found: list[Check]) -> dict[str, str]:
    """Result by name, of those that are not ok."""
    return {each.name: str(each.result) for each in found if each.result is not Result.OK}


def test_where_all_is_well_every_check_says_so() -> None:
    aws = FakeAws()
    found = run(aws)
    assert results(found) == {}
    assert [each.name for each in found] == [
        *("login", "price file", "config", "region", "price", "machine image", "container image"),
        *("instance profile", "scheduler role", "bucket", "stored code"),
        *("security group", "subnet", "subnet", "subnet", "offered", "quota"),
    ]
    assert first("login", found).message == "arn:aws:iam::123456789012:user/ada (account 123456789012)"


def test_the_bucket_is_written_once_under_the_prefix() -> None:
    written = []
    aws = FakeAws(put_object=lambda *arguments: written.append(arguments))
    run(aws)
    assert [call[:3] for call in written] == [("us-east-1", "acme", f"fastlaunch/{DOCTOR_KEY}")]


def test_no_fact_is_asked_for_twice() -> None:
    aws = FakeAws()
    found = lookup(aws)
    checks(context(found, "p5.48xlarge", "p4d.24xlarge"))
    assert {fact: count for fact, count in aws.asked.items() if count > 1} == {
        ("zones_offering", "us-east-1"): 2  # one for each type
    }
    before = aws.asked.total()
    checks(context(found, "p5.48xlarge", "p4d.24xlarge"))
    assert aws.asked.total() == before


@pytest.mark.parametrize(
    ("facts", "name", "kind", "word"),
    [
        ({"identity": denied("sts:GetCallerIdentity")}, "login", NotAuthorised, "AccessDenied"),
        ({"image_digest": None}, "container image", BadConfiguration, "pytorch:2.13"),
        ({"profile_role": None}, "instance profile", NotAuthorised, "no instance profile"),
        ({"may_pass": False}, "instance profile", NotAuthorised, "may not pass"),
        ({"bucket_exists": False}, "bucket", BadConfiguration, "no bucket acme"),
        ({"put_object": denied("s3:PutObject")}, "bucket", NotAuthorised, "s3:PutObject"),
        ({"zones_offering": zones("xyz")}, "offered", NoCapacity, "us-east-1a has no p5.48xlarge"),
        ({"quota": 100.0}, "quota", QuotaExceeded, "needs 192 vCPUs, 0 of 100"),
        ({"machine_image": Throttled("too fast")}, "machine image", Throttled, "too fast"),
    ],
)
def test_a_check_fails_with_its_own_kind_of_error(
    facts: dict[str, Any], name: str, kind: type[UserError], word: str
) -> None:
    found = check(name, FakeAws(**facts))
    assert found.result is Result.FAILED
    assert word in found.message and type(found.error) is kind
    with pytest.raises(kind, match=word):
        usable([site()], [found])


def test_without_a_login_nothing_else_is_asked() -> None:
    aws = FakeAws(identity=NotAuthorised("no credentials", "aws configure"))
    found = run(aws)
    assert set(aws.asked) == {("identity", "")}
    left = {name: result for name, result in results(found).items() if name != "login"}
    assert set(left.values()) == {"not checked"} and "bucket" in left
    # What needs no AWS is checked all the same.
    assert first("price", found).result is first("config", found).result is Result.OK


def test_a_region_that_is_not_there_is_not_asked() -> None:
    config = {"settings": settings(eu_west_9=usual("eu-west-9"))}
    found = run(looked_up=config, regions=("eu-west-9",))
    assert first("region", found).result is Result.FAILED
    assert first("bucket", found).result is Result.NOT_CHECKED


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({"regions": denied("it")}, "region"),
        ({"quota": denied("it")}, "quota"),
        ({"quota": Unreachable("no answer")}, "quota"),
        ({"running_vcpus": denied("it")}, "quota"),
        ({"spot_price_usd": denied("it")}, "spot price"),
        ({"spot_price_usd": None}, "spot price"),
        ({"may_pass": denied("it")}, "instance profile,scheduler role"),
        ({"profile_role": denied("it")}, "instance profile"),
    ],
)
def test_what_aws_does_not_tell_and_the_job_does_not_need_holds_up_nothing(
    facts: dict[str, Any], names: str
) -> None:
    found = run(FakeAws(**facts), **SPOT)
    assert results(found) == dict.fromkeys(names.split(","), "not checked")
    assert usable([site()], found)[0] == [site()]


@pytest.mark.parametrize("facts", [{"bucket_exists": denied("s3:ListBucket")}, {"role_lacks": denied("it")}])
def test_some_rights_are_not_missed_at_all(facts: dict[str, Any]) -> None:
    assert results(run(FakeAws(**facts))) == {}


def test_a_quota_that_is_not_published_is_not_checked() -> None:
    assert check("quota", None, "p6-b200.48xlarge", **SPOT).result is Result.NOT_CHECKED


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"default_routes": {None: ""}}, "neither S3 nor ECR"),
        ({"default_routes": {}}, "neither S3 nor ECR"),
        ({"default_routes": {None: "igw-1", "subnet-a": ""}}, "neither S3 nor ECR"),
        ({"subnets": subnets(public=False)}, "no public address"),
        ({"default_routes": {None: ""}, "endpoints": frozenset({"s3", "ecr.api"})}, "endpoint for ecr.dkr"),
        ({"default_routes": {None: ""}, "endpoints": denied("it")}, "may not be looked at"),
        ({"default_routes": denied("it"), "subnets": subnets(public=False)}, "may not be looked at"),
    ],
)
def test_a_subnet_without_a_way_out_is_a_warning(facts: dict[str, Any], word: str) -> None:
    found = check("subnet", FakeAws(**facts))
    assert found.result is Result.WARNING and word in found.message and found.hint


@pytest.mark.parametrize(
    "facts",
    [
        {"subnets": subnets(public=False), "default_routes": {None: "nat-1"}},
        {"subnets": subnets(public=False), "default_routes": {"subnet-a": "tgw-1", None: "nat-1"}},
        {"default_routes": {None: ""}, "endpoints": frozenset({"s3", "ecr.api", "ecr.dkr", "logs"})},
        {"default_routes": denied("ec2:DescribeRouteTables")},
    ],
)
def test_a_way_out_is_seen(facts: dict[str, Any]) -> None:
    assert check("subnet", FakeAws(**facts)).result is Result.OK


def test_without_subnets_it_warns_that_ec2_chooses() -> None:
    bare = RegionSettings(bucket="acme", instance_profile="node", scheduler_role=ROLE)
    assert results(run(here=bare)) == {"subnet": "warning"}
    assert check("subnet", FakeAws(default_vpc=None), here=bare).result is Result.FAILED


def test_an_empty_config_says_what_to_write_and_is_no_fault_of_awss() -> None:
    found = check("config", looked_up={"settings": settings(us_west_2=usual("us-west-2"))})
    assert found.error is not None and found.error.exit_code == 2
    assert "neither bucket nor instance profile" in found.message
    checked = run(here=usual(instance_profile=None))
    assert results(checked) == {"config": "failed", "instance profile": "not checked"}


def test_a_quota_concerns_its_type_alone() -> None:
    found = run(FakeAws(quota=100.0), "p5.48xlarge", "p4d.24xlarge")
    left, refused = usable([site(), site("p4d.24xlarge")], found)
    assert [one.instance.name for one in left] == ["p4d.24xlarge"]
    assert refused[0][0] == "p5.48xlarge in us-east-1a"


@pytest.mark.parametrize(
    ("today", "result"), [(date(2026, 11, 27), Result.OK), (date(2026, 11, 28), Result.WARNING)]
)
def test_a_price_older_than_7_days_is_a_warning(today: date, result: Result) -> None:
    now = datetime.combine(today, time(12), tzinfo=UTC)
    assert check("price", looked_up={"now": now}).result is result


def test_an_old_price_file_is_a_warning() -> None:
    newest = max(price.as_of for price in FRESH.prices if price.service == "ec2")
    later = datetime(newest.year + 1, 12, 31, tzinfo=UTC)
    assert str(newest) in check("price file").message
    assert check("price file", looked_up={"now": later}).result is Result.WARNING


def test_spot_above_the_limit_is_a_warning() -> None:
    found = check("spot price", **SPOT, max_price_usd=10.0)
    assert found.result is Result.WARNING and "--max-price 10" in found.message
    assert check("spot price", **SPOT).result is Result.OK


@pytest.mark.parametrize(
    ("digest", "result"), [("sha256:0", Result.OK), (None, Result.FAILED), (denied("it"), Result.NOT_CHECKED)]
)
def test_an_image_of_ones_own_is_looked_up_as_far_as_that_is_allowed(digest: Any, result: Result) -> None:
    assert check("container image", FakeAws(image_digest=digest), image=IMAGE).result is result


@pytest.mark.parametrize("tag", ["2.9.0", "2.14"])
def test_a_base_image_past_its_end_or_not_certain_is_a_warning(tag: str) -> None:
    looked_up = {"base": training_base(tag, today=NOW.date())}
    assert check("container image", looked_up=looked_up).result is Result.WARNING


def test_a_machine_that_could_not_upload_is_a_warning() -> None:
    rights = []

    def missing(role: str, asked: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
        rights.extend(asked)
        return ["s3:PutObject on acme"]

    found = check("instance profile", FakeAws(role_lacks=missing))
    assert found.result is Result.WARNING and "s3:PutObject on acme" in found.message
    assert rights[1][0] == "arn:PARTITION:s3:::acme/fastlaunch/runs/RUN/boot.json"


def test_without_an_instance_type_the_account_is_checked() -> None:
    found = checks(replace(context(lookup()), instances=()))
    assert {"offered", "quota", "price"}.isdisjoint(each.name for each in found)
    assert results(found) == {}


@pytest.mark.parametrize(
    ("facts", "arn", "result"),
    [
        ({}, ROLE, Result.OK),
        ({}, None, Result.FAILED),
        ({"may_pass": denied("it")}, ROLE, Result.NOT_CHECKED),
        ({"may_pass": lambda role, service: service != "scheduler.amazonaws.com"}, ROLE, Result.WARNING),
        ({"role": Role(arn=ROLE, trusts=frozenset({"ec2.amazonaws.com"}))}, ROLE, Result.FAILED),
    ],
)
def test_without_the_timers_role_nothing_starts_and_with_it_the_timer_holds_up_nothing(
    facts: dict[str, Any], arn: str | None, result: Result
) -> None:
    found = check("scheduler role", FakeAws(**facts), here=usual(scheduler_role=arn))
    assert found.result is result and (result is Result.OK or found.hint)
    declined = run(here=usual(scheduler_role=None), account_timer=False)
    assert "scheduler role" not in {each.name for each in declined}


def test_what_starts_by_a_schedule_needs_a_role_that_may_start_it() -> None:
    to_come = {"reservation": replace(BLOCK, state="scheduled", **LATER)}
    lacks: dict[str, Any] = {"role_lacks": lambda role, rights: [f"{rights[0][1][0]}"]}

    def result(facts: dict[str, Any], **changes: Any) -> Result:
        return check("scheduler role", FakeAws(**facts), **{**IN_BLOCK, "detach": True, **changes}).result

    assert result(to_come) is Result.OK
    assert result({**to_come, **lacks}) is Result.FAILED
    assert result({**to_come, **lacks}, account_timer=False) is Result.FAILED
    assert result({**to_come, "role_lacks": denied("it")}) is Result.OK
    # A process that waits, or a block that has begun, needs only timers.
    assert result({**to_come, **lacks}, detach=False) is Result.OK
    assert result(lacks) is Result.OK
    lacking = check("scheduler role", FakeAws(**to_come, **lacks), **IN_BLOCK, detach=True)
    assert "fastlaunch init" in (lacking.hint or "") and "ec2:RunInstances" in lacking.message


# Several nodes


def nodes(facts: dict[str, Any] | None = None, *instances: str, **changes: Any) -> dict[str, Check]:
    """The first check of each name for two nodes, in an account that has all they need but for `facts`."""
    groups = {f"us-east-1{letter}": "close" for letter in "abc"}
    here = usual(**{"placement_groups": groups, **changes.pop("here", {})})
    aws = FakeAws(**{"default_routes": {None: "nat-1"}, "quota": 400.0, **(facts or {})})
    found = run(aws, *instances, here=here, **{"num_nodes": 2, **changes})
    return {each.name: each for each in reversed(found)}


def test_where_all_is_well_two_nodes_may_start() -> None:
    found = nodes()
    assert {each.result for each in found.values()} == {Result.OK}
    assert {"between nodes", "placement group"} <= found.keys()
    assert "needs 384 vCPUs" in found["quota"].message
    assert {"between nodes", "placement group"}.isdisjoint(nodes(num_nodes=1))


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        ({"default_routes": {None: "igw-1"}}, "NAT"),
        ({"default_routes": {None: ""}}, "NAT"),
        ({"default_routes": {None: ""}, "endpoints": frozenset({"s3"})}, "com.amazonaws.us-east-1.ecr.dkr"),
    ],
)
def test_a_public_subnet_is_no_way_out_for_several_interfaces(facts: dict[str, Any], hint: str) -> None:
    found = nodes(facts)["subnet"]
    assert type(found.error) is BadConfiguration and hint in str(found.hint)


def test_a_way_out_of_several_interfaces() -> None:
    services = frozenset({"s3", "ecr.api", "ecr.dkr"})
    assert nodes({"default_routes": {None: ""}, "endpoints": services})["subnet"].result is Result.OK
    assert nodes({"default_routes": denied("it")})["subnet"].result is Result.WARNING
    # A type without EFA has one interface, which may have a public address.
    assert nodes({"default_routes": {None: "igw-1"}}, "g5.xlarge")["subnet"].result is Result.OK
    assert type(nodes(here={"subnets": {}})["subnet"].error) is BadConfiguration


@pytest.mark.parametrize(
    ("lets_in", "lets_out", "ways"),
    [(True, False, {"egress"}), (False, True, {"ingress"}), (False, False, {"ingress", "egress"})],
)
def test_efa_wants_a_group_that_names_itself_both_ways(lets_in: bool, lets_out: bool, ways: set[str]) -> None:
    found = nodes({"group_rules": rules(lets_in, lets_out)})["between nodes"]
    assert type(found.error) is BadConfiguration
    commands = str(found.hint).split(" && ")
    assert {command.split()[2].rpartition("-")[2] for command in commands} == ways
    assert all("--group-id sg-1" in command for command in commands)


def test_between_nodes_without_a_named_group_or_efa() -> None:
    assert type(nodes(here={"security_groups": ()})["between nodes"].error) is BadConfiguration
    closed = {"group_rules": rules(False, False)}
    found = nodes(closed, "g5.xlarge")["between nodes"]
    assert found.result is Result.WARNING and "--source-group sg-1" in str(found.hint)
    assert nodes({}, "g5.xlarge")["between nodes"].result is Result.OK
    assert nodes({}, "g5.xlarge", here={"security_groups": ()})["between nodes"].result is Result.OK


@pytest.mark.parametrize("group", [None, PlacementGroup(name="close", strategy="spread", state="available")])
def test_a_placement_group_is_there_and_a_cluster(group: PlacementGroup | None) -> None:
    found = nodes({"placement_group": group})["placement group"]
    assert type(found.error) is BadConfiguration
    assert "aws ec2 create-placement-group --region us-east-1 --strategy cluster" in str(found.hint)


def test_a_zone_without_a_group_is_a_warning_with_the_command() -> None:
    found = nodes(here={"placement_groups": {}})["placement group"]
    assert found.result is Result.WARNING
    assert "--group-name fastlaunch-us-east-1a" in str(found.hint)
    assert "placement_groups: {us-east-1a: fastlaunch-us-east-1a}" in str(found.hint)


# Capacity blocks


def test_a_block_needs_no_quota_and_no_placement_group() -> None:
    found = nodes({"quota": 0.0}, here={"placement_groups": {}}, **IN_BLOCK)
    assert {each.result for each in found.values()} == {Result.OK}
    assert {"quota", "placement group"}.isdisjoint(found)
    assert "2 of 2 instances free, 10 h 0 min left" in found["capacity block"].message
    assert found["price"].message == "$1,887.84 paid up front"


# SageMaker


def quotas(**values: float) -> dict[str, Quota]:
    """SageMaker's quotas: `p5_48xlarge=2.0` of training jobs, with `spot_` before it of spot ones."""
    found = {}
    for key, value in values.items():
        usage = "spot training job" if key.startswith("spot_") else "training job"
        name = f"ml.{key.removeprefix('spot_').replace('_', '.')} for {usage} usage"
        found[name] = Quota(code="L-1", name=name, value=value, is_default=False)
    return found


def train(
    facts: dict[str, Any] | None = None, *instances: str, here: RegionSettings | None = None, **changes: Any
) -> list[Check]:
    """Every check of a training job, in an account in which it may start but for `facts`."""
    room = quotas(p5_48xlarge=2.0, p4d_24xlarge=2.0, spot_p5_48xlarge=0.0)
    aws = FakeAws(**{"quotas_by_name": room, **(facts or {})})
    return run(aws, *instances, here=here or usual(role=ROLE), backend="sagemaker", **changes)


def test_where_all_is_well_a_training_job_may_start() -> None:
    found = train()
    assert results(found) == {}
    assert [each.name for each in found] == [
        *("login", "price file", "config", "region", "price", "container image", "role", "bucket"),
        *("stored code", "quota"),
    ]
    assert "needs 1 instance of 2: ml.p5.48xlarge for training job" in first("quota", found).message
    # SageMaker's price, not EC2's.
    assert "$63.296/h" in first("price", found).message
    assert {each.instance for each in found} == {None, "ml.p5.48xlarge"}


def test_a_training_jobs_own_network_is_looked_at_before() -> None:
    here = usual(role=ROLE, sagemaker_subnets=("subnet-a",), sagemaker_security_groups=("sg-1",))
    assert first("network", train(here=here)).result is Result.OK
    other = {"security_group_vpcs": {"sg-1": "vpc-2"}}
    assert "in vpc-1 and vpc-2" in first("network", train(other, here=here)).message
    closed = {"group_rules": rules(lets_in=False)}
    assert first("network", train(closed, here=here)).result is Result.OK
    assert "no ingress rule" in first("network", train(closed, here=here, num_nodes=2)).message


@pytest.mark.parametrize(
    ("facts", "result", "kind"),
    [
        ({"role": Role(arn=ROLE, trusts=frozenset({"ec2.amazonaws.com"}))}, Result.FAILED, BadConfiguration),
        ({"role": None}, Result.FAILED, BadConfiguration),
        ({"may_pass": False}, Result.FAILED, NotAuthorised),
        # Where IAM tells little, nothing is held up.
        ({"role": denied("iam:GetRole")}, Result.OK, None),
        ({"may_pass": denied("iam:SimulatePrincipalPolicy")}, Result.NOT_CHECKED, None),
        ({"role_lacks": ["s3:PutObject on acme"]}, Result.WARNING, None),
    ],
)
def test_a_role_is_there_and_sagemakers_and_may_be_passed(
    facts: dict[str, Any], result: Result, kind: type[UserError] | None
) -> None:
    found = first("role", train(facts))
    assert found.result is result and kind in (None, type(found.error))


def test_a_training_job_needs_a_role_and_a_bucket() -> None:
    found = train(here=usual())
    assert "--role ARN" in str(first("config", found).hint)
    assert "fastlaunch init --region us-east-1" in str(first("role", found).hint)
    assert first("config", train(here=usual(bucket=None))).result is Result.FAILED


def test_a_training_plan_needs_no_quota_and_one_that_may_not_be_listed_holds_up_nothing() -> None:
    assert "quota" not in {each.name for each in train(training_plan=TRAINING_PLAN)}
    assert first("quota", train({"quotas_by_name": denied("it")})).result is Result.NOT_CHECKED


@pytest.mark.parametrize(
    ("plan", "result", "words"),
    [
        (PLAN, Result.OK, "1 of 2 instances free"),
        (replace(PLAN, status="Scheduled", **LATER), Result.OK, "2026-11-22 01:30 UTC: SageMaker queues"),
        (replace(PLAN, status="Pending", **LATER), Result.WARNING, "is pending"),
        (replace(PLAN, ends_at=NOW + timedelta(minutes=119)), Result.WARNING, "before --max-hours is over"),
        (replace(PLAN, status="Expired"), Result.FAILED, "is expired"),
        (None, Result.FAILED, "there is no training plan"),
        (denied("it"), Result.NOT_CHECKED, "it"),
    ],
)
def test_a_training_plan_takes_jobs_before_it_begins(plan: Any, result: Result, words: str) -> None:
    judged = first("training plan", train({"training_plan": plan}, training_plan=TRAINING_PLAN))
    assert judged.result is result and words in judged.message
    assert "training plan" not in {each.name for each in train()}


def test_of_several_types_those_with_room_are_left() -> None:
    found = train(
        {"quotas_by_name": quotas(p5_48xlarge=0.0, p4d_24xlarge=2.0)}, "p5.48xlarge", "p4d.24xlarge"
    )
    left, refused = usable([training_site("p5.48xlarge"), training_site("p4d.24xlarge")], found)
    assert [site.name for site in left] == ["ml.p4d.24xlarge in us-east-1"]
    assert [name for name, _ in refused] == ["ml.p5.48xlarge in us-east-1"]
    with pytest.raises(QuotaExceeded):
        usable([training_site("p5.48xlarge")], found)
