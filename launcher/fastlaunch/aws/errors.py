"""Turn AWS's errors into our kinds of error, with what to do about each. Tables, without boto3.

Codes of EC2: docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html; of S3: docs.aws.amazon.com/
AmazonS3/latest/API/ErrorResponses.html; of every service: the "Common Errors" page of its API reference;
reasons of an instance's state: docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html. botocore
itself raises for a missing or expired login.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastlaunch.aws.quota_codes import quota_code, quota_page
from fastlaunch.core.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    TlsFailed,
    Unreachable,
    UserError,
)
from fastlaunch.core.plan import Ending
from fastlaunch.core.settings import profile_name
from fastlaunch.core.terminal import printable

if TYPE_CHECKING:
    from fastlaunch.aws.types import Instance


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """A call to AWS, for messages."""

    service: str
    action: str
    region: str
    # What it is about, such as a bucket's name; empty if the action says it.
    subject: str = ""
    # The type of an instance to be started.
    instance_type: str | None = None
    purchase: str = "on-demand"

    def __str__(self) -> str:
        about = f" of {self.subject}" if self.subject else ""
        return f"{self.service}:{self.action}{about} in {self.region}"


_LOG_IN = (
    "log in again (`aws sso login{profile}`, `aws login{profile}`, or new AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY), then `fastlaunch doctor`"
)
# EC2 gives one code for a session that has ended, a clock that is wrong, and a region that is switched off.
_LOG_IN_OR_REGION = (
    f"{_LOG_IN}; if that does not help, set this machine's clock, or "
    "switch {region} on (console: Account, AWS Regions)"
)
_ALLOW = "ask for the right {right} for your login (`aws sts get-caller-identity` shows it)"
_SPOT_ROLE = (
    "create the role that spot needs, once for the account: "
    "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`"
)
_ELSEWHERE = "allow another region or instance type (`--region R1,R2`, `--instance T1,T2`), or try later"
_SPOT_PRICE = "leave --max-price out, or raise it; it is below what spot costs there now"
_QUOTA = "ask for more under Service Quotas in {region}, or delete what nobody uses"
_CORRECT = "correct what the message names, in the command or under `aws.{region}` in the config file"
_NETWORK = "give subnets: `aws.{region}.subnets` in the config file"
_PROFILE = (
    "name an instance profile that exists: `aws.{region}.instance_profile` in the config file; EC2 takes a "
    "minute to see a new one"
)
_BUCKET = "name a bucket of {region} that exists: `aws.{region}.bucket` in the config file"
_TOKEN_USED = "this request started nothing; `fastlaunch status` shows what the token's own instance does"
_TOKEN_ENDED = (
    "this attempt's instance ran before and has ended; `fastlaunch resume RUN` begins a new attempt"
)
_AGAIN = "nothing was done: wait a minute and type the same again"
_SUPPORT = "the account is not ready for this: see the mails from AWS, or ask AWS Support"
_REGION_OFF = "switch {region} on under Account, AWS Regions in the console, or choose another region"
_UNKNOWN = "type the same again: the same token goes out, so nothing is started twice"
_JOB_NAME_USED = "an earlier job had this name; `fastlaunch resume RUN` begins an attempt with a new name"
_KEY = (
    "let your login, and for spot EC2's own role, use the key of the volume: `aws.{region}.volume_kms_key` "
    "in the config file, else the region's default for EBS"
)


def _by_name(*groups: tuple[type[CloudRefused], str, str]) -> Mapping[str, tuple[type[CloudRefused], str]]:
    """Return kind and hint by name, from (kind, hint, names)."""
    return {name: (kind, hint) for kind, hint, names in groups for name in names.split()}


#: Kind, hint and codes; `_by_shape` handles all other codes.
_CODES = _by_name(
    # Another zone of the region never helps.
    (QuotaExceeded, "", "VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded"),
    (
        QuotaExceeded,
        _QUOTA,
        "VolumeLimitExceeded MaxIOPSLimitExceeded NetworkInterfaceLimitExceeded AddressLimitExceeded "
        "LimitExceeded LimitExceededException ServiceQuotaExceededException ResourceLimitExceeded "
        "TooManyBuckets",
    ),
    # Another zone, region or type may help.
    (
        NoCapacity,
        _ELSEWHERE,
        "InsufficientInstanceCapacity InsufficientReservedInstanceCapacity InsufficientCapacity "
        "InsufficientHostCapacity InsufficientVolumeCapacity ReservationCapacityExceeded "
        "InsufficientFreeAddressesInSubnet Unsupported",
    ),
    (NoCapacity, _SPOT_PRICE, "SpotMaxPriceTooLow"),
    # Credentials and rights.
    (
        NotAuthorised,
        _LOG_IN_OR_REGION,
        "AuthFailure InvalidClientTokenId UnrecognizedClientException RequestExpired RequestTimeTooSkewed",
    ),
    (NotAuthorised, _SPOT_ROLE, "AuthFailure.ServiceLinkedRoleCreationNotPermitted"),
    (
        NotAuthorised,
        _LOG_IN,
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidAccessKeyId InvalidToken "
        "SignatureDoesNotMatch InvalidSignatureException IncompleteSignature MissingAuthenticationToken "
        "MissingAuthenticationTokenException",
    ),
    (NotAuthorised, _SUPPORT, "Blocked PendingVerification NotSignedUp AllAccessDisabled AccountProblem"),
    (NotAuthorised, _REGION_OFF, "OptInRequired"),
    # The request names what does not exist, or does not fit.
    (BadConfiguration, _TOKEN_USED, "IdempotentParameterMismatch"),
    (BadConfiguration, _TOKEN_ENDED, "IdempotentInstanceTerminated"),
    (BadConfiguration, _JOB_NAME_USED, "ResourceInUse"),
    (BadConfiguration, _NETWORK, "VPCIdNotSpecified DefaultVpcDoesNotExist MissingInput"),
    (BadConfiguration, _PROFILE, "NoSuchEntity"),
    (
        BadConfiguration,
        _BUCKET,
        "NoSuchBucket InvalidBucketName PermanentRedirect AuthorizationHeaderMalformed "
        "IllegalLocationConstraintException",
    ),
    # Too fast. S3 also answers so when several write one key at once.
    (
        Throttled,
        _AGAIN,
        "RequestLimitExceeded TooManyRequestsException PriorRequestNotComplete BandwidthLimitExceeded "
        "SlowDown OperationAborted ConditionalRequestConflict",
    ),
    # Perhaps done, perhaps not.
    (Unreachable, _UNKNOWN, "RequestTimeout RequestTimeoutException"),
)

#: Kind and hint by HTTP status, for an answer without a code: to HEAD, or from a proxy.
_STATUSES: Mapping[int, tuple[type[CloudRefused], str]] = {
    301: (BadConfiguration, _BUCKET),
    307: (BadConfiguration, _BUCKET),
    401: (NotAuthorised, _LOG_IN),
    403: (NotAuthorised, _ALLOW),
}

_CONFIGURE = (
    "run `aws configure`, or correct what the message names, in the command or in AWS's own config file"
)
_CERTIFICATE = (
    "if a proxy stands in between, let AWS_CA_BUNDLE name the file with its certificates; else unset it, and "
    "check AWS_ENDPOINT_URL and this machine's clock"
)
_ENDPOINT = (
    "AWS_ENDPOINT_URL, and `endpoint_url` of a profile, take a whole URL, such as http://127.0.0.1:5000; or "
    "unset it"
)
_FOREIGN = (
    "check AWS_ENDPOINT_URL, HTTPS_PROXY and whether this network wants a login; the request may have been "
    "carried out: `fastlaunch status` looks"
)
_CHAIN = (
    "correct it in AWS's config file or environment (`aws sts get-caller-identity{profile}` tries it), or "
    "choose another login: --profile NAME"
)
_SECOND_FACTOR = (
    "type the same on a terminal, or bring a session along: `aws sts get-session-token --serial-number ARN "
    "--token-code CODE`, and its three values as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN"
)
_NO_ANSWER = (
    "is the network up, and is {region} a region of AWS? The request may have been carried out: "
    "`fastlaunch status` looks, and the same command sends the same token"
)

#: Replacements of hints for calls that carry no token and can simply be repeated.
_WITHOUT_TOKEN = {
    _NO_ANSWER: "is the network up, and is {region} a region of AWS? If so, type the same again",
    _UNKNOWN: "type the same again",
    _FOREIGN: "check AWS_ENDPOINT_URL, HTTPS_PROXY and whether this network wants a login",
}

#: Kind, hint and names of botocore's exceptions, or of their base classes.
_EXCEPTIONS = _by_name(
    (NotAuthorised, _LOG_IN, "NoCredentialsError TokenRetrievalError NoAuthTokenError SSOError LoginError"),
    (NotAuthorised, _CHAIN, "PartialCredentialsError CredentialRetrievalError MetadataRetrievalError"),
    (NotAuthorised, _SECOND_FACTOR, "RefreshWithMFAUnsupportedError"),
    (
        BadConfiguration,
        _CONFIGURE,
        "ProfileNotFound ConfigNotFound ConfigParseError InvalidConfigError "
        "InvalidRetryConfigurationError InvalidProxiesConfigError MissingDependencyException "
        "UnknownCredentialError InvalidDefaultsMode InvalidSTSRegionalEndpointsConfigError "
        "InvalidS3UsEast1RegionalEndpointConfigError InvalidMaxRetryAttemptsError InvalidRegionError "
        "UnknownRegionError NoRegionError BaseEndpointResolverError EndpointProviderError",
    ),
    (BadConfiguration, _CORRECT, "ParamValidationError InvalidDNSNameError"),
    (TlsFailed, _CERTIFICATE, "SSLError"),
    (
        Unreachable,
        _NO_ANSWER,
        "ConnectionError HTTPClientError IncompleteReadError ChecksumError FlexibleChecksumError "
        "ResponseParserError",
    ),
)

#: The most characters to repeat of what a user's program says.
_LONGEST = 300

_FAULT = "AWS's own fault; `fastlaunch resume RUN` goes on from the last checkpoint on another machine"
_TAKEN = "`fastlaunch resume RUN` goes on from the last checkpoint; on-demand instances are not taken back"

#: Kind, words and hint by StateReason code, for instances that nobody ended on purpose.
_REASONS: Mapping[str, tuple[type[CloudRefused], str, str]] = {
    "Client.InternalError": (BadConfiguration, "could not use its volume, often for want of its key", _KEY),
    "Client.VolumeLimitExceeded": (QuotaExceeded, "got no volume", _QUOTA),
    "Server.InsufficientInstanceCapacity": (NoCapacity, "was not started for want of capacity", _ELSEWHERE),
    "Server.SpotInstanceTermination": (NoCapacity, "was taken back by EC2", _TAKEN),
    "Server.SpotInstanceShutdown": (NoCapacity, "was taken back by EC2", _TAKEN),
    "Server.InternalError": (NoCapacity, "ended by an error of its host", _FAULT),
}

#: StateReason codes of instances that ended themselves or that their owner ended.
_ON_PURPOSE = (
    "pending",
    "Client.InstanceInitiatedShutdown",
    "Client.InstanceTerminated",
    "Client.UserInitiatedShutdown",
    "Client.UserInitiatedHibernate",
)

#: The right that an action needs, if it has another name.
_RIGHTS = {"HeadBucket": "ListBucket", "HeadObject": "GetObject", "ListObjectsV2": "ListBucket"}

#: What ended an instance, by its StateReason code.
_ENDINGS: Mapping[str | None, Ending] = {
    "Server.InsufficientInstanceCapacity": Ending.NO_CAPACITY,
    "Server.SpotInstanceTermination": Ending.RECLAIMED,
    "Server.SpotInstanceShutdown": Ending.RECLAIMED,
}


def refusal(api_call: ApiCall, code: str, message: str, *, status: int = 0) -> CloudRefused:
    """Return the error to raise for AWS's refusal of the call. status: HTTP's."""
    kind, hint = _CODES.get(code) or _by_shape(code, status)
    if code == "InvalidParameterValue" and "iaminstanceprofile" in message.lower():
        hint = _PROFILE
    if kind is QuotaExceeded and not hint:
        hint = _quota_hint(api_call)
    answer = f"{code}: {message}" if message and message != code else code
    return _error(kind, f"AWS refused {api_call}: {answer}", hint, api_call, code)


def is_unknown_job(error: CloudRefused) -> bool:
    """Return whether the error, which has two forms, says that SageMaker knows no such training job (yet)."""
    return error.code == "ResourceNotFound" or (
        error.code == "ValidationException"
        and ("Requested resource not found" in error.message or "Could not find" in error.message)
    )


def is_without_keys(error: UserError) -> bool:
    """Return whether no login is set up at all, rather than one that failed."""
    return isinstance(error, CloudRefused) and error.code == "NoCredentialsError"


def unanswered(api_call: ApiCall, names: tuple[str, ...], message: str) -> CloudRefused | None:
    """Return the error to raise for an exception of botocore; None for one that is a bug.

    names: those of the exception's class and its bases, nearest first.
    """
    for name in names:
        if name in _EXCEPTIONS:
            kind, hint = _EXCEPTIONS[name]
            problem = "no answer to" if issubclass(kind, Unreachable) else "cannot send"
            return _error(kind, f"{problem} {api_call}: {message}", hint, api_call, names[0])
    return None


def no_answer(api_call: ApiCall, problem: str) -> CloudRefused:
    """Return the error to raise if a proxy or a login page answered instead of AWS."""
    message = f"what answers {api_call} is not AWS: {problem[:_LONGEST]}"
    return _error(Unreachable, message, _FOREIGN, api_call, "")


def no_login(error: Exception, *, region: str) -> CloudRefused:
    """Return the error to raise if botocore's chain of logins failed with `error`.

    The user's programs and files run there, so it may be any exception. region: that of the call that needed
    the login.
    """
    names = tuple(kind.__name__ for kind in type(error).__mro__)
    kind, hint = next((_EXCEPTIONS[name] for name in names if name in _EXCEPTIONS), (NotAuthorised, _CHAIN))
    what = " ".join(str(error).split()) or names[0]
    if isinstance(error, EOFError):
        what, hint = "it wants a second factor (MFA), and there is no terminal to ask on", _SECOND_FACTOR
    elif hint is _CHAIN and not isinstance(error, OSError):
        what = f"{names[0]}: {what}"
    if hint is _CORRECT:
        hint = _CHAIN
    message = f"the AWS login{_of_profile()} failed: {what[:_LONGEST]}"
    return _error(
        kind, message, hint, ApiCall(service="sts", action="GetCallerIdentity", region=region), names[0]
    )


def no_client(service: str, error: Exception, *, region: str) -> CloudRefused:
    """Return the error to raise if botocore made no client, usually because of an endpoint's URL."""
    message = f"the AWS settings{_of_profile()} cannot be used for {service}: {error}"
    return _error(
        BadConfiguration, message, _ENDPOINT, ApiCall(service=service, action="", region=region), ""
    )


def _of_profile() -> str:
    name = profile_name()
    return "" if name is None else f" of profile {name!r}"


def state_reason_problem(instance: "Instance") -> CloudRefused | None:
    """Return why EC2 ended the instance or never started it; None if it ended on purpose."""
    code = _reason_code(instance)
    if code is None or code in _ON_PURPOSE:
        return None
    api_call = ApiCall(service="ec2", action="RunInstances", region=instance.region)
    unknown = (
        (NoCapacity, "was ended by EC2", _FAULT)
        if code.startswith("Server.")
        else (BadConfiguration, "was ended by EC2", _CORRECT)
    )
    kind, words, hint = _REASONS.get(code, unknown)
    return _error(kind, f"instance {instance.id} {words}: {instance.state_reason}", hint, api_call, code)


def _reason_code(instance: "Instance") -> str | None:
    """Return the code of the instance's StateReason, such as `Server.SpotInstanceTermination`."""
    return instance.state_reason.partition(":")[0] if instance.state_reason else None


def ending_of(instance: "Instance") -> Ending | None:
    """Return what ended the instance; None if EC2 does not say, or if it ended itself."""
    return _ENDINGS.get(_reason_code(instance))


def _by_shape(code: str, status: int) -> tuple[type[CloudRefused], str]:
    if re.fullmatch(r"\d*", code) and status in _STATUSES:
        return _STATUSES[status]
    if "Throttl" in code or status == 429:
        return Throttled, _AGAIN
    if code.startswith("InvalidIamInstanceProfile"):
        return BadConfiguration, _PROFILE
    if status >= 500 or code in ("InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"):
        return Unreachable, _UNKNOWN
    if re.search(r"Denied|Unauthorized|NotAuthorized|Expired", code):
        return NotAuthorised, _ALLOW
    return BadConfiguration, _CORRECT


def _quota_hint(api_call: ApiCall) -> str:
    quota = quota_code(api_call.instance_type or "", api_call.purchase)
    if quota is None:
        return f"{_QUOTA}; another region has its own, another zone does not help"
    page = quota_page(api_call.region, quota.code)
    return (
        f"end instances that count against '{quota.name}' ({quota.code}, in vCPUs), or ask for more: {page} "
        "(another region has its own, another zone does not help)"
    )


def _error(kind: type[CloudRefused], message: str, hint: str, api_call: ApiCall, code: str) -> CloudRefused:
    right = f"{api_call.service}:{_RIGHTS.get(api_call.action, api_call.action)}"
    # It may be another right, such as iam:PassRole for a training job.
    if denied := re.search(r"not authorized to perform: ([\w-]+:\w+)", message):
        right = denied[1]
    if api_call.action not in ("RunInstances", "CreateTrainingJob", "SubmitServiceJob"):
        hint = _WITHOUT_TOKEN.get(hint, hint)
    name = profile_name()
    profile = f" --profile {shlex.quote(name)}" if name else ""
    error = kind(printable(message), hint.format(right=right, region=api_call.region, profile=profile))
    error.code = code
    return error
