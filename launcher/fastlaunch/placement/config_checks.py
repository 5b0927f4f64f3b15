"""What has to be named for a region: bucket, instance profile, role; what is not says what to write."""

from fastlaunch.aws.client import Aws
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised, UserError
from fastlaunch.core.settings import RegionSettings, Settings

EC2 = "ec2.amazonaws.com"
SAGEMAKER = "sagemaker.amazonaws.com"
SCHEDULER = "scheduler.amazonaws.com"
#: Services as the user knows them.
SERVICE_NAMES = {EC2: "EC2", SAGEMAKER: "SageMaker", SCHEDULER: "EventBridge Scheduler"}
#: By entry of the config file: what it is for, and what its value is.
_PURPOSES = {
    "bucket": ("for code, records and checkpoints", "NAME"),
    "instance_profile": ("by which the machine may write to the bucket", "NAME"),
    "role": ("by which SageMaker runs the job", "ARN"),
}


def setup_command(region: str) -> str:
    """Return the command that makes all of it in a region, after asking."""
    return f"fastlaunch init --region {region}"


def configured(settings: Settings, region: str, name: str) -> str:
    """Return the region's `bucket`, `instance_profile` or `role`. Raises UserError if the config has none."""
    value: str | None = getattr(settings.region_settings(region), name)
    if value is None:
        purpose, kind = _PURPOSES[name]
        raise UserError(
            f"no {name.replace('_', ' ')} is named for {region}, {purpose}",
            f"write `{name}: {kind}` under `aws: {region}:` in the config file, or give "
            f"--{name.replace('_', '-')} {kind}; this makes one: {setup_command(region)}",
        )
    return value


def check_bucket(aws: Aws, region: str, bucket: str) -> None:
    """Raise BadConfiguration if the bucket is known not to exist, or to be in another region.

    HeadBucket wants s3:ListBucket on all of the bucket; without, writing to it says more.
    """
    try:
        exists = aws.bucket_exists(region, bucket)
    except NotAuthorised:
        return
    if not exists:
        raise BadConfiguration(
            f"there is no bucket {bucket}", f"create it: aws s3 mb s3://{bucket} --region {region}"
        )


def check_role(aws: Aws, region: str, arn: str, service: str) -> None:
    """Raise BadConfiguration if the role is seen not to exist, or not to trust the service."""
    try:
        role = aws.role(region, arn)
    except NotAuthorised:
        return
    if role is None:
        raise BadConfiguration(
            f"there is no role {arn}",
            f"`aws iam list-roles` names yours; this makes one: {setup_command(region)}",
        )
    if service not in role.trusts:
        raise BadConfiguration(
            f"{arn} does not let {SERVICE_NAMES[service]} take it on",
            f"its trust policy has to name the service {service}: `fastlaunch iam print` has one that does",
        )


def missing_rights(aws: Aws, role: str, here: RegionSettings) -> list[str]:
    """Return the rights of a machine that the role's policies do not give; none where IAM does not tell.

    What a bucket's or a registry's own policy gives is not seen, so that a right may be there all the same.
    """
    rights: tuple[tuple[str, tuple[str, ...]], ...] = (("*", ("ecr:GetAuthorizationToken",)),)
    if here.bucket is not None:
        key = "/".join(filter(None, (here.bucket, here.prefix, "runs/RUN/boot.json")))
        rights += ((f"arn:PARTITION:s3:::{key}", ("s3:GetObject", "s3:PutObject")),)
    try:
        return aws.role_lacks(role, rights)
    except CloudRefused:
        return []
