"""Quotas: which one counts, what runs against it, and whether a job still fits."""

from typing import Any

import pytest
from ec2_builders import catalogue
from fake_aws_facts import FakeAws, denied, fake_aws

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.aws.quota_codes import quota_page
from fastlaunch.core.errors import NotAuthorised, QuotaExceeded
from fastlaunch.placement.quota_checks import QuotaUse, quota_use


def use(aws: FakeAws, instance: str = "p5.48xlarge", **changes: Any) -> QuotaUse:
    found = maybe(aws, instance, **changes)
    assert found is not None
    return found


def maybe(aws: FakeAws, instance: str, **changes: Any) -> QuotaUse | None:
    usually = {"region": "us-east-1", "purchase": "on-demand", "num_nodes": 1, "ask": CachedCalls()}
    return quota_use(catalogue().instance(instance), aws=aws, **{**usually, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("instance", "purchase", "code"),
    [
        ("p4d.24xlarge", "on-demand", "L-417A185B"),
        ("p5en.48xlarge", "on-demand", "L-417A185B"),
        ("p6-b200.48xlarge", "on-demand", "L-417A185B"),
        ("g6e.12xlarge", "on-demand", "L-DB2E81BA"),
        ("trn1.32xlarge", "on-demand", "L-2C3B7624"),
        ("p5.48xlarge", "spot", "L-C4BD4855"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("g5.xlarge", "spot", "L-3819A6DF"),
        ("trn1.32xlarge", "spot", "L-6B0D517C"),
    ],
)
def test_family_and_purchase_decide_the_quota(instance: str, purchase: str, code: str) -> None:
    assert use(fake_aws(), instance, purchase=purchase).quota.code == code


def test_the_quota_of_p6_spot_is_not_known() -> None:
    aws = fake_aws()
    assert maybe(aws, "p6-b200.48xlarge", purchase="spot") is None
    assert not aws.asked


def test_what_runs_of_the_family_counts_whoever_started_it() -> None:
    running = {
        ("p4d.24xlarge", "on-demand"): 96,
        ("p5.48xlarge", "spot"): 192,
        ("p5.48xlarge", "capacity-block"): 192,
        ("g5.xlarge", "on-demand"): 40,
        ("m7i.large", "on-demand"): 200,
    }
    aws = fake_aws(running=running, applied=288.0)
    found = use(aws)
    assert (found.used_vcpus, found.need_vcpus, found.fits) == (96, 192, True)
    assert str(found) == ("needs 192 vCPUs, 96 of 288 are in use: Running On-Demand P instances (L-417A185B)")
    assert use(aws, purchase="spot").used_vcpus == 192


@pytest.mark.parametrize(("limit", "fits"), [(192.0, True), (191.0, False), (0.0, False)])
def test_a_job_fits_up_to_the_limit(limit: float, fits: bool) -> None:
    assert use(fake_aws(applied=limit)).fits is fits


@pytest.mark.parametrize(("limit", "fits"), [(288.0, True), (287.0, False)])
def test_what_runs_takes_its_share_of_the_limit(limit: float, fits: bool) -> None:
    assert use(fake_aws(applied=limit, running={("p4d.24xlarge", "on-demand"): 96})).fits is fits


def test_nodes_are_counted_in_vcpus() -> None:
    found = use(fake_aws(applied=384.0), num_nodes=3)
    assert (found.need_vcpus, found.fits) == (576, False)


def test_the_refusal_says_how_much_to_ask_for_and_where() -> None:
    refusal = use(fake_aws(applied=192.0, running={("p4d.24xlarge", "on-demand"): 96})).refusal
    assert isinstance(refusal, QuotaExceeded)
    assert "needs 192 vCPUs, 96 of 192 are in use" in refusal.message
    assert "ask for 288 vCPUs: https://us-east-1.console.aws.amazon.com/" in (refusal.hint or "")
    assert "L-417A185B" in (refusal.hint or "")


def test_a_quota_that_nobody_changed_is_the_default() -> None:
    found = use(fake_aws(applied=None, default=0.0))
    assert (found.limit_vcpus, found.is_default, found.fits) == (0.0, True, False)
    assert "0 of 0, AWS's default are in use" in str(found)
    assert not use(fake_aws()).is_default


def test_a_limit_that_aws_does_not_tell_is_not_judged() -> None:
    found = use(fake_aws(applied=None, default=None))
    assert (found.fits, found.is_default) == (None, False)


def test_use_that_may_not_be_counted_refuses_only_what_is_sure() -> None:
    refused = {"running_vcpus": denied("ec2:DescribeInstances")}
    assert use(fake_aws(refused=refused)).fits is None
    assert "an unknown number of 384 are in use" in str(use(fake_aws(refused=refused)))
    assert use(fake_aws(refused=refused, applied=100.0)).fits is False


def test_a_quota_that_may_not_be_looked_at_is_an_error() -> None:
    with pytest.raises(NotAuthorised):
        use(fake_aws(refused={"quota": denied("servicequotas:GetServiceQuota")}))


def test_use_is_counted_once_for_several_types() -> None:
    aws, ask = fake_aws(), CachedCalls()
    for name in ("p5.48xlarge", "p4d.24xlarge", "g5.xlarge"):
        maybe(aws, name, ask=ask)
    assert aws.asked["running_vcpus", "us-east-1"] == 1
    assert aws.asked["quota", "us-east-1"] == 2  # P4 and P5 share one


def test_the_console_is_that_of_the_regions_partition() -> None:
    hosts = [
        quota_page(region, "L-1").split("/")[2] for region in ("us-gov-west-1", "cn-north-1", "eu-west-1")
    ]
    assert hosts == [
        "us-gov-west-1.console.amazonaws-us-gov.com",
        "cn-north-1.console.amazonaws.cn",
        "eu-west-1.console.aws.amazon.com",
    ]
