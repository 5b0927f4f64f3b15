"""`fastlaunch iam print`: what an account must allow, as policies or as a template that makes everything."""

import json
import re
from collections.abc import Mapping
from typing import Any

import click

from fastlaunch.aws.policies import documents, names_by_hand, template, template_text
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import examples, next_command
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.settings import Settings
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.jobs.option_rules import check_folder, check_secret


@click.group(
    epilog=examples(
        (
            "a template that makes all that jobs need",
            "fastlaunch iam print --cloudformation --region us-east-1",
        )
    )
)
def iam() -> None:
    """Show what an AWS account must allow. Nothing here asks AWS, or changes anything."""


@iam.command(
    "print",
    short_help="Print IAM policies, or with --cloudformation a template.",
    epilog=examples(
        (
            "a template that makes all that jobs need",
            "fastlaunch iam print --cloudformation --region us-east-1",
        ),
        ("the same, for p5 alone", "fastlaunch iam print --cloudformation --only-type 'p5*'"),
        ("the policies by file name", "fastlaunch iam print --bucket my-bucket --account 123456789012"),
    ),
)
@click.argument("name", required=False)
@click.option(
    "--cloudformation",
    is_flag=True,
    help="Print one template that creates bucket, roles, repository and network.",
)
@click.option("--region", metavar="R", help="Let jobs run in this region.  [default: the config's]")
@click.option(
    "--bucket", metavar="NAME", help="Keep runs in this bucket.  [default: the config's for the region]"
)
@click.option(
    "--prefix",
    metavar="FOLDER",
    help="Keep them in this folder of it.  [default: the config's, or fastlaunch]",
)
@click.option("--account", default="ACCOUNT", help="Write this account number into the policies.")
@click.option("--repository", help="Push images of fastlaunch build to this repository.")
@click.option("--kms-key", metavar="ARN", help="Encrypt the bucket and the volumes with this key.")
@click.option("--zone", "zones", multiple=True, help="Let several nodes run in this zone; may be repeated.")
@click.option(
    "--node-role",
    metavar="ARN",
    help="The role in the machines' instance profile.  [default: fastlaunch-node]",
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="ARN",
    help="Let jobs read this secret or parameter; may be repeated.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="s3://...",
    help="Let jobs read this folder of S3; may be repeated.",
)
@click.option(
    "--queue",
    metavar="NAME",
    help="Let jobs be put into this queue of AWS Batch alone; the template makes it.  [default: any; none]",
)
@click.option(
    "--only-type",
    "instance_types",
    multiple=True,
    metavar="TYPE",
    help="Let only these instance types start, such as 'p5*'; may be repeated.",
)
@click.option(
    "--only-region", "regions", multiple=True, help="Let jobs start only in this region; may be repeated."
)
@click.option(
    "--only-vpc", "vpc", metavar="ID", help="Let machines and training jobs stand only in this VPC."
)
def print_(
    name: str | None, cloudformation: bool, region: str | None, zones: tuple[str, ...], **given: Any
) -> None:
    """Print what an account must allow, as IAM's JSON: all policies by file name, or the one called NAME.

    With --cloudformation, print one template that creates a bucket, every role and policy, a repository, a
    security group, a gateway to S3 and placement groups; its output ConfigFile holds the config file's lines.
    """
    context = app_context(config_may_lack=True)
    settings, region = context.settings, region or context.own_region()
    for arn in given["secrets"]:
        check_secret(arn)
    for uri in given["inputs"]:
        check_folder(uri)
    given["inputs"] = tuple(f"{uri.rstrip('/')}/" for uri in given["inputs"])
    names = {key: value for key, value in _names(settings, region, given).items() if value is not None}
    _check_one_name_each({**names, "zones": zones})
    if not cloudformation:
        profile = settings.region_settings(region).instance_profile
        if profile not in (None, _BY_HAND) and "node_role" not in names:
            unknown = f"which role instance profile {profile} has is not known here, and the policies name"
            command = f"aws iam get-instance-profile --instance-profile-name {profile}"
            report_line(as_warning(f"{unknown} {_BY_HAND}\n  give --node-role ARN, by: {command}"))
        click.echo(_policies(name, names))
        return
    if name is not None:
        raise UserError(f"{name} and --cloudformation are given", "the template holds every policy")
    if not names["prefix"]:
        raise UserError("the template needs a folder in the bucket", "give --prefix fastlaunch")
    here = settings.region_settings(region)
    # Without zones in the config file, use those that nearly every region has.
    configured = {**here.subnets, **here.placement_groups} or [f"{region}{letter}" for letter in "abc"]
    names["zones"] = zones or list(configured)
    for key in _NAMED_BY_THE_TEMPLATE & names.keys():
        del names[key]
    click.echo(template_text(template(**names)), nl=False)
    next_command(
        f"aws cloudformation deploy --region {region} --stack-name fastlaunch --capabilities CAPABILITY_IAM "
        f"--template-file fastlaunch.yaml --parameter-overrides BucketName={names.get('bucket', 'NAME')} "
        f"Vpc={names.get('vpc', 'vpc-ID')}"
    )


#: What stands for any name in a policy.
_SEVERAL = re.compile(r"[*?$\s]")
#: The machines' role and instance profile, if both were made by hand as in docs/setup.md.
_BY_HAND = "fastlaunch-node"
_NAMED_BY_THE_TEMPLATE = {"account", "partition", "node_role", "training_role", "scheduler_role"}


def _names(settings: Settings, region: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the names for the policies: those given, else the config file's, else None."""
    from fastlaunch.api.init import names_of_region

    here = settings.region_settings(region)
    names = names_of_region(settings, region)
    special = {"cn": "aws-cn", "us-gov": "aws-us-gov"}
    return {
        **given,
        **names,
        "kms_keys": tuple(dict.fromkeys(filter(None, (given["kms_key"], *names["kms_keys"])))),
        "bucket": given["bucket"] or here.bucket,
        "prefix": here.prefix if given["prefix"] is None else given["prefix"].strip("/"),
        "repository": given["repository"] or names["repository"],
        "partition": next((name for start, name in special.items() if region.startswith(f"{start}-")), "aws"),
        "training_role": here.role,
        "scheduler_role": here.scheduler_role,
    }


def _check_one_name_each(names: Mapping[str, Any]) -> None:
    """Raise UserError for a name in which a policy's wildcard or variable would stand for others, too."""
    for key, value in names.items():
        for text in value if isinstance(value, tuple) else (value,):
            # Types of instances may be a pattern, as the help of the option says.
            if key != "instance_types" and isinstance(text, str) and _SEVERAL.search(text):
                what = key.replace("_", " ").removesuffix("s")
                raise UserError(f"{what} {text!r} would allow others, too", "write it out, without *, ? or $")


def _policies(name: str | None, names: dict[str, Any]) -> str:
    names = {key: value for key, value in names.items() if key != "kms_key"}
    by_file = documents(names_by_hand(**{"bucket": "BUCKET", **names}))
    if name is None:
        return json.dumps(by_file, indent=2)
    for file in (name, f"{name}-policy.json"):
        if file in by_file:
            return json.dumps(by_file[file], indent=2)
    raise UnknownName("policy", name, by_file)
