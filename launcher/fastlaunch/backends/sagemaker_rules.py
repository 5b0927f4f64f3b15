"""What SageMaker refuses of a CreateTrainingJob request: limits of its model that botocore does not check
itself (it looks at types and least lengths alone), and what no model says.

Made to grow: a rule is a function from request and region to what is wrong, and stands in RULES. That a name
has been used before is only known by asking. Sources: botocore 1.44.5's model of SageMaker and its
documentation unless a rule says otherwise, read 2026-11. A text such as `<role>` stands for what is not known
yet, and is let pass.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlaunch.backends import Plan
from fastlaunch.backends.sagemaker.plan import is_accelerated

Request = Mapping[str, Any]
Rule = Callable[[Request, str], Iterator[str]]

_PLACEHOLDER = re.compile(r"<[a-z0-9-]+>")
_ECR = re.compile(r"[0-9]{12}\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.[a-z0-9.-]+/.+")
_S3 = r"(https|s3)://([^/]+)/?(.*)"
_TRAINING_PLAN = r"arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]*:[0-9]{12}:training-plan/.*"
_TAG_TEXT = r"[\w \u00a0.:/=+\-@]*"
#: 28 days.
_MAX_RUNTIME_S = 2_419_200
#: docs.aws.amazon.com/sagemaker/latest/dg/model-train-storage.html: what the platform itself mounts there.
_TAKEN_PATHS = ("/", "/opt/ml", "/opt/ml/input", "/opt/ml/input/data", "/opt/ml/model", "/opt/ml/output")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Of what stands at `path`: least and most (characters, entries, or the number itself), and its pattern.

    path: names joined by dots, `[]` for every entry of a list, `{}` for every value of a map, `{key}` for
    every key.
    """

    path: str
    least: int = 0
    most: int | None = None
    pattern: str = ""


LIMITS = (
    Limit(path="TrainingJobName", least=1, most=63, pattern=r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"),
    Limit(path="HyperParameters", most=100),
    Limit(path="HyperParameters.{key}", most=256, pattern=".*"),
    Limit(path="HyperParameters.{}", most=2_500, pattern=".*"),
    Limit(path="AlgorithmSpecification.TrainingImage", most=255, pattern=".*"),
    Limit(path="AlgorithmSpecification.MetricDefinitions", most=40),
    Limit(path="AlgorithmSpecification.MetricDefinitions.[].Name", least=1, most=255, pattern=".+"),
    Limit(path="AlgorithmSpecification.MetricDefinitions.[].Regex", least=1, most=500, pattern=".+"),
    Limit(path="AlgorithmSpecification.ContainerEntrypoint", least=1, most=100),
    Limit(path="AlgorithmSpecification.ContainerEntrypoint.[]", most=256, pattern=".*"),
    Limit(path="AlgorithmSpecification.ContainerArguments", least=1, most=100),
    Limit(path="AlgorithmSpecification.ContainerArguments.[]", most=256, pattern=".*"),
    Limit(
        path="RoleArn",
        least=20,
        most=2_048,
        pattern=r"arn:aws[a-z\-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+",
    ),
    Limit(path="InputDataConfig", least=1, most=20),
    Limit(path="InputDataConfig.[].ChannelName", least=1, most=64, pattern=r"[A-Za-z0-9\.\-_]+"),
    Limit(path="InputDataConfig.[].DataSource.S3DataSource.S3Uri", most=1_024, pattern=_S3),
    Limit(path="OutputDataConfig.S3OutputPath", most=1_024, pattern=_S3),
    Limit(path="CheckpointConfig.S3Uri", most=1_024, pattern=_S3),
    Limit(path="CheckpointConfig.LocalPath", most=4_096, pattern=".*"),
    Limit(path="ResourceConfig.KeepAlivePeriodInSeconds", most=21_600),
    Limit(path="ResourceConfig.TrainingPlanArn", least=50, most=2_048, pattern=_TRAINING_PLAN),
    Limit(path="ResourceConfig.InstancePreferences", least=1, most=5),
    Limit(path="ResourceConfig.InstancePreferences.[].TrainingPlanArns", least=1, most=1),
    Limit(path="StoppingCondition.MaxRuntimeInSeconds", least=1),
    Limit(path="StoppingCondition.MaxWaitTimeInSeconds", least=1),
    Limit(path="StoppingCondition.MaxPendingTimeInSeconds", least=1_800, most=2_419_200),
    Limit(path="Tags", most=50),
    Limit(path="Tags.[].Key", least=1, most=128, pattern=_TAG_TEXT),
    Limit(path="Tags.[].Value", most=256, pattern=_TAG_TEXT),
    Limit(path="Environment", most=100),
    Limit(path="Environment.{key}", most=512, pattern="[a-zA-Z_][a-zA-Z0-9_]*"),
    Limit(path="Environment.{}", most=512, pattern=r"[\S\s]*"),
    Limit(path="RetryStrategy.MaximumRetryAttempts", least=1, most=30),
)


def broken_training_rules(plan: Plan) -> list[str]:
    """What is wrong with a CreateTrainingJob plan, in words; empty if SageMaker would take it."""
    assert plan.operation == "CreateTrainingJob" and plan.region is not None
    return [problem for rule in RULES for problem in rule(plan.request, plan.region)]


def _limits(request: Request, region: str) -> Iterator[str]:
    for limit in LIMITS:
        for value in _at(request, limit.path.split(".")):
            size = value if isinstance(value, int) else len(value)
            what = {int: "", str: " characters"}.get(type(value), " entries")
            if limit.most is not None and size > limit.most:
                yield f"{limit.path} has {size:,}{what}, above {limit.most:,}"
            elif isinstance(value, str) and _PLACEHOLDER.search(value):
                continue
            elif size < limit.least:
                yield f"{limit.path} has {size:,}{what}, below {limit.least:,}"
            elif isinstance(value, str) and limit.pattern and not re.fullmatch(limit.pattern, value):
                yield f"{limit.path} {value!r} does not fit {limit.pattern}"


def _at(value: Any, path: Sequence[str]) -> Iterator[Any]:
    """What stands at the path, as often as it does."""
    if not path:
        yield value
        return
    name, rest = path[0], path[1:]
    if name == "{key}":
        yield from value
    elif name in ("[]", "{}"):
        for each in value if name == "[]" else value.values():
            yield from _at(each, rest)
    elif name in value:
        yield from _at(value[name], rest)


def _image(request: Request, region: str) -> Iterator[str]:
    algorithm: Request = request["AlgorithmSpecification"]
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "either TrainingImage or AlgorithmName has to be given, and not both"
    image = algorithm.get("TrainingImage", "")
    # github.com/aws/sagemaker-python-sdk/issues/2605: nor does it pull from public ECR.
    elsewhere = _ECR.fullmatch(image)
    if image and not elsewhere and not _PLACEHOLDER.match(image) and not _has_own_registry(algorithm):
        yield f"{image} is not in a private registry of ECR, from where alone SageMaker pulls"
    if elsewhere and elsewhere[1] != region:
        yield f"{image} is in ECR of {elsewhere[1]}, and the job in {region}"


def _has_own_registry(algorithm: Request) -> bool:
    access: Request = algorithm.get("TrainingImageConfig", {})
    return access.get("TrainingRepositoryAccessMode") == "Vpc"


def _types(request: Request, region: str) -> Iterator[str]:
    resources: Request = request.get("ResourceConfig", {})
    given = [
        name for name in ("InstanceType", "InstancePreferences", "InstanceGroups") if resources.get(name)
    ]
    if len(given) != 1:
        yield f"one of InstanceType, InstancePreferences and InstanceGroups has to be given, not {len(given)}"
    for name in ("SelectedInstanceType", "SelectedInstanceCount"):
        if name in resources:
            yield f"{name} is SageMaker's answer, and not asked for"
    for name in _names(resources):
        if not name.startswith("ml."):
            yield f"{name} is not the name of an instance type of SageMaker's: those begin with ml."


def _counts(request: Request, region: str) -> Iterator[str]:
    resources: Request = request.get("ResourceConfig", {})
    preferences = _preferences(resources)
    own = [one["InstanceCount"] for one in preferences if "InstanceCount" in one]
    has_own, has_one = bool(own), "InstanceCount" in resources
    if has_own == has_one or (has_own and len(own) < len(preferences)):
        yield "InstanceCount is given once, or by every one of InstancePreferences"
    for count in (*own, *([resources["InstanceCount"]] if has_one else [])):
        if count < 1:
            yield f"InstanceCount {count}: it takes 1 or more"
    if resources.get("VolumeSizeInGB", 1) < 1:
        yield f"VolumeSizeInGB {resources['VolumeSizeInGB']}: it takes 1 or more"


def _instance_preferences(request: Request, region: str) -> Iterator[str]:
    resources: Request = request.get("ResourceConfig", {})
    preferences = _preferences(resources)
    if not preferences:
        return
    if request.get("EnableManagedSpotTraining"):
        yield "InstancePreferences with EnableManagedSpotTraining: it chooses among on-demand types alone"
    if "InstancePlacementConfig" in resources:
        yield "InstancePreferences with InstancePlacementConfig"
    for name, number in Counter(_names(resources)).items():
        if number > 1:
            yield f"{name} is {number} of the InstancePreferences"
    if "TrainingPlanArn" in resources and any("TrainingPlanArns" in one for one in preferences):
        yield "TrainingPlanArn beside TrainingPlanArns of InstancePreferences"


def _warm_pool(request: Request, region: str) -> Iterator[str]:
    # docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html
    if request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds"):
        if request.get("EnableManagedSpotTraining"):
            yield "KeepAlivePeriodInSeconds with EnableManagedSpotTraining: no spot machines are kept"
        if request["ResourceConfig"].get("InstanceGroups"):
            yield "KeepAlivePeriodInSeconds with InstanceGroups: no mixed machines are kept"


def _training_plan(request: Request, region: str) -> Iterator[str]:
    resources: Request = request.get("ResourceConfig", {})
    plans = [resources["TrainingPlanArn"]] if "TrainingPlanArn" in resources else []
    plans += [arn for one in _preferences(resources) for arn in one.get("TrainingPlanArns", ())]
    if plans and request.get("EnableManagedSpotTraining"):
        yield "a training plan with EnableManagedSpotTraining: its machines are not spot"
    for arn in plans:
        parts = arn.split(":")
        if not _PLACEHOLDER.search(arn) and len(parts) > 3 and parts[3] != region:
            yield f"{arn} is of {parts[3]}, and the job in {region}"


def _times(request: Request, region: str) -> Iterator[str]:
    stopping: Request = request["StoppingCondition"]
    run_s, wait_s = stopping.get("MaxRuntimeInSeconds", 86_400), stopping.get("MaxWaitTimeInSeconds")
    if run_s > _MAX_RUNTIME_S:
        yield f"MaxRuntimeInSeconds {run_s:,} is above 28 days"
    if request.get("EnableManagedSpotTraining"):
        if wait_s is None:
            yield "EnableManagedSpotTraining needs MaxWaitTimeInSeconds"
        elif wait_s < run_s:
            yield f"MaxWaitTimeInSeconds {wait_s:,} is below MaxRuntimeInSeconds {run_s:,}"
        # docs.aws.amazon.com/sagemaker/latest/dg/model-managed-spot-training.html
        elif wait_s > 3_600 and "CheckpointConfig" not in request:
            yield f"MaxWaitTimeInSeconds {wait_s:,} is above 3,600 without CheckpointConfig"
    elif wait_s is not None:
        yield "MaxWaitTimeInSeconds is for EnableManagedSpotTraining alone"
    names = _names(request.get("ResourceConfig", {}))
    if "MaxPendingTimeInSeconds" in stopping and not any(is_accelerated(name) for name in names):
        yield f"MaxPendingTimeInSeconds means nothing for {', '.join(names)}: no accelerated instance type"


def _checkpoints(request: Request, region: str) -> Iterator[str]:
    """SageMaker would take a job without, and every record of it would be lost."""
    if "CheckpointConfig" not in request:
        yield "CheckpointConfig is missing: nothing that the job writes would be kept"
    path = request.get("CheckpointConfig", {}).get("LocalPath", "/opt/ml/checkpoints")
    if not path.startswith("/") or (path.rstrip("/") or "/") in _TAKEN_PATHS:
        yield f"checkpoints cannot lie in {path}, which is no folder of their own"


def _channels(request: Request, region: str) -> Iterator[str]:
    channels: Sequence[Request] = request.get("InputDataConfig", ())
    for name, number in Counter(channel["ChannelName"] for channel in channels).items():
        if number > 1:
            yield f"channel {name} is given {number} times"
    for channel in channels:
        if len(channel["DataSource"]) != 1:
            yield f"channel {channel['ChannelName']} needs one source, not {len(channel['DataSource'])}"


def _isolation(request: Request, region: str) -> Iterator[str]:
    # docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html
    if request.get("EnableNetworkIsolation") and request.get("RemoteDebugConfig", {}).get(
        "EnableRemoteDebug"
    ):
        yield "EnableNetworkIsolation with EnableRemoteDebug"


def _metrics(request: Request, region: str) -> Iterator[str]:
    metrics: Sequence[Request] = request["AlgorithmSpecification"].get("MetricDefinitions", ())
    for name, number in Counter(metric["Name"] for metric in metrics).items():
        if number > 1:
            yield f"metric {name} is defined {number} times"
    for metric in metrics:
        try:
            groups = re.compile(metric["Regex"]).groups
        except re.error as error:
            yield f"the regular expression of metric {metric['Name']} is wrong: {error}"
            continue
        if groups != 1:
            yield f"the regular expression of metric {metric['Name']} has {groups} groups, not one"


def _tags(request: Request, region: str) -> Iterator[str]:
    keys = [tag["Key"] for tag in request.get("Tags", ())]
    for key, number in Counter(keys).items():
        if number > 1:
            yield f"tag {key} is given {number} times"
        if key.lower().startswith("aws:"):
            yield f"tag {key} begins with aws:"


def _preferences(resources: Request) -> Sequence[Request]:
    preferences: Sequence[Request] = resources.get("InstancePreferences", ())
    return preferences


def _names(resources: Request) -> list[str]:
    """Instance types that the job may get."""
    alone = [resources["InstanceType"]] if "InstanceType" in resources else []
    groups: Sequence[Request] = resources.get("InstanceGroups", ())
    return alone + [one["InstanceType"] for one in (*_preferences(resources), *groups)]


RULES: tuple[Rule, ...] = (
    _limits,
    _image,
    _types,
    _counts,
    _instance_preferences,
    _warm_pool,
    _training_plan,
    _times,
    _checkpoints,
    _channels,
    _isolation,
    _metrics,
    _tags,
)
