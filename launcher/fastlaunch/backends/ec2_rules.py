"""What EC2 refuses, or takes to mean something else, though botocore's model of RunInstances allows it.

A rule is a function from the request to what is wrong with it, and stands in RULES; SageMaker's are in
`sagemaker_rules`. Sources: the EC2 API reference and user guide unless a rule says
otherwise, read 2026-11.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastlaunch.backends import Plan, ec2_network_rules
from fastlaunch.backends.ec2.user_data import MAX_USER_DATA_BYTES
from fastlaunch.backends.ec2_network_rules import NETWORK_RULES
from fastlaunch.catalog.hardware import InstanceType

Request = Mapping[str, Any]
Rule = Callable[[Request], Iterator[str]]

_TAGGED_BY_RUN_INSTANCES = ("instance", "volume", "network-interface", "spot-instances-request")
#: gp3, since September 2025: GiB, operations per second, MiB/s; and MiB/s for each operation per second.
_GP3_GIB, _GP3_IOPS, _GP3_MIB_PER_S, _GP3_RATIO = (1, 65_536), (3_000, 80_000), (125, 2_000), 0.25
_PLACEHOLDER = re.compile(r"<[a-z0-9-]+>")


def broken_rules(
    plan: Plan, *, root_device: str | None = None, instance: InstanceType | None = None
) -> list[str]:
    """What is wrong with a RunInstances plan, in words; empty if EC2 would take it.

    root_device: the AMI's own root device; where it is given, a volume of another name is found out.
    instance: the plan's type; where it is given, network cards that it does not have are found out.
    """
    assert plan.operation == "RunInstances"
    found = [problem for rule in RULES for problem in rule(plan.request)]
    if instance:
        found += ec2_network_rules.hardware(plan.request, instance)
    if root_device:
        found += _root_volume(plan.request, root_device)
    return found


def _counts(request: Request) -> Iterator[str]:
    least, most = request["MinCount"], request["MaxCount"]
    if not 1 <= least <= most:
        yield f"MinCount {least} and MaxCount {most}: it takes 1 or more, and no fewer at most than at least"
    elif least < most:
        yield f"MinCount {least} and MaxCount {most}: fewer machines may come than the job needs"


def _client_token(request: Request) -> Iterator[str]:
    token = request.get("ClientToken", "")
    if len(token) > 64 or not token.isascii():
        yield f"ClientToken {token!r} is not up to 64 ASCII characters"


def _user_data(request: Request) -> Iterator[str]:
    num_bytes = len(request.get("UserData", "").encode())
    if num_bytes > MAX_USER_DATA_BYTES:
        yield f"UserData has {num_bytes:,} bytes, above {MAX_USER_DATA_BYTES:,}"


def _profile(request: Request) -> Iterator[str]:
    if {"Arn", "Name"} <= request.get("IamInstanceProfile", {}).keys():
        yield "IamInstanceProfile has both Arn and Name"


def _spot(request: Request) -> Iterator[str]:
    market, options = _market(request)
    if options and market != "spot":
        yield f"SpotOptions with MarketType {market}"
    if market != "spot":
        return
    lasting = options.get("SpotInstanceType", "one-time") == "persistent"
    behaviour = options.get("InstanceInterruptionBehavior", "terminate")
    if behaviour != "terminate" and not lasting:
        yield f"a one-time spot request cannot {behaviour} on interruption: only a persistent one can"
    # github.com/aws/aws-cli/issues/4679; a dry run accepts it.
    if "ValidUntil" in options and not lasting:
        yield "ValidUntil is for persistent spot requests only"
    if "BlockDurationMinutes" in options:
        yield "BlockDurationMinutes: EC2 no longer sells spot blocks"
    if "MaxPrice" in options and not _is_price(options["MaxPrice"]):
        yield f"MaxPrice {options['MaxPrice']!r} is not a decimal number of at least 0.001"
    # github.com/ansible/ansible/pull/63246
    if request.get("InstanceInitiatedShutdownBehavior", "stop") == "stop" and not lasting:
        yield "a one-time spot instance cannot stop when it shuts down: terminate"
    if behaviour != "terminate" and {"GroupName", "GroupId"} & _placement(request).keys():
        yield f"a spot instance that would {behaviour} on interruption may not be in a placement group"
    if _placement(request).get("Tenancy") == "host":
        yield "spot instances do not run on dedicated hosts"


def _reservations(request: Request) -> Iterator[str]:
    market, _ = _market(request)
    wanted: Request = request.get("CapacityReservationSpecification", {})
    target: Request = wanted.get("CapacityReservationTarget", {})
    preference = wanted.get("CapacityReservationPreference")
    if market == "spot" and (target or preference == "capacity-reservations-only"):
        yield "spot does not take capacity out of a reservation or a capacity block"
    if market == "capacity-block" and "CapacityReservationId" not in target:
        yield "a capacity block needs its CapacityReservationId as target"
    if len(target) > 1:
        yield "CapacityReservationTarget is an id or a resource group, not both"
    if target and preference in ("open", "none"):
        yield f"CapacityReservationPreference {preference} with a target"


def _hibernation(request: Request) -> Iterator[str]:
    _, options = _market(request)
    hibernates = request.get("HibernationOptions", {}).get("Configured")
    if options.get("InstanceInterruptionBehavior") == "hibernate" or hibernates:
        if re.match(r"(p|g|trn|inf|dl)[0-9]", request["InstanceType"]):
            yield f"{request['InstanceType']} cannot hibernate: no accelerated instance type can"
        if request.get("InstanceInitiatedShutdownBehavior") == "terminate":
            yield "hibernation with InstanceInitiatedShutdownBehavior terminate: it would lose what it saved"


def _volumes(request: Request) -> Iterator[str]:
    mappings: Sequence[Request] = request.get("BlockDeviceMappings", ())
    for name, number in Counter(mapping.get("DeviceName") for mapping in mappings).items():
        if number > 1:
            yield f"{name} is mapped {number} times"
    for volume in (mapping["Ebs"] for mapping in mappings if "Ebs" in mapping):
        if "KmsKeyId" in volume and not volume.get("Encrypted"):
            yield "KmsKeyId of a volume that is not encrypted"
        if volume.get("VolumeType") != "gp3":
            if "Throughput" in volume:
                yield f"Throughput is for gp3 volumes, not {volume.get('VolumeType')}"
            continue
        iops, throughput = volume.get("Iops", _GP3_IOPS[0]), volume.get("Throughput", _GP3_MIB_PER_S[0])
        limits = ((volume.get("VolumeSize", _GP3_GIB[0]), _GP3_GIB, "GiB"), (iops, _GP3_IOPS, "IOPS"))
        for value, (low, high), unit in (*limits, (throughput, _GP3_MIB_PER_S, "MiB/s")):
            if not low <= value <= high:
                yield f"a gp3 volume of {value:,} {unit}: it takes {low:,} to {high:,}"
        if throughput > iops * _GP3_RATIO:
            yield f"{throughput} MiB/s need {throughput / _GP3_RATIO:,.0f} IOPS, not {iops:,}"


def _root_volume(request: Request, root_device: str) -> Iterator[str]:
    for mapping in request.get("BlockDeviceMappings", ()):
        name = mapping.get("DeviceName", "")
        if name != root_device and not _PLACEHOLDER.fullmatch(name):
            yield f"{name} is not the AMI's root device {root_device}: it would become a second volume"


def _metadata(request: Request) -> Iterator[str]:
    options: Request = request.get("MetadataOptions", {})
    hops = options.get("HttpPutResponseHopLimit", 1)
    if not 1 <= hops <= 64:
        yield f"HttpPutResponseHopLimit {hops}: it takes 1 to 64"
    if options.get("InstanceMetadataTags") == "enabled":
        for key in (tag["Key"] for tags in _tags(request) for tag in tags["Tags"]):
            if not re.fullmatch(r"[A-Za-z0-9+=.,_:@-]+", key) or key in (".", "..", "_index"):
                yield f"tag {key!r} cannot be shown in the instance's metadata"


def _tag_limits(request: Request) -> Iterator[str]:
    for kind, number in Counter(tags["ResourceType"] for tags in _tags(request)).items():
        if number > 1:
            yield f"{kind} has {number} TagSpecifications"
        if kind not in _TAGGED_BY_RUN_INSTANCES:
            yield f"RunInstances does not tag a {kind}"
        if kind == "spot-instances-request" and _market(request)[0] != "spot":
            yield "tags for a spot request where none is made"
    for tags in _tags(request):
        keys = [tag["Key"] for tag in tags["Tags"]]
        if len(keys) > 50:
            yield f"{len(keys)} tags on {tags['ResourceType']}: it takes 50"
        if len({*keys}) < len(keys):
            yield f"a tag of {tags['ResourceType']} is given twice"
        for tag in tags["Tags"]:
            if not 1 <= len(tag["Key"]) <= 128 or tag["Key"].lower().startswith("aws:"):
                yield f"tag {tag['Key']!r} is not of 1 to 128 characters, or begins with aws:"
            if len(tag["Value"]) > 256:
                yield f"the value of tag {tag['Key']} has {len(tag['Value'])} characters, above 256"


def _market(request: Request) -> tuple[str, Request]:
    market: Request = request.get("InstanceMarketOptions", {})
    return market.get("MarketType", "on-demand"), market.get("SpotOptions", {})


def _placement(request: Request) -> Request:
    placement: Request = request.get("Placement", {})
    return placement


def _tags(request: Request) -> Sequence[Request]:
    tags: Sequence[Request] = request.get("TagSpecifications", ())
    return tags


def _is_price(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)) and float(text) >= 0.001


RULES: tuple[Rule, ...] = (
    _counts,
    _client_token,
    _user_data,
    _profile,
    _spot,
    _reservations,
    _hibernation,
    *NETWORK_RULES,
    _volumes,
    _metadata,
    _tag_limits,
)
