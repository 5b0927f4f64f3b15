"""The CloudFormation template of template.yaml, completed for a region's names."""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from fastlaunch.aws.policies import AccountNames, mapped, statements, trust


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
    **allowed: Any,
) -> dict[str, Any]:
    """Return the template as data; each policy statement has a `Why`.

    zones: where several nodes may run. kms_key: ARN of the bucket's key, None for S3's own. kms_keys: those
    of volumes and output. vpc: the only one for machines and training jobs; None for any. allowed: further
    fields of `AccountNames`. The other arguments become defaults of the template's parameters.
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
        is_substituted=True,
        **allowed,
    )
    text = (files("fastlaunch.aws") / "template.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = mapped(yaml.safe_load(text), lambda value: _document(value, names))
    defaults = {"Prefix": prefix, "RepositoryName": repository, "ImageRegistry": registry}
    for name, default in {**defaults, "BucketName": bucket, "Vpc": vpc}.items():
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


def _document(value: Any, names: AccountNames) -> Any:
    """Return the document that a text such as `POLICY node` or `TRUST node` names; else the value itself."""
    match str(value).split():
        case ["POLICY", name]:
            document: Any = {"Version": "2012-10-17", "Statement": statements(name, names)}
        case ["TRUST", name]:
            document = trust(name, names)
        case _:
            return value
    # Fn::Sub puts in the names of the stack's parts.
    return mapped(
        document, lambda part: {"Fn::Sub": part} if isinstance(part, str) and "${" in part else part
    )
