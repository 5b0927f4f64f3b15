"""What SageMaker refuses: each rule breaks on one change to a plan that holds; its limits are the model's."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import botocore.session
import pytest
from ec2_builders import IMAGE
from sagemaker_builders import TRAINING_PLAN, training_job, training_plan_of, training_site

from fastlaunch.backends import Plan
from fastlaunch.backends.sagemaker_rules import LIMITS, RULES, Limit, broken_training_rules

ON_DEMAND = training_plan_of(at=training_site(keep_alive_minutes=10))
SPOT = training_plan_of(training_job(purchase="spot", checkpoint_every=50))
CHOICE = training_plan_of(at=training_site("p5.48xlarge", "p5en.48xlarge"))
RESERVED = training_plan_of(at=training_site(training_plan=TRAINING_PLAN))

Change = Callable[[dict[str, Any]], object]


def changed(base: Plan, change: Change) -> list[str]:
    """What is wrong with `base` after a change to its request."""
    request = deepcopy(dict(base.request))
    change(request)
    return broken_training_rules(replace(base, request=request))


def merged(**values: Any) -> Change:
    return lambda request: request.update(values)


def inside(part: str, **values: Any) -> Change:
    """A change to one part of the request; None takes a value away."""

    def change(request: dict[str, Any]) -> None:
        request[part] = {k: v for k, v in {**request.get(part, {}), **values}.items() if v is not None}

    return change


def algorithm(**values: Any) -> Change:
    return inside("AlgorithmSpecification", **values)


def resources(**values: Any) -> Change:
    return inside("ResourceConfig", **values)


def stopping(**values: Any) -> Change:
    return inside("StoppingCondition", **values)


def preferences(*each: dict[str, Any], **values: Any) -> Change:
    return resources(InstancePreferences=list(each), InstanceType=None, **values)


def types(*names: str, **values: Any) -> list[dict[str, Any]]:
    return [{"InstanceType": name, **values} for name in names]


def tags(*pairs: tuple[str, str]) -> Change:
    return merged(Tags=[{"Key": key, "Value": value} for key, value in pairs])


def metric(regex: str, name: str = "loss") -> dict[str, str]:
    return {"Name": name, "Regex": regex}


def without(name: str) -> Change:
    return lambda request: request.pop(name)


P5, P5EN = "ml.p5.48xlarge", "ml.p5en.48xlarge"
ELSEWHERE = IMAGE.replace("us-east-1", "eu-west-1")
PUBLIC = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"
OTHER_PLAN = TRAINING_PLAN.replace("us-east-1", "eu-west-1")


@pytest.mark.parametrize("base", [ON_DEMAND, SPOT, CHOICE, RESERVED])
def test_plans_as_they_are_break_nothing(base: Plan) -> None:
    assert broken_training_rules(base) == []


@pytest.mark.parametrize(
    ("base", "change", "told"),
    [
        # Limits of the model
        (ON_DEMAND, merged(TrainingJobName="a" * 64), ["TrainingJobName has 64 characters, above 63"]),
        (ON_DEMAND, merged(TrainingJobName="run_1"), ["TrainingJobName 'run_1' does not fit"]),
        (ON_DEMAND, merged(TrainingJobName="run-"), ["TrainingJobName 'run-' does not fit"]),
        (ON_DEMAND, merged(TrainingJobName=""), ["TrainingJobName has 0 characters, below 1"]),
        (ON_DEMAND, merged(HyperParameters={str(n): "" for n in range(101)}), ["101 entries, above 100"]),
        (ON_DEMAND, merged(HyperParameters={"k" * 257: ""}), ["{key} has 257 characters"]),
        (ON_DEMAND, merged(HyperParameters={"k": "v" * 2501}), ["{} has 2,501 characters, above 2,500"]),
        (ON_DEMAND, merged(HyperParameters={"k": "a\nb"}), ["does not fit .*"]),
        (ON_DEMAND, inside("Environment", **{"k": "v" * 513}), ["Environment.{} has 513"]),
        (ON_DEMAND, inside("Environment", **{"a-b": "v"}), ["Environment.{key} 'a-b' does not fit"]),
        (ON_DEMAND, algorithm(ContainerArguments=["x" * 257]), ["ContainerArguments.[] has 257"]),
        (ON_DEMAND, algorithm(ContainerArguments=["a\nb"]), ["ContainerArguments.[] 'a\\nb' does not fit"]),
        (ON_DEMAND, algorithm(ContainerArguments=[]), ["ContainerArguments has 0 entries, below 1"]),
        (
            ON_DEMAND,
            algorithm(TrainingImage=IMAGE + "0" * 200),
            [
                "TrainingImage has",
            ],
        ),
        (ON_DEMAND, merged(RoleArn="fastlaunch-job-by-its-name"), ["RoleArn 'fastlaunch-job"]),
        (ON_DEMAND, inside("CheckpointConfig", S3Uri="acme/runs"), ["CheckpointConfig.S3Uri 'acme/runs'"]),
        (ON_DEMAND, resources(KeepAlivePeriodInSeconds=21_601), ["has 21,601, above 21,600"]),
        (ON_DEMAND, stopping(MaxPendingTimeInSeconds=1_799), ["has 1,799, below 1,800"]),
        (ON_DEMAND, stopping(MaxPendingTimeInSeconds=2_419_201), ["has 2,419,201, above 2,419,200"]),
        (ON_DEMAND, tags(*((f"t{number}", "") for number in range(51))), ["Tags has 51 entries, above 50"]),
        (ON_DEMAND, tags(("k", "v" * 257)), ["Tags.[].Value has 257"]),
        (ON_DEMAND, tags(("k", "a;b")), ["Tags.[].Value 'a;b' does not fit"]),
        (CHOICE, preferences(*types(*(f"ml.p5.{n}xlarge" for n in range(6)))), ["has 6 entries, above 5"]),
        (RESERVED, resources(TrainingPlanArn="cr-0123456789abcdef0" + "0" * 40), ["does not fit arn:aws"]),
        # Image
        (ON_DEMAND, algorithm(TrainingImage=ELSEWHERE), ["is in ECR of eu-west-1, and the job in us-east-1"]),
        (ON_DEMAND, algorithm(TrainingImage=PUBLIC), ["is not in a private registry of ECR"]),
        (ON_DEMAND, algorithm(TrainingImage="pytorch/pytorch:latest"), ["is not in a private registry"]),
        (ON_DEMAND, algorithm(AlgorithmName="xgboost"), ["either TrainingImage or AlgorithmName"]),
        (ON_DEMAND, algorithm(TrainingImage=None), ["either TrainingImage or AlgorithmName"]),
        # Types and numbers of machines
        (ON_DEMAND, resources(InstancePreferences=types(P5EN)), ["has to be given, not 2"]),
        (
            ON_DEMAND,
            resources(InstanceType=None),
            ["has to be given, not 0", "MaxPendingTimeInSeconds means"],
        ),
        (ON_DEMAND, resources(InstanceType="p5.48xlarge"), ["is not the name of", "means nothing for p5"]),
        (ON_DEMAND, resources(SelectedInstanceType=P5), ["SelectedInstanceType is SageMaker's answer"]),
        (ON_DEMAND, resources(InstanceCount=0), ["InstanceCount 0: it takes 1 or more"]),
        (ON_DEMAND, resources(InstanceCount=None), ["InstanceCount is given once"]),
        (ON_DEMAND, resources(VolumeSizeInGB=0), ["VolumeSizeInGB 0"]),
        (
            CHOICE,
            merged(EnableManagedSpotTraining=True),
            ["InstancePreferences with EnableManaged", "needs MaxW"],
        ),
        (CHOICE, resources(InstancePlacementConfig={}), ["with InstancePlacementConfig"]),
        (CHOICE, preferences(*types(P5, P5)), [f"{P5} is 2 of the InstancePreferences"]),
        (CHOICE, preferences(*types(P5, P5EN, InstanceCount=1)), ["InstanceCount is given once"]),
        (
            CHOICE,
            preferences(*types(P5, InstanceCount=1), *types(P5EN), InstanceCount=None),
            ["InstanceCount is given once"],
        ),
        # Warm pools and training plans
        (
            SPOT,
            resources(KeepAlivePeriodInSeconds=600),
            ["KeepAlivePeriodInSeconds with EnableManagedSpotTraining"],
        ),
        (
            ON_DEMAND,
            resources(
                InstanceType=None,
                InstanceGroups=[{"InstanceType": P5, "InstanceGroupName": "a", "InstanceCount": 1}],
            ),
            ["KeepAlivePeriodInSeconds with InstanceGroups"],
        ),
        (SPOT, resources(TrainingPlanArn=TRAINING_PLAN), ["a training plan with EnableManagedSpotTraining"]),
        (RESERVED, resources(TrainingPlanArn=OTHER_PLAN), ["is of eu-west-1, and the job in us-east-1"]),
        (
            CHOICE,
            lambda request: [
                preferences(*types(P5, TrainingPlanArns=[TRAINING_PLAN]))(request),
                resources(TrainingPlanArn=TRAINING_PLAN)(request),
            ],
            ["TrainingPlanArn beside TrainingPlanArns"],
        ),
        # Times
        (
            SPOT,
            stopping(MaxWaitTimeInSeconds=7_199),
            ["MaxWaitTimeInSeconds 7,199 is below MaxRuntimeInSeconds 7,"],
        ),
        (SPOT, stopping(MaxWaitTimeInSeconds=None), ["needs MaxWaitTimeInSeconds"]),
        (
            SPOT,
            without("CheckpointConfig"),
            ["is above 3,600 without CheckpointConfig", "CheckpointConfig is missing"],
        ),
        (ON_DEMAND, stopping(MaxWaitTimeInSeconds=9_000), ["is for EnableManagedSpotTraining alone"]),
        (ON_DEMAND, stopping(MaxRuntimeInSeconds=2_419_201), ["is above 28 days"]),
        (
            ON_DEMAND,
            resources(InstanceType="ml.c5.xlarge"),
            ["MaxPendingTimeInSeconds means nothing for ml.c5"],
        ),
        # What is read and written
        (ON_DEMAND, without("CheckpointConfig"), ["CheckpointConfig is missing"]),
        (ON_DEMAND, inside("CheckpointConfig", LocalPath="/opt/ml/model/"), ["no folder of their own"]),
        (ON_DEMAND, inside("CheckpointConfig", LocalPath="checkpoints"), ["no folder of their own"]),
        (
            ON_DEMAND,
            lambda request: request["InputDataConfig"].append(request["InputDataConfig"][0]),
            ["code is"],
        ),
        (
            ON_DEMAND,
            lambda request: request["InputDataConfig"][0].update(DataSource={}),
            ["channel code needs one source, not 0"],
        ),
        (
            ON_DEMAND,
            merged(EnableNetworkIsolation=True, RemoteDebugConfig={"EnableRemoteDebug": True}),
            ["EnableNetworkIsolation with EnableRemoteDebug"],
        ),
        # Metrics and tags
        (ON_DEMAND, algorithm(MetricDefinitions=[metric("a(")]), ["of metric loss is wrong"]),
        (ON_DEMAND, algorithm(MetricDefinitions=[metric("a")]), ["has 0 groups, not one"]),
        (ON_DEMAND, algorithm(MetricDefinitions=[metric("(a)"), metric("(b)")]), ["loss is defined 2 times"]),
        (ON_DEMAND, tags(("k", "1"), ("k", "2")), ["tag k is given 2 times"]),
        (ON_DEMAND, tags(("AWS:x", "")), ["begins with aws:"]),
    ],
)
def test_a_broken_rule_is_told_and_no_other(base: Plan, change: Change, told: list[str]) -> None:
    found = changed(base, change)
    assert len(found) == len(told), found
    for problem, words in zip(found, told, strict=True):
        assert words in problem


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (ON_DEMAND, merged(TrainingJobName="a" * 63)),
        (ON_DEMAND, resources(InstanceCount=8)),
        (ON_DEMAND, stopping(MaxPendingTimeInSeconds=1_800)),
        (ON_DEMAND, resources(KeepAlivePeriodInSeconds=0)),
        (ON_DEMAND, algorithm(TrainingImage="<image-digest>")),
        (ON_DEMAND, merged(RoleArn="<role>")),
        (ON_DEMAND, merged(RoleArn="arn:aws-us-gov:iam::123456789012:role/team/job")),
        (ON_DEMAND, inside("CheckpointConfig", LocalPath="/opt/ml/checkpoints/")),
        (
            ON_DEMAND,
            algorithm(
                TrainingImage="registry.example/x",
                TrainingImageConfig={"TrainingRepositoryAccessMode": "Vpc"},
            ),
        ),
        (SPOT, stopping(MaxWaitTimeInSeconds=7_200)),
        (CHOICE, preferences(*types(P5, P5EN, InstanceCount=1), InstanceCount=None)),
        (CHOICE, preferences(*types(P5, TrainingPlanArns=[TRAINING_PLAN]), *types(P5EN))),
        (CHOICE, stopping(MaxPendingTimeInSeconds=86_400)),
        (ON_DEMAND, merged(RetryStrategy={"MaximumRetryAttempts": 1})),
    ],
)
def test_what_sagemaker_takes_breaks_nothing(base: Plan, change: Change) -> None:
    assert changed(base, change) == []


def test_every_rule_is_in_the_table() -> None:
    from fastlaunch.backends import sagemaker_rules

    takes_a_request = {
        name
        for name, value in vars(sagemaker_rules).items()
        if list(getattr(value, "__annotations__", ())) == ["request", "region", "return"]
    }
    assert takes_a_request == {rule.__name__ for rule in RULES}


@cache
def input_shape() -> Any:
    model = botocore.session.get_session().get_service_model("sagemaker")
    return model.operation_model("CreateTrainingJob").input_shape


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.path)
def test_a_limit_is_the_models(limit: Limit) -> None:
    shape = input_shape()
    for name in limit.path.split("."):
        part = {"[]": "member", "{}": "value", "{key}": "key"}.get(name)
        shape = getattr(shape, part) if part else shape.members[name]
    assert limit.least == shape.metadata.get("min", 0)
    assert limit.most == shape.metadata.get("max")
    pattern = shape.metadata.get("pattern", "")
    # Classes of characters that Python's expressions do not have.
    assert limit.pattern == pattern or r"\p{" in pattern


@pytest.mark.parametrize("base", [ON_DEMAND, SPOT, CHOICE, RESERVED])
def test_no_limit_of_what_is_planned_is_forgotten(base: Plan) -> None:
    known = {limit.path for limit in LIMITS}
    assert set(limited(input_shape(), base.request, "")) <= known


def limited(shape: Any, value: Any, path: str) -> Any:
    """Paths of what the request holds and the model has limits for."""
    limits = {key: shape.metadata[key] for key in ("max", "pattern") if key in shape.metadata}
    if limits and path:
        yield path.removeprefix(".")
    if shape.type_name == "structure":
        for name, each in value.items():
            yield from limited(shape.members[name], each, f"{path}.{name}")
    elif shape.type_name == "list":
        for each in value:
            yield from limited(shape.member, each, f"{path}.[]")
    elif shape.type_name == "map":
        for key, each in value.items():
            yield from limited(shape.key, key, f"{path}.{{key}}")
            yield from limited(shape.value, each, f"{path}.{{}}")
