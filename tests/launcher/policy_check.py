"""Whether a policy of ours allows an action: its statements only allow, with a handful of conditions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One action on one resource."""

    action: str
    resource: str = "*"
    # The request's condition keys; of a key with several values, these with spaces between them.
    context: Mapping[str, str] = field(default_factory=dict)


def allows(policies: Iterable[Mapping[str, Any]], ask: Ask) -> bool:
    """Return whether a statement of the policies allows it."""
    return any(_fits(statement, ask) for policy in policies for statement in policy["Statement"])


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _fits(statement: Mapping[str, Any], ask: Ask) -> bool:
    return (
        any(fnmatchcase(ask.action, pattern) for pattern in as_list(statement["Action"]))
        and any(_matches(ask, pattern) for pattern in as_list(statement["Resource"]))
        and all(
            _holds(operator, ask.context.get(key), as_list(values))
            for operator, tests in statement.get("Condition", {}).items()
            for key, values in tests.items()
        )
    )


def _matches(ask: Ask, pattern: str) -> bool:
    """Whether a resource fits; never where the pattern has a policy variable that the request does not."""
    names = re.findall(r"\$\{([^}]+)\}", pattern)
    for name in set(names) & ask.context.keys():
        pattern = pattern.replace(f"${{{name}}}", ask.context[name])
    return set(names) <= ask.context.keys() and fnmatchcase(ask.resource, pattern)


def _holds(operator: str, value: str | None, expected: list[str]) -> bool:
    if operator == "Null":
        return expected == ["true" if value is None else "false"]
    if operator.startswith("ForAllValues:"):
        values = value.split() if value is not None else []
        return all(any(fnmatchcase(one, pattern) for pattern in expected) for one in values)
    assert operator in ("StringEquals", "StringLike", "ArnLike", "Bool")
    return value is not None and any(fnmatchcase(value, pattern) for pattern in expected)
