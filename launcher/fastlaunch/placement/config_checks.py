"""What has to be named for a region: bucket, instance profile, role; what is not says what to write."""

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, UserError
from fastlaunch.core.settings import RegionSettings, Settings


def making(region: str, zone: str | None = None) -> str:
    """The commands that make all of it in a region, and placement groups in a zone, by one template."""
    zones = f" --zone {zone}" if zone else ""
    return (
        f"fastlaunch iam print --cloudformation --region {region}{zones} > fastlaunch.yaml && "
        f"aws cloudformation deploy --region {region} --stack-name fastlaunch --capabilities CAPABILITY_IAM "
        "--template-file fastlaunch.yaml --parameter-overrides BucketName=NAME Vpc=vpc-ID"
    )


def configured_bucket(settings: Settings, region: str) -> str:
    """The bucket of the region. Raises UserError if there is none in the config."""
    return _configured(settings, region, "bucket", "for code, records and checkpoints", "--bucket")


def configured_profile(settings: Settings, region: str) -> str:
    """The instance profile of the region. Raises UserError if there is none in the config."""
    what = "by which the machine may write to the bucket"
    return _configured(settings, region, "instance_profile", what, "--instance-profile")


def configured_role(settings: Settings, region: str) -> str:
    """ARN of SageMaker's execution role. Raises UserError if there is none in the config."""
    return _configured(settings, region, "role", "by which SageMaker runs the job", "--role")


def check_bucket(aws: Aws, ask: AskOnce, region: str, bucket: str) -> None:
    """Nothing, if the bucket exists and is in the region, as far as that may be known; else BadConfiguration.

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
