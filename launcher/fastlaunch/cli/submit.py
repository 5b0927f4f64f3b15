"""`fastlaunch submit`: options to jobs, jobs to plans, and they run: here, or on AWS (submit_cloud.py)."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from fastlaunch.backends.protocol import Backend
from fastlaunch.cli.context import AppContext, app_context, open_launcher
from fastlaunch.cli.options import NAMES, profile_option, split_names, table_or_json_option, yes_option
from fastlaunch.cli.render import exit_code_of, print_runs
from fastlaunch.cli.submit_options import (
    GroupedCommand,
    check_backend,
    check_local,
    cloud_options,
    settings_with,
    take_fields,
    training_options,
)
from fastlaunch.core.errors import EXIT_DONE, UnknownName, UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.settings import RegionSettings
from fastlaunch.jobs.build import Jobs, build_jobs
from fastlaunch.jobs.options import BACKENDS, ML, CloudOptions, SubmitOptions, backend_of
from fastlaunch.jobs.spec import JobSpec
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: Stands for the id that a run gets when it is submitted.
_RUN_ID = "<run-id>"


@click.command(cls=GroupedCommand, short_help="Train a workload with a recipe: here, or on AWS.")
@click.option("--local", is_flag=True, help="Train on this machine: short for --backend local.")
@click.option(
    "--backend",
    metavar="NAME",
    help="Train on local, ec2 or sagemaker; --instance implies ec2, or sagemaker with ml. before it.",
)
@click.option(
    "--container",
    is_flag=True,
    help="With --local --backend sagemaker: rehearse the job in containers here, by the SageMaker SDK.",
)
@click.option(
    "--instance",
    "instances",
    type=NAMES,
    metavar="TYPE[,TYPE]",
    help="Train on this instance type; on the next where there is no capacity (`sweep` trains on each). "
    "With --local: rehearse for it here.",
)
@click.option(
    "--region",
    "regions",
    type=NAMES,
    metavar="REGION[,REGION]",
    help="Buy it in this region, else in the next.  [default: yours, or us-east-1]",
)
@training_options
@cloud_options
@click.option("--dry-run", is_flag=True, help="Print the plan; start, write and ask nothing.")
@click.option(
    "--show",
    type=click.Choice(["request", "user-data", "files"]),
    metavar="WHAT",
    help="With --dry-run for AWS: print only the `request`, the `user-data`, or the `files` that travel.",
)
@table_or_json_option("the runs are")
@yes_option
@profile_option
def submit(
    local: bool,
    container: bool,
    backend: str | None,
    instances: tuple[str, ...] | None,
    regions: tuple[str, ...] | None,
    max_cost_usd: float | None,
    dry_run: bool,
    show: str | None,
    output: str,
    yes: bool,
    **fields: Any,
) -> int:
    """Train a workload with a recipe: here, or on AWS. Or run COMMAND, a script of your own.

    Defaults that work: without a GPU vit-tiny at batch 8, with one vit-huge at 64; recipe bf16, 200 steps.
    With several recipes, repeats run A B, B A, A B, so that what changes with time meets them all alike.

    \b
      fastlaunch submit --local --recipe fp32,bf16,compile --until-resolved
      fastlaunch submit --local --instance p5.48xlarge --recipe te-fp8
      fastlaunch submit --local --experiment fusion --repeats 5
      fastlaunch submit --local -L amp=fp32,bf16 -- python train.py --amp {amp}
      fastlaunch submit --instance p5.48xlarge,p5en.48xlarge --dry-run
      fastlaunch submit --instance p5.48xlarge --dry-run -- python train.py
      fastlaunch submit --instance ml.p5.48xlarge --num-nodes 2 --dry-run
    """
    context, given_regions = app_context(), regions
    regions = regions or split_names(context.settings.region)
    name = backend_name(context, local=local, container=container, named=backend, instances=instances)
    if fields["command"] is not None and container:
        raise UserError("--container rehearses a workload of ours, not a script", "leave out --container")
    if show and not (dry_run and name in BACKENDS and output == "table"):
        raise UserError(
            "--show is for a dry run for AWS, in words", "give --instance and --dry-run without --output json"
        )
    cloud_fields, region_fields = take_fields(fields, CloudOptions), take_fields(fields, RegionSettings)
    fields["recipes"] = tuple(recipe for text in fields["recipes"] for recipe in split_names(text))
    cloud = CloudOptions(instances=instances or (), regions=regions, backend=name, **cloud_fields)
    options = SubmitOptions(region=regions[0], **fields)
    _check_add_to(context, options)
    if name in BACKENDS:
        from fastlaunch.cli.submit_cloud import submit_to_cloud

        check_backend(region_fields, cloud)
        settings = settings_with(context.settings, region_fields, regions)
        return submit_to_cloud(
            replace(context, settings=settings),
            options,
            cloud,
            max_cost_usd=max_cost_usd,
            dry_run=dry_run,
            show=show,
            output=output,
            yes=yes,
        )
    if instances is None:
        check_local(
            {**cloud_fields, **region_fields, "max_cost_usd": max_cost_usd, "regions": given_regions},
            used=("num_nodes", "image", "base_image", "regions") if container else (),
        )
    else:
        # A rehearsal for AWS is the same command with --local; of several types it rehearses the first.
        options = replace(options, instance=next(iter(instances), "").removeprefix(ML))
    jobs = _build(context, options, image=cloud.image if container else None)
    # In containers there are as many nodes as on AWS.
    num_missing_nodes = 0 if container else cloud.num_nodes - 1
    for line in _rehearsal(options, instances, jobs, num_missing_nodes):
        click.echo(line, err=True)
    for caveat in jobs.caveats:
        click.echo(f"warning: {caveat}", err=True)
    runner, specs = context.backends[name], jobs.specs
    if container:
        from fastlaunch.cli.submit_container import containers

        runner, specs = containers(context, specs, cloud)
    if dry_run:
        plans = [runner.plan({_RUN_ID: spec}) for spec in specs]
        click.echo(_plans_json(plans) if output == "json" else _plans_text(plans, specs))
        return EXIT_DONE
    if not container and options.command is None:
        check_installed(context, jobs)
    return _run(context, runner, specs, options, output=output)


def _check_add_to(context: AppContext, options: SubmitOptions) -> None:
    """Raise UserError if there is no submission that these runs would add to. Makes no ledger."""
    if options.add_to is None:
        return
    from fastlaunch.ledger.ledger import LEDGER_NAME, open_ledger

    if not (context.settings.home / LEDGER_NAME).exists():
        raise UserError(f"there is no submission {options.add_to}", "nothing was submitted here yet")
    with open_ledger(context.settings, clock=context.now) as ledger:
        ledger.check_submission(options.add_to)


def backend_name(
    context: AppContext, *, local: bool, container: bool, named: str | None, instances: Sequence[str] | None
) -> str:
    """Return where to train. Raises UserError if the options do not say, or contradict each other."""
    if container:
        if not local or named != "sagemaker":
            raise UserError(
                "--container rehearses a SageMaker job here", "give --local --container --backend sagemaker"
            )
        return "local"
    if local and named not in (None, "local"):
        raise UserError(f"--local is short for --backend local, not {named}", "give one of the two")
    if local:
        return "local"
    on_aws = _typed(context, "--instance", "p5.48xlarge")
    if named is None and instances is None:
        here = f"on this machine, type: {_typed(context, '--local')}"
        raise UserError(
            "it does not say where to train", here if "--" in context.argv else f"{here}\n  on AWS: {on_aws}"
        )
    if named not in (None, *context.backends, *BACKENDS):
        raise UnknownName("backend", str(named), (*context.backends, *BACKENDS))
    if named in BACKENDS and instances is None:
        raise UserError("it does not say on which instance type", f"type: {on_aws}")
    return named if named == "local" else backend_of(instances or (), named)


def _typed(context: AppContext, *more: str) -> str:
    """Return the command line as typed, with more options."""
    at = context.argv.index("--") if "--" in context.argv else len(context.argv)
    return shlex.join(["fastlaunch", *context.argv[:at], *more, *context.argv[at:]])


def _build(context: AppContext, options: SubmitOptions, *, image: str | None) -> Jobs:
    catalogue = None
    # It also says what a GPU can do.
    if options.instance is not None or context.machine.devices:
        from fastlaunch.catalog.load import load_catalogue

        catalogue = load_catalogue(context.settings.prices)
    return build_jobs(options, machine=context.machine, catalogue=catalogue, image=image)


def _rehearsal(
    options: SubmitOptions, instances: Sequence[str] | None, jobs: Jobs, num_missing_nodes: int
) -> list[str]:
    """Return lines on what the jobs here leave out of those on AWS, or of the experiment."""
    nodes = [("nodes", f"{num_missing_nodes + 1}; here: 1")] if num_missing_nodes else []
    differences = [*nodes, *jobs.differences]
    if not differences:
        return []
    width = max(len(name) for name, _ in differences)
    return [
        f"rehearsing for {options.instance} on this machine, which does not cover:"
        if instances
        else f"experiment {options.experiment} on this machine is not, in all, as it was published:",
        *(f"  {name:<{width}}  {how}" for name, how in differences),
    ]


def _plans_json(plans: Sequence[Plan]) -> str:
    shown = [plan.to_json() for plan in plans]
    return json.dumps(shown[0] if len(shown) == 1 else {"plans": shown}, indent=2)


def _plans_text(plans: Sequence[Plan], jobs: Sequence[JobSpec]) -> str:
    lines = []
    repeats: dict[JobSpec, list[tuple[Plan, JobSpec]]] = {}
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


def check_installed(context: AppContext, jobs: Jobs) -> None:
    missing = context.machine.missing(workload.module for workload in jobs.workloads)
    if missing:
        raise UserError(
            f"training here needs {' and '.join(missing)}, not installed in {sys.prefix}",
            INSTALL_EXTRA.format("train"),
        )


def _run(
    context: AppContext,
    backend: Backend,
    jobs: Sequence[JobSpec],
    options: SubmitOptions,
    *,
    output: str,
) -> int:
    from fastlaunch.cli.compare import looks_of
    from fastlaunch.runs.launcher import Submission, check_home
    from fastlaunch.runs.reconcile import reconcile

    check_home(context.settings.home)
    with open_launcher(context, {backend.name: backend}) as launcher:
        reconcile(launcher.ledger, context.backends, context.settings)
        for other in launcher.ledger.select(["state=running", "backend=local"]):
            click.echo(f"warning: run {other.id} is under way here: both will be slower than alone", err=True)
        submission = Submission(
            jobs_at=lambda _: tuple(jobs),
            adds_to=options.add_to,
            verdicts=looks_of(context.settings, options),
        )
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *context.argv]))
    print_runs(runs, output=output)
    return exit_code_of(runs, stopped=bool(launcher.stop.by))
