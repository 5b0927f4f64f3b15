"""What AWS would refuse: each limit is broken by one change to a plan that holds."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ec2_builders import plan
from sagemaker_builders import TRAINING_PLAN, training_plan_of, training_site

from fastlaunch.backends.validate import model_problems, request_problems

EC2 = plan()
TRAINING = training_plan_of()
RESERVED = training_plan_of(at=training_site(training_plan=TRAINING_PLAN))
BLOCK: Mapping[str, Any] = {"InstanceMarketOptions": {"MarketType": "capacity-block"}}


def tagged(value: str) -> dict[str, Any]:
    tags = [{"Key": "fastlaunch:output", "Value": value}]
    return {"TagSpecifications": [{"ResourceType": "instance", "Tags": tags}]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        (tagged("x" * 256), None),
        (tagged("x" * 257), "fastlaunch:output has 257"),
        (BLOCK, None),
        ({**BLOCK, "SubnetId": None}, "name its subnet"),
        ({**BLOCK, "SubnetId": None, "Placement": {"AvailabilityZone": "us-east-1a"}}, None),
    ],
)
def test_ec2(changes: dict[str, Any], problem: str | None) -> None:
    request = {key: value for key, value in {**EC2.request, **changes}.items() if value is not None}
    problems = request_problems(replace(EC2, request=request))
    assert [problem in text for text in problems if problem] == ([True] if problem else [])
    assert bool(problems) is bool(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"TrainingJobName": "a" * 64}, "TrainingJobName has 64 characters, above 63"),
        ({"TrainingJobName": "<run-id>-a1"}, None),
        ({"TrainingJobName": "a_b"}, "TrainingJobName 'a_b' does not fit"),
        ({"RoleArn": "arn"}, "RoleArn has 3 characters, below 20"),
        ({"HyperParameters": {f"run-{n}": "x" for n in range(101)}}, "101 entries, above 100"),
        ({"Environment": {"1": "x"}}, "does not fit"),
        ({"Tags": [{"Key": "k", "Value": "x" * 257}]}, "Tags.Value has 257"),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 29 * 86_400}}, "above 28 days"),
        (
            {"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxPendingTimeInSeconds": 60}},
            "MaxPendingTimeInSeconds has 60, below 1,800",
        ),
    ],
)
def test_sagemaker(changes: dict[str, Any], problem: str | None) -> None:
    problems = request_problems(replace(TRAINING, request={**TRAINING.request, **changes}))
    assert len(problems) == (1 if problem else 0), problems
    assert problem is None or problem in problems[0]


def test_a_training_plan_is_of_the_jobs_region() -> None:
    assert request_problems(RESERVED) == []
    (problem,) = request_problems(replace(RESERVED, region="eu-west-2"))
    assert "the job in eu-west-2" in problem


def test_a_model_without_limits_finds_nothing() -> None:
    assert model_problems("ec2", "RunInstances", EC2.request) == []
