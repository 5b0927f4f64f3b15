"""The options of `submit`, named as the fields that they fill, and what becomes of those for AWS."""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

import click

from fastlaunch.cli.options import (
    BATCH_SIZE,
    BYTES,
    COUNT,
    MINUTES,
    NPROC,
    POSITIVE_COUNT,
    SECONDS,
    USD,
    account_timer_option,
    with_options,
)
from fastlaunch.core.conventions import DEFAULT_MOST_ROUNDS, FIRST_LOOK, MAX_REPLACEMENTS, MOST_ROUNDS
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import Settings, misfit
from fastlaunch.jobs.options import (
    CloudOptions,
)

#: The headings of `submit --help`, and the parameters under them; all others are under the last.
HEADINGS: Mapping[str, tuple[str, ...]] = {
    "Train": (
        *(
            "recipes",
            "workload",
            "workload_arguments",
            "experiment",
            "batch_size",
            "steps",
            "epochs",
            "repeats",
            "until_resolved",
            "max_rounds",
            "add_to",
            "seed",
            "data",
        ),
        *("model", "tokenizer", "sequence_length", "checkpoint_every", "eval_every"),
    ),
    "Script": ("lists", "baseline", "nproc", "hang_timeout_s"),
    "Where": ("local", "backend", "instances", "regions", "num_nodes", "profile"),
    "Spend": (
        *("dry_run", "show", "yes", "max_cost_usd", "max_minutes", "purchase", "max_price_usd"),
        *("reservation", "block_fee_usd", "max_replacements", "detach", "account_timer"),
    ),
    "Network": ("subnets", "security_groups", "placement_groups", "allow_tcp"),
    "SageMaker": ("role", "training_plan", "container"),
    "Advanced": (),
}


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options under headings; what follows `--` is its `command`."""

    headings: ClassVar[Mapping[str, tuple[str, ...]]] = HEADINGS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, command = args, None
        if "--" in args:
            at = args.index("--")
            options, command = args[:at], tuple(args[at + 1 :])
        try:
            rest = super().parse_args(ctx, options)
        except click.UsageError as error:
            if command is None and error.message.startswith("Got unexpected extra argument"):
                raise UserError(
                    error.message.rstrip("."), "before the command of a script of your own write --"
                ) from None
            raise
        ctx.params["command"] = command
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))
        }
        *groups, last = self.headings.items()
        # All sections have their texts in one column.
        width = max(len(option) for option, _ in records.values())
        for heading, names in [*groups, (last[0], tuple(records))]:
            rows = [records.pop(name) for name in names if name in records]
            with formatter.section(heading):
                formatter.write_dl([(option.ljust(width), text) for option, text in rows])


#: Fields of `SubmitOptions`: what to train and how.
training_options = with_options(
    click.option(
        "--recipe",
        "recipes",
        multiple=True,
        metavar="NAME",
        help="Train with this recipe; several with commas, or repeated. `fastlaunch recipes` lists them."
        "  [default: bf16]",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Change a field of every recipe, such as compile_mode=max-autotune. May be repeated.",
    ),
    click.option(
        "--workload", metavar="NAME", help="Train this workload; `fastlaunch workloads` lists them."
    ),
    click.option(
        "--experiment",
        metavar="NAME",
        help="Repeat a published experiment: its workloads, recipes and batch sizes. "
        "`fastlaunch experiments` lists them.",
    ),
    click.option(
        "--batch-size",
        type=BATCH_SIZE,
        metavar="N|auto",
        help="Train on this many samples per GPU and step; auto finds the most that fit all recipes, "
        "auto-each the most that fit each.",
    ),
    click.option(
        "--memory-budget",
        type=BYTES,
        metavar="SIZE",
        help="Let auto fill this much memory, such as 2GiB, where there is no GPU.  [default: 1GiB]",
    ),
    click.option(
        "--steps",
        type=COUNT,
        help="Take this many optimizer steps per run.  [default: 200, or the experiment's]",
    ),
    click.option("--epochs", type=COUNT, help="Train for this many passes over the data instead of --steps."),
    click.option(
        "--repeats",
        type=COUNT,
        default=1,
        show_default=True,
        help="Run each recipe or variant this often, interleaved.",
    ),
    click.option(
        "--until-resolved",
        is_flag=True,
        help="Run rounds until every recipe's verdict is settled; a settled one stops.",
    ),
    click.option(
        "--max-rounds",
        type=COUNT,
        metavar="N",
        help=f"Until all is settled, run at most this many rounds, {FIRST_LOOK} to {MOST_ROUNDS}."
        f"  [default: {DEFAULT_MOST_ROUNDS}]",
    ),
    click.option(
        "--add-to",
        metavar="SUBMISSION",
        help="Make these more runs of that submission: `compare` shows both. It prints the command.",
    ),
    click.option(
        "--seed", type=COUNT, default=0, show_default=True, help="Seed the weights and the order of the data."
    ),
    click.option(
        "-L",
        "lists",
        multiple=True,
        metavar="NAME=A,B",
        help="Run COMMAND with each of these in place of {NAME}; several -L make every combination.",
    ),
    click.option(
        "--baseline",
        metavar="NAME=A",
        help="Compare the variants with this one.  [default: the first]",
    ),
    click.option(
        "--nproc",
        type=NPROC,
        metavar="N|gpu",
        help="Start this many processes, a Python script under torchrun; gpu is one per GPU.  "
        "[default: one per GPU, one on a CPU; a script as it is]",
    ),
    click.option(
        "--hang-timeout",
        "hang_timeout_s",
        type=SECONDS,
        metavar="S",
        help="End a script without a step for this long; 10min works too.  [default: never]",
    ),
    click.option(
        "--data",
        metavar="SOURCE",
        help="Read synthetic, loader, folder:PATH or file:PATH.  [default: synthetic, or the experiment's]",
    ),
    click.option(
        "--num-workers",
        type=COUNT,
        help="Load that data with this many processes per GPU.  [default: a share of the cores, at most 12]",
    ),
    click.option(
        "--checkpoint-every",
        type=COUNT,
        default=0,
        help="Save a checkpoint every so many steps.  [default: none]",
    ),
    click.option(
        "--eval-every",
        type=COUNT,
        help="Evaluate on held-out data every so many steps, and at the end.  [default: never]",
    ),
    click.option(
        "--model", metavar="PATH|HUB_ID", help="Train this language model: a folder, or a name on the hub."
    ),
    click.option(
        "--tokenizer",
        metavar="PATH|HUB_ID",
        help="Split text with this tokenizer.  [default: the model's, else bytes]",
    ),
    click.option(
        "--sequence-length",
        type=POSITIVE_COUNT,
        metavar="TOKENS",
        help="Cut text into samples of this many tokens.",
    ),
    click.option(
        "--set-workload",
        "workload_arguments",
        multiple=True,
        metavar="KEY=VALUE",
        help="Call the function of ./file.py:function with this argument. May be repeated.",
    ),
)

#: Fields of `CloudOptions` that `doctor` checks as well: what is bought.
purchase_options = with_options(
    click.option(
        "--purchase",
        default="on-demand",
        show_default=True,
        metavar="OPTION",
        help="Buy on-demand, spot (which AWS may take back at two minutes' notice) or capacity-block.",
    ),
    click.option(
        "--max-price",
        "max_price_usd",
        type=USD,
        metavar="USD",
        help="Pay at most this for an hour of EC2 spot.",
    ),
    click.option(
        "--reservation", metavar="cr-ID", help="Run in this capacity block, which you have bought before."
    ),
    click.option(
        "--block-fee",
        "block_fee_usd",
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
    click.option("--training-plan", metavar="ARN", help="Run in this reserved capacity of SageMaker."),
)

#: The other fields of `CloudOptions`, those of `RegionSettings`, and what becomes of the submission.
cloud_options = with_options(
    purchase_options,
    click.option(
        "--max-hours",
        "max_minutes",
        type=MINUTES,
        default="2",
        show_default=True,
        metavar="H",
        help="Turn the machine off after this long; 90min works too.",
    ),
    click.option(
        "--max-replacements",
        type=COUNT,
        default=MAX_REPLACEMENTS,
        show_default=True,
        metavar="N",
        help="Replace a machine with a faulty GPU at most this often, within --max-hours and the ceiling.",
    ),
    click.option(
        "--max-cost",
        "max_cost_usd",
        type=USD,
        metavar="USD",
        help="Refuse a submission that may cost more.",
    ),
    click.option(
        "--detach", is_flag=True, help="Return once it runs. Timers end what hangs or is forgotten."
    ),
    account_timer_option,
    click.option(
        "--tag",
        "tags",
        multiple=True,
        metavar="KEY=VALUE",
        help="Tag machines, volumes, network interfaces and training jobs; may be repeated.  "
        "[default: the config's, and Owner]",
    ),
    click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME=ARN",
        help="Give jobs this secret or parameter as the variable NAME, read where they run; may be repeated.",
    ),
    click.option(
        "--env",
        "variables",
        multiple=True,
        metavar="NAME=VALUE",
        help="Give jobs this variable; may be repeated. It is stored as it is: for a password use --secret.",
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
    click.option(
        "--base-image", metavar="TAG", help="Use this container image of AWS.  [default: the newest]"
    ),
    click.option(
        "--image", metavar="URI@sha256:...", help="Use this container image, made by `fastlaunch build`."
    ),
)

#: Options of one backend alone, and what to do instead on the other.
_EC2_ONLY = {
    "instance_profile": "give --role ARN",
    "subnets": "leave it out; `sagemaker_subnets` in the config file names those of jobs",
    "security_groups": "leave it out; `sagemaker_security_groups` in the config file names those of jobs",
    "placement_groups": "leave it out: SageMaker places the nodes of a job by itself",
}
_SAGEMAKER_ONLY = {"role": "give --instance-profile NAME, or --backend sagemaker"}


def take_fields(values: dict[str, Any], of: type) -> dict[str, Any]:
    """Move the values that are fields of a dataclass out of `values`, and return them."""
    names = {field.name for field in fields(of)} & values.keys()
    return {name: values.pop(name) for name in names}


def check_local(values: Mapping[str, Any], *, used: Collection[str]) -> None:
    """Raise UserError if one of these options for AWS was given. used: those that count here as well."""
    defaults = {field.name: field.default for field in fields(CloudOptions)}
    for name, value in values.items():
        if value not in (None, (), defaults.get(name)) and name not in used:
            raise UserError(f"{_option(name)} is for AWS, and this trains here", f"leave {_option(name)} out")


def check_backend(region_fields: Mapping[str, Any], cloud: CloudOptions) -> None:
    """Raise UserError for an option that means nothing to the backend."""
    service, refused = ("EC2", _EC2_ONLY) if cloud.backend == "sagemaker" else ("SageMaker", _SAGEMAKER_ONLY)
    for name, hint in refused.items():
        if region_fields[name]:
            raise UserError(f"{_option(name)} is for {service}", hint)
    if not region_fields["placement_groups"]:
        return
    if cloud.purchase == "capacity-block":
        raise UserError(
            "a capacity block's instances stand together by themselves, and take no placement group",
            "leave out --placement-group",
        )
    if cloud.num_nodes == 1:
        raise UserError("--placement-group is for several nodes", "add --num-nodes, or leave it out")


def settings_with(settings: Settings, region_fields: Mapping[str, Any], regions: tuple[str, ...]) -> Settings:
    """Return the settings with these fields, where given, in place of the config file's for `regions`.

    Bucket, subnets, security and placement groups belong to one region. Raises UserError where several are
    allowed.
    """
    changes = {name: value for name, value in region_fields.items() if value}
    for name, (value, example) in _BY_ZONE.items():
        if name in changes:
            changes[name] = _by_zone(_option(name), changes[name], regions, value=value, example=example)
    of_one_region = [name for name in changes if name not in ("instance_profile", "role")]
    if len(regions) > 1 and of_one_region:
        raise UserError(
            f"{_option(of_one_region[0])} belongs to one region, and {len(regions)} are allowed",
            "give one --region, or say it for each region under `aws` in the config file",
        )
    if not changes:
        return settings
    changed = {name: replace(settings.region_settings(name), **changes) for name in regions}
    for name, region_settings in changed.items():
        if problem := misfit(name, region_settings):
            raise UserError(f"for {name}, {problem}", "correct the option, or the config file")
    return replace(settings, aws={**settings.aws, **changed})


#: Options given as ZONE=value: what the value is called, and an example.
_BY_ZONE = {"subnets": ("ID", "subnet-0a1b2c"), "placement_groups": ("NAME", "fastlaunch-us-east-1a")}


def _by_zone(
    option: str, texts: tuple[str, ...], regions: tuple[str, ...], *, value: str, example: str
) -> dict[str, str]:
    by_zone: dict[str, str] = {}
    for text in texts:
        zone, separator, name = (part.strip() for part in text.partition("="))
        if not (zone and separator and name):
            raise UserError(
                f"{option} {text!r} is not ZONE={value}", f"give one such as us-east-1a={example}"
            )
        if not any(zone.startswith(region) and zone != region for region in regions):
            raise UserError(
                f"{option}: {zone} is no zone of {' or '.join(regions)}", f"give --region {zone[:-1]}"
            )
        if zone in by_zone:
            raise UserError(f"{option}: {zone} is given twice", "give one per zone")
        by_zone[zone] = name
    return by_zone


def _option(name: str) -> str:
    """Return the option of this command that fills the parameter."""
    return next(param.opts[0] for param in click.get_current_context().command.params if param.name == name)
