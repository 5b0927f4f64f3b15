"""Roles, by which services of AWS act for an account."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastlaunch.aws.ec2 import Aws
from fastlaunch.core.errors import BadConfiguration


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role. trusts: the services that may take it on, such as `sagemaker.amazonaws.com`."""

    arn: str
    trusts: frozenset[str]


def role(aws: Aws, region: str, arn: str) -> Role | None:
    """The role of this ARN, None if there is none in the account (iam:GetRole)."""
    name = arn.rpartition("/")[2]
    try:
        told = aws.ask("iam", region, "GetRole", subject=name, RoleName=name)["Role"]
    except BadConfiguration as error:
        if error.code == "NoSuchEntity":
            return None
        raise
    # The name may be one of another account's role, or of another path.
    if told["Arn"] != arn:
        return None
    return Role(arn=arn, trusts=_trusted(told.get("AssumeRolePolicyDocument", {})))


def _trusted(document: Mapping[str, Any]) -> frozenset[str]:
    found: set[str] = set()
    for statement in _listed(document.get("Statement", ())):
        if statement.get("Effect") == "Allow" and isinstance(statement.get("Principal"), Mapping):
            found |= set(_listed(statement["Principal"].get("Service", ())))
    return frozenset(found)


def _listed(value: Any) -> Sequence[Any]:
    """A policy may give one thing without brackets."""
    return [value] if isinstance(value, str | Mapping) else value
