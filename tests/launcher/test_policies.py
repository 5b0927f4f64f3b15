"""The policies: every call of ours is allowed, and what the conditions forbid is not."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import policy_check
import pytest

from fastlaunch.aws.policies import names_by_hand, policy, policy_names, trust
from fastlaunch.aws.types import Identity
from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.core.ownership import SCHEDULE_PREFIX

ACCOUNT, BUCKET, REGION = "123456789012", "acme-training", "us-west-2"
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0a1b2c3d"
NAMES = names_by_hand(account=ACCOUNT, bucket=BUCKET, kms_keys=(KEY,))
POLICIES = {name: policy(name, NAMES) for name in policy_names()}
#: Of an account with rules.
STRICT_NAMES = names_by_hand(
    account=ACCOUNT,
    bucket=BUCKET,
    regions=("us-east-1", "us-west-2"),
    instance_types=("p5*", "g6.xlarge"),
    vpc="vpc-1",
    ami_parameter="/ours/ami",
    secrets=(f"arn:aws:secretsmanager:us-west-2:{ACCOUNT}:secret:hub-x1y2z3",),
    inputs=("s3://acme-data/imagenet/", "s3://acme-more/"),
    queue="team",
)
STRICT = {name: policy(name, STRICT_NAMES) for name in policy_names()}
PLANS = Path(__file__).parents[1] / "plans"
INSTANCE = f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/*"
INTERFACE = f"arn:aws:ec2:{REGION}:{ACCOUNT}:network-interface/*"
SUBNET = f"arn:aws:ec2:{REGION}:{ACCOUNT}:subnet/subnet-1"
VPC = f"arn:aws:ec2:{REGION}:{ACCOUNT}:vpc/vpc-1"
SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hub-x1y2z3"
JOB = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/20261121-090312-k3f9-a1"
BATCH_JOB = JOB.replace("/2026", "/AWSBatch2026") + "0a1b"
QUEUED_JOB = f"arn:aws:batch:{REGION}:{ACCOUNT}:service-job/0a1b"
QUEUE = f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/team"
_TAGS = {"run": "20261121-090312-k3f9", "attempt": "1", "max-minutes": "120", "output": f"s3://{BUCKET}/x"}
TAGS = {f"aws:RequestTag/fastlaunch:{tag}": value for tag, value in _TAGS.items()}
OURS = {f"aws:ResourceTag/fastlaunch:{tag}": value for tag, value in _TAGS.items()}
#: Actions whose right has another name. docs.aws.amazon.com/AmazonS3, "Required permissions for S3 API".
RIGHTS = {
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
}
#: Allowed to everybody.
FREE = {"sts:GetCallerIdentity"}
#: What `init` asks of whoever deploys the template, and may make roles: others use the stack that is there.
DEPLOYERS = {
    f"cloudformation:{action}"
    for action in (
        *("CreateChangeSet", "DescribeChangeSet", "ExecuteChangeSet", "DeleteChangeSet"),
        *("DescribeStackEvents", "DeleteStack"),
    )
}


def allows(
    name: str,
    action: str,
    resource: str = "*",
    context: Mapping[str, str] | None = None,
    *,
    policies: Mapping[str, Any] = POLICIES,
) -> bool:
    """Return whether the policy of this name allows the action on the resource."""
    return policy_check.allows(
        [policies[name]], policy_check.Ask(action=action, resource=resource, context=context or {})
    )


def actions(*names: str) -> set[str]:
    return {
        action
        for name in names
        for statement in POLICIES[name]["Statement"]
        for action in policy_check.as_list(statement["Action"])
    }


def calls_of_the_launcher() -> set[str]:
    """`service:Action` of every call in the room `aws`: two constants, the second in CamelCase."""
    calls = set()
    for path in files("fastlaunch.aws").iterdir():
        if not path.name.endswith(".py"):
            continue
        for node in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            texts = [str(one.value) for one in given if isinstance(one, ast.Constant)]
            if (
                ast.unparse(node.func) in ("self.call", "self.call_or_none", "self.paginate", "ApiCall")
                and len(texts) > 1
            ):
                calls.add(f"{texts[0]}:{texts[1]}")
    return calls


def test_every_call_of_the_launcher_is_allowed() -> None:
    calls = calls_of_the_launcher()
    assert len(calls) > 30 and "ec2:RunInstances" in calls
    allowed = actions("launcher", "launcher-sagemaker", "launcher-queue", "launcher-build")
    assert {RIGHTS.get(call, call) for call in calls} - FREE - DEPLOYERS - allowed == set()


def test_every_golden_plan_may_be_sent() -> None:
    for path in PLANS.glob("*.json"):
        plan = json.loads(path.read_text())
        if plan["backend"] == "ec2":
            for tagged in plan["request"]["TagSpecifications"]:
                resource = f"arn:aws:ec2:{REGION}:{ACCOUNT}:{tagged['ResourceType']}/*"
                tags = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in tagged["Tags"]}
                creating = {**tags, "ec2:CreateAction": "RunInstances"}
                assert allows("launcher", "ec2:RunInstances", resource, tags)
                assert allows("launcher", "ec2:CreateTags", resource, creating)
        elif plan["backend"] == "sagemaker":
            payload = json.loads(plan["request"].get("serviceRequestPayload", "null")) or plan["request"]
            tags = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in payload["Tags"]}
            assert allows("launcher-sagemaker", "sagemaker:CreateTrainingJob", JOB, tags)
            if payload is not plan["request"]:
                tags = {f"aws:RequestTag/{key}": value for key, value in plan["request"]["tags"].items()}
                assert allows("launcher-queue", "batch:SubmitServiceJob", QUEUED_JOB, tags)
                assert allows("launcher-queue", "batch:TagResource", QUEUED_JOB, tags)
                assert allows("launcher-queue", "batch:SubmitServiceJob", QUEUE)


HERE = {**TAGS, "aws:RequestedRegion": REGION}
TRAINING = {**HERE, "sagemaker:InstanceTypes": "ml.p5.48xlarge", "sagemaker:VpcSubnets": "subnet-1"}


def test_what_only_some_accounts_need_is_allowed_by_name() -> None:
    image = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/ours/ami"
    key = {"kms:GrantIsForAWSResource": "true"}
    for name, action, resource, context in (
        ("launcher", "ssm:GetParameter", image, {}),
        ("node", "secretsmanager:GetSecretValue", SECRET, {}),
        ("training", "secretsmanager:GetSecretValue", SECRET, {}),
        ("node", "s3:GetObject", "arn:aws:s3:::acme-data/imagenet/1.tar", {}),
        ("training", "s3:ListBucket", "arn:aws:s3:::acme-data", {"s3:prefix": "imagenet/"}),
        ("training", "s3:GetBucketLocation", "arn:aws:s3:::acme-more", {}),
        ("training", "ec2:CreateNetworkInterfacePermission", INTERFACE, {}),
    ):
        assert allows(name, action, resource, context, policies=STRICT)
        assert not allows(name, action, resource, context)
    assert not allows("node", "secretsmanager:GetSecretValue", f"{SECRET[:-6]}other0", policies=STRICT)
    assert not allows("node", "s3:GetObject", "arn:aws:s3:::acme-data/imagenet2/1.tar", policies=STRICT)
    for name, action in (("launcher", "kms:CreateGrant"), ("training", "kms:Encrypt")):
        assert allows(name, action, KEY, key)
        assert not allows(name, action, KEY, key, policies=STRICT)


S3 = f"arn:aws:s3:::{BUCKET}"
TIMER = f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule/default/"


RUNS, CODE, LOGS = f"{S3}/fastlaunch/runs/r/x", f"{S3}/fastlaunch/code/x", f"arn:aws:logs:{REGION}:{ACCOUNT}"
AWS_IMAGE = f"arn:aws:ecr:{REGION}:763104351884:repository/pytorch"
OWN_IMAGE = f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/fastlaunch"
ALL_NAMES = replace(STRICT_NAMES, kms_keys=(KEY,))
_Need = tuple[str, str, Mapping[str, str]]
#: A bucket of inputs, all of it.
MORE = "arn:aws:s3:::acme-more"
#: What a machine or a training job does.
JOB_NEEDS: list[_Need] = [
    ("ecr:GetAuthorizationToken", "*", {}),
    ("ecr:BatchGetImage", AWS_IMAGE, {}),
    ("s3:GetObject", CODE, {}),
    ("s3:ListBucket", S3, {"s3:prefix": "fastlaunch/runs/r/"}),
    ("s3:PutObject", RUNS, {}),
    ("kms:GenerateDataKey", KEY, {}),
    ("secretsmanager:GetSecretValue", SECRET, {}),
    ("s3:GetObject", f"{MORE}/x", {}),
    ("s3:ListBucket", MORE, {"s3:prefix": "x/"}),
    ("s3:ListBucket", "arn:aws:s3:::acme-data", {"s3:prefix": "imagenet/x/"}),
]
SHARED = f"{S3}/fastlaunch/shared"
GRANT = {"kms:GrantIsForAWSResource": "true"}
#: A machine's start, by a launcher or by a schedule.
STARTS: list[_Need] = [
    ("ec2:RunInstances", INSTANCE, {**HERE, "ec2:InstanceType": "p5.48xlarge"}),
    ("ec2:RunInstances", INTERFACE, TAGS),
    ("ec2:RunInstances", SUBNET, {"ec2:Vpc": VPC}),
    ("ec2:RunInstances", f"arn:aws:ec2:{REGION}::image/ami-1", {}),
    ("ec2:CreateTags", INSTANCE, {"ec2:CreateAction": "RunInstances"}),
    ("ec2:CreateTags", INTERFACE, {"ec2:CreateAction": "RunInstances"}),
    ("iam:PassRole", NAMES.node_role, {"iam:PassedToService": "ec2.amazonaws.com"}),
    ("kms:DescribeKey", KEY, {}),
    ("kms:CreateGrant", KEY, GRANT),
]
#: What is done with each policy: a submission in an account with rules, and what goes with it.
NEEDS: dict[str, list[_Need]] = {
    "node": JOB_NEEDS,
    "training": [
        *JOB_NEEDS,
        ("s3:GetBucketLocation", S3, {}),
        ("s3:GetBucketLocation", "arn:aws:s3:::acme-more", {}),
        ("logs:PutLogEvents", f"{LOGS}:log-group:/aws/sagemaker/TrainingJobs:x", {}),
        ("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}),
        ("kms:Encrypt", KEY, {}),
        ("kms:CreateGrant", KEY, GRANT),
        ("ec2:DescribeSubnets", "*", {}),
        ("ec2:CreateNetworkInterface", SUBNET, {"ec2:Vpc": VPC}),
        ("ec2:CreateNetworkInterface", INTERFACE, {}),
    ],
    # Whosever they are.
    "scheduler": [("ec2:TerminateInstances", INSTANCE, OURS), *STARTS],
    "launcher": [
        # submit
        ("ssm:GetParameter", f"arn:aws:ssm:{REGION}::parameter/aws/service/deeplearning/x", {}),
        ("ssm:GetParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/ours/ami", {}),
        ("ec2:DescribeImages", "*", {}),
        ("ecr:BatchGetImage", AWS_IMAGE, {}),
        ("s3:ListBucket", S3, {}),
        ("s3:PutObject", CODE, {}),
        ("kms:GenerateDataKey", KEY, {}),
        ("iam:SimulatePrincipalPolicy", "*", {}),
        *STARTS,
        # --detach
        ("scheduler:CreateSchedule", f"{TIMER}{SCHEDULE_PREFIX}r-a1", {}),
        ("iam:PassRole", NAMES.scheduler_role, {"iam:PassedToService": "scheduler.amazonaws.com"}),
        # status, resume and share
        ("s3:GetObject", RUNS, {}),
        ("s3:PutObject", RUNS, {}),
        # reap
        ("scheduler:DeleteSchedule", f"{TIMER}{SCHEDULE_PREFIX}r-a1", {}),
        ("ec2:TerminateInstances", INSTANCE, OURS),
        ("sagemaker:DescribeTrainingJob", JOB, {}),
        ("sagemaker:StopTrainingJob", JOB, OURS),
        ("sagemaker:StopTrainingJob", BATCH_JOB, OURS),
    ],
    "launcher-queue": [
        ("batch:GetJobQueueSnapshot", QUEUE, {"aws:RequestedRegion": REGION}),
        ("batch:SubmitServiceJob", QUEUE, {"aws:RequestedRegion": REGION}),
        ("batch:SubmitServiceJob", QUEUED_JOB, HERE),
        ("batch:TagResource", QUEUED_JOB, HERE),
        ("batch:ListServiceJobs", "*", {}),
        ("batch:TerminateServiceJob", QUEUED_JOB, OURS),
    ],
    "launcher-sagemaker": [
        ("sagemaker:CreateTrainingJob", JOB, TRAINING),
        ("sagemaker:CreateTrainingJob", f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-plan/x", {}),
        ("sagemaker:DescribeTrainingPlan", f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-plan/x", {}),
        ("sagemaker:AddTags", JOB, {"sagemaker:TaggingAction": "CreateTrainingJob"}),
        ("iam:PassRole", NAMES.training_role, {"iam:PassedToService": "sagemaker.amazonaws.com"}),
        ("logs:GetLogEvents", f"{LOGS}:log-group:/aws/sagemaker/TrainingJobs:x", {}),
    ],
    "launcher-build": [
        ("ecr:GetAuthorizationToken", "*", {}),
        ("ecr:BatchGetImage", AWS_IMAGE, {}),
        ("ecr:PutImage", OWN_IMAGE, {}),
    ],
    "launcher-share": [
        ("s3:GetObject", f"{SHARED}/ann/x", {}),
        ("s3:PutObject", f"{SHARED}/ann/x", {"aws:username": "ann"}),
    ],
}


@pytest.mark.parametrize("name", policy_names())
def test_without_any_of_its_statements_a_policy_does_not_do(name: str) -> None:
    every: list[Any] = policy(name, ALL_NAMES)["Statement"]

    def refused(statements: list[Any]) -> list[str]:
        """The actions that these do not allow."""
        asks = [
            policy_check.Ask(action=act, resource=on, context=context) for act, on, context in NEEDS[name]
        ]
        return [ask.action for ask in asks if not policy_check.allows([{"Statement": statements}], ask)]

    assert refused(every) == []
    spare = [one["Sid"] for one in every if not refused([other for other in every if other is not one])]
    assert spare == []


#: A wrong value, by the key of a context; of any other key "other".
WRONG = {
    "sagemaker:InstanceTypes": ("ml.p5.48xlarge ml.p4d.24xlarge",),
    "sagemaker:VpcSubnets": (),
    **{f"aws:{of}Tag/fastlaunch:run": ("", "web") for of in ("Request", "Resource")},
    **{
        f"aws:{of}Tag/fastlaunch:{tag}": ("",)
        for of in ("Request", "Resource")
        for tag in _TAGS
        if tag != "run"
    },
}


@pytest.mark.parametrize("name", policy_names())
def test_nothing_is_done_with_another_context_or_with_less(name: str) -> None:
    """By all its tags reap finds a machine or a job; an account's rules say where it is and of which type."""
    held = policy(name, ALL_NAMES)
    for action, on, context in NEEDS[name]:
        for key in context:
            less = {other: value for other, value in context.items() if other != key}
            wrong = () if on == MORE else WRONG.get(key, ("other",))
            for asked in (less, *({**less, key: value} for value in wrong)):
                ask = policy_check.Ask(action=action, resource=on, context=asked)
                assert not policy_check.allows([held], ask), (action, on, key, asked.get(key))


ACCOUNT_USER = "arn:aws:iam::123456789012:user"
SESSION = "arn:aws:sts::123456789012:assumed-role"


@pytest.mark.parametrize(
    ("identity", "context"),
    [
        (
            Identity(account=ACCOUNT, arn=f"{ACCOUNT_USER}/ann", user_id="AIDAX"),
            {"aws:username": "ann", "aws:userid": "AIDAX"},
        ),
        (
            Identity(account=ACCOUNT, arn=f"{ACCOUNT_USER}/team/a+n=n,@b.c_d-e", user_id="AIDAX"),
            {"aws:username": "a+n=n,@b.c_d-e", "aws:userid": "AIDAX"},
        ),
        (
            Identity(account=ACCOUNT, arn=f"{SESSION}/Train/ann@acme.com", user_id="AROAX:ann@acme.com"),
            {"aws:userid": "AROAX:ann@acme.com"},
        ),
        (
            Identity(account=ACCOUNT, arn=f"{SESSION}/ann/i-0a1b", user_id="AROAX:i-0a1b"),
            {"aws:userid": "AROAX:i-0a1b"},
        ),
        (
            Identity(account=ACCOUNT, arn="arn:aws:iam::123456789012:root", user_id=ACCOUNT),
            {"aws:userid": ACCOUNT},
        ),
    ],
)
def test_everybody_shares_runs_under_the_own_name_alone(
    identity: Identity, context: Mapping[str, str]
) -> None:
    def may(action: str, folder: str) -> bool:
        every = {**context, "aws:PrincipalArn": identity.arn}
        return any(allows(name, action, f"{SHARED}/{folder}", every) for name in policy_names())

    assert may("s3:PutObject", f"{identity.owner_key}/r.tar.xz")
    for other in (
        "bob/r.tar.xz",
        "r.tar.xz",
        f"x{identity.owner_key}/r.tar.xz",
        f"{identity.owner_key}x/r.tar.xz",
    ):
        assert not may("s3:PutObject", other) and may("s3:GetObject", other)


def aws_tags(**changes: str) -> dict[str, str]:
    """Tags of a machine, or of a job, as EC2 and SageMaker show them to IAM."""
    return OURS | {f"aws:ResourceTag/{key.replace('_', ':')}": value for key, value in changes.items()}


_EC2 = {"iam:PassedToService": "ec2.amazonaws.com"}
ADMIN_ROLE = f"arn:aws:iam::{ACCOUNT}:role/admin"
START: _Need = ("ec2:RunInstances", INSTANCE, {**HERE, "ec2:InstanceType": "p5.48xlarge"})
#: What no policy here allows.
NOBODY: list[_Need] = [
    ("s3:DeleteObject", RUNS, {}),
    ("s3:DeleteObjectVersion", RUNS, {}),
    ("s3:PutBucketVersioning", S3, {}),
    ("s3:PutLifecycleConfiguration", S3, {}),
    ("s3:PutBucketPolicy", S3, {}),
    ("s3:GetObject", f"{S3}/others", {}),
    ("s3:PutObject", f"{S3}/others", {}),
    ("ec2:CreateTags", INSTANCE, {}),
    ("ec2:TerminateInstances", INSTANCE, aws_tags(fastlaunch_run="web")),
    ("sagemaker:StopTrainingJob", JOB.replace("20261121-090312-k3f9-a1", "nightly"), OURS),
    ("sagemaker:CreateTrainingJob", JOB.replace("20261121-090312-k3f9-a1", "nightly"), TRAINING),
    ("sagemaker:StopTrainingJob", BATCH_JOB.replace("20261121-090312-k3f9-a1", "nightly"), OURS),
    ("batch:TerminateServiceJob", QUEUED_JOB, {}),
    ("batch:SubmitServiceJob", QUEUED_JOB, {"aws:RequestedRegion": REGION}),
    ("batch:SubmitServiceJob", f"{QUEUE}-others", {"aws:RequestedRegion": REGION}),
    ("batch:SubmitJob", QUEUE, {}),
    ("s3:PutObject", f"{S3}/fastlaunch/shared/ann/x", {}),
    ("ec2:ModifyInstanceAttribute", INSTANCE, OURS),
    ("ecr:BatchDeleteImage", OWN_IMAGE, {}),
    ("ecr:PutImageTagMutability", OWN_IMAGE, {}),
    ("ecr:PutImage", AWS_IMAGE, {}),
    ("iam:PassRole", ADMIN_ROLE, _EC2),
    ("iam:PutRolePolicy", NAMES.node_role, {}),
]
_OF_A_JOB: list[_Need] = [
    START,
    ("ec2:TerminateInstances", INSTANCE, OURS),
    ("sagemaker:StopTrainingJob", JOB, OURS),
    ("s3:PutObject", CODE, {}),
    ("s3:ListBucket", S3, {"s3:prefix": ""}),
    ("secretsmanager:GetSecretValue", f"{SECRET[:-6]}other0", {}),
    ("iam:PassRole", NAMES.node_role, _EC2),
    ("ecr:PutImage", OWN_IMAGE, {}),
]
#: By a row of docs/security.md: the policies held, and what they do not allow, beside `NOBODY`.
WHO: dict[str, tuple[tuple[str, ...], list[_Need]]] = {
    "machine": (("node",), _OF_A_JOB),
    "training job": (
        ("training",),
        [*_OF_A_JOB, ("logs:GetLogEvents", f"{LOGS}:log-group:/aws/sagemaker/TrainingJobs:x", {})],
    ),
    "timer": (
        ("scheduler",),
        [
            ("ec2:RunInstances", INSTANCE, {}),
            ("sagemaker:StopTrainingJob", JOB, OURS),
            ("s3:GetObject", RUNS, {}),
        ],
    ),
    "launcher": (
        ("launcher", "launcher-sagemaker", "launcher-queue"),
        [
            ("secretsmanager:GetSecretValue", SECRET, {}),
            ("scheduler:DeleteSchedule", f"{TIMER}nightly", {}),
            ("ecr:PutImage", OWN_IMAGE, {}),
        ],
    ),
    "builder": (
        ("launcher-build",),
        [
            START,
            ("ec2:TerminateInstances", INSTANCE, OURS),
            ("s3:GetObject", RUNS, {}),
            ("s3:PutObject", CODE, {}),
            ("iam:PassRole", NAMES.node_role, _EC2),
        ],
    ),
}


@pytest.mark.parametrize("who", WHO)
def test_who_can_do_nothing_to_others(who: str) -> None:
    held, cannot = WHO[who]
    policies = [policy(name, ALL_NAMES) for name in held]
    for action, on, context in (*cannot, *NOBODY):
        ask = policy_check.Ask(action=action, resource=on, context=context)
        assert not policy_check.allows(policies, ask), (action, on)


def test_with_a_prefix_of_ones_own_nobody_reads_or_writes_below_anothers() -> None:
    for name in policy_names():
        ada = policy(name, replace(ALL_NAMES, prefix="fastlaunch-ada"))
        for action in ("s3:GetObject", "s3:PutObject"):
            assert not policy_check.allows([ada], policy_check.Ask(action=action, resource=RUNS))
            own = policy_check.Ask(action=action, resource=RUNS.replace("fastlaunch/", "fastlaunch-ada/"))
            assert policy_check.allows([ada], own) == (name in ("node", "training", "launcher"))


def test_the_node_gets_its_image_and_code_and_ends_nothing() -> None:
    assert not any(action.startswith(("ec2:", "iam:")) for action in actions("node", "training"))
    assert actions("node") >= {"s3:GetObject", "s3:PutObject", "s3:ListBucket", "ecr:GetAuthorizationToken"}
    for image in shipped_base_images().images:
        resource = f"arn:aws:ecr:eu-west-1:763104351884:repository/{image.repository}"
        for name in ("node", "training", "launcher", "launcher-build"):
            assert allows(name, "ecr:BatchGetImage", resource)


def test_a_role_is_assumed_by_its_service_alone() -> None:
    for name, service in (("node", "ec2"), ("training", "sagemaker"), ("scheduler", "scheduler")):
        (statement,) = trust(name, NAMES)["Statement"]
        assert statement["Principal"] == {"Service": f"{service}.amazonaws.com"}
        if name != "node":
            assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}


def test_without_a_key_of_its_own_no_statement_names_one() -> None:
    plain: Any = [policy(name, names_by_hand(account=ACCOUNT, bucket=BUCKET)) for name in policy_names()]
    assert "kms" not in json.dumps(plain)


@pytest.mark.parametrize("name", policy_names())
def test_a_policy_is_no_larger_than_iam_takes(name: str) -> None:
    # IAM does not count white space. docs.aws.amazon.com/IAM, "IAM and AWS STS quotas".
    names = names_by_hand(
        account=ACCOUNT,
        bucket="b" * 63,
        prefix="p" * 40,
        kms_keys=tuple("arn:aws-us-gov:kms:us-gov-east-1:123456789012:key/" + digit * 36 for digit in "01"),
        secrets=("arn:aws-us-gov:secretsmanager:us-gov-east-1:123456789012:secret:" + "s" * 40,) * 5,
        ami_parameter="/golden-images/gpu/latest",
        regions=("us-gov-east-1", "us-gov-west-1"),
        instance_types=("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge", "g6.*"),
        vpc="vpc-" + "0" * 17,
        partition="aws-us-gov",
    )
    assert len(re.sub(r"\s", "", json.dumps(policy(name, names)))) < 6144
