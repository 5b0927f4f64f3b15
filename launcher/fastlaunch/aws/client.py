"""`Aws`: the typed calls of every service in one object, and one that asks everything once."""

from collections.abc import Callable
from typing import Any, cast

from fastlaunch.aws.cloudformation import CloudFormationCalls
from fastlaunch.aws.ec2 import Ec2Calls
from fastlaunch.aws.ecr import EcrCalls
from fastlaunch.aws.iam import IamCalls
from fastlaunch.aws.pricing import PricingCalls
from fastlaunch.aws.quotas import QuotaCalls
from fastlaunch.aws.s3 import S3Calls
from fastlaunch.aws.sagemaker import SageMakerCalls
from fastlaunch.aws.scheduler import SchedulerCalls
from fastlaunch.core.errors import CloudRefused


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


def cached(aws: Aws) -> Aws:
    """Return an `Aws` that remembers the answer to each call, or AWS's refusal.

    Use it for calls that only read, within one command, with positional and hashable arguments.
    """
    return cast(Aws, _CachedCalls(aws))


class _CachedCalls:
    def __init__(self, aws: Aws) -> None:
        self._aws = aws
        self._known: dict[tuple[Any, ...], Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            key = (name, *args)
            if key not in self._known:
                try:
                    self._known[key] = getattr(self._aws, name)(*args)
                except CloudRefused as error:
                    self._known[key] = error
            if isinstance(self._known[key], CloudRefused):
                raise self._known[key]
            return self._known[key]

        return call
