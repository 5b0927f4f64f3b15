"""Whether IAM policies allow what is asked: as IAM evaluates a principal's own policies, for what ours use.

An explicit Deny wins, then any Allow; nothing else is allowed. docs.aws.amazon.com/IAM, "Policy evaluation
logic" and "IAM JSON policy elements: Condition operators".
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One action on one resource, as a service asks IAM for it. context: the request's condition keys."""

    action: str
    resource: str = "*"
    context: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        told = ", ".join(f"{key}={value}" for key, value in self.context.items())
        return f"{self.action} on {self.resource}" + (f" with {told}" if told else "")


def allows(policies: Iterable[Mapping[str, Any]], ask: Ask) -> bool:
    """Whether the policy documents together allow it."""
    effects = {
        statement["Effect"]
        for policy in policies
        for statement in policy["Statement"]
        if _fits(statement, ask)
    }
    assert effects <= {"Allow", "Deny"}
    return "Allow" in effects and "Deny" not in effects


def _fits(statement: Mapping[str, Any], ask: Ask) -> bool:
    known = {"Sid", "Effect", "Action", "Resource", "Condition"}
    assert statement.keys() <= known, f"not evaluated: {statement.keys() - known}"
    return (
        any(_matches(pattern.lower(), ask.action.lower()) for pattern in listed(statement["Action"]))
        and any(_names(pattern, ask.resource) for pattern in listed(statement["Resource"]))
        and all(
            _holds(operator, key, listed(values), ask.context)
            for operator, tests in statement.get("Condition", {}).items()
            for key, values in tests.items()
        )
    )


def _holds(operator: str, key: str, values: Sequence[str], context: Mapping[str, str]) -> bool:
    # Names of condition keys are not case-sensitive.
    given = {name.lower(): value for name, value in context.items()}.get(key.lower())
    if operator == "Null":
        return any((given is None) == (value == "true") for value in values)
    if given is None:
        return False
    if operator == "StringEquals":
        return given in values
    if operator == "StringLike":
        return any(_matches(value, given) for value in values)
    if operator == "Bool":
        return given.lower() in [value.lower() for value in values]
    raise AssertionError(f"not evaluated: {operator}")


def _names(pattern: str, resource: str) -> bool:
    """Whether the pattern of ARNs fits; wildcards reach no further than a segment between colons."""
    if pattern == "*":
        return True
    patterns, segments = pattern.split(":", 5), resource.split(":", 5)
    return len(patterns) == len(segments) and all(
        _matches(one, other) for one, other in zip(patterns, segments, strict=True)
    )


@cache
def _matches(pattern: str, text: str) -> bool:
    parts = re.split(r"([*?])", pattern)
    expression = "".join({"*": ".*", "?": "."}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, text, re.DOTALL) is not None


def listed(value: Any) -> list[Any]:
    """The values of what IAM lets stand alone or in a list."""
    return value if isinstance(value, list) else [value]
