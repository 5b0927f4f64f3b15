"""Every policy that fastlaunch needs in an account, as data, for people and for the template. Pure.

`node` is the role of EC2's machines, `training` that of SageMaker's jobs, `scheduler` that of the timer in
the account.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fastlaunch.account_statements import (
    JOB_LOGS,
    AccountNames,
    Statement,
    bucket_key,
    find,
    pull,
    storage,
)
from fastlaunch.launcher_policies import launcher, launcher_build, launcher_sagemaker

VERSION = "2012-10-17"


def node(names: AccountNames) -> tuple[Statement, ...]:
    """What a machine of EC2 may do: its runs, the code, its image. It ends itself without any right."""
    return (*storage(names), *find(names, "runs/*"), *pull(names), *bucket_key(names))


def training(names: AccountNames) -> tuple[Statement, ...]:
    """What a training job, and SageMaker on its behalf, may do."""
    return (
        *storage(names),
        # SageMaker lists what it fetches, the code as well.
        *find(names, "runs/*", "code/*"),
        Statement(
            sid="BucketRegion",
            why="SageMaker asks in which region the bucket is",
            actions=("s3:GetBucketLocation",),
            resources=(names.bucket_arn,),
        ),
        *pull(names),
        Statement(
            sid="Logs",
            why="what the containers print goes to CloudWatch",
            actions=(
                "logs:CreateLogGroup",
                "logs:CreateLogStream",
                "logs:DescribeLogStreams",
                "logs:PutLogEvents",
            ),
            resources=(names.arn("logs", JOB_LOGS), names.arn("logs", f"{JOB_LOGS}:*")),
        ),
        Statement(
            sid="Metrics",
            why="the console's graphs of loss and step time",
            actions=("cloudwatch:PutMetricData",),
            resources=("*",),
            condition={"StringLike": {"cloudwatch:namespace": "/aws/sagemaker/*"}},
        ),
        *bucket_key(names),
    )


def scheduler(names: AccountNames) -> tuple[Statement, ...]:
    """What the timer in the account may do: end fastlaunch's machines."""
    return (
        Statement(
            sid="EndTagged",
            why="a detached run's machines end after their deadline, whatever happened to them",
            actions=("ec2:TerminateInstances",),
            resources=(names.arn("ec2", "instance/*"),),
            condition={"Null": {"aws:ResourceTag/fastlaunch:run": "false"}},
        ),
    )


#: Every policy by its name.
POLICIES: Mapping[str, Callable[[AccountNames], tuple[Statement, ...]]] = {
    "node": node,
    "training": training,
    "scheduler": scheduler,
    "launcher": launcher,
    "launcher-sagemaker": launcher_sagemaker,
    "launcher-build": launcher_build,
}
#: Who takes on the role of a name.
SERVICES: Mapping[str, str] = {"node": "ec2", "training": "sagemaker", "scheduler": "scheduler"}


def policy(name: str, names: AccountNames) -> dict[str, Any]:
    """The policy of this name, of POLICIES, as IAM takes it."""
    statements = [statement.to_json() for statement in POLICIES[name](names)]
    return {"Version": VERSION, "Statement": statements}


def trust(name: str, names: AccountNames) -> dict[str, Any]:
    """Who may take on the role of this name, of SERVICES: its service, for this account alone."""
    service = f"{SERVICES[name]}.amazonaws.com"
    statement: dict[str, Any] = {
        "Effect": "Allow",
        "Principal": {"Service": service},
        "Action": "sts:AssumeRole",
    }
    # EC2 takes on the role of the account's own machines, and tells no account.
    if name != "node":
        statement["Condition"] = {"StringEquals": {"aws:SourceAccount": names.account}}
    return {"Version": VERSION, "Statement": [statement]}


def documents(names: AccountNames) -> dict[str, dict[str, Any]]:
    """Every policy and every trust policy, by the name of its file in docs/aws-setup.md."""
    trusts = {f"{name}-trust.json": trust(name, names) for name in SERVICES}
    return trusts | {f"{name}-policy.json": policy(name, names) for name in POLICIES}
