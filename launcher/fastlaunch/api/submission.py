"""`submit`: train a workload with a recipe, or run a script of the user's own, here or on AWS."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

from fastlaunch.api.context import AppContext, check_add_to, default_context, open_launcher
from fastlaunch.api.keywords import SubmitArguments
from fastlaunch.api.results import DryRun, Runs, Submitted
from fastlaunch.backends.protocol import Backend
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import split_names
from fastlaunch.jobs.build import Jobs, build_jobs
from fastlaunch.jobs.option_rules import backend_of, check_on_aws, check_places, settings_with
from fastlaunch.jobs.options import BACKENDS, Options, arguments, command_line
from fastlaunch.jobs.spec import JobSpec
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: Stands for the id that a run gets when it is submitted.
_RUN_ID = "<run-id>"


@overload
def submit(
    *,
    dry_run: Literal[True],
    yes: bool = ...,
    context: AppContext | None = ...,
    **options: Unpack[SubmitArguments],
) -> DryRun: ...


@overload
def submit(
    *,
    dry_run: Literal[False] = ...,
    yes: bool = ...,
    context: AppContext | None = ...,
    **options: Unpack[SubmitArguments],
) -> Submitted: ...


@overload
def submit(
    *, dry_run: bool, yes: bool = ..., context: AppContext | None = ..., **options: Unpack[SubmitArguments]
) -> DryRun | Submitted: ...


def submit(
    *,
    dry_run: bool = False,
    yes: bool = False,
    context: AppContext | None = None,
    **options: Unpack[SubmitArguments],
) -> DryRun | Submitted:
    """Train a workload with a recipe, here or on AWS; or run `command`, a script of the user's own.

    Takes the options of `fastlaunch submit`, named as in `SubmitArguments`: one that may be repeated takes a
    list, and NAME=VALUE a dict. Progress is shown on stderr. Returns when all runs have ended, unless
    `detach`.

    dry_run: return the plan; start, write and ask nothing. yes: spend up to the ceiling without being asked;
    on AWS it is needed where there is nobody to ask. context: what it acts on, looked up by default.

    Raises UserError for what cannot be, and its kinds where AWS refuses. A run that fails is no exception:
    `Submitted.runs` say how each ended.
    """
    check_truths("submit", dry_run=dry_run, yes=yes)
    given = arguments(options, function="submit")
    if context is None:
        context = default_context(command_line("submit", given))
    return _submit(context, Options(**given), dry_run=dry_run, yes=yes)


def check_truths(function: str, **given: Any) -> None:
    """Raise TypeError for one that is neither True nor False: a text such as `no` would count as yes."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}(): {name} is {value!r}, and takes bool")


def _submit(context: AppContext, options: Options, *, dry_run: bool, yes: bool) -> DryRun | Submitted:
    name, container = backend_name(context, options), options.container
    if options.command is not None and container:
        raise UserError("--container rehearses a workload of ours, not a script", "leave out --container")
    # A rehearsal for AWS is the same command with --local.
    if name == "local" and not options.instances:
        check_places(options, "container" if container else "local")
    options = with_regions(context, options)
    if name in BACKENDS:
        from fastlaunch.api.cloud import submit_to_cloud

        check_on_aws(options)
        context = replace(context, settings=settings_with(context.settings, options))
        return submit_to_cloud(context, options, dry_run=dry_run, yes=yes)
    jobs = _build(context, options, image=options.image if container else None)
    # In containers there are as many nodes as on AWS.
    check_add_to(context, options.add_to, jobs.specs)
    num_missing_nodes = 0 if container else options.num_nodes - 1
    for line in _rehearsal(options, jobs, num_missing_nodes):
        context.report(line)
    for caveat in jobs.caveats:
        context.report(f"warning: {caveat}")
    runner, specs = context.backends[name], jobs.specs
    if container:
        from fastlaunch.api.containers import containers

        runner, specs = containers(context, specs, options)
    if dry_run:
        return DryRun(plans=tuple(runner.plan({_RUN_ID: spec}) for spec in specs), jobs=specs)
    if not container and options.command is None:
        check_installed(context, jobs)
    return _run(context, runner, specs, options)


def with_regions(context: AppContext, options: Options) -> Options:
    """Return the options with the regions of the config file or the login where none is typed."""
    if options.regions:
        return options
    region = context.settings.region if options.service == "local" else context.own_region()
    return replace(options, regions=split_names(region))


def backend_name(context: AppContext, options: Options) -> str:
    """Return where to train. Raises UserError if the options do not say, or contradict each other."""
    named = options.backend
    if options.container:
        if not options.local or named != "sagemaker":
            raise UserError(
                "--container rehearses a SageMaker job here", "give --local --container --backend sagemaker"
            )
        return "local"
    if options.local and named not in (None, "local"):
        raise UserError(f"--local is short for --backend local, not {named}", "give one of the two")
    if options.local:
        return "local"
    on_aws = _typed(context, "--instance", "p5.48xlarge")
    if named is None and not options.instances:
        here = f"on this machine, type: {_typed(context, '--local')}"
        raise UserError(
            "it does not say where to train", here if "--" in context.argv else f"{here}\n  on AWS: {on_aws}"
        )
    if named not in (None, *context.backends, *BACKENDS):
        raise UnknownName("backend", str(named), (*context.backends, *BACKENDS))
    if named in BACKENDS and not options.instances:
        raise UserError("it does not say on which instance type", f"type: {on_aws}")
    return named if named == "local" else backend_of(options.instances, named)


def _typed(context: AppContext, *more: str) -> str:
    """Return the command line as typed, with more options."""
    at = context.argv.index("--") if "--" in context.argv else len(context.argv)
    return shlex.join(["fastlaunch", *context.argv[:at], *more, *context.argv[at:]])


def _build(context: AppContext, options: Options, *, image: str | None) -> Jobs:
    catalogue = None
    # It also says what a GPU can do.
    if options.rehearsed or context.machine.devices:
        from fastlaunch.catalog.load import load_catalogue

        catalogue = load_catalogue(*context.settings.price_files())
    return build_jobs(options, machine=context.machine, catalogue=catalogue, image=image)


def _rehearsal(options: Options, jobs: Jobs, num_missing_nodes: int) -> list[str]:
    """Return lines on what the jobs here leave out of those on AWS, or of the experiment."""
    nodes = [("nodes", f"{num_missing_nodes + 1}; here: 1")] if num_missing_nodes else []
    differences = [*nodes, *jobs.differences]
    if not differences:
        return []
    width = max(len(name) for name, _ in differences)
    return [
        f"rehearsing for {options.rehearsed} on this machine, which does not cover:"
        if options.rehearsed
        else f"experiment {options.experiment} on this machine is not, in all, as it was published:",
        *(f"  {name:<{width}}  {how}" for name, how in differences),
    ]


def check_installed(context: AppContext, jobs: Jobs) -> None:
    missing = context.machine.missing(workload.module for workload in jobs.workloads)
    if missing:
        raise UserError(
            f"training here needs {' and '.join(missing)}, not installed in {sys.prefix}",
            INSTALL_EXTRA.format("train"),
        )


def _run(context: AppContext, backend: Backend, jobs: Sequence[JobSpec], options: Options) -> Submitted:
    from fastlaunch.api.comparison import looks_of
    from fastlaunch.lifecycle.launcher import Submission, check_home
    from fastlaunch.lifecycle.reconcile import reconcile

    check_home(context.settings.home)
    with open_launcher(context, {backend.name: backend}) as launcher:
        reconcile(launcher.ledger, context.backends, context.settings)
        for other in launcher.ledger.select(["state=running", "backend=local"]):
            context.report(f"warning: run {other.id} is under way here: both will be slower than alone")
        submission = Submission(
            jobs_at=lambda _: tuple(jobs),
            adds_to=options.add_to,
            verdicts=looks_of(context, options),
        )
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *context.argv]))
    return Submitted(runs=Runs(runs), is_stopped=bool(launcher.stop.by))
