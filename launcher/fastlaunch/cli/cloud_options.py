"""The options of `submit` that hold on AWS only, and what they make of the settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from fastlaunch.cli.options import MINUTES, USD, Command
from fastlaunch.cloud_request import CloudTerms
from fastlaunch.errors import UserError
from fastlaunch.settings import RegionSettings, Settings, misfit

DEFAULT_MAX_MINUTES = 120

_OPTIONS = (
    click.option(
        "--purchase",
        default="on-demand",
        show_default=True,
        metavar="OPTION",
        help="on-demand, or spot, which AWS may take back at two minutes' notice.",
    ),
    click.option("--max-price", type=USD, metavar="USD", help="Most paid for an hour of spot."),
    click.option(
        "--max-hours",
        type=MINUTES,
        default="2",
        show_default=True,
        metavar="H",
        help="The machine turns itself off after so long; also 90min.",
    ),
    click.option("--max-cost", type=USD, metavar="USD", help="Refuse what may cost more than this."),
    click.option("--detach", is_flag=True, help="Do not follow; only the machine's own timer then stops it."),
    click.option(
        "--bucket", metavar="NAME", help="For code, records and checkpoints.  [default: the config's]"
    ),
    click.option("--instance-profile", metavar="NAME", help="Of the machine.  [default: the config's]"),
    click.option(
        "--subnet",
        "subnets",
        multiple=True,
        metavar="ZONE=ID",
        help="Where to run, in order; may be repeated.  [default: the config's, else EC2's]",
    ),
    click.option(
        "--security-group",
        "security_groups",
        multiple=True,
        metavar="ID",
        help="Of the machine; may be repeated.  [default: the config's, else the VPC's]",
    ),
    click.option("--base-image", metavar="TAG", help="AWS's container image.  [default: the newest]"),
    click.option("--image", metavar="URI@sha256:...", help="A container image made by `fastlaunch build`."),
)
_NAMES = (
    *("purchase", "max_price", "max_hours", "max_cost", "detach", "bucket", "instance_profile"),
    *("subnets", "security_groups", "base_image", "image"),
)
#: What the parameters are that have a default.
_DEFAULTS = {"purchase": "on-demand", "max_hours": DEFAULT_MAX_MINUTES}


def cloud_options(command: Command) -> Command:
    """`command` with the options, as parameters that `take_cloud_options` takes out again."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_cloud_options(options: dict[str, Any]) -> dict[str, Any]:
    """The parameters of these options, removed from `options`."""
    return {name: options.pop(name) for name in _NAMES}


def check_local(typed: Mapping[str, Any]) -> None:
    """Nothing, if none of these options was given; UserError for one, which a run here would not heed.

    A rehearsal with --instance is the command for AWS with --local, and may have them.
    """
    given = [_option(name) for name, value in typed.items() if value and value != _DEFAULTS.get(name)]
    if given:
        raise UserError(f"{given[0]} is for AWS, and this trains here", f"leave {given[0]} out")


def split_names(text: str) -> tuple[str, ...]:
    """`a, b` as its names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def terms_of(typed: Mapping[str, Any], *, instance: str, region: str) -> CloudTerms:
    """Where a job may run and how it is bought. instance, region: one or several, with commas."""
    return CloudTerms(
        instances=split_names(instance),
        regions=split_names(region),
        purchase=typed["purchase"],
        max_price_usd=typed["max_price"],
        max_minutes=typed["max_hours"],
        image=typed["image"],
        base_image=typed["base_image"],
    )


def settings_with(settings: Settings, typed: Mapping[str, Any], regions: tuple[str, ...]) -> Settings:
    """The settings with what was typed put over the config's for these regions.

    Bucket, subnets and security groups belong to one region. Raises UserError where several are allowed.
    """
    subnets = _subnets(typed["subnets"], regions)
    regional = {"bucket": typed["bucket"], "subnets": subnets, "security_groups": typed["security_groups"]}
    if len(regions) > 1 and any(regional.values()):
        option = next(_option(name) for name, value in regional.items() if value)
        raise UserError(
            f"{option} belongs to one region, and {len(regions)} are allowed",
            "give one --region, or say it for each region under `aws` in the config file",
        )
    changes = {**regional, "instance_profile": typed["instance_profile"]}
    changes = {name: value for name, value in changes.items() if value}
    if not changes:
        return settings
    changed = {name: replace(settings.aws.get(name, RegionSettings()), **changes) for name in regions}
    for name, here in changed.items():
        if problem := misfit(name, here):
            raise UserError(f"for {name}, {problem}", "correct the option, or the config file")
    return replace(settings, aws={**settings.aws, **changed})


def _option(name: str) -> str:
    """The option that gives this parameter."""
    repeated = {"subnets": "subnet", "security_groups": "security-group"}
    return f"--{repeated.get(name) or name.replace('_', '-')}"


def _subnets(given: tuple[str, ...], regions: tuple[str, ...]) -> dict[str, str]:
    subnets: dict[str, str] = {}
    for text in given:
        zone, separator, subnet = (part.strip() for part in text.partition("="))
        if not (zone and separator and subnet):
            raise UserError(f"--subnet {text!r} is not ZONE=ID", "give one such as us-east-1a=subnet-0a1b2c")
        if not any(zone.startswith(region) and zone != region for region in regions):
            raise UserError(
                f"--subnet: {zone} is no zone of {' or '.join(regions)}", f"give --region {zone[:-1]}"
            )
        if zone in subnets:
            raise UserError(f"--subnet: {zone} is given twice", "give one subnet per zone")
        subnets[zone] = subnet
    return subnets
