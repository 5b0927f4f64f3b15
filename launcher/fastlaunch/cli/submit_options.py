"""The options of `submit`, named as the fields that they fill."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import click

from fastlaunch.cli.options import (
    BATCH_SIZE,
    BYTES,
    COUNT,
    MINUTES,
    NPROC,
    POSITIVE_COUNT,
    PROFILE_HELP,
    SECONDS,
    USD,
    account_timer_option,
    use_profile,
    with_options,
)
from fastlaunch.core.conventions import DEFAULT_MOST_ROUNDS, FIRST_LOOK, MAX_REPLACEMENTS, MOST_ROUNDS
from fastlaunch.core.errors import UserError
from fastlaunch.core.paths import shipped

#: What a job needs besides its code.
NEEDS = ("requirements", "requirements_from_index", "inputs")
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
        *("model", "tokenizer", "sequence_length", "checkpoint_every", "eval_every", "step_profile"),
    ),
    "Script": ("lists", "baseline", "nproc", "hang_timeout_s", *NEEDS),
    "Where": ("local", "backend", "instances", "regions", "num_nodes", "profile"),
    "Spend": (
        *("dry_run", "show", "yes", "max_cost_usd", "max_minutes", "purchase", "max_price_usd"),
        *("reservation", "block_fee_usd", "max_replacements", "detach", "account_timer"),
    ),
    "Network": ("subnets", "security_groups", "placement_groups", "allow_tcp"),
    "SageMaker": ("role", "training_plan", "container"),
    "Advanced": (),
}


_WRITE_DASHES = "before the command of a script of your own write --"
#: Where a job file's command stands until the options are parsed, and what was typed.
_COMMAND_OF_FILE, _TYPED = "fastlaunch.command", "fastlaunch.typed"
#: Set by `--profile` without a name.
_PROFILES = "fastlaunch.step_profile"


def _use_job_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Let the options of a job file count where they are not typed."""
    if path is None:
        return
    from fastlaunch.cli.job_file import read_job

    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} is no job file, whose name ends with .yaml", _WRITE_DASHES)
    ctx.default_map, ctx.meta[_COMMAND_OF_FILE] = read_job(path, ctx, typed=ctx.meta[_TYPED])


def _print_job_schema(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given:
        click.echo(shipped("docs/job.schema.json").read_text(encoding="utf-8"), nl=False)
        ctx.exit()


#: `submit [JOB_FILE]`, and what describes one to an editor.
job_file_arguments = with_options(
    click.argument(
        "job_file",
        required=False,
        metavar="[JOB.yaml]",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_use_job_file,
    ),
    click.option(
        "--job-schema",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_job_schema,
        help="Print the JSON schema of job files, for your editor, and end.",
    ),
)


def _use_or_make_profile(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value == "":
        ctx.meta[_PROFILES] = True
    else:
        use_profile(ctx, param, value)


#: `--profile NAME` as other commands have it, and `--profile` alone for --step-profile.
training_profile_option = click.option(
    "--profile",
    is_flag=False,
    flag_value="",
    metavar="NAME",
    expose_value=False,
    is_eager=True,
    callback=_use_or_make_profile,
    help=PROFILE_HELP,
)


class GroupedCommand(click.Command):
    """A command whose `--help` lists its options under headings; what follows `--` is its `command`."""

    headings: ClassVar[Mapping[str, tuple[str, ...]]] = HEADINGS

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, command = args, None
        if "--" in args:
            at = args.index("--")
            options, command = args[:at], tuple(args[at + 1 :])
        ctx.meta[_TYPED] = tuple(options)
        try:
            rest = super().parse_args(ctx, options)
        except click.UsageError as error:
            if command is None and error.message.startswith("Got unexpected extra argument"):
                is_file = any(word.endswith((".yaml", ".yml")) for word in options)
                hint = "only submit takes a job file" if is_file else _WRITE_DASHES
                raise UserError(error.message.rstrip("."), hint) from None
            raise
        if ctx.meta.get(_PROFILES):
            ctx.params["step_profile"] = True
        ctx.params["command"] = ctx.meta.get(_COMMAND_OF_FILE) if command is None else command
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {
            param.name: record
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx))
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
        help="Run COMMAND with each of these in place of {NAME}; several -L make every combination. Write a "
        r"comma in a value as \, or in brackets.",
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
        "--step-profile",
        is_flag=True,
        help="After the last step, profile a few more: where a step's time goes. A bare --profile does, too.",
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
        help="Refuse a submission that may cost more.  [default: `max_cost` of the config file]",
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
        "--requirements",
        metavar="FILE",
        help="Resolve this file of pip's into wheels here, and install them before the job starts.",
    ),
    click.option(
        "--requirements-from-index",
        is_flag=True,
        help="Let the machine's own pip resolve that file, from its index.",
    ),
    click.option(
        "--input",
        "inputs",
        multiple=True,
        metavar="NAME=s3://...",
        help="Fetch this folder of S3 before the clock starts; $FASTLAUNCH_INPUT_NAME says where it is. "
        "May be repeated.",
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
