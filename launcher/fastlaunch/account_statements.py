"""IAM statements as data that says what it is for, and the names of an account that it is made of. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: What docker asks of a registry. docs.aws.amazon.com/AmazonECR, "Pushing an image" and "Private repository
#: policies".
PULL = ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer")
#: SageMaker writes what a job's containers print there.
JOB_LOGS = "log-group:/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What is allowed, on what, under which condition; and why, in words."""

    sid: str
    why: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    condition: Mapping[str, Mapping[str, str]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The statement as IAM takes it."""
        data: dict[str, Any] = {
            "Sid": self.sid,
            "Effect": "Allow",
            "Action": one_or_list(self.actions),
            "Resource": one_or_list(self.resources),
        }
        if self.condition:
            data["Condition"] = {kind: dict(tests) for kind, tests in self.condition.items()}
        return data


@dataclass(frozen=True, kw_only=True)
class AccountNames:
    """What the statements name. Texts such as `ACCOUNT`, or a template's `${AWS::AccountId}`, do as well.

    registry: account of AWS's own images. repository: of images built here. node_role, training_role,
    scheduler_role: ARNs. kms_key: ARN of the bucket's and the volumes' own key, None for AWS's.
    """

    account: str
    bucket: str
    node_role: str
    training_role: str
    scheduler_role: str
    partition: str = "aws"
    prefix: str = "fastlaunch"
    registry: str = "763104351884"
    repository: str = "fastlaunch"
    kms_key: str | None = None

    def arn(self, service: str, resource: str, *, region: str = "*") -> str:
        """ARN, or pattern of ARNs, of the account's own."""
        return f"arn:{self.partition}:{service}:{region}:{self.account}:{resource}"

    def key(self, under: str) -> str:
        """Key of an object, or pattern of keys, below the prefix."""
        return f"{self.prefix}/{under}" if self.prefix else under

    def objects(self, under: str) -> str:
        """ARN of an object, or pattern of ARNs, below the prefix."""
        return f"arn:{self.partition}:s3:::{self.bucket}/{self.key(under)}"

    @property
    def bucket_arn(self) -> str:
        """ARN of the bucket itself."""
        return f"arn:{self.partition}:s3:::{self.bucket}"

    @property
    def own_images(self) -> str:
        """Pattern of the ARNs of the repositories that `fastlaunch build` pushes to."""
        return self.arn("ecr", f"repository/{self.repository}*")

    @property
    def all_images(self) -> tuple[str, str]:
        """Patterns of the ARNs of AWS's repositories, and of the own ones."""
        return (f"arn:{self.partition}:ecr:*:{self.registry}:repository/pytorch*", self.own_images)


def names_by_hand(*, account: str, bucket: str, partition: str = "aws", **given: Any) -> AccountNames:
    """The names that docs/aws-setup.md gives to what it makes."""

    def role(name: str) -> str:
        return f"arn:{partition}:iam::{account}:role/fastlaunch-{name}"

    roles = {f"{name}_role": role(name) for name in ("node", "training", "scheduler")}
    return AccountNames(account=account, bucket=bucket, partition=partition, **{**roles, **given})


def storage(names: AccountNames) -> tuple[Statement, ...]:
    """What node and job do with the bucket: runs both ways, the code down."""
    return (
        Statement(
            sid="Runs",
            why="records, logs and checkpoints go up; a checkpoint to go on from comes down",
            # Large files go in parts, which are dropped if that fails.
            actions=("s3:AbortMultipartUpload", "s3:GetObject", "s3:PutObject"),
            resources=(names.objects("runs/*"),),
        ),
        Statement(
            sid="Code",
            why="the training code comes down",
            actions=("s3:GetObject",),
            resources=(names.objects("code/*"),),
        ),
    )


def find(names: AccountNames, *under: str) -> tuple[Statement, ...]:
    """Listing the bucket, under these patterns of keys below the prefix."""
    prefixes = one_or_list(tuple(names.key(one) for one in under))
    return (
        Statement(
            sid="FindCheckpoints",
            why="the newest checkpoint is found, and nothing outside of these folders is listed",
            actions=("s3:ListBucket",),
            resources=(names.bucket_arn,),
            condition={"StringLike": {"s3:prefix": prefixes}},
        ),
    )


def pull(names: AccountNames) -> tuple[Statement, ...]:
    """What `docker pull` takes, of AWS's images and the own ones."""
    return (
        Statement(
            sid="RegistryLogin",
            why="docker logs in to the registry",
            actions=("ecr:GetAuthorizationToken",),
            resources=("*",),
        ),
        Statement(
            sid="ImagePull",
            why="the container's image comes down: AWS's, or one that was built here",
            actions=PULL,
            resources=names.all_images,
        ),
    )


def pass_role(sid: str, why: str, role: str, service: str) -> Statement:
    """Giving one role to one service. service: such as `ec2`."""
    return Statement(
        sid=sid,
        why=f"{why}, and that one alone",
        actions=("iam:PassRole",),
        resources=(role,),
        condition={"StringEquals": {"iam:PassedToService": f"{service}.amazonaws.com"}},
    )


def bucket_key(names: AccountNames) -> tuple[Statement, ...]:
    """The use of the bucket's own key; nothing where it has none."""
    if names.kms_key is None:
        return ()
    return (
        Statement(
            sid="BucketKey",
            why="objects are encrypted with the bucket's own key",
            actions=("kms:Decrypt", "kms:GenerateDataKey"),
            resources=(names.kms_key,),
        ),
    )


def one_or_list(values: tuple[str, ...]) -> Any:
    """One value as itself, as IAM's own documents are written; several as a list."""
    return values[0] if len(values) == 1 else list(values)
