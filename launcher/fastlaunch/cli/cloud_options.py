"""The options of `submit` that hold on AWS only, and what they make of terms and settings."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from fastlaunch.cli.options import MINUTES, POSITIVE_COUNT, USD, Command
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import RegionSettings, Settings, misfit
from fastlaunch.jobs.options import CloudOptions

DEFAULT_MAX_MINUTES = 120

_OPTIONS = (
    click.option(
        "--purchase",
        default="on-demand",
        show_default=True,
        metavar="OPTION",
        help="Buy on-demand, spot (which AWS may take back at two minutes' notice) or capacity-block.",
    ),
    click.option("--max-price", type=USD, metavar="USD", help="Pay at most this for an hour of EC2 spot."),
    click.option(
        "--reservation", metavar="cr-ID", help="Run in this capacity block, which you have bought before."
    ),
    click.option(
        "--block-fee",
        type=USD,
        metavar="USD",
        help="Say what that block cost up front.  [default: the price file's]",
    ),
    click.option(
        "--num-nodes",
        type=POSITIVE_COUNT,
        default=1,
        show_default=True,
        help="Train one job on this many machines.",
    ),
    click.option("--allow-tcp", is_flag=True, help="Let several nodes talk without EFA. The run records it."),
    click.option(
        "--max-hours",
        type=MINUTES,
        default="2",
        show_default=True,
        metavar="H",
        help="Turn the machine off after this long; 90min works too.",
    ),
    click.option("--max-cost", type=USD, metavar="USD", help="Refuse a submission that may cost more."),
    click.option(
        "--detach", is_flag=True, help="Return once it runs. Timers end what hangs or is forgotten."
    ),
    click.option(
        "--bucket",
        metavar="NAME",
        help="Keep code, records and checkpoints in this bucket.  [default: the config's]",
    ),
    click.option(
        "--instance-profile", metavar="NAME", help="Give the machine this profile.  [default: the config's]"
    ),
    click.option(
        "--role", metavar="ARN", help="Run a SageMaker job with this role.  [default: the config's]"
    ),
    click.option(
        "--subnet",
        "subnets",
        multiple=True,
        metavar="ZONE=ID",
        help="Try this subnet; repeat for more, in order.  [default: the config's, else EC2's]",
    ),
    click.option(
        "--security-group",
        "security_groups",
        multiple=True,
        metavar="ID",
        help="Put the machine into this group; may be repeated.  [default: the config's, else the VPC's]",
    ),
    click.option(
        "--placement-group",
        "placement_groups",
        multiple=True,
        metavar="ZONE=NAME",
        help="Keep several nodes close together in this group.  [default: the config's]",
    ),
    click.option("--training-plan", metavar="ARN", help="Run in this reserved capacity of SageMaker."),
    click.option(
        "--base-image", metavar="TAG", help="Use this container image of AWS.  [default: the newest]"
    ),
    click.option(
        "--image", metavar="URI@sha256:...", help="Use this container image, made by `fastlaunch build`."
    ),
)
_NAMES = (
    *("purchase", "max_price", "reservation", "block_fee", "num_nodes", "allow_tcp", "max_hours", "max_cost"),
    *("detach", "bucket", "instance_profile", "role", "subnets", "security_groups", "placement_groups"),
    *("training_plan", "base_image", "image"),
)
#: What the parameters are that have a default.
_DEFAULTS = {"purchase": "on-demand", "max_hours": DEFAULT_MAX_MINUTES, "num_nodes": 1}
#: Parameters that mean nothing to the other backend, and what is to be done there instead.
_EC2_ONLY = {
    "instance_profile": "give --role ARN",
    "subnets": "leave it out: SageMaker's own network is used",
    "security_groups": "leave it out: SageMaker's own network is used",
    "placement_groups": "leave it out: SageMaker places the nodes of a job by itself",
}
_SAGEMAKER_ONLY = {"role": "give --instance-profile NAME, or --backend sagemaker"}


def cloud_options(command: Command) -> Command:
    """`command` with the options, as parameters that `take_cloud_options` takes out again."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_cloud_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the parameters of these options from `options`, and return them."""
    return {name: options.pop(name) for name in _NAMES}


#: What a rehearsal in containers heeds too.
_OF_CONTAINERS = ("num_nodes", "image", "base_image")


def check_local(typed: Mapping[str, Any], *, container: bool = False) -> None:
    """Raise UserError for an option that a run here would not heed.

    A rehearsal with --instance is the command for AWS with --local, and may have them.
    """
    heeded = _OF_CONTAINERS if container else ()
    given = [
        _option(name)
        for name, value in typed.items()
        if value and value != _DEFAULTS.get(name) and name not in heeded
    ]
    if given:
        raise UserError(f"{given[0]} is for AWS, and this trains here", f"leave {given[0]} out")


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in `a, b`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def make_cloud_options(
    typed: Mapping[str, Any], *, instances: tuple[str, ...], regions: tuple[str, ...], backend: str
) -> CloudOptions:
    """Return the options of AWS. Raises UserError for one that means nothing to the backend."""
    _check_backend(typed, backend)
    return CloudOptions(
        instances=instances,
        regions=regions,
        backend=backend,
        num_nodes=typed["num_nodes"],
        allow_tcp=typed["allow_tcp"],
        reservation=typed["reservation"],
        block_fee_usd=typed["block_fee"],
        training_plan=typed["training_plan"],
        purchase=typed["purchase"],
        max_price_usd=typed["max_price"],
        max_minutes=typed["max_hours"],
        image=typed["image"],
        base_image=typed["base_image"],
    )


def _check_backend(typed: Mapping[str, Any], backend: str) -> None:
    service, refused = ("EC2", _EC2_ONLY) if backend == "sagemaker" else ("SageMaker", _SAGEMAKER_ONLY)
    for name, instead in refused.items():
        if typed[name]:
            raise UserError(f"{_option(name)} is for {service}", instead)
    if not typed["placement_groups"]:
        return
    if typed["purchase"] == "capacity-block":
        raise UserError(
            "a capacity block's instances stand together by themselves, and take no placement group",
            "leave out --placement-group",
        )
    if typed["num_nodes"] == 1:
        raise UserError("--placement-group is for several nodes", "add --num-nodes, or leave it out")


def settings_with(settings: Settings, typed: Mapping[str, Any], regions: tuple[str, ...]) -> Settings:
    """Return the settings with the options typed for these regions in place of the config file's.

    Bucket, subnets, security and placement groups belong to one region. Raises UserError where several are
    allowed.
    """
    regional = {
        "bucket": typed["bucket"],
        "subnets": _by_zone("subnets", typed["subnets"], regions),
        "security_groups": typed["security_groups"],
        "placement_groups": _by_zone("placement_groups", typed["placement_groups"], regions),
    }
    if len(regions) > 1 and any(regional.values()):
        option = next(_option(name) for name, value in regional.items() if value)
        raise UserError(
            f"{option} belongs to one region, and {len(regions)} are allowed",
            "give one --region, or say it for each region under `aws` in the config file",
        )
    changes = {**regional, "instance_profile": typed["instance_profile"], "role": typed["role"]}
    changes = {name: value for name, value in changes.items() if value}
    if not changes:
        return settings
    changed = {name: replace(settings.aws.get(name, RegionSettings()), **changes) for name in regions}
    for name, here in changed.items():
        if problem := misfit(name, here):
            raise UserError(f"for {name}, {problem}", "correct the option, or the config file")
    return replace(settings, aws={**settings.aws, **changed})


def _option(name: str) -> str:
    """Return the option that gives this parameter."""
    return f"--{_REPEATED.get(name) or name.replace('_', '-')}"


#: Options that may be repeated, by their parameters; and an example of what those by zone take.
_REPEATED = {"subnets": "subnet", "security_groups": "security-group", "placement_groups": "placement-group"}
_EXAMPLES = {"subnets": ("ID", "subnet-0a1b2c"), "placement_groups": ("NAME", "fastlaunch-us-east-1a")}


def _by_zone(name: str, given: tuple[str, ...], regions: tuple[str, ...]) -> dict[str, str]:
    option, (kind, example) = _option(name), _EXAMPLES[name]
    by_zone: dict[str, str] = {}
    for text in given:
        zone, separator, value = (part.strip() for part in text.partition("="))
        if not (zone and separator and value):
            raise UserError(f"{option} {text!r} is not ZONE={kind}", f"give one such as us-east-1a={example}")
        if not any(zone.startswith(region) and zone != region for region in regions):
            raise UserError(
                f"{option}: {zone} is no zone of {' or '.join(regions)}", f"give --region {zone[:-1]}"
            )
        if zone in by_zone:
            what = option.removeprefix("--").replace("-", " ")
            raise UserError(f"{option}: {zone} is given twice", f"give one {what} per zone")
        by_zone[zone] = value
    return by_zone
