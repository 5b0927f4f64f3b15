"""What an error of AWS means: which kind it is, and what to do about it. Pure tables, no boto3.

Codes of EC2: docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html; of S3: docs.aws.amazon.com/
AmazonS3/latest/API/ErrorResponses.html; of every service: the "Common Errors" page of its API reference;
what SageMaker says with a ValidationException: as its users quote it. Reasons of an instance's state:
docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html. Those of a missing or expired login are
the names of botocore's own exceptions.
"""

import re
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
    Unreachable,
)

if TYPE_CHECKING:
    from fastlaunch.aws.ec2 import Instance


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked of AWS. subject: what it was about, such as a bucket's name, empty if that is plain.

    instance_type, purchase: of an instance that was to be started.
    """

    service: str
    action: str
    region: str
    subject: str = ""
    instance_type: str | None = None
    purchase: str = "on-demand"

    def __str__(self) -> str:
        about = f" of {self.subject}" if self.subject else ""
        return f"{self.service}:{self.action}{about} in {self.region}"


_LOG_IN = (
    "log in again (`aws sso login`, `aws login`, or new AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), "
    "then `fastlaunch doctor`"
)
_CLOCK = "set this machine's clock, which AWS finds more than five minutes off"
# EC2 says the same of a session that has ended and of a clock that is wrong.
_LOG_IN_OR_CLOCK = f"{_LOG_IN}; if that does not help, {_CLOCK}"
# A region that is switched off does not know anybody.
_LOG_IN_OR_REGION = f"{_LOG_IN_OR_CLOCK}, or switch {{region}} on (console: Account, AWS Regions)"
_ALLOW = "ask for {service}:{action} to be allowed to who is logged in (`aws sts get-caller-identity`)"
_DECODE = (
    "ask for {service}:{action} to be allowed; which statement refused it says "
    "`aws sts decode-authorization-message --encoded-message TEXT` with the text after "
    "'Encoded authorization failure message'"
)
_SPOT_ROLE = (
    "create the role that spot needs, once for the account: "
    "`aws iam create-service-linked-role --aws-service-name spot.amazonaws.com`"
)
_ELSEWHERE = "allow another region or instance type (`--region R1,R2`, `--instance T1,T2`), or try later"
_SPOT_PRICE = "leave --max-price out, or raise it; it is below what spot costs there now"
_IN_ZONE = "this type is not to be had in that zone; name another (`aws.REGION.subnets` in the config file)"
_ADDRESSES = "no address is free in the subnet; end what uses them, or name a larger one"
_STORAGE = "ask for more under Service Quotas, Amazon EBS, in {region}, or delete volumes that nobody uses"
_QUOTA = "ask for more under Service Quotas in {region}, or delete what nobody uses"
_CORRECT = "correct what the message names, in the command or under `aws.{region}` in the config file"
_NETWORK = "give subnets: `aws.{region}.subnets` in the config file"
_PROFILE = "name an instance profile that exists: `aws.{region}.instance_profile` in the config file"
_PROFILE_UNSEEN = (
    "EC2 does not see the instance profile: one that was made a moment ago takes a minute; else name one "
    "that exists, `aws.{region}.instance_profile` in the config file"
)
_BUCKET = "name a bucket of {region} that exists: `aws.{region}.bucket` in the config file"
_BUCKET_REGION = "the bucket is in another region; name one of {region} (`aws.{region}.bucket`)"
_TOKEN_USED = "nothing was started by this one; `fastlaunch status` says what the token's own instance does"
_TOKEN_ENDED = (
    "this attempt's instance was started before and has ended; `fastlaunch resume RUN` begins a new one"
)
_AGAIN = "wait a minute and type the same again; nothing was done"
_SUPPORT = "the account is not ready for this: see the mails from AWS, or ask AWS Support"
_REGION_OFF = "switch {region} on under Account, AWS Regions in the console, or choose another region"
_UNKNOWN = "type the same again: the same request carries the same token, so that nothing is started twice"

_JOB_NAME_USED = "another job had this name before; `fastlaunch resume RUN` begins an attempt with a new one"
_JOB_ROLE = (
    "name a role that trusts sagemaker.amazonaws.com: `aws.{region}.role` in the config file "
    "(`fastlaunch iam print` shows one)"
)
_JOB_FILES = "is the bucket in {region}, and may the role in `aws.{region}.role` list and read it?"
_JOB_IMAGE = "name an image by digest that lies in ECR of {region}, and that the role may pull"
_JOB_TYPE = "SageMaker has no such instance type in {region}; choose another (`--instance`, `--region`)"
_JOB_PLAN = "name a training plan of {region} that is active or scheduled: --training-plan ARN"
_PASS_ROLE = "ask for iam:PassRole on the role that the message names, for sagemaker.amazonaws.com"
_KEY = "let the role use the key of the volume, or make another the default for EBS in {region}"

#: Kind and hint by code. A code that is not here is told by its shape, see `_by_shape`.
_CODES: Mapping[str, tuple[type[CloudRefused], str]] = {
    # Another zone of the region never helps.
    "VcpuLimitExceeded": (QuotaExceeded, ""),
    "InstanceLimitExceeded": (QuotaExceeded, ""),
    "MaxSpotInstanceCountExceeded": (QuotaExceeded, ""),
    "VolumeLimitExceeded": (QuotaExceeded, _STORAGE),
    "MaxIOPSLimitExceeded": (QuotaExceeded, _STORAGE),
    "NetworkInterfaceLimitExceeded": (QuotaExceeded, _QUOTA),
    "AddressLimitExceeded": (QuotaExceeded, _QUOTA),
    "LimitExceeded": (QuotaExceeded, _QUOTA),
    "LimitExceededException": (QuotaExceeded, _QUOTA),
    "ServiceQuotaExceededException": (QuotaExceeded, _QUOTA),
    "ResourceLimitExceeded": (QuotaExceeded, _QUOTA),
    "TooManyBuckets": (QuotaExceeded, _QUOTA),
    # Another zone, region or type may.
    "InsufficientInstanceCapacity": (NoCapacity, _ELSEWHERE),
    "InsufficientReservedInstanceCapacity": (NoCapacity, _ELSEWHERE),
    "InsufficientCapacity": (NoCapacity, _ELSEWHERE),
    "InsufficientHostCapacity": (NoCapacity, _ELSEWHERE),
    "InsufficientVolumeCapacity": (NoCapacity, _ELSEWHERE),
    "ReservationCapacityExceeded": (NoCapacity, _ELSEWHERE),
    "SpotMaxPriceTooLow": (NoCapacity, _SPOT_PRICE),
    "Unsupported": (NoCapacity, _IN_ZONE),
    "InsufficientFreeAddressesInSubnet": (NoCapacity, _ADDRESSES),
    # Credentials and rights.
    "AccessDenied": (NotAuthorised, _ALLOW),
    "AccessDeniedException": (NotAuthorised, _ALLOW),
    "AuthFailure": (NotAuthorised, _LOG_IN_OR_REGION),
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (NotAuthorised, _SPOT_ROLE),
    "UnauthorizedOperation": (NotAuthorised, _ALLOW),
    "ExpiredToken": (NotAuthorised, _LOG_IN),
    "ExpiredTokenException": (NotAuthorised, _LOG_IN),
    "TokenRefreshRequired": (NotAuthorised, _LOG_IN),
    "InvalidAccessKeyId": (NotAuthorised, _LOG_IN),
    "InvalidClientTokenId": (NotAuthorised, _LOG_IN_OR_REGION),
    "InvalidToken": (NotAuthorised, _LOG_IN),
    "UnrecognizedClientException": (NotAuthorised, _LOG_IN_OR_REGION),
    "SignatureDoesNotMatch": (NotAuthorised, _LOG_IN),
    "InvalidSignatureException": (NotAuthorised, _LOG_IN),
    "IncompleteSignature": (NotAuthorised, _LOG_IN),
    "MissingAuthenticationToken": (NotAuthorised, _LOG_IN),
    "MissingAuthenticationTokenException": (NotAuthorised, _LOG_IN),
    "RequestExpired": (NotAuthorised, _LOG_IN_OR_CLOCK),
    "RequestTimeTooSkewed": (NotAuthorised, _CLOCK),
    "Blocked": (NotAuthorised, _SUPPORT),
    "PendingVerification": (NotAuthorised, _SUPPORT),
    "NotSignedUp": (NotAuthorised, _SUPPORT),
    "AllAccessDisabled": (NotAuthorised, _SUPPORT),
    "AccountProblem": (NotAuthorised, _SUPPORT),
    "OptInRequired": (NotAuthorised, _REGION_OFF),
    # The request names what does not exist, or does not fit.
    "IdempotentParameterMismatch": (BadConfiguration, _TOKEN_USED),
    "IdempotentInstanceTerminated": (BadConfiguration, _TOKEN_ENDED),
    "ResourceInUse": (BadConfiguration, _JOB_NAME_USED),
    "VPCIdNotSpecified": (BadConfiguration, _NETWORK),
    "DefaultVpcDoesNotExist": (BadConfiguration, _NETWORK),
    "MissingInput": (BadConfiguration, _NETWORK),
    "NoSuchEntity": (BadConfiguration, _PROFILE),
    "NoSuchBucket": (BadConfiguration, _BUCKET),
    "InvalidBucketName": (BadConfiguration, _BUCKET),
    "PermanentRedirect": (BadConfiguration, _BUCKET_REGION),
    "AuthorizationHeaderMalformed": (BadConfiguration, _BUCKET_REGION),
    "IllegalLocationConstraintException": (BadConfiguration, _BUCKET_REGION),
    # Too fast; S3 tells writers of the same key who come at once to come again.
    "RequestLimitExceeded": (Throttled, _AGAIN),
    "Throttling": (Throttled, _AGAIN),
    "ThrottlingException": (Throttled, _AGAIN),
    "ThrottledException": (Throttled, _AGAIN),
    "RequestThrottled": (Throttled, _AGAIN),
    "RequestThrottledException": (Throttled, _AGAIN),
    "EC2ThrottledException": (Throttled, _AGAIN),
    "TooManyRequestsException": (Throttled, _AGAIN),
    "PriorRequestNotComplete": (Throttled, _AGAIN),
    "BandwidthLimitExceeded": (Throttled, _AGAIN),
    "SlowDown": (Throttled, _AGAIN),
    "OperationAborted": (Throttled, _AGAIN),
    "ConditionalRequestConflict": (Throttled, _AGAIN),
    # Perhaps done, perhaps not.
    "RequestTimeout": (Unreachable, _UNKNOWN),
    "RequestTimeoutException": (Unreachable, _UNKNOWN),
}

#: Hint by what the message of SageMaker's ValidationException says, in small letters; the first that fits.
_INVALID_JOBS = (
    ("could not assume role", _JOB_ROLE),
    ("roles may be assumed", _JOB_ROLE),
    ("training plan", _JOB_PLAN),
    ("trainingplan", _JOB_PLAN),
    ("instancetype", _JOB_TYPE),
    ("s3", _JOB_FILES),
    ("bucket", _JOB_FILES),
    ("image", _JOB_IMAGE),
    ("repository", _JOB_IMAGE),
    (".ecr.", _JOB_IMAGE),
)

#: What an answer without a code means, by HTTP status: those to HEAD, and a proxy's.
_STATUSES: Mapping[int, tuple[type[CloudRefused], str]] = {
    301: (BadConfiguration, _BUCKET_REGION),
    307: (BadConfiguration, _BUCKET_REGION),
    401: (NotAuthorised, _LOG_IN),
    403: (NotAuthorised, _ALLOW),
    404: (BadConfiguration, _CORRECT),
    429: (Throttled, _AGAIN),
}

_CONFIGURE = "run `aws configure`, or correct what the message names in AWS's own config file"
_REGION = "name a region that exists: `--region us-east-1`"
_NO_ANSWER = (
    "is the network there, and `{region}` a region of AWS? What was asked for may have been done: "
    "`fastlaunch status` looks, and the same command sends the same token"
)

#: Of what carries no token, and may simply be asked again.
_WITHOUT_TOKEN = {
    _NO_ANSWER: "is the network there, and `{region}` a region of AWS? Then type the same again",
    _UNKNOWN: "type the same again",
}

#: Kind and hint by the name of botocore's exception, or of one that it is made from.
_EXCEPTIONS: Mapping[str, tuple[type[CloudRefused], str]] = {
    "NoCredentialsError": (NotAuthorised, _LOG_IN),
    "PartialCredentialsError": (NotAuthorised, _LOG_IN),
    "CredentialRetrievalError": (NotAuthorised, _LOG_IN),
    "TokenRetrievalError": (NotAuthorised, _LOG_IN),
    "NoAuthTokenError": (NotAuthorised, _LOG_IN),
    "RefreshWithMFAUnsupportedError": (NotAuthorised, _LOG_IN),
    "MetadataRetrievalError": (NotAuthorised, _LOG_IN),
    "SSOError": (NotAuthorised, _LOG_IN),
    "LoginError": (NotAuthorised, _LOG_IN),
    "ProfileNotFound": (BadConfiguration, _CONFIGURE),
    "ConfigNotFound": (BadConfiguration, _CONFIGURE),
    "ConfigParseError": (BadConfiguration, _CONFIGURE),
    "InvalidConfigError": (BadConfiguration, _CONFIGURE),
    "InvalidRetryConfigurationError": (BadConfiguration, _CONFIGURE),
    "InvalidProxiesConfigError": (BadConfiguration, _CONFIGURE),
    "MissingDependencyException": (BadConfiguration, _CONFIGURE),
    "UnknownCredentialError": (BadConfiguration, _CONFIGURE),
    "InvalidRegionError": (BadConfiguration, _REGION),
    "UnknownRegionError": (BadConfiguration, _REGION),
    "NoRegionError": (BadConfiguration, _REGION),
    "BaseEndpointResolverError": (BadConfiguration, _REGION),
    "EndpointProviderError": (BadConfiguration, _REGION),
    "ParamValidationError": (BadConfiguration, _CORRECT),
    "InvalidDNSNameError": (BadConfiguration, _BUCKET),
    "SSLError": (Unreachable, "is AWS_CA_BUNDLE right, and does a proxy stand in between?"),
    "ConnectionError": (Unreachable, _NO_ANSWER),
    "HTTPClientError": (Unreachable, _NO_ANSWER),
    "IncompleteReadError": (Unreachable, _NO_ANSWER),
    "ChecksumError": (Unreachable, _NO_ANSWER),
    "FlexibleChecksumError": (Unreachable, _NO_ANSWER),
    "ResponseParserError": (Unreachable, _NO_ANSWER),
}

_FAULT = "AWS's own fault; `fastlaunch resume RUN` goes on from the last checkpoint on another machine"
_TAKEN = "`fastlaunch resume RUN` goes on from the last checkpoint; on-demand instances are not taken back"

#: Kind, words and hint by the code of an instance's StateReason, where it ended otherwise than by being told.
_REASONS: Mapping[str, tuple[type[CloudRefused], str, str]] = {
    "Client.InternalError": (BadConfiguration, "could not use its volume, often for want of its key", _KEY),
    "Client.InvalidSnapshot.NotFound": (BadConfiguration, "has an image whose snapshot is gone", _CORRECT),
    "Client.VolumeLimitExceeded": (QuotaExceeded, "got no volume", _STORAGE),
    "Server.InsufficientInstanceCapacity": (NoCapacity, "was not started for want of capacity", _ELSEWHERE),
    "Server.SpotInstanceTermination": (NoCapacity, "was taken back by EC2", _TAKEN),
    "Server.SpotInstanceShutdown": (NoCapacity, "was taken back by EC2", _TAKEN),
    "Server.InternalError": (NoCapacity, "ended by an error of its host", _FAULT),
    "Server.ScheduledStop": (NoCapacity, "was stopped for maintenance of its host", _FAULT),
}

#: Codes of a StateReason by which an instance took its own or its owner's way.
_ASKED_FOR = (
    "pending",
    "Client.InstanceInitiatedShutdown",
    "Client.InstanceTerminated",
    "Client.UserInitiatedShutdown",
    "Client.UserInitiatedHibernate",
)

#: The right that an action needs, where IAM calls it otherwise.
_RIGHTS = {"HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}

SPOT_INTERRUPTIONS = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")


def refusal(asked: Asked, code: str, message: str, *, status: int = 0) -> CloudRefused:
    """The error that AWS's answer to `asked` means, ready to raise. status: of HTTP."""
    kind, hint = _CODES.get(code) or _by_shape(code, status)
    if code == "InvalidParameterValue" and "iaminstanceprofile" in message.lower():
        hint = _PROFILE_UNSEEN
    if asked.service == "sagemaker":
        hint = _training_hint(code, message) or hint
    if kind is QuotaExceeded and not hint:
        hint = _quota_hint(asked)
    if kind is NotAuthorised and "Encoded authorization failure message" in message:
        hint = _DECODE
    said = f"{code}: {message}" if message and message != code else code
    return _made(kind, f"AWS refused {asked}: {said}", hint, asked, code)


def is_unknown_job(error: CloudRefused) -> bool:
    """Whether SageMaker knows no training job of the name (yet); it says so in two ways."""
    return error.code == "ResourceNotFound" or (
        error.code == "ValidationException"
        and ("Requested resource not found" in error.message or "Could not find" in error.message)
    )


def unanswered(asked: Asked, names: tuple[str, ...], message: str) -> CloudRefused | None:
    """The error that an exception of botocore means, None for one that is a bug.

    names: of the exception's class and of those it is made from, nearest first.
    """
    for name in names:
        if name in _EXCEPTIONS:
            kind, hint = _EXCEPTIONS[name]
            how = "no answer to" if kind is Unreachable else "cannot send"
            return _made(kind, f"{how} {asked}: {message}", hint, asked, names[0])
    return None


def state_reason_problem(instance: "Instance") -> CloudRefused | None:
    """Why EC2 ended the instance or never started it, as an error; None where nobody but its owner did."""
    code = reason_code(instance)
    if code is None or code in _ASKED_FOR:
        return None
    asked = Asked(service="ec2", action="RunInstances", region=instance.region)
    unknown = (
        (NoCapacity, "was ended by EC2", _FAULT)
        if code.startswith("Server.")
        else (BadConfiguration, "was ended by EC2", _CORRECT)
    )
    kind, words, hint = _REASONS.get(code, unknown)
    return _made(kind, f"instance {instance.id} {words}: {instance.state_reason}", hint, asked, code)


def reason_code(instance: "Instance") -> str | None:
    """Code of the instance's StateReason, such as `Server.SpotInstanceTermination`."""
    return instance.state_reason.partition(":")[0] if instance.state_reason else None


def is_spot_interruption(instance: "Instance") -> bool:
    """Whether EC2 took the spot instance back."""
    return reason_code(instance) in SPOT_INTERRUPTIONS


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


def _quota_hint(asked: Asked) -> str:
    quota = quota_code(asked.instance_type or "", asked.purchase)
    if quota is None:
        return f"{_QUOTA}; another region has its own, another zone does not help"
    page = quota_page(asked.region, quota.code)
    return (
        f"end instances that count against '{quota.name}' ({quota.code}, in vCPUs), or ask for more: {page} "
        "(another region has its own, another zone does not help)"
    )


def _training_hint(code: str, message: str) -> str | None:
    """What to do about a refusal of SageMaker's that says more than its code does."""
    if code == "AccessDeniedException" and "iam:PassRole" in message:
        return _PASS_ROLE
    if code == "ResourceLimitExceeded" and (named := re.search(r"service limit '([^']+)'", message)):
        quota = named[1].replace("{", "").replace("}", "")
        return f"ask for more of '{quota}' under Service Quotas, Amazon SageMaker, in {{region}}"
    if code == "ValidationException":
        return next((hint for text, hint in _INVALID_JOBS if text in message.lower()), None)
    return None


def _made(kind: type[CloudRefused], message: str, hint: str, asked: Asked, code: str) -> CloudRefused:
    right = _RIGHTS.get(asked.action, asked.action)
    if asked.action not in ("RunInstances", "CreateTrainingJob"):
        hint = _WITHOUT_TOKEN.get(hint, hint)
    told = hint.format(service=asked.service, action=right, region=asked.region)
    error = kind(message, told)
    error.code = code
    return error
