"""`fastlaunch submit`: options to jobs, jobs to plans, and they run: here, or on AWS (submit_cloud.py)."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fastlaunch.backends.protocol import Backend
from fastlaunch.cli.cloud_options import (
    check_local,
    cloud_options,
    make_cloud_options,
    split_names,
    take_cloud_options,
)
from fastlaunch.cli.context import AppContext, app_context
from fastlaunch.cli.options import table_or_json_option, yes_option
from fastlaunch.cli.render import exit_code_of, print_runs
from fastlaunch.cli.training_options import training_options
from fastlaunch.core.errors import EXIT_DONE, UnknownName, UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.units import parse_count
from fastlaunch.jobs.build import Jobs, build_jobs
from fastlaunch.jobs.options import BACKENDS, ML, SubmitOptions, backend_of
from fastlaunch.jobs.spec import JobSpec

#: Stands for the id that a run gets when it is submitted.
_RUN_ID = "<run-id>"


@click.command(short_help="Train a workload with a recipe: here, or on AWS.")
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
    metavar="TYPE[,TYPE]",
    help="Train on this instance type, else on the next. With --local: rehearse for it here.",
)
@click.option(
    "--region",
    metavar="REGION[,REGION]",
    help="Buy it in this region, else in the next.  [default: yours, or us-east-1]",
)
@training_options
@cloud_options
@click.option("--dry-run", is_flag=True, help="Print the plan; start, write and ask nothing.")
@table_or_json_option("the runs are")
@yes_option
def submit(
    local: bool,
    container: bool,
    backend: str | None,
    dry_run: bool,
    output: str,
    region: str | None,
    yes: bool,
    **options: Any,
) -> int:
    """Train a workload with a recipe: here, or on AWS.

    Defaults that work: without a GPU vit-tiny at batch 8, with one vit-huge at 64; recipe bf16, 200 steps.
    With several recipes, repeats run A B, B A, A B, so that what changes with time meets them all alike.

    \b
      fastlaunch submit --local --recipe fp32,bf16,compile --repeats 3
      fastlaunch submit --local --instance p5.48xlarge --recipe te-fp8
      fastlaunch submit --local --experiment fusion --repeats 5
      fastlaunch submit --instance p5.48xlarge,p5en.48xlarge --recipe te-fp8 --dry-run
      fastlaunch submit --instance ml.p5.48xlarge --num-nodes 2 --recipe te-fp8 --dry-run
    """
    context = app_context()
    typed = take_cloud_options(options)
    named = _rehearsed(local=local, named=backend) if container else backend
    name = _backend_name(context, local=local, named=named, instance=options["instance"])
    region = region or context.settings.region
    if name in BACKENDS:
        from fastlaunch.cli.submit_cloud import submit_to_cloud

        instances, regions = split_names(options.pop("instance")), split_names(region)
        cloud = make_cloud_options(typed, instances=instances, regions=regions, backend=name)
        request = _request(region, options)
        return submit_to_cloud(context, request, cloud, typed, dry_run=dry_run, output=output, yes=yes)
    if options["instance"] is None:
        check_local(typed, container=container)
    jobs = _jobs(context, region, options, image=typed["image"] if container else None)
    for line in _rehearsal(options, jobs, typed["num_nodes"]):
        click.echo(line, err=True)
    for caveat in jobs.caveats:
        click.echo(f"warning: {caveat}", err=True)
    alone = jobs.specs, context.backends[name]
    specs, here = _in_containers(context, jobs.specs, typed) if container else alone
    if dry_run:
        plans = [here.plan({_RUN_ID: job}) for job in specs]
        click.echo(_plans_json(plans) if output == "json" else _plans_text(plans, specs))
        return EXIT_DONE
    if not container:
        _check_installed(context, jobs)
    return _run(context, here, specs, output=output)


def _rehearsed(*, local: bool, named: str | None) -> str:
    """Return the backend of a rehearsal in containers. Raises UserError if other options contradict it."""
    if not local or named != "sagemaker":
        raise UserError(
            "--container rehearses a SageMaker job here", "give --local --container --backend sagemaker"
        )
    return "local"


def _backend_name(context: AppContext, *, local: bool, named: str | None, instance: str | None) -> str:
    if local and named not in (None, "local"):
        raise UserError(f"--local is short for --backend local, not {named}", "give one of the two")
    if local:
        return "local"
    typed = shlex.join(["fastlaunch", *context.argv])
    if named is None and instance is None:
        raise UserError(
            "it does not say where to train",
            f"on this machine, type: {typed} --local\n  on AWS: {typed} --instance p5.48xlarge",
        )
    if named not in (None, *context.backends, *BACKENDS):
        raise UnknownName("backend", str(named), (*context.backends, *BACKENDS))
    if named in BACKENDS and instance is None:
        raise UserError("it does not say on which instance type", f"type: {typed} --instance p5.48xlarge")
    return named if named == "local" else backend_of(split_names(instance or ""), named)


def _request(region: str, options: dict[str, Any]) -> SubmitOptions:
    batch_size = options.pop("batch_size")
    if batch_size is not None and batch_size != "auto":
        batch_size = parse_count(batch_size)
    return SubmitOptions(
        recipes=tuple(name for given in options.pop("recipes") for name in split_names(given)),
        overrides=tuple(options.pop("overrides")),
        batch_size=batch_size,
        region=region,
        **options,
    )


def _jobs(context: AppContext, region: str, options: dict[str, Any], *, image: str | None) -> Jobs:
    if options["instance"] is not None:
        # A rehearsal for AWS is the same command with --local; of several types it rehearses the first.
        options["instance"] = next(iter(split_names(options["instance"])), "").removeprefix(ML)
    request = _request(next(iter(split_names(region)), ""), options)
    catalogue = None
    # What a GPU takes stands there too.
    if request.instance is not None or context.machine.devices:
        from fastlaunch.catalog.load import load_catalogue

        catalogue = load_catalogue(context.settings.prices)
    return build_jobs(request, machine=context.machine, catalogue=catalogue, image=image)


def _rehearsal(options: Mapping[str, Any], jobs: Jobs, num_nodes: int) -> list[str]:
    nodes = [("nodes", f"{num_nodes}; here: 1")] if num_nodes > 1 else []
    differences = [*nodes, *jobs.differences]
    if not differences:
        return []
    what = f"experiment {options['experiment']}" if options["instance"] is None else options["instance"]
    width = max(len(name) for name, _ in differences)
    return [
        f"rehearsing for {what} on this machine, which does not cover:"
        if options["instance"]
        else f"{what} on this machine is not, in all, as it was published:",
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
        last_seed = alike[-1][1].seed
        times = f", {len(alike)} times, seeds {job.seed} to {last_seed}" if len(alike) > 1 else ""
        lines += [f"{job.recipe.label} on {job.workload}{times}:"]
        lines += [f"  {' '.join([*environment, shlex.join(plan.request['argv'])])}", ""]
    runs = "1 run" if len(jobs) == 1 else f"{len(jobs)} runs, one after another"
    return "\n".join([*lines, f"Planned, not started: {runs}, on this machine, for which nothing is billed."])


def _in_containers(
    context: AppContext, jobs: Sequence[JobSpec], typed: Mapping[str, Any]
) -> tuple[tuple[JobSpec, ...], Backend]:
    from fastlaunch.cli.submit_container import rehearsal_backend, rehearsed_jobs

    path, separator, _ = jobs[0].workload.rpartition(".py:")
    user_file = Path(f"{path}.py") if separator else None
    return rehearsed_jobs(jobs, typed), rehearsal_backend(context, typed, os.environ, user_file=user_file)


def _check_installed(context: AppContext, jobs: Jobs) -> None:
    missing = context.machine.missing(workload.module for workload in jobs.workloads)
    if missing:
        raise UserError(
            f"training here needs {' and '.join(missing)}, not installed in {sys.prefix}",
            "pip install 'fastlaunch[train]'",
        )


def _run(context: AppContext, backend: Backend, jobs: Sequence[JobSpec], *, output: str) -> int:
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.runs.display import make_display
    from fastlaunch.runs.launcher import Launcher, Submission, check_home
    from fastlaunch.runs.reconcile import reconcile
    from fastlaunch.runs.stop_request import StopRequest

    check_home(context.settings.home)
    with open_ledger(context.settings) as ledger, StopRequest() as stop:
        reconcile(ledger, context.backends)
        for other in ledger.select(["state=running", "backend=local"]):
            click.echo(f"warning: run {other.id} is under way here: both will be slower than alone", err=True)
        launcher = Launcher(
            backends={backend.name: backend},
            ledger=ledger,
            settings=context.settings,
            display=make_display(sys.stderr, context.monotonic_s),
            stop=stop,
            sleep=context.sleep,
        )
        submission = Submission(jobs_at=lambda here: tuple(jobs))
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *context.argv]))
    print_runs(runs, output=output)
    return exit_code_of(runs, stopped=bool(stop.by))
