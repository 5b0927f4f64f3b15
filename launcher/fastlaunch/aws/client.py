"""`Aws`: the typed calls of every service in one object, and one that asks everything once."""

from collections.abc import Callable
from typing import Any, cast

from fastlaunch.aws.account import AccountCalls
from fastlaunch.aws.batch import BatchCalls
from fastlaunch.aws.cloudformation import CloudFormationCalls
from fastlaunch.aws.ec2 import Ec2Calls
from fastlaunch.aws.pricing import PricingCalls
from fastlaunch.aws.storage import StorageCalls
from fastlaunch.core.errors import CloudRefused


class Aws(Ec2Calls, BatchCalls, StorageCalls, AccountCalls, PricingCalls, CloudFormationCalls):
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
