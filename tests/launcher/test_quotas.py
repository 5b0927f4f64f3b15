"""Quotas: which one counts, what runs against it, and whether a job still fits."""

from typing import Any

import pytest
from ec2_builders import catalogue
from fake_aws_facts import NOW, FakeAws, cloud, denied

from fastlaunch.aws.account import Quota
from fastlaunch.aws.quota_codes import quota_page
from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.core.errors import NotAuthorised, QuotaExceeded
from fastlaunch.placement.quota_checks import QuotaUse, quota_use


def maybe(instance: str = "p5.48xlarge", *, facts: dict[str, Any], **changes: Any) -> QuotaUse | None:
    options = cloud(instance, **changes)
    return quota_use(catalogue().instance(instance), "us-east-1", options, FakeAws(**facts))  # type: ignore[arg-type]


def use(
    instance: str = "p5.48xlarge", *, num_nodes: int = 1, purchase: str = "on-demand", **facts: Any
) -> QuotaUse:
    found = maybe(instance, facts=facts, num_nodes=num_nodes, purchase=purchase)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("instance", "purchase", "code"),
    [
        ("p4d.24xlarge", "on-demand", "L-417A185B"),
        ("p6-b300.48xlarge", "on-demand", "L-417A185B"),
        ("g6e.12xlarge", "on-demand", "L-DB2E81BA"),
        ("trn1.32xlarge", "on-demand", "L-2C3B7624"),
        ("p5en.48xlarge", "spot", "L-C4BD4855"),
        ("p4de.24xlarge", "spot", "L-7212CCBC"),
        ("g5.xlarge", "spot", "L-3819A6DF"),
        ("trn1.32xlarge", "spot", "L-6B0D517C"),
    ],
)
def test_family_and_purchase_decide_the_quota(instance: str, purchase: str, code: str) -> None:
    assert use(instance, purchase=purchase).code == code


@pytest.mark.parametrize(
    ("instance", "purchase"), [("p6-b200.48xlarge", "spot"), ("p5.48xlarge", "capacity-block")]
)
def test_some_count_against_no_known_quota(instance: str, purchase: str) -> None:
    assert maybe(instance, facts={}, purchase=purchase) is None


def test_what_runs_of_the_family_counts_whoever_started_it() -> None:
    running = {
        ("p4d.24xlarge", "on-demand"): 96,
        ("p5.48xlarge", "spot"): 192,
        ("p5.48xlarge", "capacity-block"): 192,
        ("g5.xlarge", "on-demand"): 40,
        ("m7i.large", "on-demand"): 200,
    }
    found = use(running_vcpus=running, quota=288.0)
    assert (found.used, found.needed, found.fits) == (96, 192, True)
    assert str(found) == "needs 192 vCPUs, 96 of 288 are in use: Running On-Demand P instances (L-417A185B)"
    assert use(running_vcpus=running, purchase="spot").used == 192


@pytest.mark.parametrize(
    ("limit", "num_nodes", "used", "fits"),
    [
        (192.0, 1, 0, True),
        (191.0, 1, 0, False),
        (288.0, 1, 96, True),
        (287.0, 1, 96, False),
        (575.0, 3, 0, False),
    ],
)
def test_a_job_fits_up_to_the_limit(limit: float, num_nodes: int, used: int, fits: bool) -> None:
    running = {("p4d.24xlarge", "on-demand"): used}
    assert use(quota=limit, num_nodes=num_nodes, running_vcpus=running).fits is fits


def test_the_refusal_says_how_much_to_ask_for_and_where() -> None:
    refusal = use(quota=192.0, running_vcpus={("p4d.24xlarge", "on-demand"): 96}).refusal
    assert isinstance(refusal, QuotaExceeded)
    assert "ask for 288 vCPUs: https://us-east-1.console.aws.amazon.com/" in (refusal.hint or "")
    assert "/services/ec2/quotas/L-417A185B" in (refusal.hint or "")


@pytest.mark.parametrize(
    ("facts", "limit", "is_default", "fits"),
    [
        ({}, 384.0, False, True),
        ({"quota": None, "default_quota": 0.0}, 0.0, True, False),
        ({"quota": None, "default_quota": None}, None, False, None),
        # What may not be counted refuses only what is sure.
        ({"running_vcpus": denied("ec2:DescribeInstances")}, 384.0, False, None),
        ({"running_vcpus": denied("ec2:DescribeInstances"), "quota": 100.0}, 100.0, False, False),
    ],
)
def test_what_is_not_known_is_not_judged(
    facts: dict[str, Any], limit: float | None, is_default: bool, fits: bool | None
) -> None:
    found = use(**facts)
    assert (found.limit, found.is_default, found.fits) == (limit, is_default, fits)


def test_a_quota_that_may_not_be_looked_at_is_an_error() -> None:
    with pytest.raises(NotAuthorised):
        use(quota=denied("servicequotas:GetServiceQuota"))


def test_own_training_jobs_count_by_type_and_purchase() -> None:
    names = {purchase: f"ml.p5.48xlarge for {purchase}training job usage" for purchase in ("", "spot ")}
    quotas = {name: Quota(code="L-1", name=name, value=4.0, is_default=False) for name in names.values()}
    job = TrainingJob(
        name="r-a1",
        arn="arn",
        region="us-east-1",
        status="InProgress",
        secondary_status="Training",
        created_at=NOW,
        instance_type="ml.p5.48xlarge",
        num_instances=2,
    )
    facts = {"quotas_by_name": quotas, "live_training_jobs": [job]}

    def found(num_nodes: int, purchase: str = "on-demand") -> QuotaUse:
        needed = maybe(facts=facts, backend="sagemaker", num_nodes=num_nodes, purchase=purchase)
        assert needed is not None
        return needed

    assert (found(2).fits, found(3).fits) == (True, False)
    assert str(found(2)) == (
        "needs 2 instances of 4, 2 in use by fastlaunch: ml.p5.48xlarge for training job usage (L-1)"
    )
    assert "ask for 5: " in (found(3).refusal.hint or "")
    assert found(4, "spot").fits and found(4, "spot").used == 0
    assert maybe("p4d.24xlarge", facts=facts, backend="sagemaker") is None


def test_the_console_is_that_of_the_regions_partition() -> None:
    hosts = [
        quota_page(region, "L-1").split("/")[2] for region in ("us-gov-west-1", "cn-north-1", "eu-west-1")
    ]
    assert hosts == [
        "us-gov-west-1.console.amazonaws-us-gov.com",
        "cn-north-1.console.amazonaws.cn",
        "eu-west-1.console.aws.amazon.com",
    ]
