"""What AWS's errors are made into: the kind, the words and the next thing to type."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from stubbed_aws import StubbedAws

from fastlaunch.aws import errors as aws_errors
from fastlaunch.aws.errors import ApiCall, is_spot_interruption, refusal, state_reason_problem, unanswered
from fastlaunch.aws.quota_codes import quota_code
from fastlaunch.aws.types import Instance
from fastlaunch.core.errors import (
    EXIT_CLOUD_REFUSED,
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
)

REQUEST = {
    "ImageId": "ami-0123456789abcdef0",
    "InstanceType": "p5.48xlarge",
    "MinCount": 1,
    "MaxCount": 1,
    "ClientToken": "run-a1",
}
SPOT = {**REQUEST, "InstanceMarketOptions": {"MarketType": "spot"}}
RUN = ApiCall(service="ec2", action="RunInstances", region="us-east-1", instance_type="p5.48xlarge")


def refused_run(stubbed_aws: StubbedAws, request: Mapping[str, Any] = REQUEST) -> CloudRefused:
    with pytest.raises(CloudRefused) as error:
        stubbed_aws.aws.run_instances("us-east-1", request)
    assert error.value.exit_code == EXIT_CLOUD_REFUSED
    return error.value


def test_no_capacity(stubbed_aws: StubbedAws) -> None:
    told = "We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested"
    stubbed_aws.error("ec2", "run_instances", "InsufficientInstanceCapacity", told, 500)
    error = refused_run(stubbed_aws)
    assert type(error) is NoCapacity and error.code == "InsufficientInstanceCapacity"
    assert error.message == (
        f"AWS refused ec2:RunInstances of p5.48xlarge in us-east-1: InsufficientInstanceCapacity: {told}"
    )
    assert error.hint == (
        "allow another region or instance type (`--region R1,R2`, `--instance T1,T2`), or try later"
    )
    assert stubbed_aws.slept_s == []


def test_quota(stubbed_aws: StubbedAws) -> None:
    told = "You have requested more vCPU capacity than your current vCPU limit of 0 allows"
    stubbed_aws.error("ec2", "run_instances", "VcpuLimitExceeded", told)
    error = refused_run(stubbed_aws)
    assert type(error) is QuotaExceeded and told in error.message
    assert error.hint == (
        "end instances that count against 'Running On-Demand P instances' (L-417A185B, in vCPUs), or ask for "
        "more: https://us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/L-417A185B "
        "(another region has its own, another zone does not help)"
    )


def test_an_encoded_message_is_told_how_to_read(stubbed_aws: StubbedAws) -> None:
    told = "You are not authorized. Encoded authorization failure message: 4GOI_abc"
    stubbed_aws.error("ec2", "run_instances", "UnauthorizedOperation", told, 403)
    error = refused_run(stubbed_aws)
    assert "4GOI_abc" in error.message
    assert "aws sts decode-authorization-message --encoded-message" in (error.hint or "")


@pytest.mark.parametrize("code", ["AuthFailure", "InvalidClientTokenId", "UnrecognizedClientException"])
def test_a_region_that_is_off_knows_nobody(code: str) -> None:
    assert "switch us-east-1 on" in (refusal(RUN, code, "told so").hint or "")


def test_an_instance_profile_that_ec2_does_not_see_yet() -> None:
    said = "Value (node) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name"
    error = refusal(RUN, "InvalidParameterValue", said)
    assert type(error) is BadConfiguration and "a minute" in (error.hint or "")
    assert "a minute" not in (refusal(RUN, "InvalidParameterValue", "something else").hint or "")


@pytest.mark.parametrize(
    ("service", "method", "code", "status", "kind", "call"),
    [
        ("ssm", "get_parameter", "ParameterNotFound", 400, BadConfiguration, "parameter"),
        ("ssm", "get_parameter", "InternalServerError", 500, Unreachable, "parameter"),
        ("s3", "get_object", "NoSuchBucket", 404, BadConfiguration, "get_object"),
        ("s3", "get_object", "ExpiredToken", 400, NotAuthorised, "get_object"),
        ("s3", "list_objects_v2", "AccessDenied", 403, NotAuthorised, "list_objects"),
        ("servicequotas", "get_service_quota", "AccessDeniedException", 400, NotAuthorised, "quota"),
    ],
)
def test_every_service(
    stubbed_aws: StubbedAws,
    service: str,
    method: str,
    code: str,
    status: int,
    kind: type[CloudRefused],
    call: str,
) -> None:
    for _ in range(2 if kind is Unreachable else 1):
        stubbed_aws.error(service, method, code, "told so", status)
    arguments = {"parameter": ("/p",), "quota": ("ec2", "L-1")}.get(call, ("bucket", "key"))
    with pytest.raises(kind, match=r" in r: .*told so") as error:
        getattr(stubbed_aws.aws, call)("r", *arguments)
    assert error.value.code == code and error.value.hint


# The table


def test_every_known_code_has_a_next_action() -> None:
    for code in aws_errors._CODES:
        error = refusal(RUN, code, "told so", status=400)
        assert error.code == code and error.message.endswith(f"{code}: told so")
        assert error.hint and "{" not in error.hint


#: Known answers for what decides whether another candidate is tried, and whether money may be at stake.
KINDS = {
    QuotaExceeded: "VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded VolumeLimitExceeded",
    NoCapacity: (
        "InsufficientInstanceCapacity InsufficientReservedInstanceCapacity InsufficientHostCapacity "
        "Unsupported SpotMaxPriceTooLow ReservationCapacityExceeded InsufficientFreeAddressesInSubnet"
    ),
    NotAuthorised: "UnauthorizedOperation AuthFailure ExpiredToken OptInRequired PendingVerification Blocked",
    BadConfiguration: "IdempotentParameterMismatch IdempotentInstanceTerminated InvalidSubnetID.NotFound",
    Throttled: "RequestLimitExceeded ThrottlingException SlowDown ConditionalRequestConflict",
    Unreachable: "InternalError InternalFailure ServiceUnavailable Unavailable RequestTimeout",
}


@pytest.mark.parametrize(
    ("kind", "code"), [(kind, code) for kind, text in KINDS.items() for code in text.split()]
)
def test_kinds_of_codes(kind: type[CloudRefused], code: str) -> None:
    assert type(refusal(RUN, code, "told so")) is kind


@pytest.mark.parametrize(
    ("action", "code", "hint"),
    [
        ("HeadBucket", "AccessDenied", "s3:ListBucket"),
        ("PutObject", "AccessDenied", "s3:PutObject"),
        ("PutObject", "NoSuchBucket", "`aws.us-east-1.bucket`"),
        ("RunInstances", "InvalidIamInstanceProfileArnMalformed", "`aws.us-east-1.instance_profile`"),
        ("RunInstances", "Unsupported", "that zone"),
        ("RunInstances", "SpotMaxPriceTooLow", "--max-price"),
        ("RunInstances", "IdempotentInstanceTerminated", "fastlaunch resume"),
        ("RunInstances", "ExpiredToken", "aws sso login"),
        (
            "RunInstances",
            "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
            "aws iam create-service-linked-role",
        ),
    ],
)
def test_hints_name_what_to_change(action: str, code: str, hint: str) -> None:
    asked = ApiCall(service="s3", action=action, region="us-east-1", subject="bucket")
    assert hint in (refusal(asked, code, "told so").hint or "")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("InvalidGroup.NotFound", 400, BadConfiguration),
        ("SomethingNew", 400, BadConfiguration),
        ("SomethingNew", 500, Unreachable),
        ("SomethingThrottled", 400, Throttled),
        ("KMSAccessDeniedException", 400, NotAuthorised),
        ("SessionExpired", 403, NotAuthorised),
        ("", 403, NotAuthorised),
        ("404", 404, BadConfiguration),
        ("429", 429, Throttled),
        ("502", 502, Unreachable),
        ("InternalError", 0, Unreachable),
    ],
)
def test_codes_that_are_in_no_table(code: str, status: int, kind: type[CloudRefused]) -> None:
    assert type(refusal(RUN, code, "told so", status=status)) is kind


@pytest.mark.parametrize(
    ("raised", "kind", "hint"),
    [
        ("NoCredentialsError", NotAuthorised, "aws sso login"),
        ("PartialCredentialsError", NotAuthorised, "AWS_SECRET_ACCESS_KEY"),
        ("UnauthorizedSSOTokenError", NotAuthorised, "aws sso login"),
        ("LoginRefreshRequired", NotAuthorised, "aws login"),
        ("ProfileNotFound", BadConfiguration, "aws configure"),
        ("InvalidRegionError", BadConfiguration, "--region"),
        ("UnknownEndpointError", BadConfiguration, "--region"),
        ("EndpointConnectionError", Unreachable, "us-east-1"),
        ("ConnectTimeoutError", Unreachable, "us-east-1"),
        ("ReadTimeoutError", Unreachable, "fastlaunch status"),
        ("ConnectionClosedError", Unreachable, "fastlaunch status"),
        ("ProxyConnectionError", Unreachable, "us-east-1"),
        ("SSLError", Unreachable, "AWS_CA_BUNDLE"),
    ],
)
def test_exceptions_of_botocore(raised: str, kind: type[CloudRefused], hint: str) -> None:
    import botocore.exceptions

    names = tuple(each.__name__ for each in getattr(botocore.exceptions, raised).__mro__)
    error = unanswered(RUN, names, "told so")
    assert type(error) is kind and error.code == raised
    assert hint in (error.hint or "") and "told so" in error.message


def test_a_bug_stays_one() -> None:
    assert unanswered(RUN, ("KeyError", "LookupError", "Exception"), "told so") is None


def test_quotas_by_family_and_purchase() -> None:
    known = {
        ("p4d.24xlarge", "on-demand"): "L-417A185B",
        ("p6-b300.48xlarge", "on-demand"): "L-417A185B",
        ("g6.xlarge", "on-demand"): "L-DB2E81BA",
        ("trn2.48xlarge", "on-demand"): "L-2C3B7624",
        ("p5en.48xlarge", "spot"): "L-C4BD4855",
        ("p4de.24xlarge", "spot"): "L-7212CCBC",
        ("g7e.2xlarge", "spot"): "L-3819A6DF",
        ("trn1.32xlarge", "spot"): "L-6B0D517C",
        ("p6-b200.48xlarge", "spot"): None,
        ("p5.48xlarge", "capacity-block"): None,
        ("m7i.large", "on-demand"): None,
    }
    found = {key: quota_code(*key) for key in known}
    assert {key: quota and quota.code for key, quota in found.items()} == known


# Why an instance ended


def ended(reason: str | None) -> Instance:
    return Instance(
        id="i-1",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="p5.48xlarge",
        state="terminated",
        is_spot=True,
        launch_time=datetime(2026, 11, 21, tzinfo=UTC),
        state_reason=reason,
    )


@pytest.mark.parametrize(
    ("reason", "kind", "hint"),
    [
        ("Client.InternalError: Client error on launch", BadConfiguration, "key"),
        ("Client.VolumeLimitExceeded: Volume limit exceeded", QuotaExceeded, "Amazon EBS"),
        ("Client.InvalidSnapshot.NotFound: The snapshot", BadConfiguration, "config file"),
        ("Server.InsufficientInstanceCapacity: Insufficient capacity", NoCapacity, "--region"),
        ("Server.SpotInstanceTermination: Spot instance termination", NoCapacity, "fastlaunch resume"),
        ("Server.SpotInstanceShutdown: Spot instance shutdown", NoCapacity, "fastlaunch resume"),
        ("Server.InternalError: Internal error on launch", NoCapacity, "fastlaunch resume"),
        ("Server.SomethingNew: told so", NoCapacity, "fastlaunch resume"),
        ("Client.SomethingNew: told so", BadConfiguration, "config file"),
    ],
)
def test_reasons_of_an_end(reason: str, kind: type[CloudRefused], hint: str) -> None:
    error = state_reason_problem(ended(reason))
    assert type(error) is kind and error.code == reason.partition(":")[0]
    assert error.message.startswith("instance i-1 ") and error.message.endswith(reason)
    assert hint in (error.hint or "") and "{" not in (error.hint or "")


@pytest.mark.parametrize(
    "reason",
    [
        None,
        "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
        "Client.UserInitiatedShutdown: User initiated shutdown",
    ],
)
def test_an_end_of_its_own_is_no_problem(reason: str | None) -> None:
    assert state_reason_problem(ended(reason)) is None and not is_spot_interruption(ended(reason))
