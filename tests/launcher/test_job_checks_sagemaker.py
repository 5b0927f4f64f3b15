"""Checks of what a training job needs: a role that SageMaker may take on, room in its quotas, prices."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from ec2_builders import IMAGE, catalogue
from fake_aws_facts import ROLE, FakeAws, check_context, denied, fake_aws, settings, trusting, usual
from sagemaker_builders import TRAINING_PLAN

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.backends.placements import SageMakerPlacement
from fastlaunch.catalog.container_images import training_base
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, QuotaExceeded, UserError
from fastlaunch.core.settings import RegionSettings
from fastlaunch.placement.aws_lookup import AwsLookup
from fastlaunch.placement.check import Check, CheckContext, Result
from fastlaunch.placement.checks import checks, usable

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def quotas(**values: float) -> dict[str, Any]:
    """What ListServiceQuotas says; `p5_48xlarge="..."` of training jobs, `spot_` and `pool_` before it."""
    usages = {"spot": "spot training job", "pool": "training warm pool"}
    found = []
    for number, (name, value) in enumerate(values.items()):
        kind, _, rest = name.partition("_")
        usage, family = (usages[kind], rest) if kind in usages else ("training job", name)
        instance = family.replace("_", ".").replace("p6.b200", "p6-b200")
        quota = {"QuotaName": f"ml.{instance} for {usage} usage", "QuotaCode": f"L-{number}", "Value": value}
        found.append(quota)
    return {"Quotas": found}


def furnished(**changes: Any) -> FakeAws:
    """An account in which a job may start."""
    answers = {
        "GetRole": trusting("sagemaker.amazonaws.com"),
        "ListServiceQuotas": quotas(p5_48xlarge=2.0, p4d_24xlarge=2.0),
        "ListAWSDefaultServiceQuotas": quotas(p5_48xlarge=0.0, spot_p5_48xlarge=0.0, pool_p5_48xlarge=0.0),
        "ListTrainingJobs": {"TrainingJobSummaries": []},
    }
    return fake_aws(answers={**answers, **changes.pop("answers", {})}, **changes)


def lookup(aws: FakeAws, here: RegionSettings | None = None) -> AwsLookup:
    return AwsLookup(
        aws=aws,  # type: ignore[arg-type]
        settings=settings(us_east_1=here or usual()),
        catalogue=catalogue(),
        now=NOW,
        base=training_base(None, today=NOW.date()),
        ask=CachedCalls(),
    )


def job(*instances: str, **changes: Any) -> CheckContext:
    names = instances or ("p5.48xlarge",)
    return check_context(lookup(fake_aws()), names, **{"backend": "sagemaker", **changes})


def all_of(aws: FakeAws, wanted: CheckContext | None = None, **here: Any) -> list[Check]:
    looked_up = lookup(aws, replace(usual(), **{"role": ROLE, **here}))
    return checks(replace(wanted or job(), lookup=looked_up))


def made(aws: FakeAws, wanted: CheckContext | None = None, **here: Any) -> dict[str, Check]:
    """The first check of every name."""
    return {check.name: check for check in reversed(all_of(aws, wanted, **here))}


def training_site(instance: str) -> SageMakerPlacement:
    return SageMakerPlacement(
        instance=catalogue().instance(instance),
        region="us-east-1",
        role=ROLE,
        bucket="acme",
        prefix="fastlaunch",
        image=IMAGE,
        code=None,
        usd_per_hour=63.296,
        price_as_of="2026-09-01",
        volume_gib=200,
    )


def test_where_all_is_well_a_job_may_start() -> None:
    found = all_of(furnished())
    assert {check.result for check in found} == {Result.OK}
    assert [check.name for check in found] == [
        *("login", "config", "region", "container image", "role", "bucket", "quota", "price file", "price"),
    ]
    told = {check.name: check.message for check in found}
    assert told["config"] == f"bucket acme, role {ROLE}"
    assert told["quota"] == "needs 1 instance of 2: ml.p5.48xlarge for training job usage (L-0)"
    # SageMaker's price, not EC2's.
    assert told["price"] == "at most $63.296/h, as of 2026-09-01"
    assert {check.instance for check in found} == {None, "ml.p5.48xlarge"}


@pytest.mark.parametrize(
    ("changes", "kind", "told", "hint"),
    [
        (
            {"answers": {"GetRole": trusting("ec2.amazonaws.com")}},
            BadConfiguration,
            "does not let SageMaker take it on",
            "sagemaker.amazonaws.com",
        ),
        (
            {"answers": {"GetRole": {"Role": {"Arn": ROLE.replace("role/", "role/other/")}}}},
            BadConfiguration,
            f"there is no role {ROLE}",
            "fastlaunch iam print",
        ),
        (
            {"untrusted": ("sagemaker.amazonaws.com",)},
            NotAuthorised,
            "may not pass",
            "fastlaunch iam print",
        ),
    ],
)
def test_a_role_is_there_and_sagemakers_and_may_be_passed(
    changes: dict[str, Any], kind: type[UserError], told: str, hint: str
) -> None:
    check = made(furnished(**changes))["role"]
    assert type(check.error) is kind
    assert told in check.message and hint in str(check.hint)


def test_a_role_that_iam_does_not_know_is_none() -> None:
    unknown = BadConfiguration("no such entity")
    unknown.code = "NoSuchEntity"
    assert f"there is no role {ROLE}" in made(furnished(refused={"GetRole": unknown}))["role"].message


def test_a_role_that_may_not_be_looked_at_holds_up_nothing() -> None:
    assert made(furnished(refused={"GetRole": denied("iam:GetRole")}))["role"].result is Result.OK
    refused = {"may_pass": denied("iam:SimulatePrincipalPolicy")}
    assert made(furnished(refused=refused))["role"].result is Result.NOT_CHECKED


def test_a_role_that_could_not_upload_is_warned_of() -> None:
    check = made(furnished(lacking=("s3:PutObject",)))["role"]
    assert check.result is Result.WARNING and "do not give s3:PutObject on arn:PARTITION:s3" in check.message


def test_without_a_role_it_says_what_makes_one() -> None:
    found = made(furnished(), role=None)
    assert "no role is named for us-east-1" in found["config"].message
    assert "role: ARN" in str(found["config"].hint) and "--role ARN" in str(found["config"].hint)
    assert found["role"].result is Result.NOT_CHECKED
    assert "aws cloudformation deploy --region us-east-1" in str(found["role"].hint)
    assert "neither bucket nor role" in made(furnished(), role=None, bucket=None)["config"].message


def test_quotas_count_nodes() -> None:
    check = made(furnished(), job(num_nodes=3))["quota"]
    assert type(check.error) is QuotaExceeded
    assert "needs 3 instances of 2: ml.p5.48xlarge for training job usage" in check.message
    assert "/servicequotas/home/services/sagemaker/quotas/L-0" in str(check.hint)
    assert "ask for 3: https://us-east-1.console.aws.amazon.com" in str(check.hint)


def test_spot_has_a_quota_of_its_own() -> None:
    spot = made(furnished(), job(purchase="spot", checkpoint_every=9))["quota"]
    assert "0, AWS's default: ml.p5.48xlarge for spot training job usage" in spot.message and spot.error


def test_a_training_plan_needs_no_quota() -> None:
    assert "quota" not in made(furnished(), job(training_plan=TRAINING_PLAN))


def test_quotas_that_may_not_be_listed_hold_up_nothing() -> None:
    refused = {"ListServiceQuotas": denied("servicequotas:ListServiceQuotas")}
    assert made(furnished(refused=refused))["quota"].result is Result.NOT_CHECKED
    # A type that the region does not have has no quota either.
    assert (
        "no quota of SageMaker's for ml.p6-b200"
        in made(furnished(), job("p6-b200.48xlarge"))["quota"].message
    )


def test_quotas_are_listed_once_for_all_types() -> None:
    aws = furnished()
    all_of(aws, job("p5.48xlarge", "p4d.24xlarge"))
    assert {
        aws.asked[name, "us-east-1"] for name in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas")
    } == {1}


def test_of_several_types_those_with_room_are_left() -> None:
    short = furnished(answers={"ListServiceQuotas": quotas(p5_48xlarge=0.0, p4d_24xlarge=2.0)})
    found = all_of(short, job("p5.48xlarge", "p4d.24xlarge"))
    left = usable([training_site("p5.48xlarge"), training_site("p4d.24xlarge")], found)
    assert [place.name for place in left.placements] == ["ml.p4d.24xlarge in us-east-1"]
    ((name, why),) = left.skipped
    assert name == "ml.p5.48xlarge in us-east-1" and "not enough quota" in why
    with pytest.raises(QuotaExceeded, match="not enough quota"):
        usable([training_site("p5.48xlarge")], found)


def test_an_image_of_the_region_is_looked_up() -> None:
    check = made(furnished(digest=None))["container image"]
    assert (
        type(check.error) is BadConfiguration and "has no image pytorch:2.13-cu133-amzn2023" in check.message
    )
