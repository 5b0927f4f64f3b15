"""What AWS's errors are made into: the kind, and the next thing to type."""

from datetime import UTC, datetime

import botocore.exceptions
import pytest
from stubbed_aws import StubbedAws

from fastlaunch.aws import errors as aws_errors
from fastlaunch.aws.errors import ApiCall, ending_of, refusal, state_reason_problem, unanswered
from fastlaunch.aws.types import Instance
from fastlaunch.core.errors import (
    EXIT_CLOUD_REFUSED,
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    TlsFailed,
    Unreachable,
)
from fastlaunch.core.plan import Ending

RUN = ApiCall(service="ec2", action="RunInstances", region="us-east-1", instance_type="p5.48xlarge")


def test_a_refusal_says_what_aws_refused_and_what_to_type(stubbed_aws: StubbedAws) -> None:
    stubbed_aws.error("ec2", "run_instances", "InsufficientInstanceCapacity", "no p5.48xlarge", 500)
    request = {"ImageId": "ami-1", "InstanceType": "p5.48xlarge", "MinCount": 1, "MaxCount": 1}
    with pytest.raises(NoCapacity) as caught:
        stubbed_aws.aws.run_instances("us-east-1", {**request, "ClientToken": "run-a1"})
    assert (caught.value.code, caught.value.exit_code) == ("InsufficientInstanceCapacity", EXIT_CLOUD_REFUSED)
    assert caught.value.message == (
        "AWS refused ec2:RunInstances of p5.48xlarge in us-east-1: InsufficientInstanceCapacity: "
        "no p5.48xlarge"
    )
    assert "--region R1,R2" in (caught.value.hint or "") and stubbed_aws.slept_s == []


@pytest.mark.parametrize(
    ("service", "method", "code", "status", "kind", "call", "arguments"),
    [
        ("ssm", "get_parameter", "ParameterNotFound", 400, BadConfiguration, "parameter", ["/p"]),
        ("ssm", "get_parameter", "InternalServerError", 500, Unreachable, "parameter", ["/p"]),
        ("s3", "list_objects_v2", "NoSuchBucket", 404, BadConfiguration, "list_objects", ["b", "k"]),
        ("s3", "list_objects_v2", "AccessDenied", 403, NotAuthorised, "list_objects", ["b", "k"]),
        ("servicequotas", "get_service_quota", "AccessDeniedException", 400, NotAuthorised, "quota", "ab"),
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
    arguments: list[str],
) -> None:
    for _ in range(2 if kind is Unreachable else 1):
        stubbed_aws.error(service, method, code, "why", status)
    with pytest.raises(kind, match=r" in r: .*why") as error:
        getattr(stubbed_aws.aws, call)("r", *arguments)
    assert error.value.code == code and error.value.hint


def test_every_known_code_has_a_next_action() -> None:
    for code in aws_errors._CODES:
        error = refusal(RUN, code, "why", status=400)
        assert error.code == code and error.message.endswith(f"{code}: why")
        assert error.hint and "{" not in error.hint


#: Known answers for what decides whether another candidate is tried, and whether money may be at stake.
KINDS = {
    QuotaExceeded: "VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded VolumeLimitExceeded",
    NoCapacity: (
        "InsufficientInstanceCapacity InsufficientReservedInstanceCapacity InsufficientHostCapacity "
        "Unsupported SpotMaxPriceTooLow ReservationCapacityExceeded InsufficientFreeAddressesInSubnet"
    ),
    NotAuthorised: (
        "UnauthorizedOperation AccessDenied AuthFailure ExpiredToken OptInRequired PendingVerification "
        "Blocked KMSAccessDeniedException SessionExpired"
    ),
    BadConfiguration: (
        "IdempotentParameterMismatch IdempotentInstanceTerminated InvalidSubnetID.NotFound SomethingNew"
    ),
    Throttled: (
        "RequestLimitExceeded ThrottlingException EC2ThrottledException SlowDown ConditionalRequestConflict"
    ),
    Unreachable: "InternalError InternalFailure ServiceUnavailable Unavailable RequestTimeout",
}


@pytest.mark.parametrize(
    ("kind", "code"), [(kind, code) for kind, text in KINDS.items() for code in text.split()]
)
def test_kinds_of_codes(kind: type[CloudRefused], code: str) -> None:
    assert type(refusal(RUN, code, "why")) is kind


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("SomethingNew", 500, Unreachable),
        ("", 403, NotAuthorised),
        ("404", 404, BadConfiguration),
        ("429", 429, Throttled),
        ("502", 502, Unreachable),
    ],
)
def test_the_status_decides_where_no_code_does(code: str, status: int, kind: type[CloudRefused]) -> None:
    assert type(refusal(RUN, code, "why", status=status)) is kind


def test_the_login_that_has_expired_is_renewed_by_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ApiCall(service="sts", action="GetCallerIdentity", region="us-east-1")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert "aws sso login --profile lab`" in (refusal(call, "ExpiredToken", "why").hint or "")


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        *((name, NotAuthorised) for name in ("NoCredentialsError", "UnauthorizedSSOTokenError")),
        *((name, BadConfiguration) for name in ("ProfileNotFound", "UnknownEndpointError")),
        *((name, Unreachable) for name in ("EndpointConnectionError", "ReadTimeoutError")),
        *((name, Unreachable) for name in ("ConnectionClosedError", "ProxyConnectionError")),
        *(("LoginRefreshRequired", NotAuthorised), ("SSLError", TlsFailed)),
    ],
)
def test_exceptions_of_botocore(raised: str, kind: type[CloudRefused]) -> None:
    names = tuple(ancestor.__name__ for ancestor in getattr(botocore.exceptions, raised).__mro__)
    error = unanswered(RUN, names, "why")
    assert type(error) is kind and error.code == raised and error.hint and "why" in error.message


def test_a_bug_stays_one() -> None:
    assert unanswered(RUN, ("KeyError", "LookupError", "Exception"), "why") is None


def test_a_call_that_only_looks_is_not_said_to_have_started_something() -> None:
    look = ApiCall(service="sts", action="GetCallerIdentity", region="r")
    hints = [error.hint for call in (look, RUN) if (error := unanswered(call, ("ConnectionError",), ""))]
    assert ["token" in (hint or "") for hint in hints] == [False, True]


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
    ("reason", "kind", "hint", "ending"),
    [
        ("Client.InternalError: Client error on launch", BadConfiguration, "key", None),
        ("Client.VolumeLimitExceeded: Volume limit exceeded", QuotaExceeded, "Service Quotas", None),
        ("Server.InsufficientInstanceCapacity: none", NoCapacity, "--region", Ending.NO_CAPACITY),
        ("Server.SpotInstanceTermination: taken", NoCapacity, "fastlaunch resume", Ending.RECLAIMED),
        ("Server.InternalError: Internal error on launch", NoCapacity, "fastlaunch resume", None),
        ("Server.SomethingNew: why", NoCapacity, "fastlaunch resume", None),
        ("Client.SomethingNew: why", BadConfiguration, "config file", None),
    ],
)
def test_reasons_of_an_end(reason: str, kind: type[CloudRefused], hint: str, ending: Ending | None) -> None:
    assert ending_of(ended(reason)) is ending
    error = state_reason_problem(ended(reason))
    assert type(error) is kind and error.code == reason.partition(":")[0]
    assert error.message.startswith("instance i-1 ") and error.message.endswith(reason)
    assert hint in (error.hint or "") and "{" not in (error.hint or "")


@pytest.mark.parametrize(
    "reason", [None, "Client.InstanceInitiatedShutdown: x", "Client.UserInitiatedShutdown: x"]
)
def test_an_end_of_its_own_is_no_problem(reason: str | None) -> None:
    assert state_reason_problem(ended(reason)) is None and ending_of(ended(reason)) is None
