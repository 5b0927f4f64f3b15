"""What AWS would refuse of a plan's request, though it can be planned: found before anything is sent.

Sources: the EC2 API reference and user guide, and botocore's model of SageMaker, read 2026-11.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fastlaunch.aws.request_model import model_problems
from fastlaunch.core.plan import Plan

Request = Mapping[str, Any]

#: Characters of a tag's value.
_MAX_TAG_VALUE = 256
_MAX_TAGS = 50
#: 28 days.
_MAX_RUNTIME_S = 2_419_200


def request_problems(plan: Plan) -> list[str]:
    """Return what is wrong with the request, in words; empty if AWS would take it."""
    if plan.operation == "RunInstances":
        return list(_ec2_problems(plan.request))
    assert plan.operation == "CreateTrainingJob" and plan.region is not None
    limits = model_problems("sagemaker", "CreateTrainingJob", plan.request)
    return [*limits, *_sagemaker_problems(plan.request, plan.region)]


def _ec2_problems(request: Request) -> Iterator[str]:
    # botocore's model of RunInstances holds no limits. User data does not grow: it is far below EC2's 16 KB.
    tags = request["TagSpecifications"][0]["Tags"]
    if len(tags) > _MAX_TAGS:
        yield f"it has {len(tags)} tags, above {_MAX_TAGS}; Owner and five others are fastlaunch's"
    for tag in tags:
        if len(tag["Value"]) > _MAX_TAG_VALUE:
            length = len(tag["Value"])
            yield f"the value of tag {tag['Key']} has {length} characters, above {_MAX_TAG_VALUE}"
    places = [request, request.get("Placement", {}), *request.get("NetworkInterfaces", ())]
    market = request.get("InstanceMarketOptions", {}).get("MarketType")
    if market == "capacity-block" and not any({"SubnetId", "AvailabilityZone"} & set(at) for at in places):
        yield "a capacity block lies in one zone: name its subnet or its zone"


def _sagemaker_problems(request: Request, region: str) -> Iterator[str]:
    run_s = request["StoppingCondition"]["MaxRuntimeInSeconds"]
    if run_s > _MAX_RUNTIME_S:
        yield f"MaxRuntimeInSeconds {run_s:,} is above 28 days"
    arn = request["ResourceConfig"].get("TrainingPlanArn", "")
    if arn.startswith("arn:") and arn.split(":")[3] != region:
        yield f"{arn} is of {arn.split(':')[3]}, and the job in {region}"
