"""Calls to AWS made once, whatever number of candidates need the answer."""

from collections.abc import Callable
from typing import Any, cast

from fastlaunch.aws.client import Aws
from fastlaunch.core.errors import CloudRefused


def cached(aws: Aws) -> Aws:
    """Return an `Aws` that remembers what each call answered or how AWS refused it.

    For calls that only look, within one command. Arguments are hashable, and not given by name.
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
