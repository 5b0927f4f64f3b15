"""What was left out and why, in words."""

from collections.abc import Iterable


def by_reason(left_out: Iterable[tuple[str, str]]) -> list[str]:
    """`us-east-1a, us-east-1b: no answer`: names, together where they are left out for the same reason."""
    names: dict[str, list[str]] = {}
    for name, why in left_out:
        names.setdefault(why, []).append(name)
    return [f"{', '.join(of)}: {why}" for why, of in names.items()]
