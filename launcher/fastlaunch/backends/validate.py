"""Find what AWS would refuse in a plan's request, before anything is sent.

Sources: the EC2 API reference and user guide, read 2026-11; for SageMaker the model in botocore's data files,
as importing botocore would take longer than the rest of a dry run.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastlaunch.core.plan import PAYLOAD, Plan

Request = Mapping[str, Any]

#: Characters of a tag's value.
_MAX_TAG_VALUE = 256
_MAX_TAGS = 50
#: 28 days.
_MAX_RUNTIME_S = 2_419_200
#: Bytes. docs.aws.amazon.com/batch, "AWS Batch service quotas".
_MAX_PAYLOAD = 10 * 1024
#: What is not known yet, such as `<role>`.
_PLACEHOLDER = re.compile(r"<[a-z0-9-]+>")


def request_problems(plan: Plan) -> list[str]:
    """Return what is wrong with the request, in words; empty if AWS would take it."""
    if plan.operation == "RunInstances":
        return list(_ec2_problems(plan.request))
    assert plan.operation in ("CreateTrainingJob", "SubmitServiceJob") and plan.region is not None
    limits = model_problems("sagemaker", "CreateTrainingJob", plan.payload)
    in_queue = _queue_problems(plan.request) if plan.is_queued else ()
    return [*limits, *_sagemaker_problems(plan.payload, plan.region), *in_queue]


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


def _queue_problems(request: Request) -> Iterator[str]:
    yield from model_problems("batch", "SubmitServiceJob", request)
    size = len(request[PAYLOAD].encode())
    if size > _MAX_PAYLOAD:
        yield f"its payload has {size:,} bytes, above AWS Batch's {_MAX_PAYLOAD:,}: give fewer --env or --tag"


def model_problems(service: str, operation: str, request: Mapping[str, Any]) -> list[str]:
    """Return which limits of the model the request breaks: lengths, ranges, patterns.

    botocore itself checks names, types and minimums when it sends. Placeholders pass.
    """
    model = _model(service)
    shape = model["operations"][operation]["input"]["shape"]
    return list(_problems(model["shapes"], shape, request, ""))


@cache
def _model(service: str) -> Any:
    spec = find_spec("botocore")
    assert spec is not None and spec.origin is not None
    versions = Path(spec.origin).parent.joinpath("data", service).glob("*/service-2.json.gz")
    return json.loads(gzip.decompress(max(versions).read_bytes()))


def _problems(shapes: Mapping[str, Any], name: str, value: Any, path: str) -> Iterator[str]:
    shape = shapes[name]
    yield from _broken_limits(shape, value, path)
    if shape["type"] == "structure":
        for member, part in value.items():
            inner = f"{path}.{member}".removeprefix(".")
            yield from _problems(shapes, shape["members"][member]["shape"], part, inner)
    elif shape["type"] == "list":
        for part in value:
            yield from _problems(shapes, shape["member"]["shape"], part, path)
    elif shape["type"] == "map":
        for key, part in value.items():
            yield from _problems(shapes, shape["key"]["shape"], key, path)
            yield from _problems(shapes, shape["value"]["shape"], part, f"{path}.{key}")


def _broken_limits(shape: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    is_text, is_open = isinstance(value, str), isinstance(value, str) and _PLACEHOLDER.search(value)
    size = len(value) if hasattr(value, "__len__") else value
    unit = " characters" if is_text else " entries" if hasattr(value, "__len__") else ""
    pattern = shape.get("pattern")
    if "max" in shape and size > shape["max"]:
        yield f"{path} has {size:,}{unit}, above {shape['max']:,}"
    elif "min" in shape and size < shape["min"] and not is_open:
        yield f"{path} has {size:,}{unit}, below {shape['min']:,}"
    # Python's expressions know no classes of Unicode, which only tags have.
    elif is_text and pattern and r"\p" not in pattern and not is_open and not re.fullmatch(pattern, value):
        yield f"{path} {value!r} does not fit {pattern}"
