"""`sweep`: recipes and batch sizes, or a script's variants, on several instance types, within one budget."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from fastlaunch.api.keywords import SweepArguments
from fastlaunch.api.results import Runs, Submitted
from fastlaunch.api.submission import check_truths
from fastlaunch.core.errors import UserError
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.jobs.options import Options, arguments, command_line
from fastlaunch.lifecycle.launcher import Launcher, check_home, open_launcher
from fastlaunch.lifecycle.submit import report_edits
from fastlaunch.lifecycle.sweep_plan import SweepPlan, make_parts, plan_lines, plan_sweep
from fastlaunch.lifecycle.world import StopRequest, World, default_context

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.api.comparison import Comparison
    from fastlaunch.ledger.rows import Sweep as StoredSweep
    from fastlaunch.lifecycle.sweep import Saved, Sweep

#: Shows a sweep's plan before it starts.
Announce = Callable[[SweepPlan], None]


@dataclass(frozen=True, kw_only=True)
class Swept(Submitted):
    """The result of a sweep; `runs` holds the runs of all cells."""

    #: The argument of `sweep(resume=id)`.
    id: str
    #: The runs by instance type, or of this machine.
    by_part: Mapping[str, Runs]
    #: The reasons by part that was not started or not completed.
    left_out: Mapping[str, UserError]
    #: The saving of stopping early against the full matrix; None if it could not be computed.
    saved: "Saved | None"
    #: None if nothing was measured or could be compared.
    comparison: "Comparison | None" = field(repr=False)
    #: With `until_best`, the rows that may be best for each global batch, ordered by their figures.
    best: "Sequence[Sequence[Row]]" = field(default=(), repr=False)

    @property
    def exit_code(self) -> int:
        """The exit code of the first failed part, else as for a submission."""
        code = super().exit_code
        codes = () if self.is_stopped else (error.exit_code for error in self.left_out.values())
        return next(filter(None, codes), code)


@overload
def sweep(
    *,
    resume: str | None = ...,
    dry_run: Literal[True],
    yes: bool = ...,
    announce: Announce | None = ...,
    context: World | None = ...,
    **options: Unpack[SweepArguments],
) -> SweepPlan: ...


@overload
def sweep(
    *,
    resume: str | None = ...,
    dry_run: Literal[False] = ...,
    yes: bool = ...,
    announce: Announce | None = ...,
    context: World | None = ...,
    **options: Unpack[SweepArguments],
) -> Swept: ...


@overload
def sweep(
    *,
    resume: str | None = ...,
    dry_run: bool,
    yes: bool = ...,
    announce: Announce | None = ...,
    context: World | None = ...,
    **options: Unpack[SweepArguments],
) -> SweepPlan | Swept: ...


def sweep(
    *,
    resume: str | None = None,
    dry_run: bool = False,
    yes: bool = False,
    announce: Announce | None = None,
    context: World | None = None,
    **options: Unpack[SweepArguments],
) -> SweepPlan | Swept:
    """Measure recipes, or variants of a script, on several instance types, within one budget.

    The keywords are the options of `fastlaunch sweep`, as named in `SweepArguments`; without `repeats` each
    cell runs until its verdict is settled. resume: the id of a sweep to continue, or "" for the last one,
    with its original options only. dry_run: return the plan without starting, writing or asking anything.
    yes: spend up to the ceiling without asking; required on AWS without a terminal. announce: shows the plan
    before the start; by default its lines go to stderr. context: the environment to act on, detected by
    default.

    Raises UserError for an impossible request, and its kinds if AWS refuses everything.
    """
    check_truths("sweep", dry_run=dry_run, yes=yes)
    given = arguments(options, function="sweep")
    world, stored = context or default_context(command_line("sweep", given)), None
    if resume is not None:
        if given or dry_run:
            raise UserError("--resume goes on with a sweep as it was typed", "leave out the other options")
        stored = _stored(world, resume)
        given = arguments(stored.arguments, function="sweep")
        world = replace(world, argv=command_line("sweep", given))
    plan, world = plan_sweep(Options(**given), world)
    return plan if dry_run else _carry_out(world, plan, stored, given=given, yes=yes, announce=announce)


def _stored(world: World, name: str) -> "StoredSweep":
    """Return the sweep to continue. Raises UserError if there is none, or it belongs to another folder."""
    from fastlaunch.ledger.ledger import open_ledger

    with open_ledger(world.settings, clock=world.now) as ledger:
        stored = ledger.sweep(name or None)
    if Path.cwd() != stored.directory:
        raise UserError(f"{stored.id} was started in {stored.directory}", f"type: cd {stored.directory}")
    return stored


def _carry_out(
    world: World,
    plan: SweepPlan,
    stored: "StoredSweep | None",
    *,
    given: dict[str, Any],
    yes: bool,
    announce: Announce | None,
) -> Swept:
    from fastlaunch.api.until_best import until_best
    from fastlaunch.core import locks
    from fastlaunch.core.home import make_folder
    from fastlaunch.lifecycle.sweep import Sweep

    if plan.ceilings:
        world.check_can_ask(yes=yes)
    check_home(world.settings.home)
    num_parallel = given.get("parallel") or 1
    backends = world.cloud_backends if plan.ceilings else {"local": world.backends["local"]}
    with open_launcher(world, backends) as launcher:
        ledger = launcher.ledger
        started = ledger.parts_of(stored.id) if stored else {}
        if announce is not None:
            announce(plan)
        for line in () if announce else plan_lines(plan):
            world.report(line)
        for line in plan.warnings:
            world.report(as_warning(line))
        if stored:
            world.report(f"going on with {stored.id}; started: {', '.join(started) or 'nothing'}")
            for submission in started.values():
                report_edits(world, ledger.select(submission=submission), plan.scripts)
        parts, refused = make_parts(plan, started, world)
        for name, error in refused.items():
            world.report(f"left out: {name}: {error.message}")
        if plan.ceilings:
            world.confirm("Go on?" if stored else "Start it?", yes=yes)
        sweep_id = stored.id if stored else ledger.add_sweep(given, Path.cwd())
        world.report(f"{sweep_id}: to go on with it if it is stopped: fastlaunch sweep --resume")
        lock = ledger.launcher_lock(sweep_id)
        if locks.is_held(lock):
            raise UserError(f"another fastlaunch is running {sweep_id}", "look: fastlaunch status")
        make_folder(lock.parent)
        carried_out = Sweep(
            id=sweep_id,
            launcher=launcher,
            command=shlex.join(["fastlaunch", *world.argv]),
            parts=parts,
            max_cost_usd=plan.max_cost_usd,
            num_parallel=num_parallel,
            open_beside=partial(_open_beside, world, launcher.stop) if num_parallel > 1 else None,
            until_best=until_best(plan, world) if plan.is_until_best else None,
            left_out=refused,
        )
        with locks.held(lock):
            carried_out.carry_out()
        return _result(world, carried_out, launcher, plan)


@contextmanager
def _open_beside(world: World, stop: StopRequest, name: str) -> Iterator[Launcher]:
    """Yield a launcher with its own ledger connection, whose lines begin with its part's name."""
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.lifecycle.display import PlainLines

    beside = replace(world, connect=lambda: world.aws, sleep=stop.sleeping(world.sleep))
    with open_ledger(world.settings, clock=world.now) as ledger:
        yield Launcher(
            backends=beside.cloud_backends,
            ledger=ledger,
            settings=world.settings,
            display=PlainLines(clock=world.monotonic_s, prefix=f"{name}: "),
            stop=stop,
            report=lambda line: report_line(f"{name}: {line}"),
        )


def _result(world: World, carried_out: "Sweep", launcher: Launcher, plan: SweepPlan) -> Swept:
    """Return the parts' runs, their comparison and the saving."""
    from fastlaunch.api.comparison import compare_at_own_prices
    from fastlaunch.api.until_best import best_rows
    from fastlaunch.lifecycle.sweep import duration_s, saved, sweep_runs

    by_part = sweep_runs(launcher.ledger, carried_out.id)
    runs = [run for part_runs in by_part.values() for run in part_runs]
    best: list[list[Row]] = []
    comparison = early = None
    with world.advice.guard("the comparison"):
        is_measured = any(run.summary and duration_s(run.summary) is not None for run in runs)
        if carried_out.until_best and is_measured:
            best = best_rows(runs, plan, world)
        baseline = best[0][0].run_ids[0] if best else None
        if is_measured:
            comparison = compare_at_own_prices(world, runs, baseline)
    with world.advice.guard("what stopping early saved"):
        early = saved(launcher.ledger, runs)
    return Swept(
        id=carried_out.id,
        runs=Runs(runs),
        by_part={name: Runs(part_runs) for name, part_runs in by_part.items()},
        left_out=dict(carried_out.left_out),
        saved=early,
        comparison=comparison,
        best=best,
        is_stopped=bool(launcher.stop.by),
    )
