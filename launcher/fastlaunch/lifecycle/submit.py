"""`submit` in stages, which are the same for dry and real runs, on this machine and on AWS.

Options -> jobs -> sites -> checks -> plans -> the question -> ledger -> start, follow and finish. `sweep`
takes its parts through the same stages.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.catalog.prices import age_note
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.home import LEDGER_NAME, check_home
from fastlaunch.core.settings import Budgets
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import split_names
from fastlaunch.jobs.build import Jobs, build_jobs, check_names
from fastlaunch.jobs.contents import all_with_contents, script_now
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.option_rules import backend_of, check_on_aws, check_places, settings_with
from fastlaunch.jobs.options import BACKENDS, Options
from fastlaunch.jobs.scripts import check_travels_along
from fastlaunch.jobs.working_directory import WorkingDirectory, working_directory
from fastlaunch.lifecycle.announcement import DryRun, announcement
from fastlaunch.lifecycle.offerings import as_if_in_block, lacks_block, no_block
from fastlaunch.lifecycle.world import World
from fastlaunch.placement.cost_ceiling import BUDGET, check_budget, is_known
from fastlaunch.placement.resolve import Placement, place_offline, place_on_aws, plan_at, upload_code
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Expected
    from fastlaunch.backends.protocol import Backend
    from fastlaunch.jobs.job import Script
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.lifecycle.launcher import Launcher, Submission

#: Placeholder for the id that a run gets when it is submitted.
_RUN_ID = "<run-id>"


def submit(options: Options, world: World, *, dry_run: bool, yes: bool) -> "DryRun | tuple[list[Run], bool]":
    """Carry out the options; return the runs, and whether the user stopped them. Or return the plan.

    yes: the answer to the question, if it is known. Raises UserError for impossible options, and subclasses
    where AWS refuses.
    """
    if lacks_block(options) and not dry_run:
        raise _no_block(options, world)
    options, world = settle(options, world)
    jobs = build(options, world)
    placement = choose_sites(jobs, world)
    check_add_to(options.add_to, placement.jobs_at(), world)
    check_offline_budget(placement, world, dry_run=dry_run)
    report_jobs(placement.jobs, world)
    if dry_run:
        return plan(placement, world)
    placement = check(placement, world, yes=yes)
    expected = expected_of(placement, world)
    with launching(placement, world) as launcher:
        if placement.sites:
            from fastlaunch.lifecycle.budgets import check_budgets, others_of

            check_budgets(launcher, placement.ceiling.usd, others=others_of(launcher))
            world.report(announcement(placement, launcher.ledger, expected))
            world.confirm("Start it?", yes=yes)
            upload_code(placement, world.aws)
        submission = submission_of(placement, world)
        runs = launcher.submit(submission, command=shlex.join(["fastlaunch", *world.argv]))
        return runs, bool(launcher.stop.by)


def _no_block(options: Options, world: World) -> UserError:
    settled, there = settle(as_if_in_block(options), world)
    expected = expected_of(choose_sites(build(settled, there), there), there)
    hours = None if isinstance(expected, str) else expected.hours
    longest = None if hours is None else hours.value if hours.high is None else hours.high
    return no_block(replace(options, regions=settled.regions), there.aws, hours=longest)


# Options


def settle(options: Options, world: World) -> tuple[Options, World]:
    """Return the options with their regions filled in, and the world with the settings for these.

    Raises UserError if they do not say where to train, contradict each other, or do not apply there.
    """
    name, container = backend_name(options, world), options.container
    if options.command is not None and container:
        raise UserError("--container rehearses a workload of ours, not a script", "leave out --container")
    # A rehearsal for AWS is the AWS command with --local.
    if name == "local" and not options.instances:
        check_places(options, "container" if container else "local")
    if not options.regions:
        region = world.own_region() if name in BACKENDS else world.settings.region
        options = replace(options, regions=split_names(region))
    if name not in BACKENDS:
        return options, world
    check_on_aws(options)
    return options, replace(world, settings=settings_with(world.settings, options))


def backend_name(options: Options, world: World) -> str:
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
    on_aws = _typed(world, "--instance", "p5.48xlarge")
    if named is None and not options.instances:
        check_names(options)
        here = f"on this machine, type: {_typed(world, '--local')}"
        raise UserError(
            "the command does not say where to train",
            here if "--" in world.argv else f"{here}\n  on AWS: {on_aws}",
        )
    if named not in (None, *world.backends, *BACKENDS):
        raise UnknownName("backend", str(named), (*world.backends, *BACKENDS))
    if named in BACKENDS and not options.instances:
        raise UserError("the command names no instance type", f"type: {on_aws}")
    return named if named == "local" else backend_of(options.instances, named)


def _typed(world: World, *more: str) -> str:
    """Return the command line as typed, with more options."""
    at = world.argv.index("--") if "--" in world.argv else len(world.argv)
    return shlex.join(["fastlaunch", *world.argv[:at], *more, *world.argv[at:]])


# Jobs and sites


def build(options: Options, world: World) -> Jobs:
    """Return the jobs of settled options."""
    if options.service in BACKENDS:
        return build_jobs(options, catalogue=world.catalogue)
    # The catalogue also holds the abilities of a GPU.
    needs_catalogue = options.rehearsed or world.machine.devices
    return build_jobs(options, machine=world.machine, catalogue=world.catalogue if needs_catalogue else None)


def choose_sites(jobs: Jobs, world: World, directory: WorkingDirectory | None = None) -> Placement:
    """Return the sites where the jobs may run, without asking AWS; none on this machine.

    directory: the files that travel with a script, if they are known already. Raises UserError for requests
    that AWS would refuse, and for a script that does not travel.
    """
    if jobs.options.service not in BACKENDS:
        return Placement(jobs=jobs, sites=(), skipped=())
    if jobs.scripts:
        if directory is None:
            directory = working_directory(Path.cwd(), home=world.settings.home)
            (why_not, to_take), paths = directory.why_not, {file.path for file in directory.files}
            check_travels_along(jobs.scripts, paths, why_not=why_not, to_take=to_take)
        scripts = all_with_contents(jobs.scripts, home=world.settings.home.absolute(), directory=directory)
        jobs = replace(jobs, scripts=scripts)
    return place_offline(
        jobs,
        settings=world.settings,
        catalogue=world.catalogue,
        now=world.now(),
        # Only git knows the commit, and a dry run does not start git.
        commit="<commit>" if world.find_commit else None,
        directory=directory,
    )


def expected_of(placement: Placement, world: World) -> "Expected | str":
    """Return the jobs' expected time and cost at the first site, or a sentence on why they are unknown."""
    if not placement.sites:
        return "nothing is billed"
    with world.advice.guard("the expected cost"):
        from fastlaunch.lifecycle.evidence import expected

        try:
            return expected(world, placement.jobs_at(), placement.sites[0], data=placement.jobs.data_file)
        except UserError as error:
            return error.message
    return "as it could not be computed"


# Checks


def check_add_to(submission: str | None, jobs: Sequence[Job], world: World) -> None:
    """Raise UserError if the submission does not exist, or has no workload of `jobs`. Creates no ledger.

    Reports which of a script's variants are new rows in it.
    """
    if submission is None:
        return
    from fastlaunch.ledger.ledger import open_ledger

    if not (world.settings.home / LEDGER_NAME).exists():
        raise UserError(f"there is no submission {submission}", "nothing was submitted here yet")
    with open_ledger(world.settings, clock=world.now) as ledger:
        ledger.check_submission(submission)
        runs = ledger.fetch_comparable(submission=submission)
        times = ledger.times_of_attempts("local")
    before, now = {run.workload for run in runs}, {job.workload for job in jobs}
    if runs and not before & now:
        raise UserError(
            f"--add-to: {submission} trains {', '.join(sorted(before))}, and these runs would train "
            f"{', '.join(sorted(now))}",
            "give the same workload, or the same command behind --, or leave out --add-to",
        )
    rows = dict.fromkeys(run.recipe for run in runs)
    for label in dict.fromkeys(job.script.label for job in jobs if job.script):
        if label not in rows:
            world.report(as_warning(f"{label} is a row of its own: {submission} has {', '.join(rows)}"))
    home = world.settings.home.absolute()
    scripts = {
        label: script
        for label, job in {job.label: job for job in jobs}.items()
        if (script := script_now(job, Path.cwd(), home=home, runs=times))
    }
    report_edits(world, runs, scripts)


def report_edits(world: World, runs: "Sequence[Run]", scripts: "Mapping[str, Script]") -> None:
    """Report the files of the scripts, by label, that changed since earlier runs."""
    from fastlaunch.lifecycle.local import edited_since

    for edited in dict.fromkeys(edited_since(runs, label, script) for label, script in scripts.items()):
        if edited:
            text = f"{edited} changed since {runs[0].submission_id}: these runs are other rows"
            world.report(as_warning(f"{text}; to pool them all the same: fastlaunch compare --any-version"))


def check_offline_budget(placement: Placement, world: World, *, dry_run: bool) -> None:
    """Raise UserError if the ceiling is above a budget. A dry run only warns about the config file's."""
    if not placement.sites:
        return
    ceiling, typed_usd = placement.ceiling, placement.options.max_cost_usd
    budget_usd, block = world.settings.budget_usd(typed_usd), ceiling.dearest.block
    # A block's hourly price is known once AWS has told its length; it is checked then.
    if block is None or is_known(block):
        check_budget(ceiling, typed_usd if dry_run else budget_usd)
    if dry_run and budget_usd is not None and ceiling.is_above(budget_usd):
        world.report(as_warning(f"{ceiling.usd:,.2f} USD is above {BUDGET} of ${budget_usd:,.2f}"))
    if world.settings.budgets != Budgets():
        from fastlaunch.lifecycle.budgets import check_offline

        check_offline(world, ceiling.usd, dry_run=dry_run)


def report_jobs(jobs: Jobs, world: World) -> None:
    """Report what a rehearsal does not cover, what is left out, and caveats about the figures."""
    options = jobs.options
    # Containers simulate as many nodes as on AWS.
    is_alone = options.service not in BACKENDS and options.num_nodes > 1 and not options.container
    differences = [("nodes", f"{options.num_nodes}; here: 1")] if is_alone else []
    if differences := [*differences, *jobs.differences]:
        width = max(len(name) for name, _ in differences)
        world.report(
            f"rehearsing for {options.rehearsed} on this machine, which does not cover:"
            if options.rehearsed
            else f"experiment {options.experiment} on this machine differs from the published one:"
        )
        for name, how in differences:
            world.report(f"  {name:<{width}}  {how}")
    for name, why in jobs.skipped:
        world.report(f"left out: {name}: {why}")
    for caveat in jobs.caveats:
        world.report(as_warning(caveat))


def check(placement: Placement, world: World, *, yes: bool) -> Placement:
    """Return the placement, checked and completed by AWS's answers or by the packages installed here.

    Raises UserError for missing things, and subclasses where AWS refuses.
    """
    jobs, options = placement.jobs, placement.options
    if not placement.sites:
        if not jobs.scripts and not options.container:
            check_installed(jobs, world)
        check_home(world.settings.home)
        return placement
    world.check_can_ask(yes=yes)
    check_home(world.settings.home)
    if options.requirements:
        world.report(f"looking for what {options.requirements} requires")
    return ask_aws(placement, world, max_cost_usd=world.settings.budget_usd(options.max_cost_usd))


def ask_aws(placement: Placement, world: World, *, max_cost_usd: float | None = None) -> Placement:
    """Return the placement with the sites where AWS says that the jobs can run, within the budget."""
    return place_on_aws(
        placement.jobs,
        aws=world.aws,
        settings=world.settings,
        catalogue=world.catalogue,
        now=world.now(),
        commit=world.commit,
        max_cost_usd=max_cost_usd,
        directory=placement.directory,
    )


def check_installed(jobs: Jobs, world: World) -> None:
    """Raise UserError if a workload's package is not installed here."""
    if missing := world.machine.missing(workload.module for workload in jobs.workloads):
        raise UserError(
            f"training here needs {' and '.join(missing)}, not installed in {sys.prefix}",
            INSTALL_EXTRA.format("train"),
        )


# Plans, and what carries them out


def plan(placement: Placement, world: World) -> DryRun:
    """Return a plan per run here, or the plan at the first site with the ceiling of the dearest site."""
    jobs, options = placement.jobs_at(), placement.options
    if not placement.sites:
        runner = _runner(placement, world)
        plans = tuple(runner.plan({_RUN_ID: job}) for job in jobs)
        return DryRun(plans=plans, jobs=jobs, placement=placement)
    site = placement.sites[0]
    names = [_RUN_ID, *(f"<run-id-{number}>" for number in range(2, len(jobs) + 1))]
    request = plan_at(dict(zip(names, jobs, strict=True)), site, attempt=1, max_minutes=options.max_minutes)
    # A fee computed from an hourly price is known once AWS has told the block's hours.
    request = replace(request, max_cost_usd=placement.ceiling.usd, sunk_usd=options.block_fee_usd)
    is_named = world.settings.region_settings(site.region).scheduler_role is not None
    return DryRun(
        plans=(request,),
        jobs=jobs,
        placement=placement,
        expected=expected_of(placement, world),
        old_prices=age_note(placement.price_dates, world.today),
        lacks_scheduler=site.backend == "ec2" and options.account_timer and not is_named,
        budget_usd=world.settings.budget_usd(options.max_cost_usd),
    )


def _runner(placement: Placement, world: World) -> "Backend":
    """Return the backend that runs the jobs on this machine, directly or in containers."""
    if not placement.options.container:
        return world.backends[placement.options.service]
    from fastlaunch.lifecycle.rehearsal import rehearsal_backend

    return rehearsal_backend(world, placement.jobs)


def submission_of(placement: Placement, world: World) -> "Submission":
    """Return the submission for the launcher."""
    from fastlaunch.lifecycle.launcher import Submission
    from fastlaunch.lifecycle.rounds import verdicts_of

    return Submission(
        jobs_at=placement.jobs_at,
        placements=placement.sites,
        options=placement.options,
        verdicts=verdicts_of(world, placement.options),
    )


@contextmanager
def launching(placement: Placement, world: World) -> "Iterator[Launcher]":
    """Yield the launcher. On this machine, reconcile the ledger first."""
    from fastlaunch.lifecycle.launcher import open_launcher
    from fastlaunch.lifecycle.reconcile import reconcile

    if placement.sites:
        with open_launcher(world, world.cloud_backends) as launcher:
            yield launcher
        return
    runner = _runner(placement, world)
    with open_launcher(world, {runner.name: runner}) as launcher:
        reconcile(launcher.ledger, world.backends, world.settings)
        for other in launcher.ledger.select(["state=running", "backend=local"]):
            world.report(as_warning(f"run {other.id} is under way here: both will be slower than alone"))
        yield launcher
