"""Calls to AWS made once, whatever number of candidates need the answer."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fastlaunch.core.errors import CloudRefused

P = ParamSpec("P")
T = TypeVar("T")


class CachedCalls:
    """Calls a method of `Aws` and remembers its answer or refusal: `cached(aws.parameter, region, name)`.

    For calls that only look, within one command. Arguments are hashable.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Any, CloudRefused | None]] = {}

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        key = (call, args, tuple(sorted(kwargs.items())))
        if key not in self._known:
            try:
                self._known[key] = call(*args, **kwargs), None
            except CloudRefused as error:
                self._known[key] = None, error
        value, refusal = self._known[key]
        if refusal is not None:
            raise refusal
        answer: T = value
        return answer
