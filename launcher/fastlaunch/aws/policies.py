"""What an account needs, for its names: the policies of policies.yaml and the template of template.yaml."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AccountNames:
    """What the policies name, or placeholders such as `ACCOUNT` or a template's `${AWS::AccountId}`."""

    account: str
    bucket: str
    # ARNs of the roles.
    node_role: str
    training_role: str
    scheduler_role: str
    partition: str = "aws"
    prefix: str = "fastlaunch"
    # Account of AWS's own images.
    registry: str = "763104351884"
    # For images built here.
    repository: str = "fastlaunch"
    # ARNs of the keys of bucket, volumes and output; none for AWS's.
    kms_keys: tuple[str, ...] = ()
    # ARNs of secrets and parameters that jobs may read.
    secrets: tuple[str, ...] = ()
    # URIs of folders in S3 that jobs may read, with a slash at their ends.
    inputs: tuple[str, ...] = ()
    # SSM parameter of the user's own machine image; None for AWS's.
    ami_parameter: str | None = None
    # Regions where jobs may start; empty for all.
    regions: tuple[str, ...] = ()
    # Instance types that may start, such as `p5*`; empty for all.
    instance_types: tuple[str, ...] = ()
    # Name of the queue of AWS Batch for jobs; `*` for any.
    queue: str = "*"
    # Id of the only VPC for machines and training jobs; None for any.
    vpc: str | None = None
    # Whether the names are for an Fn::Sub of CloudFormation.
    is_substituted: bool = False

    def policy_variable(self, name: str) -> str:
        """Return a variable that IAM fills in for each request, such as `${aws:userid}`."""
        return f"${{{'!' if self.is_substituted else ''}{name}}}"


def names_by_hand(*, account: str, bucket: str, partition: str = "aws", **given: Any) -> AccountNames:
    """Return the names that docs/setup.md uses."""
    role = f"arn:{partition}:iam::{account}:role/fastlaunch"
    roles = {f"{name}_role": f"{role}-{name}" for name in ("node", "training", "scheduler")}
    return AccountNames(account=account, bucket=bucket, partition=partition, **{**roles, **given})


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies."""
    return tuple(_data()["policies"])


def statements(name: str, names: AccountNames) -> list[dict[str, Any]]:
    """Return the statements of a policy, each with its `Why`."""
    values = _values(names)
    filled = []
    for given in map(dict, _data()["policies"][name]):
        if not values[given.pop("OnlyWith", "account")]:
            continue
        why, sid, several = given.pop("Why"), given.pop("Sid"), given.pop("ForEach", None)
        for number, of_one in enumerate(values[several] if several else ({},), start=1):
            named = {"Why": why, "Sid": sid if number == 1 else f"{sid}{number}", "Effect": "Allow"}
            filled.append(named | _filled(given, values | of_one))
    return filled


def policy(name: str, names: AccountNames) -> dict[str, Any]:
    """Return the policy of this name, as IAM takes it."""
    named = statements(name, names)
    return _document(
        [{key: value for key, value in statement.items() if key != "Why"} for statement in named]
    )


def trust(name: str, names: AccountNames) -> dict[str, Any]:
    """Return the trust policy of the role `node`, `training` or `scheduler`."""
    return _document(_filled(_data()["trust"][name], _values(names)))


def documents(names: AccountNames) -> dict[str, dict[str, Any]]:
    """Return the policies and trust policies of docs/policies.md, by file name."""
    trusts = {f"{name}-trust.json": trust(name, names) for name in _data()["trust"]}
    return trusts | {f"{name}-policy.json": policy(name, names) for name in policy_names()}


def _document(statements: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the data with `change` applied to every value that is neither a mapping nor a list."""
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    return [mapped(part, change) for part in value] if isinstance(value, list) else change(value)


def _values(names: AccountNames) -> dict[str, Any]:
    """Return the values for the names in braces."""
    vpc = f"arn:{names.partition}:ec2:*:{names.account}:vpc/{names.vpc}"
    folders = [f"arn:{names.partition}:s3:::{uri.removeprefix('s3://')}" for uri in names.inputs]
    prefixes: dict[str, list[str]] = {}
    for folder in folders:
        bucket, _, prefix = folder.partition("/")
        prefixes.setdefault(bucket, []).append(f"{prefix}*")
    return {
        **asdict(names),
        "folder": f"{names.prefix}/" if names.prefix else "",
        "user_name": names.policy_variable("aws:username"),
        "user_id": names.policy_variable("aws:userid"),
        "ami_parameter": (names.ami_parameter or "").lstrip("/"),
        "input_objects": tuple(f"{folder}*" for folder in folders),
        "input_buckets": tuple(prefixes),
        "by_input_bucket": tuple(
            {"input_bucket": bucket, "input_prefixes": tuple(of)} for bucket, of in prefixes.items()
        ),
        "vpcs": (vpc,) if names.vpc else (),
        "training_types": tuple(f"ml.{name}" for name in names.instance_types),
        "false_with_types": ("false",) if names.instance_types else (),
        "false_with_vpc": ("false",) if names.vpc else (),
    }


def _filled(value: Any, values: dict[str, Any]) -> Any:
    """Return the data with values for the braces, without empty parts."""
    if isinstance(value, list):
        return [_filled(part, values) for part in value]
    if isinstance(value, dict):
        filled = {key: _filled(part, values) for key, part in value.items()}
        return {key: part for key, part in filled.items() if part not in ({}, [])}
    alone = re.fullmatch(r"\{(\w+)\}", value)
    if alone and isinstance(several := values[alone[1]], tuple):
        return several[0] if len(several) == 1 else list(several)
    return value.format(**values)


@cache
def _data() -> Any:
    import yaml

    text = (files("fastlaunch.aws") / "policies.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def template(
    *,
    zones: Sequence[str],
    bucket: str | None = None,
    prefix: str = "fastlaunch",
    repository: str = "fastlaunch",
    registry: str = "763104351884",
    kms_key: str | None = None,
    kms_keys: Sequence[str] = (),
    vpc: str | None = None,
    queue: str | None = None,
    **allowed: Any,
) -> dict[str, Any]:
    """Return the template as data; each policy statement has a `Why`.

    zones: where several nodes may run. kms_key: ARN of the bucket's key, None for S3's own. kms_keys: those
    of volumes and output. vpc: the only one for machines and training jobs; None for any. queue: to make in
    AWS Batch; None for none. allowed: further fields of `AccountNames`. The other arguments become defaults
    of the template's parameters.
    """
    import yaml

    names = AccountNames(
        account="${AWS::AccountId}",
        partition="${AWS::Partition}",
        bucket="${BucketName}",
        prefix="${Prefix}",
        registry="${ImageRegistry}",
        repository="${RepositoryName}",
        node_role="${NodeRole.Arn}",
        training_role="${TrainingRole.Arn}",
        scheduler_role="${SchedulerRole.Arn}",
        kms_keys=tuple(dict.fromkeys(filter(None, (kms_key, *kms_keys)))),
        vpc="${Vpc}" if vpc else None,
        queue="${QueueName}",
        is_substituted=True,
        **allowed,
    )
    text = (files("fastlaunch.aws") / "template.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = mapped(yaml.safe_load(text), lambda value: _in_template(value, names))
    defaults = {"Prefix": prefix, "RepositoryName": repository, "ImageRegistry": registry}
    for name, default in {**defaults, "BucketName": bucket, "Vpc": vpc, "QueueName": queue}.items():
        if default:
            data["Parameters"][name]["Default"] = default
    if kms_key:
        (rule,) = data["Resources"]["Bucket"]["Properties"]["BucketEncryption"][
            "ServerSideEncryptionConfiguration"
        ]
        rule["ServerSideEncryptionByDefault"] = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": kms_key}
    _, only_first = data["Outputs"]["ConfigFile"]["Value"]["Fn::Join"][1]
    config = only_first["Fn::If"][1]
    config["Fn::Sub"] += "    placement_groups:\n" if zones else ""
    for zone in zones:
        group = "PlacementGroup" + re.sub(r"[^a-z0-9]", "", zone)
        data["Resources"][group] = {
            "Type": "AWS::EC2::PlacementGroup",
            "Condition": "IsFirst",
            "Properties": {"Strategy": "cluster"},
        }
        config["Fn::Sub"] += f"      {zone}: ${{{group}}}\n"
    return data


def template_text(data: Mapping[str, Any]) -> str:
    """Return the template as YAML, with every `Why` as a comment before its statement."""
    import yaml

    class WithoutAliases(yaml.SafeDumper):
        """Write no aliases, which CloudFormation refuses."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    WithoutAliases.add_representer(str, as_block)

    def as_comment(why: re.Match[str]) -> str:
        return f"{why[1]}# {yaml.safe_load(why[2])}\n{why[1]}- Sid:"

    text = yaml.dump(data, Dumper=WithoutAliases, sort_keys=False, width=10_000)
    return re.sub(r"^( *)- Why: (.*)\n +Sid:", as_comment, text, flags=re.MULTILINE)


def _in_template(value: Any, names: AccountNames) -> Any:
    """Return the document that a text such as `POLICY node` or `TRUST node` names; else the value itself."""
    match str(value).split():
        case ["POLICY", name]:
            document: Any = _document(statements(name, names))
        case ["TRUST", name]:
            document = trust(name, names)
        case _:
            return value
    # Fn::Sub puts in the names of the stack's parts.
    return mapped(
        document, lambda part: {"Fn::Sub": part} if isinstance(part, str) and "${" in part else part
    )
