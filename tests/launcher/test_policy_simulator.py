"""The evaluator of policies, against what IAM's documentation says of each rule."""

from typing import Any

import pytest
from policy_simulator import Ask, allows


def policy(**statement: Any) -> dict[str, Any]:
    given = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*", **statement}
    return {"Version": "2012-10-17", "Statement": [given]}


GET = Ask(action="s3:GetObject", resource="arn:aws:s3:::acme/runs/a/b")


@pytest.mark.parametrize(
    ("statement", "is_allowed"),
    [
        ({}, True),
        ({"Action": "s3:getobject"}, True),
        ({"Action": "s3:Get*"}, True),
        ({"Action": ["s3:PutObject", "s3:Get?bject"]}, True),
        ({"Action": "s3:GetObjectTagging"}, False),
        ({"Action": "ec2:GetObject"}, False),
        ({"Resource": "arn:aws:s3:::acme/runs/*"}, True),
        ({"Resource": "arn:aws:s3:::acme/run?/*"}, True),
        ({"Resource": "arn:aws:s3:::acme/runs"}, False),
        ({"Resource": "arn:aws:s3:::acme/code/*"}, False),
        # A wildcard ends with its segment.
        ({"Resource": "arn:aws:s3*/runs/a/b"}, False),
        ({"Condition": {"StringEquals": {"aws:x": "1"}}}, False),
        ({"Effect": "Deny"}, False),
    ],
)
def test_actions_and_resources(statement: dict[str, Any], is_allowed: bool) -> None:
    assert allows([policy(**statement)], GET) is is_allowed


@pytest.mark.parametrize(
    ("condition", "context", "is_allowed"),
    [
        ({"StringEquals": {"a:k": "v"}}, {"a:k": "v"}, True),
        ({"StringEquals": {"a:k": "v"}}, {"A:K": "v"}, True),
        ({"StringEquals": {"a:k": ["u", "v"]}}, {"a:k": "v"}, True),
        ({"StringEquals": {"a:k": "v*"}}, {"a:k": "vv"}, False),
        ({"StringLike": {"a:k": "v*"}}, {"a:k": "vv"}, True),
        ({"StringLike": {"a:k": "v*"}}, {}, False),
        ({"Null": {"a:k": "false"}}, {"a:k": ""}, True),
        ({"Null": {"a:k": "false"}}, {}, False),
        ({"Null": {"a:k": "true"}}, {}, True),
        ({"Bool": {"a:k": "true"}}, {"a:k": "true"}, True),
        ({"Bool": {"a:k": "true"}}, {"a:k": "false"}, False),
        ({"Null": {"a:k": "false"}, "StringEquals": {"a:l": "v"}}, {"a:k": "v"}, False),
    ],
)
def test_conditions(condition: dict[str, Any], context: dict[str, str], is_allowed: bool) -> None:
    ask = Ask(action=GET.action, resource=GET.resource, context=context)
    assert allows([policy(Condition=condition)], ask) is is_allowed


def test_a_denial_wins_and_what_is_not_evaluated_is_told() -> None:
    assert not allows([policy(), policy(Effect="Deny")], GET)
    assert allows([policy(), policy(Effect="Deny", Action="s3:PutObject")], GET)
    assert not allows([], GET)
    for odd in ({"NotAction": "s3:*"}, {"Condition": {"DateLessThan": {"a:k": "2026"}}}):
        with pytest.raises(AssertionError, match="not evaluated"):
            allows([policy(**odd)], Ask(action=GET.action, resource=GET.resource, context={"a:k": "v"}))
