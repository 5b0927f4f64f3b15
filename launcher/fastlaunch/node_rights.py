"""What a machine's or a job's role must be allowed to be worth starting: to log in to ECR, to upload."""

from fastlaunch.aws.cache import AskOnce
from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import CloudRefused
from fastlaunch.core.settings import RegionSettings


def node_lacks(aws: Aws, ask: AskOnce, here: RegionSettings) -> list[str]:
    """Rights that the policies of the region's profile do not give its role; none where IAM does not tell.

    What a bucket's or a registry's own policy gives is not seen, so that a right may be there all the same.
    """
    if here.instance_profile is None:
        return []
    try:
        return ask(aws.node_lacks, here.instance_profile, _rights(here))
    except CloudRefused:
        return []


def job_lacks(aws: Aws, ask: AskOnce, here: RegionSettings) -> list[str]:
    """The same of the role by which SageMaker runs jobs in the region."""
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
