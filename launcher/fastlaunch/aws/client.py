"""`Aws`: the typed calls of every service in one object."""

from fastlaunch.aws.cloudformation import CloudFormationCalls
from fastlaunch.aws.ec2 import Ec2Calls
from fastlaunch.aws.ecr import EcrCalls
from fastlaunch.aws.iam import IamCalls
from fastlaunch.aws.pricing import PricingCalls
from fastlaunch.aws.quotas import QuotaCalls
from fastlaunch.aws.s3 import S3Calls
from fastlaunch.aws.sagemaker import SageMakerCalls
from fastlaunch.aws.scheduler import SchedulerCalls


class Aws(
    Ec2Calls,
    S3Calls,
    EcrCalls,
    IamCalls,
    PricingCalls,
    QuotaCalls,
    SageMakerCalls,
    SchedulerCalls,
    CloudFormationCalls,
):
    """AWS in every region; see `session.AwsSession` for what all calls have in common."""
