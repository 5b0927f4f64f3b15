"""The options of `submit` and `sweep` on the command line, made from `jobs.options.Options`; a job file."""

from pathlib import Path
from typing import Any

import click

from fastlaunch.cli.options import PROFILE_HELP, Decorator, Quantity, print_json, use_profile, with_options
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.options import HEADINGS, OPTIONS, SPEND, WHERE, Option, options_of

#: Headings of the options that concern one call and not the job, by parameter.
_HEADINGS_OF_CALLS = {"profile": WHERE, "dry_run": SPEND, "show": SPEND, "yes": SPEND, "resume": SPEND}

_WRITE_DASHES = "before the command of a script of your own write --"
#: Keys of click's context for a job file's command until the options are parsed, and for the typed words.
_COMMAND_OF_FILE, _TYPED = "fastlaunch.command", "fastlaunch.typed"
#: Set by `--profile` without a name, and by `--help-all`.
_PROFILES, _HELP_ALL = "fastlaunch.step_profile", "fastlaunch.help_all"


def _use_job_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Use a job file's options where none are typed."""
    if path is None:
        return
    from fastlaunch.jobs.job_file import read_job

    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path} is no job file, whose name ends with .yaml", _WRITE_DASHES)
    ctx.default_map, ctx.meta[_COMMAND_OF_FILE] = read_job(path, typed=ctx.meta[_TYPED])


def _print_job_schema(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given:
        from fastlaunch.jobs.job_file import job_schema

        print_json(job_schema())
        ctx.exit()


#: `submit [JOB_FILE]`, and the option that prints the schema for editors.
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


#: `--profile NAME` as in other commands; `--profile` without a name means --step-profile.
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


def _print_all_help(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class GroupedCommand(click.Command):
    """A command with many options; what follows `--` is its `command`.

    `--help` lists the options that most people use, `--help-all` all of them under headings.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        help_all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_all_help,
            help="Show all options and exit.",
        )
        return [*super().get_params(ctx), help_all]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, command = args, None
        if "--" in args:
            at = args.index("--")
            options, command = args[:at], tuple(args[at + 1 :])
        ctx.meta[_TYPED] = tuple(options)
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, options)
        if rest and not ctx.resilient_parsing:
            is_file = any(word.endswith((".yaml", ".yml")) for word in rest)
            hint = "submit takes one job file, and no other command takes any" if is_file else _WRITE_DASHES
            raise UserError(f"unexpected argument {rest[0]!r}", hint)
        if ctx.meta.get(_PROFILES):
            ctx.params["step_profile"] = True
        ctx.params["command"] = ctx.meta.get(_COMMAND_OF_FILE) if command is None else command
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = [
            (param.name, record)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx))
        ]
        if not ctx.meta.get(_HELP_ALL):
            with formatter.section("Options"):
                formatter.write_dl(
                    [
                        record
                        for heading in HEADINGS
                        for name, record in records
                        if _heading_of(name) == heading and _is_usual(name)
                    ]
                )
            return
        # Align the texts of all sections.
        width = max(len(usage) for _, (usage, _) in records)
        for heading in HEADINGS:
            rows = [
                (usage.ljust(width), text) for name, (usage, text) in records if _heading_of(name) == heading
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)


def _is_usual(name: str | None) -> bool:
    option = OPTIONS.get(str(name))
    return option.is_usual if option else name in ("dry_run", "yes", "help", "help_all")


def _heading_of(name: str | None) -> str:
    option = OPTIONS.get(str(name))
    return option.heading if option else _HEADINGS_OF_CALLS.get(str(name), HEADINGS[-1])


def declared_options(command: str, **helps: str) -> Decorator:
    """Return a decorator that adds the options of `Options`. helps: help texts to replace, by field."""
    return with_options(
        *(_click_option(name, option, helps.get(name)) for name, option in options_of(command).items())
    )


def _click_option(name: str, option: Option, text: str | None) -> Decorator:
    how: dict[str, Any] = {"help": text or option.help}
    if option.is_switch:
        # Some switches, such as --no-account-timer, turn something off.
        return click.option(
            option.flag, name, is_flag=True, flag_value=not option.default, default=option.default, **how
        )
    how["metavar"] = option.metavar
    if option.repeated:
        gathered = Quantity(option.flag, option.gather, of=tuple)
        how |= {"multiple": True, "callback": lambda ctx, param, value: gathered.convert(value, param, ctx)}
    else:
        is_read = option.parse is not None or option.commas
        how |= {"type": Quantity(option.flag, option.read) if is_read else None, "default": option.default}
    return click.option(option.flag, name, **how)
