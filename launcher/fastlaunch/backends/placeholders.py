"""Names in pointed brackets, such as `<image-digest>`, for what a plan cannot know without asking AWS."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def placeholders_in(request: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names, without brackets, that stand somewhere in the request, sorted."""
    texts = list(_texts(request))
    return tuple(sorted(name for name in names if any(f"<{name}>" in text for text in texts)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)
