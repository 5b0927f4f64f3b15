"""The `fastlaunch` command: a file per command group, imported when its command is called."""

import errno
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from typing import NoReturn

import click

from fastlaunch import __version__
from fastlaunch.cli.options import examples
from fastlaunch.core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USAGE, UnknownName, UserError
from fastlaunch.core.terminal import error_lines, plain_output, printable_message

#: heading -> command -> (module under fastlaunch.cli, one line of help).
GROUPS = {
    "Start": {
        "demo": ("demo", "Compare a published experiment with ours, in a second."),
        "workloads": ("catalogue", "List the workloads: what can be trained."),
        "recipes": ("catalogue", "List the recipes: how a workload can be trained."),
        "experiments": ("catalogue", "List the published experiments: sets of runs to repeat."),
    },
    "Run": {
        "submit": ("submit", "Train a workload, or a script of your own: here, or on AWS."),
        "sweep": ("sweep", "Measure recipes on several instance types, within one budget."),
        "status": ("follow", "Show how the last submission goes, and fetch its records."),
        "watch": ("watch", "Watch runs live: steps, loss, GPU use, cost, time left."),
        "logs": ("follow", "Show what a run printed; -f follows it."),
        "cancel": ("follow", "Stop a run and keep what it recorded."),
        "resume": ("submit", "Resume an interrupted run from its last checkpoint."),
    },
    "Decide": {
        "compare": ("compare", "Compare what a dollar bought: runs side by side, with verdicts."),
        "recommend": ("recommend", "Recommend an instance, a recipe and how to buy."),
        "estimate": ("estimate", "Estimate what a training will take and cost."),
        "predict": ("predict", "Predict throughput that nobody measured, from published runs."),
        "prices": ("prices", "Show what instances cost, with dates and sources; update them."),
    },
    "Share": {
        "report": ("report", "Write a report to share: a page, a picture, Markdown, CSV."),
        "runs": ("runs", "List all runs; show, import, export, share and remove them."),
    },
    "Account": {
        "init": ("init", "Make an AWS account ready for jobs, and write the config file."),
        "doctor": ("doctor", "Check what a job on AWS needs: login, quota, image, network."),
        "iam": ("iam", "Print what an account must allow: policies, or a template."),
        "build": ("build", "Build an image with the training code in it; --push it to ECR."),
        "reap": ("reap", "End leftover instances, jobs and schedules."),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
#: Names in other tools -> our command.
SYNONYMS = {
    **dict.fromkeys(("launch", "run", "train", "start", "up", "sbatch", "srun"), "submit"),
    **dict.fromkeys(("bench", "benchmark", "matrix", "grid"), "sweep"),
    **dict.fromkeys(("down", "stop", "kill", "delete", "scancel"), "cancel"),
    **dict.fromkeys(("ls", "list", "history", "show"), "runs"),
    **dict.fromkeys(("queue", "squeue", "sacct", "ps", "jobs"), "status"),
    **dict.fromkeys(("top", "htop", "monitor"), "watch"),
    **dict.fromkeys(("price", "offer", "offers", "instances", "gpus", "catalog"), "prices"),
    **dict.fromkeys(("setup", "configure", "bootstrap", "onboard"), "init"),
    **dict.fromkeys(("check", "diagnose"), "doctor"),
    **dict.fromkeys(("cleanup", "clean", "prune", "gc"), "reap"),
    **dict.fromkeys(("pull", "fetch", "sync", "download", "collect"), "status"),
    **dict.fromkeys(("tail", "log"), "logs"),
    **dict.fromkeys(("plot", "chart", "html", "dashboard"), "report"),
    "models": "workloads",
    "cost": "estimate",
    **dict.fromkeys(("forecast", "extrapolate"), "predict"),
    **dict.fromkeys(("optimize", "choose", "advise", "pick"), "recommend"),
}
#: Options of other tools, and those that ours had -> what to type.
OPTION_SYNONYMS = {
    "--spot": "--purchase spot",
    "--use-spot": "--purchase spot",
    **dict.fromkeys(("--nodes", "--nnodes", "--instance-count", "-N"), "--num-nodes N"),
    **dict.fromkeys(("--nproc-per-node", "--nproc_per_node"), "--nproc N"),
    "--cloud": "--instance TYPE",
    **dict.fromkeys(("--budget", "--max-budget", "--max-price-usd"), "--max-cost USD"),
    **dict.fromkeys(("--instance-type", "--type", "--machine"), "--instance TYPE"),
    **dict.fromkeys(("--time", "--timeout", "--time-limit", "--max-runtime", "--hours"), "--max-hours H"),
    **dict.fromkeys(("--bs", "--batch"), "--batch-size N"),
    **dict.fromkeys(("--name", "--job-name"), "--tag NAME=VALUE"),
    "--json": "--output json",
    "--dryrun": "--dry-run",
    "--async": "--detach",
    "--zone": "--subnet ZONE=ID",
}
#: Options of other tools for the GPUs of a machine: `8`, `gpu:8` or `A100:8`.
_GPU_OPTIONS = (
    "--gpu",
    "--gpus",
    "--num-gpus",
    "--gpus-per-node",
    "--gpus-per-task",
    "--gres",
    "--accelerators",
)


class LazyGroup(click.Group):
    """Knows the names and one-line helps of its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"fastlaunch.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        command.short_help = COMMANDS[cmd_name][1]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in group.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UnknownName("command", args[0], COMMANDS, synonyms=SYNONYMS)
        return super().resolve_command(ctx, args)


def _print_help_of_all(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    """Print the help of every command, with all its options."""
    if not is_given:
        return
    click.echo(ctx.get_help())
    for name in COMMANDS:
        command = fastlaunch.get_command(ctx, name)
        assert command is not None
        click.echo()
        takes_it = any("--help-all" in param.opts for param in command.get_params(ctx))
        # Parsing the option prints the help, and ends.
        with suppress(click.exceptions.Exit):
            command.make_context(name, ["--help-all" if takes_it else "--help"], parent=ctx)
    ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        ("a result, in a second", "fastlaunch demo"),
        ("measure three recipes on this machine", "fastlaunch submit --local --recipe fp32,bf16,compile"),
        ("what a job on AWS would do and cost at most", "fastlaunch submit --instance p5.48xlarge --dry-run"),
    ),
)
@click.option(
    "--help-all",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_help_of_all,
    help="Show the help of every command and exit.",
)
@click.version_option(__version__, prog_name="fastlaunch")
def fastlaunch() -> None:
    """Which AWS instance and training recipe give the most training per dollar: measure, compare, run."""


def main() -> NoReturn:
    """Run the command line: exit 0 done, 1 job failed, 2 usage, 3 AWS refused, 130 interrupted, 70 a bug."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str], obj: object = None) -> int:
    """Return the exit code of the command line `argv`; errors are printed on stderr. `help` is `--help`.

    obj: the `World` that the commands act on; by default they make one, see `fastlaunch.cli.context`.
    """
    if "_FASTLAUNCH_COMPLETE" in os.environ:
        fastlaunch.main(prog_name="fastlaunch")  # answers the shell's completion, and exits
    # Make all output safe to print, since much of it comes from jobs, machines and AWS.
    with redirect_stdout(plain_output(sys.stdout)), redirect_stderr(plain_output(sys.stderr)):
        return _run(argv, obj)


def _run(argv: list[str], obj: object) -> int:
    try:
        if argv[:1] == ["help"]:
            argv = [*argv[1:], "--help"]
        # `fastlaunch.main` would treat a closed pipe as a failure and an EOFError as Ctrl-C.
        with fastlaunch.make_context("fastlaunch", list(argv), obj=obj) as context:
            result = fastlaunch.invoke(context)
        click.echo(nl=False)  # flush, so that a closed pipe is noticed here and not at exit
    except click.exceptions.Exit as error:
        return error.exit_code
    except UserError as error:
        width = shutil.get_terminal_size().columns if sys.stderr and sys.stderr.isatty() else None
        hint = printable_message(error.hint) if error.hint else ""
        click.echo(error_lines(printable_message(error.message), hint, width), err=True)
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and (within := error.ctx):
            known = {name for param in within.command.get_params(within) for name in param.opts}
            ours = [text for text in _ours(error.option_name, argv) if text.partition(" ")[0] in known]
            if ours:
                meant = " or ".join(map(repr, ours))
                error = click.UsageError(f"{error.message} Did you mean {meant}?", within)
            elif error.option_name in (*OPTION_SYNONYMS, *_GPU_OPTIONS):
                # It means nothing here, and an option with a similar name would mislead.
                error = click.UsageError(error.message, within)
            elif within.command.name == "submit" and "--" not in argv:
                script = "A script's command, with its options, comes after --."
                error = click.UsageError(f"{error.format_message()} {script}", within)
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # `fastlaunch runs | head`: the reader has left, which is no error.
        _forget_output()
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            click.echo(f"error: the output cannot be written: {error.strerror}\n  free some space", err=True)
            _forget_output()
            return EXIT_USAGE
        import traceback

        traceback.print_exc()
        click.echo("this is a bug in fastlaunch: please report it with the traceback above", err=True)
        return EXIT_BUG
    return result if isinstance(result, int) else 0


def _ours(option: str, argv: Sequence[str]) -> list[str]:
    """Return what to type for an option of another tool in the command line `argv`."""
    if option not in _GPU_OPTIONS:
        return [OPTION_SYNONYMS[option]] if option in OPTION_SYNONYMS else []
    from fastlaunch.catalog.load import load_catalogue

    after = [*argv, ""]
    values = [
        after[at + 1] if word == option else word.removeprefix(f"{option}=") for at, word in enumerate(argv)
    ]
    word = next(value for value, typed in zip(values, argv, strict=True) if typed.partition("=")[0] == option)
    gpus = word.lower().removeprefix("gpu:")
    if gpus.isdecimal():
        # On AWS the instance type says how many GPUs there are; a number is of processes.
        is_placed = "--local" in argv or "--instance" in argv
        return [f"--nproc {gpus}", *([] if is_placed else ["--instance TYPE"])]
    types = load_catalogue().types_with(gpus)
    return [f"--gpu {gpus}", *([f"--instance {known.name}" for known in types[:3]] or ["--instance TYPE"])]


def _forget_output() -> None:
    """Drop unwritable output, which would make the interpreter fail at exit with code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
