"""A CloudFormation template that makes all that fastlaunch uses in one region of an account. Pure.

Its policies are `account_policies`' own, with the stack's parameters and resources for names. Names of roles
are the stack's to choose, so that one stack in each region does.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastlaunch.account.policies import POLICIES, VERSION, policy, trust
from fastlaunch.account_statements import AccountNames

#: Checkpoints are larger, and nothing else: logs and records come in pieces of at most 64 MiB.
_CHECKPOINT_BYTES = 64 * 1024 * 1024
#: Logical names of the launcher's policies.
_LAUNCHER = {"launcher": "LauncherPolicy", "launcher-sagemaker": "LauncherSageMakerPolicy"}
_LAUNCHER |= {"launcher-build": "LauncherBuildPolicy"}


def template(
    *,
    zones: Sequence[str],
    bucket: str | None = None,
    prefix: str = "fastlaunch",
    repository: str = "fastlaunch",
    registry: str = "763104351884",
    kms_key: str | None = None,
) -> dict[str, Any]:
    """The template as data. zones: in which several nodes may run. The others become parameters' defaults.

    kms_key: ARN of the key of the bucket, None for S3's own.
    """
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
        kms_key=kms_key,
    )
    resources = {**_storage(kms_key), **_roles(names), **_launcher(names), **_network(zones)}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "What fastlaunch uses in this region: bucket, roles, images, network",
        "Parameters": _parameters(bucket, prefix, repository, registry),
        "Conditions": {
            "HasRouteTables": {"Fn::Not": [{"Fn::Equals": [{"Fn::Join": ["", _ref("RouteTables")]}, ""]}]},
            "HasCheckpointDays": {"Fn::Not": [{"Fn::Equals": [_ref("CheckpointDays"), 0]}]},
        },
        "Resources": resources,
        "Outputs": _outputs(zones),
    }


def template_text(data: Mapping[str, Any]) -> str:
    """The template as YAML; every statement of a policy has a comment before it that says what it is for."""
    import yaml

    class WithoutAliases(yaml.SafeDumper):
        """CloudFormation refuses YAML's aliases of what stands in several places."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    text = yaml.dump(data, Dumper=WithoutAliases, sort_keys=False, width=10_000)
    names = AccountNames(account="", bucket="", node_role="", training_role="", scheduler_role="", kms_key="")
    why = {one.sid: one.why for make in POLICIES.values() for one in make(names)}
    return re.sub(r"^( *)- Sid: (\w+)$", lambda found: _commented(found, why), text, flags=re.MULTILINE)


def _commented(found: re.Match[str], why: Mapping[str, str]) -> str:
    return f"{found[1]}# {why[found[2]]}\n{found[0]}" if found[2] in why else found[0]


def _parameters(bucket: str | None, prefix: str, repository: str, registry: str) -> dict[str, Any]:
    return {
        "BucketName": {
            "Type": "String",
            "Description": "Of the bucket to make; no other bucket in the world may be called so",
            **({"Default": bucket} if bucket else {}),
        },
        "Prefix": {
            "Type": "String",
            "Default": prefix,
            "AllowedPattern": r"[\w.-]+(/[\w.-]+)*",
            "Description": "Folder in the bucket below which everything lies",
        },
        "CheckpointDays": {
            "Type": "Number",
            "Default": 0,
            "MinValue": 0,
            "Description": "Days after which checkpoints are deleted; 0 keeps them",
        },
        "RepositoryName": {
            "Type": "String",
            "Default": repository,
            "Description": "Of the repository for images that fastlaunch build makes",
        },
        "ImageRegistry": {
            "Type": "String",
            "Default": registry,
            "AllowedPattern": "[0-9]{12}",
            "Description": "Account that serves AWS's own images in this region",
        },
        "Vpc": {"Type": "AWS::EC2::VPC::Id", "Description": "In which machines run"},
        "RouteTables": {
            "Type": "CommaDelimitedList",
            "Default": "",
            "Description": "Of its subnets, for a gateway to S3, which is free; empty if there is one",
        },
    }


def _storage(kms_key: str | None) -> dict[str, Any]:
    encryption: dict[str, Any] = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": kms_key}
    rule = {"ServerSideEncryptionByDefault": encryption if kms_key else {"SSEAlgorithm": "AES256"}}
    checkpoints = {
        "Id": "checkpoints",
        "Status": {"Fn::If": ["HasCheckpointDays", "Enabled", "Disabled"]},
        "Prefix": _sub("${Prefix}/runs/"),
        "ObjectSizeGreaterThan": str(_CHECKPOINT_BYTES),
        "ExpirationInDays": {"Fn::If": ["HasCheckpointDays", _ref("CheckpointDays"), 3650]},
    }
    parts = {"Id": "parts", "Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}
    kept = {"DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"}
    everything = [
        _sub("arn:${AWS::Partition}:s3:::${Bucket}"),
        _sub("arn:${AWS::Partition}:s3:::${Bucket}/*"),
    ]
    tls_only = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": everything,
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    return {
        "Bucket": {
            "Type": "AWS::S3::Bucket",
            **kept,
            "Properties": {
                "BucketName": _ref("BucketName"),
                "BucketEncryption": {"ServerSideEncryptionConfiguration": [rule]},
                "PublicAccessBlockConfiguration": {
                    "BlockPublicAcls": True,
                    "BlockPublicPolicy": True,
                    "IgnorePublicAcls": True,
                    "RestrictPublicBuckets": True,
                },
                "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
                "LifecycleConfiguration": {"Rules": [parts, checkpoints]},
            },
        },
        "BucketTlsOnly": {
            "Type": "AWS::S3::BucketPolicy",
            "Properties": {
                "Bucket": _ref("Bucket"),
                "PolicyDocument": {"Version": VERSION, "Statement": [tls_only]},
            },
        },
        "Repository": {
            "Type": "AWS::ECR::Repository",
            **kept,
            "Properties": {"RepositoryName": _ref("RepositoryName"), "ImageTagMutability": "IMMUTABLE"},
        },
    }


def _roles(names: AccountNames) -> dict[str, Any]:
    roles = {
        f"{name.capitalize()}Role": {
            "Type": "AWS::IAM::Role",
            "Properties": {
                "AssumeRolePolicyDocument": _substituted(trust(name, names)),
                "Policies": [
                    {"PolicyName": "fastlaunch", "PolicyDocument": _substituted(policy(name, names))}
                ],
            },
        }
        for name in ("node", "training", "scheduler")
    }
    profile = {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [_ref("NodeRole")]}}
    return {**roles, "NodeProfile": profile}


def _launcher(names: AccountNames) -> dict[str, Any]:
    policies = {
        logical: {
            "Type": "AWS::IAM::ManagedPolicy",
            "Properties": {"PolicyDocument": _substituted(policy(name, names))},
        }
        for name, logical in _LAUNCHER.items()
    }
    # Whom of the account its administrators let take it on.
    whole_account = {"AWS": _sub("arn:${AWS::Partition}:iam::${AWS::AccountId}:root")}
    assume = {"Effect": "Allow", "Principal": whole_account, "Action": "sts:AssumeRole"}
    role = {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "AssumeRolePolicyDocument": {"Version": VERSION, "Statement": [assume]},
            "ManagedPolicyArns": [_ref(logical) for logical in policies],
            "MaxSessionDuration": 43200,
        },
    }
    return {**policies, "LauncherRole": role}


def _network(zones: Sequence[str]) -> dict[str, Any]:
    # EFA wants a group that names itself both ways; 0.0.0.0/0 does not do for it.
    itself = {"GroupId": _attribute("SecurityGroup", "GroupId"), "IpProtocol": "-1"}
    resources: dict[str, Any] = {
        "SecurityGroup": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "GroupDescription": "fastlaunch: everything out, in from each other alone",
                "VpcId": _ref("Vpc"),
                "SecurityGroupEgress": [
                    {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0", "Description": "S3, ECR and the internet"}
                ],
            },
        },
        "FromEachOther": {
            "Type": "AWS::EC2::SecurityGroupIngress",
            "Properties": {**itself, "SourceSecurityGroupId": itself["GroupId"]},
        },
        "ToEachOther": {
            "Type": "AWS::EC2::SecurityGroupEgress",
            "Properties": {**itself, "DestinationSecurityGroupId": itself["GroupId"]},
        },
        "S3Endpoint": {
            "Type": "AWS::EC2::VPCEndpoint",
            "Condition": "HasRouteTables",
            "Properties": {
                "VpcId": _ref("Vpc"),
                "VpcEndpointType": "Gateway",
                "ServiceName": _sub("com.amazonaws.${AWS::Region}.s3"),
                "RouteTableIds": _ref("RouteTables"),
            },
        },
    }
    for zone in zones:
        resources[_group(zone)] = {
            "Type": "AWS::EC2::PlacementGroup",
            "Properties": {"Strategy": "cluster"},
        }
    return resources


def _outputs(zones: Sequence[str]) -> dict[str, Any]:
    lines = [
        "aws:",
        "  ${AWS::Region}:",
        "    bucket: ${Bucket}",
        "    prefix: ${Prefix}",
        "    instance_profile: ${NodeProfile}",
        "    security_groups: [${SecurityGroup.GroupId}]",
        "    repository: ${Repository}",
        "    role: ${TrainingRole.Arn}",
        "    scheduler_role: ${SchedulerRole.Arn}",
        *(["    placement_groups:"] if zones else []),
        *(f"      {zone}: ${{{_group(zone)}}}" for zone in zones),
    ]
    return {
        "ConfigFile": {
            "Description": "Lines of the config file; subnets by zone are yours to add",
            "Value": _sub("\n".join(lines) + "\n"),
        },
        "LauncherRole": {
            "Description": "Role for those who type fastlaunch",
            "Value": _attribute("LauncherRole", "Arn"),
        },
        **{
            logical: {
                "Description": f"Policy {name}, for users and roles that are there",
                "Value": _ref(logical),
            }
            for name, logical in _LAUNCHER.items()
        },
    }


def _substituted(value: Any) -> Any:
    """The same data, with Fn::Sub around every text that names a part of the stack."""
    if isinstance(value, dict):
        return {key: _substituted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_substituted(part) for part in value]
    return _sub(value) if isinstance(value, str) and "${" in value else value


def _group(zone: str) -> str:
    return "PlacementGroup" + re.sub(r"[^a-z0-9]", "", zone)


def _ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def _attribute(name: str, attribute: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, attribute]}


def _sub(text: str) -> dict[str, str]:
    return {"Fn::Sub": text}
