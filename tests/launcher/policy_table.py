"""The reviewed table: what each operation of launcher, docker, node and services asks IAM for.

An operation is a literal call of the launcher's (`ec2:RunInstances`), a command of the node's program
(`node s3 cp`), or what docker or a service of AWS does by itself. A word after the call says which case of it
it is. Actions and resources follow AWS's Service Authorization Reference; where a service is named in a
comment, so does its guide.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from policy_simulator import Ask

REGION, ACCOUNT, BUCKET = "us-west-2", "123456789012", "acme-training"
RUN = "20261121-090312-k3f9"
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/0a1b2c3d"
ROLES = f"arn:aws:iam::{ACCOUNT}:role"
_TAGS = {"aws:RequestTag/fastlaunch:run": RUN, "aws:RequestTag/fastlaunch:max-minutes": "120"}
_OWN = {"aws:ResourceTag/fastlaunch:run": RUN}
#: Repositories of AWS's images, of both generations, and of the own ones.
_AWS_IMAGE = f"arn:aws:ecr:{REGION}:763104351884:repository/pytorch-training"
_OWN_IMAGE = f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/fastlaunch"


def _ec2(resource: str) -> str:
    return f"arn:aws:ec2:{REGION}:{ACCOUNT}:{resource}"


def _s3(key: str) -> str:
    return f"arn:aws:s3:::{BUCKET}/fastlaunch/{key}"


def _free(*actions: str) -> tuple[Ask, ...]:
    return tuple(Ask(action=action) for action in actions)


def _on(resource: str, *actions: str, **context: str) -> tuple[Ask, ...]:
    return tuple(Ask(action=action, resource=resource, context=context) for action in actions)


def _under(resource: str, context: Mapping[str, str], *actions: str) -> tuple[Ask, ...]:
    return tuple(Ask(action=action, resource=resource, context=context) for action in actions)


def _pass(role: str, service: str) -> tuple[Ask, ...]:
    return _under(f"{ROLES}/{role}", {"iam:PassedToService": f"{service}.amazonaws.com"}, "iam:PassRole")


def _run(*more: str) -> tuple[Ask, ...]:
    """RunInstances: EC2 asks for every resource that the request names or makes."""
    made = [_under(_ec2(kind), _TAGS, "ec2:RunInstances") for kind in ("instance/*", "volume/*")]
    with_it = (
        f"arn:aws:ec2:{REGION}::image/ami-0123",
        f"arn:aws:ec2:{REGION}::snapshot/snap-0123",
        *map(_ec2, ("network-interface/*", "security-group/sg-0123", "subnet/subnet-0123")),
        *map(_ec2, more),
    )
    tagged = [
        _under(_ec2(kind), {**_TAGS, "ec2:CreateAction": "RunInstances"}, "ec2:CreateTags")
        for kind in ("instance/*", "volume/*")
    ]
    started = [_on(resource, "ec2:RunInstances") for resource in with_it]
    return sum((*made, *started, *tagged), _pass("fastlaunch-node", "ec2"))


_JOB = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{RUN}-a1"
_JOB_LOGS = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
_STREAM = f"{_JOB_LOGS}:log-stream:{RUN}-a1/algo-1-1763717000"
_TIMER = f"arn:aws:scheduler:{REGION}:{ACCOUNT}:schedule/default/fastlaunch-{RUN}-a1"
_START_JOB = (
    *_under(_JOB, _TAGS, "sagemaker:CreateTrainingJob"),
    *_under(_JOB, {**_TAGS, "sagemaker:TaggingAction": "CreateTrainingJob"}, "sagemaker:AddTags"),
    *_pass("fastlaunch-training", "sagemaker"),
)
_PULL = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
_PUSH = ("ecr:CompleteLayerUpload", "ecr:InitiateLayerUpload", "ecr:PutImage", "ecr:UploadLayerPart")
_RUN_FILE = _s3(f"runs/{RUN}/attempt-1/node-0/status.json")
_CODE_FILE = _s3("code/0123abcd.tar.gz")
_LIST_RUNS = _under(f"arn:aws:s3:::{BUCKET}", {"s3:prefix": f"fastlaunch/runs/{RUN}/"}, "s3:ListBucket")

#: The launcher's literal calls, held to what the modules `aws*.py` have.
LAUNCHER: Mapping[str, tuple[Ask, ...]] = {
    # Allowed to everybody who is anybody.
    "sts:GetCallerIdentity": (),
    "ec2:RunInstances": _run(),
    "ec2:RunInstances spot": _run("spot-instances-request/*"),
    "ec2:RunInstances nodes": _run("placement-group/fastlaunch-us-west-2a"),
    "ec2:RunInstances block": _run("capacity-reservation/cr-0123"),
    "ec2:TerminateInstances": _under(_ec2("instance/i-0123"), _OWN, "ec2:TerminateInstances"),
    "ec2:GetConsoleOutput": _under(_ec2("instance/i-0123"), _OWN, "ec2:GetConsoleOutput"),
    **{
        f"ec2:{action}": _free(f"ec2:{action}")
        for action in (
            "DescribeCapacityReservations",
            "DescribeImages",
            "DescribeInstances",
            "DescribeInstanceTypeOfferings",
            "DescribeInstanceTypes",
            "DescribePlacementGroups",
            "DescribeRegions",
            "DescribeRouteTables",
            "DescribeSecurityGroups",
            "DescribeSpotPriceHistory",
            "DescribeSubnets",
            "DescribeVpcEndpoints",
            "DescribeVpcs",
        )
    },
    **{
        f"servicequotas:{action}": _free(f"servicequotas:{action}")
        for action in (
            "GetAWSDefaultServiceQuota",
            "GetServiceQuota",
            "ListAWSDefaultServiceQuotas",
            "ListServiceQuotas",
        )
    },
    "iam:GetInstanceProfile": _on(
        f"arn:aws:iam::{ACCOUNT}:instance-profile/fastlaunch-node", "iam:GetInstanceProfile"
    ),
    "iam:GetRole": _on(f"{ROLES}/anybody", "iam:GetRole"),
    "iam:SimulatePrincipalPolicy": _on(f"{ROLES}/fastlaunch-node", "iam:SimulatePrincipalPolicy"),
    "ssm:GetParameter": _on(
        f"arn:aws:ssm:{REGION}::parameter/aws/service/deeplearning/ami/x86_64/base/latest/ami-id",
        "ssm:GetParameter",
    ),
    "ecr:BatchGetImage": (*_on(_AWS_IMAGE, "ecr:BatchGetImage"), *_on(_OWN_IMAGE, "ecr:BatchGetImage")),
    "ecr:GetAuthorizationToken": _free("ecr:GetAuthorizationToken"),
    "ecr:DescribeRepositories": _on(_OWN_IMAGE, "ecr:DescribeRepositories"),
    "ecr:CreateRepository": _on(_OWN_IMAGE, "ecr:CreateRepository"),
    # S3 names the right to look at a bucket, and to list it, the same.
    "s3:HeadBucket": _on(f"arn:aws:s3:::{BUCKET}", "s3:ListBucket"),
    "s3:ListObjectsV2": _LIST_RUNS,
    "s3:GetObject": _on(_RUN_FILE, "s3:GetObject"),
    "s3:PutObject": (*_on(_CODE_FILE, "s3:PutObject"), *_on(_s3("doctor.txt"), "s3:PutObject")),
    "sagemaker:CreateTrainingJob": _START_JOB,
    "sagemaker:CreateTrainingJob plan": (
        *_START_JOB,
        *(
            Ask(action="sagemaker:CreateTrainingJob", resource=_JOB.replace("training-job", kind))
            for kind in ("training-plan", "reserved-capacity")
        ),
    ),
    "sagemaker:DescribeTrainingJob": _on(_JOB, "sagemaker:DescribeTrainingJob"),
    "sagemaker:ListTags": _on(_JOB, "sagemaker:ListTags"),
    "sagemaker:ListTrainingJobs": _free("sagemaker:ListTrainingJobs"),
    "sagemaker:StopTrainingJob": _under(_JOB, _OWN, "sagemaker:StopTrainingJob"),
    "sagemaker:UpdateTrainingJob": _under(_JOB, _OWN, "sagemaker:UpdateTrainingJob"),
    # Written either way by CloudWatch Logs, by region and time.
    "logs:DescribeLogStreams": (
        *_on(_JOB_LOGS, "logs:DescribeLogStreams"),
        *_on(f"{_JOB_LOGS}:log-stream:", "logs:DescribeLogStreams"),
    ),
    "logs:GetLogEvents": _on(_STREAM, "logs:GetLogEvents"),
    "scheduler:CreateSchedule": (
        *_on(_TIMER, "scheduler:CreateSchedule"),
        *_pass("fastlaunch-scheduler", "scheduler"),
    ),
    "scheduler:DeleteSchedule": _on(_TIMER, "scheduler:DeleteSchedule"),
    "scheduler:ListSchedules": _free("scheduler:ListSchedules"),
}

#: Commands of the node's program, held to its template. Docker's pull comes with its login.
NODE: Mapping[str, tuple[Ask, ...]] = {
    # Large files go in parts, which are dropped if that fails.
    "node s3 cp": (
        *_on(_RUN_FILE, "s3:PutObject", "s3:AbortMultipartUpload"),
        *_on(_s3(f"runs/{RUN}/checkpoints/step-00000100.pt"), "s3:GetObject"),
        *_on(_CODE_FILE, "s3:GetObject"),
    ),
    "node s3 ls": _LIST_RUNS,
    "node s3api head-object": _on(_s3(f"runs/{RUN}/attempt-1/abort"), "s3:GetObject"),
    "node s3api list-objects-v2": _LIST_RUNS,
    "node ecr get-login-password": _free("ecr:GetAuthorizationToken"),
}

#: What docker, SageMaker, EC2 and the scheduler ask for, with the rights of whoever they act for.
OTHERS: Mapping[str, tuple[Ask, ...]] = {
    # docs.aws.amazon.com/AmazonECR, "Pushing an image" and "Private repository policies".
    "docker pull": (*_on(_AWS_IMAGE, *_PULL), *_on(_OWN_IMAGE, *_PULL)),
    "docker push": _on(_OWN_IMAGE, *_PUSH, "ecr:BatchCheckLayerAvailability"),
    # docs.aws.amazon.com/sagemaker, "SageMaker AI roles: CreateTrainingJob API: Execution Role Permissions".
    "sagemaker storage": (
        *_on(f"arn:aws:s3:::{BUCKET}", "s3:GetBucketLocation"),
        *_under(f"arn:aws:s3:::{BUCKET}", {"s3:prefix": "fastlaunch/code/0123abcd.tar.gz"}, "s3:ListBucket"),
        *_LIST_RUNS,
        *_on(_CODE_FILE, "s3:GetObject"),
        *_on(_RUN_FILE, "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"),
    ),
    "sagemaker image": (
        *_free("ecr:GetAuthorizationToken"),
        *_on(_AWS_IMAGE, *_PULL),
        *_on(_OWN_IMAGE, *_PULL),
    ),
    "sagemaker logs": (
        *_on(_JOB_LOGS, "logs:CreateLogGroup"),
        *_on(f"{_JOB_LOGS}:log-stream:", "logs:DescribeLogStreams"),
        *_on(_STREAM, "logs:CreateLogStream", "logs:PutLogEvents"),
        *_under("*", {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}, "cloudwatch:PutMetricData"),
    ),
    "scheduler ends a machine": _under(_ec2("instance/i-0123"), _OWN, "ec2:TerminateInstances"),
    # docs.aws.amazon.com/AmazonS3, "Using server-side encryption with AWS KMS keys".
    "key of the bucket": _on(KEY, "kms:Decrypt", "kms:GenerateDataKey"),
    # docs.aws.amazon.com/ebs, "Requirements for Amazon EBS encryption".
    "key of a volume": (
        *_on(KEY, "kms:DescribeKey", "kms:GenerateDataKeyWithoutPlaintext"),
        *_on(KEY, "kms:ReEncryptFrom", "kms:ReEncryptTo"),
        *_under(KEY, {"kms:GrantIsForAWSResource": "true"}, "kms:CreateGrant"),
    ),
}

TABLE = {**LAUNCHER, **NODE, **OTHERS}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What somebody does from beginning to end: the policies they have, and the operations it takes."""

    policies: tuple[str, ...]
    operations: tuple[str, ...]


_LOOK = ("sts:GetCallerIdentity", "ec2:DescribeRegions", "ecr:BatchGetImage", "s3:HeadBucket")
_PREPARE_EC2 = (
    *(*_LOOK, "ssm:GetParameter", "ec2:DescribeImages", "ec2:DescribeInstanceTypeOfferings"),
    *("ec2:DescribeInstances", "ec2:DescribeInstanceTypes"),
    *("servicequotas:GetServiceQuota", "servicequotas:GetAWSDefaultServiceQuota"),
    *("ec2:DescribeSubnets", "ec2:DescribeSecurityGroups", "ec2:DescribeRouteTables"),
    *("ec2:DescribeVpcs", "ec2:DescribeVpcEndpoints"),
    *("iam:GetInstanceProfile", "iam:SimulatePrincipalPolicy", "s3:PutObject"),
)
_PREPARE_JOB = (
    *(*_LOOK, "servicequotas:ListServiceQuotas", "servicequotas:ListAWSDefaultServiceQuotas"),
    *("iam:GetRole", "iam:SimulatePrincipalPolicy", "s3:PutObject"),
    # What runs counts against the quota.
    *("sagemaker:ListTrainingJobs", "sagemaker:DescribeTrainingJob"),
)
_FOLLOW = ("s3:ListObjectsV2", "s3:GetObject")
_FOLLOW_EC2 = ("ec2:DescribeInstances", *_FOLLOW)
_FOLLOW_JOB = ("sagemaker:DescribeTrainingJob", *_FOLLOW)
_REGISTRY = ("ecr:DescribeRepositories", "ecr:CreateRepository", "ecr:GetAuthorizationToken")
_EC2, _JOBS = ("launcher",), ("launcher", "launcher-sagemaker")

#: With a key of the account's own on bucket and volumes, of which everything is made.
SCENARIOS: Mapping[str, Scenario] = {
    "doctor": Scenario(
        policies=_EC2,
        operations=(*_PREPARE_EC2, *_PREPARE_JOB),
    ),
    "submit to EC2": Scenario(policies=_EC2, operations=(*_PREPARE_EC2, "ec2:RunInstances", *_FOLLOW_EC2)),
    "submit to EC2, spot": Scenario(
        policies=_EC2,
        operations=(*_PREPARE_EC2, "ec2:DescribeSpotPriceHistory", "ec2:RunInstances spot", *_FOLLOW_EC2),
    ),
    "submit to EC2, two nodes": Scenario(
        policies=_EC2,
        operations=(*_PREPARE_EC2, "ec2:DescribePlacementGroups", "ec2:RunInstances nodes", *_FOLLOW_EC2),
    ),
    "submit to EC2, capacity block": Scenario(
        policies=_EC2,
        operations=(
            *(*_PREPARE_EC2, "ec2:DescribeCapacityReservations", "ec2:RunInstances block"),
            *_FOLLOW_EC2,
        ),
    ),
    "submit to EC2 with a key": Scenario(
        policies=_EC2, operations=("ec2:RunInstances", "key of a volume", "s3:PutObject", "key of the bucket")
    ),
    "submit to EC2, detached": Scenario(
        policies=_EC2,
        operations=(*_PREPARE_EC2, "iam:GetRole", "ec2:RunInstances", "scheduler:CreateSchedule"),
    ),
    "submit to SageMaker": Scenario(
        policies=_JOBS, operations=(*_PREPARE_JOB, "sagemaker:CreateTrainingJob", *_FOLLOW_JOB)
    ),
    "submit to SageMaker, training plan": Scenario(
        policies=_JOBS, operations=(*_PREPARE_JOB, "sagemaker:CreateTrainingJob plan", *_FOLLOW_JOB)
    ),
    "a job that said nothing": Scenario(
        policies=_JOBS, operations=(*_FOLLOW_JOB, "logs:DescribeLogStreams", "logs:GetLogEvents")
    ),
    "status": Scenario(policies=_EC2, operations=(*_FOLLOW_EC2, *_FOLLOW_JOB, "scheduler:DeleteSchedule")),
    "a machine that said nothing": Scenario(
        policies=_EC2, operations=("ec2:GetConsoleOutput", "ec2:TerminateInstances")
    ),
    "cancel": Scenario(
        policies=_EC2,
        operations=(
            *("s3:PutObject", "ec2:TerminateInstances", "sagemaker:StopTrainingJob"),
            *("sagemaker:UpdateTrainingJob", "scheduler:DeleteSchedule"),
        ),
    ),
    "collect": Scenario(policies=_EC2, operations=(*_FOLLOW, "key of the bucket")),
    "reap": Scenario(
        policies=_EC2,
        operations=(
            *("ec2:DescribeRegions", "ec2:DescribeInstances", "ec2:TerminateInstances"),
            *("sagemaker:ListTrainingJobs", "sagemaker:ListTags", "sagemaker:DescribeTrainingJob"),
            *("sagemaker:StopTrainingJob", "scheduler:ListSchedules", "scheduler:DeleteSchedule"),
        ),
    ),
    "build --push": Scenario(
        policies=("launcher-build",),
        operations=("sts:GetCallerIdentity", "ecr:BatchGetImage", *_REGISTRY, "docker pull", "docker push"),
    ),
    "a machine from boot to end": Scenario(policies=("node",), operations=(*NODE, "docker pull")),
    "a machine with a key": Scenario(policies=("node",), operations=("node s3 cp", "key of the bucket")),
    "a training job": Scenario(
        policies=("training",), operations=("sagemaker storage", "sagemaker image", "sagemaker logs")
    ),
    "a training job with a key": Scenario(
        policies=("training",), operations=("sagemaker storage", "key of the bucket")
    ),
    "the timer in the account": Scenario(policies=("scheduler",), operations=("scheduler ends a machine",)),
}
