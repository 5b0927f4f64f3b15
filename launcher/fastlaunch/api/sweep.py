"""`sweep`: recipes and batch sizes, or a script's variants, on several instance types, within one budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Unpack, overload

from fastlaunch.api.keywords import SweepArguments
from fastlaunch.api.results import Runs, Submitted
from fastlaunch.api.submission import check_truths
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.options import Options, arguments, command_line
from fastlaunch.lifecycle.sweep_plan import Announce, SweepPlan, plan_sweep
from fastlaunch.lifecycle.world import World, default_context

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.api.comparison import Comparison
    from fastlaunch.lifecycle.launcher import Launcher
    from fastlaunch.lifecycle.sweep import Saved, Sweep


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
    from fastlaunch.core.home import check_home
    from fastlaunch.lifecycle.budgets import check_offline
    from fastlaunch.lifecycle.launcher import open_launcher
    from fastlaunch.lifecycle.sweep import carry_out, stored_sweep

    check_truths("sweep", dry_run=dry_run, yes=yes)
    given = arguments(options, function="sweep")
    world, stored = context or default_context(command_line("sweep", given)), None
    if resume is not None:
        if given or dry_run:
            raise UserError("--resume goes on with a sweep as it was typed", "leave out the other options")
        stored = stored_sweep(world, resume)
        given = arguments(stored.arguments, function="sweep")
        world = replace(world, argv=command_line("sweep", given))
    plan, world = plan_sweep(Options(**given), world)
    if dry_run:
        if plan.ceilings:
            total_usd = sum(ceiling.usd for ceiling in plan.ceilings.values())
            check_offline(world, total_usd, dry_run=True)
        return plan
    if plan.ceilings:
        world.check_can_ask(yes=yes)
    check_home(world.settings.home)
    backends = world.cloud_backends if plan.ceilings else {"local": world.backends["local"]}
    with open_launcher(world, backends) as launcher:
        carried_out = carry_out(launcher, world, plan, stored, given=given, yes=yes, announce=announce)
        return _result(world, carried_out, launcher, plan)


def _result(world: World, carried_out: "Sweep", launcher: "Launcher", plan: SweepPlan) -> Swept:
    """Return the parts' runs, their comparison and the saving."""
    from fastlaunch.api.comparison import compare_at_own_prices
    from fastlaunch.lifecycle.sweep import duration_s, saved, sweep_runs
    from fastlaunch.lifecycle.until_best import best_rows

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
