"""`fastlaunch submit`, which makes and runs jobs here or on AWS, and `fastlaunch resume`."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.api import submission as api
from fastlaunch.api.results import Runs, Submitted
from fastlaunch.cli.context import app_context
from fastlaunch.cli.options import (
    examples,
    next_command,
    print_json,
    profile_option,
    table_or_json_option,
    yes_option,
)
from fastlaunch.cli.render import answer_of, print_runs
from fastlaunch.cli.submit_options import (
    GroupedCommand,
    declared_options,
    job_file_arguments,
    training_profile_option,
)
from fastlaunch.core.errors import EXIT_DONE, UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.units import by_reason
from fastlaunch.jobs.job import Job
from fastlaunch.lifecycle.handover import ENGINES, task_file
from fastlaunch.lifecycle.world import World

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.lifecycle.launcher import Launcher
from fastlaunch.jobs.working_directory import shown
from fastlaunch.lifecycle.announcement import (
    DryRun,
    expected_json,
    plan_text,
    request_text,
    to_be_given,
    user_data_text,
)


@click.command(
    cls=GroupedCommand,
    epilog=examples(
        (
            "compare three recipes on this machine, until the verdicts are settled",
            "fastlaunch submit --local --recipe fp32,bf16,compile --until-resolved",
        ),
        (
            "what a job on AWS would do and cost at most; starts nothing",
            "fastlaunch submit --instance p5.48xlarge --recipe bf16,te-fp8 --dry-run",
        ),
        (
            "run it, for at most $80; where there is no capacity, on the next type",
            "fastlaunch submit --instance p5.48xlarge,p5en.48xlarge --recipe bf16,te-fp8 --max-cost 80",
        ),
        (
            "two variants of a script of your own",
            "fastlaunch submit --local -L amp=fp32,bf16 -- python train.py --amp {amp}",
        ),
        ("options from a file", "fastlaunch submit job.yaml --dry-run"),
    ),
)
@job_file_arguments
@click.option("--dry-run", is_flag=True, help="Print the plan; start, write and ask nothing.")
@click.option(
    "--show",
    type=click.Choice(["request", "user-data", "files"]),
    metavar="WHAT",
    help="With --dry-run for AWS: print only the `request`, the `user-data`, or the `files` that travel.",
)
@click.option(
    "--emit",
    type=click.Choice(list(ENGINES)),
    metavar="ENGINE",
    help="With --dry-run for AWS: print a task file for `skypilot`, `dstack`, `sbatch` or AWS `batch`.",
)
@yes_option
@declared_options("submit")
@table_or_json_option
@training_profile_option
def submit(dry_run: bool, show: str | None, emit: str | None, output: str, yes: bool, **options: Any) -> int:
    """Train a workload with a recipe: here, or on AWS. Or run COMMAND, a script of your own.

    By default it trains vit-huge at batch 64, or without a GPU vit-tiny at batch 8, for 200 steps with recipe
    bf16. With several recipes, repeats run A B, B A, A B, so that drift meets them all alike. JOB.yaml holds
    options under their names, as in `instance: p5.48xlarge`; options that you type override it.
    """
    context = app_context()
    for option, value in (("--show", show), ("--emit", emit)):
        if value and (not dry_run or output != "table"):
            raise _is_for_aws(option)
    result = api.submit(context=context, dry_run=dry_run, yes=yes, **options)
    if isinstance(result, Submitted):
        print_runs(result.runs, output=output, answer=answer_of(context, result.runs))
        return result.exit_code
    if emit:
        if not result.placement.sites:
            raise _is_for_aws("--emit")
        click.echo(task_file(emit, result.jobs, result.placement.sites[0]), nl=False)
    elif result.placement.sites:
        _print_dry_run(result, argv=context.argv, output=output, show=show)
    elif show:
        raise _is_for_aws("--show")
    elif output == "json":
        plans = [asdict(plan) for plan in result.plans]
        print_json(plans[0] if len(plans) == 1 else {"plans": plans})
    else:
        click.echo(_plans_text(result.plans, result.jobs))
    return EXIT_DONE


def _print_dry_run(dry_run: DryRun, *, argv: Sequence[str], output: str, show: str | None) -> None:
    """Print what a submission for AWS would do, as text or JSON. argv: of the command, without its name.

    Raises UserError for a --show of a part that the plan lacks.
    """
    (plan,), directory = dry_run.plans, dry_run.placement.directory
    if output == "json":
        for reason in by_reason(dry_run.placement.skipped):
            click.echo(f"left out: {reason}", err=True)
        files = {"files": [file.path for file in directory.files]} if directory else {}
        expected = {"expected": expected_json(dry_run.expected)}
        print_json({**asdict(plan), **expected, **files})
    elif show == "files":
        if directory is None:
            raise UserError(
                "--show files lists what travels with a script", "end with one: -- python train.py"
            )
        click.echo("\n".join(f"{file.num_bytes:>11,}  {shown(file.path)}" for file in directory.files))
    elif show is not None:
        click.echo(request_text(plan) if show == "request" else user_data_text(plan))
    else:
        click.echo(plan_text(dry_run))
        if not dry_run.lacks_scheduler and not to_be_given(plan):
            command, *words = (word for word in argv if word != "--dry-run")
            if dry_run.placement.ceiling.is_above(dry_run.budget_usd):
                words = ["--max-cost", str(math.ceil(dry_run.placement.ceiling.usd)), *words]
            next_command(shlex.join(["fastlaunch", command, *words]))


def _is_for_aws(option: str) -> UserError:
    return UserError(
        f"{option} is for a dry run for AWS, in words", "give --instance and --dry-run without --output json"
    )


def _plans_text(plans: Sequence[Plan], jobs: Sequence[Job]) -> str:
    lines = []
    repeats: dict[Job, list[tuple[Plan, Job]]] = {}
    for plan, job in zip(plans, jobs, strict=True):
        repeats.setdefault(job.without_seed, []).append((plan, job))
    for alike in repeats.values():
        plan, job = alike[0]
        environment = [f"{name}={shlex.quote(value)}" for name, value in plan.request["env"].items()]
        number = f"at most {len(alike)}" if job.max_rounds else str(len(alike))
        times = f", {number} times" if len(alike) > 1 else ""
        if times and not job.script:
            times += f", seeds {job.seed} to {alike[-1][1].seed}"
        lines += [f"{job.label} on {job.workload}{times}:"]
        lines += [f"  {' '.join([*environment, shlex.join(plan.request['argv'])])}", ""]
    runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs, one after another"
    if jobs[0].max_rounds:
        rows = "variant" if jobs[0].script else "recipe"
        runs = f"at most {runs}, until the verdict on each {rows} is settled"
    return "\n".join([*lines, f"Planned, not started: {runs}, on this machine, for which nothing is billed."])


@click.command(
    epilog=examples(
        ("go on where it stopped", "fastlaunch resume k3f9"),
        ("on AWS, for at most $40, without following it", "fastlaunch resume k3f9 --max-cost 40 --detach"),
    )
)
@click.argument("run")
@declared_options(
    "resume",
    max_cost_usd="Refuse if it may cost more.  [default: `max_cost` of the config file]",
    detach="Return once a machine has started.",
)
@table_or_json_option
@yes_option
@profile_option
def resume(
    run: str, max_cost_usd: float | None, detach: bool, account_timer: bool, output: str, yes: bool
) -> int:
    """Resume an interrupted run from its last checkpoint.

    RUN is a run's id, or the beginning or end of it. A run of this machine goes on here. On AWS a new machine
    of the same type goes on with it, for the minutes that earlier machines left of its limit. SageMaker
    resumes a spot job that it took back by itself: resume only one that stopped or failed.
    """
    from fastlaunch.lifecycle.launcher import open_launcher
    from fastlaunch.lifecycle.reconcile import reconcile

    context = app_context()
    with open_launcher(context, {**context.backends, **context.cloud_backends}) as launcher:
        reconcile(launcher.ledger, context.backends, context.settings)
        chosen = launcher.ledger.get(run)
        if chosen.backend == "local":
            for option, is_given in (("--max-cost", max_cost_usd is not None), ("--detach", detach)):
                if is_given:
                    raise UserError(f"{option} is for AWS, and this goes on here", f"leave {option} out")
        else:
            _ask(context, launcher, chosen, max_cost_usd=max_cost_usd, yes=yes)
        resumed = launcher.resume(chosen, detach=detach, account_timer=account_timer)
    print_runs([resumed], output=output, answer=answer_of(context, [resumed]))
    return Submitted(runs=Runs([resumed]), is_stopped=bool(launcher.stop.by)).exit_code


def _ask(context: World, launcher: "Launcher", run: "Run", *, max_cost_usd: float | None, yes: bool) -> None:
    """Say where the run would resume and what that may cost. Return if the user agrees."""
    from fastlaunch.lifecycle.budgets import check_budgets, others_of
    from fastlaunch.lifecycle.resume import resumable
    from fastlaunch.placement.cost_ceiling import NOT_COUNTED, check_budget, cost_ceiling

    plan = resumable(run, backends=launcher.cloud_backends, ledger=launcher.ledger)
    ceiling = cost_ceiling(plan.placements, num_nodes=plan.num_nodes, max_minutes=plan.minutes_left)
    check_budget(ceiling, context.settings.budget_usd(max_cost_usd))
    check_budgets(launcher, ceiling.usd, others=others_of(launcher))
    click.echo(
        f"from {plan.origin}, with {plan.minutes_left} minutes left; {ceiling}\n{NOT_COUNTED}", err=True
    )
    context.confirm(f"go on with {run.id}?", yes=yes)
