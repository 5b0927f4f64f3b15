"""`fastlaunch iam print`: what an account must allow, as policies or as a template that makes everything."""

import json
from typing import Any

import click

from fastlaunch.account.policies import documents
from fastlaunch.account.template import template, template_text
from fastlaunch.account_statements import names_by_hand
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.settings import RegionSettings, Settings, load_settings
from fastlaunch.images.build import DEFAULT_REPOSITORY

#: What a list may take before it gets a line for each value.
_WIDTH = 100


@click.group(short_help="What an account must allow: IAM policies, or a template that makes everything.")
def iam() -> None:
    """What an AWS account must allow, and what makes it. Nothing here asks AWS, or changes anything."""


@iam.command("print", short_help="Print IAM policies, or with --cloudformation a template.")
@click.argument("name", required=False)
@click.option(
    "--cloudformation", is_flag=True, help="One template: bucket, roles, images, security group, and more."
)
@click.option("--region", help="Region where jobs run; default: the config file's.")
@click.option("--bucket", help="Bucket of the runs; default: the config file's for the region.")
@click.option("--prefix", help="Folder in the bucket; default: the config file's, or fastlaunch.")
@click.option("--account", default="ACCOUNT", help="Number of the account, for the policies.")
@click.option("--repository", help="Repository of images that fastlaunch build makes.")
@click.option("--kms-key", metavar="ARN", help="Key of your own on the bucket and the volumes.")
@click.option("--zone", "zones", multiple=True, help="Zone where several nodes may run; may be repeated.")
def print_(
    name: str | None, cloudformation: bool, region: str | None, zones: tuple[str, ...], **given: str | None
) -> None:
    """Print what an account must allow, as IAM's JSON: all policies by file name, or the one called NAME.

    With --cloudformation, one template that makes a bucket, every role and policy, a repository, a security
    group, a gateway to S3 and placement groups; its output ConfigFile is what the config file needs.
    """
    settings = load_settings()
    region = region or settings.region
    named = {key: value for key, value in _named(settings, region, given).items() if value is not None}
    if not cloudformation:
        click.echo(_policies(name, named))
        return
    if name is not None:
        raise UserError(f"{name} and --cloudformation are given", "the template holds every policy")
    if not named["prefix"]:
        raise UserError("the template needs a folder in the bucket", "give --prefix fastlaunch")
    named["zones"] = zones or _zones(settings, region)
    click.echo(template_text(template(**{key: named[key] for key in _TEMPLATE if key in named})), nl=False)


#: What the template takes; roles are its own.
_TEMPLATE = ("zones", "bucket", "prefix", "repository", "registry", "kms_key")


def _named(settings: Settings, region: str, given: dict[str, str | None]) -> dict[str, Any]:
    """What the statements name: as given, else of the config file. None where neither tells."""
    from fastlaunch.catalog.container_images import registry_account

    here = settings.aws.get(region, RegionSettings())
    return {
        **given,
        "bucket": given["bucket"] or here.bucket,
        "prefix": here.prefix if given["prefix"] is None else given["prefix"].strip("/"),
        "repository": given["repository"] or here.repository or DEFAULT_REPOSITORY,
        "registry": registry_account(region),
        "partition": _partition(region),
        "training_role": here.role,
        "scheduler_role": here.scheduler_role,
    }


def _policies(name: str | None, named: dict[str, Any]) -> str:
    found = documents(names_by_hand(**{"bucket": "BUCKET", **named}))
    if name is None:
        return json.dumps(found, indent=2)
    wanted = next((file for file in (name, f"{name}-policy.json") if file in found), None)
    if wanted is None:
        raise UnknownName("policy", name, found)
    return document_text(found[wanted])


def document_text(value: Any, indent: str = "") -> str:
    """A policy as JSON, with what fits on one line on one line."""
    flat = json.dumps(value)
    inner = indent + "  "
    if not isinstance(value, dict | list) or (len(indent + flat) <= _WIDTH and "Sid" not in flat):
        return flat
    if isinstance(value, list):
        parts = [document_text(part, inner) for part in value]
        brackets = "[]"
    else:
        parts = [f"{json.dumps(key)}: {document_text(part, inner)}" for key, part in value.items()]
        brackets = "{}"
    lines = ",\n".join(inner + part for part in parts)
    return f"{brackets[0]}\n{lines}\n{indent}{brackets[1]}"


def _zones(settings: Settings, region: str) -> list[str]:
    """The zones of the config file; without, those that nearly every region has."""
    here = settings.aws.get(region, RegionSettings())
    return list({**here.subnets, **here.placement_groups}) or [f"{region}{letter}" for letter in "abc"]


def _partition(region: str) -> str:
    """`aws`, or what ARNs of China's and GovCloud's regions have instead."""
    special = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}
    return next((name for start, name in special.items() if region.startswith(start)), "aws")
