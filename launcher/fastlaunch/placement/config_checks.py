"""What has to be named for a region: bucket, instance profile, role; what is not says what to write."""

from fastlaunch.aws.cache import CachedCalls
from fastlaunch.aws.client import Aws
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised, UserError
from fastlaunch.core.settings import RegionSettings, Settings

SAGEMAKER = "sagemaker.amazonaws.com"
SCHEDULER = "scheduler.amazonaws.com"
_NAMES = {SAGEMAKER: "SageMaker", SCHEDULER: "EventBridge Scheduler"}


def making(region: str, zone: str | None = None) -> str:
    """Return the commands that make all of it in a region, with placement groups in a zone."""
    zones = f" --zone {zone}" if zone else ""
    return (
        f"fastlaunch iam print --cloudformation --region {region}{zones} > fastlaunch.yaml && "
        f"aws cloudformation deploy --region {region} --stack-name fastlaunch --capabilities CAPABILITY_IAM "
        "--template-file fastlaunch.yaml --parameter-overrides BucketName=NAME Vpc=vpc-ID"
    )


def configured_bucket(settings: Settings, region: str) -> str:
    """Return the bucket of the region. Raises UserError if there is none in the config."""
    return _configured(settings, region, "bucket", "for code, records and checkpoints", "--bucket")


def configured_profile(settings: Settings, region: str) -> str:
    """Return the instance profile of the region. Raises UserError if there is none in the config."""
    what = "by which the machine may write to the bucket"
    return _configured(settings, region, "instance_profile", what, "--instance-profile")


def configured_role(settings: Settings, region: str) -> str:
    """Return the ARN of SageMaker's execution role. Raises UserError if there is none in the config."""
    return _configured(settings, region, "role", "by which SageMaker runs the job", "--role")


def check_bucket(aws: Aws, ask: CachedCalls, region: str, bucket: str) -> None:
    """Raise BadConfiguration if the bucket is known not to exist, or to be in another region.

    HeadBucket wants s3:ListBucket on all of the bucket; without, writing to it says more.
    """
    try:
        exists = ask(aws.bucket_exists, region, bucket)
    except NotAuthorised:
        return
    if not exists:
        raise BadConfiguration(
            f"there is no bucket {bucket}", f"create it: aws s3 mb s3://{bucket} --region {region}"
        )


def _configured(settings: Settings, region: str, name: str, purpose: str, option: str) -> str:
    value: str | None = getattr(settings.aws.get(region, RegionSettings()), name)
    if value is None:
        what, kind = name.replace("_", " "), "ARN" if name == "role" else "NAME"
        raise UserError(
            f"no {what} is named for {region}, {purpose}",
            f"write `{name}: {kind}` under `aws: {region}:` in the config file, or give {option} {kind}; "
            "`fastlaunch doctor --setup` says how to make one",
        )
    return value


def check_role(aws: Aws, ask: CachedCalls, region: str, arn: str, service: str) -> bool:
    """Return whether the role is seen to exist and to trust the service: False if it may not be looked at.

    Raises BadConfiguration if it does not exist, or does not trust the service.
    """
    try:
        role = ask(aws.role, region, arn)
    except NotAuthorised:
        return False
    if role is None:
        raise BadConfiguration(
            f"there is no role {arn}", f"`aws iam list-roles` names yours; this makes one: {making(region)}"
        )
    if service not in role.trusts:
        raise BadConfiguration(
            f"{arn} does not let {_NAMES[service]} take it on",
            f"its trust policy has to name the service {service}: `fastlaunch iam print` has one that does",
        )
    return True


def node_lacks(aws: Aws, ask: CachedCalls, here: RegionSettings) -> list[str]:
    """Return the rights that the profile's policies do not give its role; none where IAM does not tell.

    What a bucket's or a registry's own policy gives is not seen, so that a right may be there all the same.
    """
    if here.instance_profile is None:
        return []
    try:
        return ask(aws.node_lacks, here.instance_profile, _rights(here))
    except CloudRefused:
        return []


def job_lacks(aws: Aws, ask: CachedCalls, here: RegionSettings) -> list[str]:
    """Return the same for the role by which SageMaker runs jobs in the region."""
    if here.role is None:
        return []
    try:
        return ask(aws.role_lacks, here.role, _rights(here))
    except CloudRefused:
        return []


def _rights(here: RegionSettings) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rights: tuple[tuple[str, tuple[str, ...]], ...] = (("*", ("ecr:GetAuthorizationToken",)),)
    if here.bucket is not None:
        key = "/".join(filter(None, (here.bucket, here.prefix, "runs/RUN/boot.json")))
        rights += ((f"arn:PARTITION:s3:::{key}", ("s3:GetObject", "s3:PutObject")),)
    return rights
