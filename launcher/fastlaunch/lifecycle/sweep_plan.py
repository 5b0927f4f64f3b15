"""A sweep before AWS is asked: its cells, its parts and their ceilings; and how its submissions are made.

A cell is an instance type x recipe x batch size. All cells of a type form a part, which is a submission and
goes through the stages of `submit`. All parts share a budget.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import age_note
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import FEWEST_TIMED_STEPS, FIRST_LOOK
from fastlaunch.core.units import by_reason
from fastlaunch.jobs.build import CPU_WORKLOAD, GPU_WORKLOAD, instances_of
from fastlaunch.jobs.job import Script
from fastlaunch.jobs.options import BACKENDS, Options
from fastlaunch.jobs.scripts import scripts_of
from fastlaunch.jobs.variants import missing_on, problem_on, variants_of
from fastlaunch.ledger.ids import BATCH_SEARCH, is_batch_search
from fastlaunch.lifecycle.announcement import range_in_brackets, travels_text, warnings_of
from fastlaunch.lifecycle.submit import (
    ask_aws,
    backend_name,
    build,
    check_installed,
    choose_sites,
    expected_of,
    settle,
    submission_of,
)
from fastlaunch.lifecycle.world import World
from fastlaunch.placement.cost_ceiling import BUDGET, NOT_COUNTED, CostCeiling
from fastlaunch.placement.resolve import Placement, upload_code

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Expected
    from fastlaunch.jobs.working_directory import WorkingDirectory
    from fastlaunch.lifecycle.launcher import Submission
    from fastlaunch_train.recipes.requirements import Capabilities

AUTO = "auto"
#: The time limit of the search for the batch size, which takes a few steps.
SEARCH_MINUTES = 60
#: Name of the part of a sweep on this machine.
HERE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row of the matrix."""

    #: As typed; None for this machine.
    instance: str | None
    #: The label of the recipe, or of a script's variant.
    label: str
    #: A number or `auto`; None for the workload's own, and for a script.
    batch_size: int | str | None
    #: The reason if it is left out.
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedPart:
    """What a sweep does on one instance type, or on this machine; or the search for its batch size."""

    #: None for a search.
    cells: tuple[Cell, ...] = ()
    #: Options of the cells that can run; None if none can.
    options: Options | None
    #: Its sites, without asking AWS; None if no cell can run.
    placement: Placement | None = None
    #: The expected time and cost, or a sentence on why they are unknown.
    expected: "Expected | str" = ""

    @property
    def num_rounds(self) -> int:
        """The most rounds of its runs; 0 if none can run."""
        return 0 if self.options is None else self.options.planned_rounds or self.options.num_repeats

    @property
    def num_runs(self) -> int:
        """The most runs."""
        return self.num_rounds * sum(cell.skipped is None for cell in self.cells)

    @property
    def ceiling(self) -> CostCeiling | None:
        """The most that it may cost; None on this machine, or if no cell can run."""
        return self.placement.ceiling if self.placement and self.placement.sites else None


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a sweep does on one instance type, or on this machine; or the search for its batch size."""

    name: str
    #: 0 on this machine.
    ceiling_usd: float = 0.0
    #: Makes the submission in its turn, with the batch size from the search. For a part that has started,
    #: only its options for following are used. None without a submission.
    submission: Callable[[int | None], "Submission"]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep before AWS is asked."""

    #: By name, with the searches for the batch size first.
    parts: Mapping[str, PlannedPart]
    is_until_best: bool = False
    #: Caveats to report before the start.
    warnings: tuple[str, ...] = ()
    #: The instance types on which the batch size is searched for.
    searched_on: tuple[str, ...] = ()
    #: For all parts together.
    max_cost_usd: float | None = None

    @property
    def types(self) -> dict[str, PlannedPart]:
        """The parts with cells, by instance type."""
        return {name: part for name, part in self.parts.items() if part.cells}

    @property
    def placements(self) -> dict[str, Placement]:
        """The placements of the parts that can run."""
        return {name: part.placement for name, part in self.parts.items() if part.placement}

    @property
    def ceilings(self) -> dict[str, CostCeiling]:
        """The ceiling of each part; empty on this machine."""
        return {name: ceiling for name, part in self.parts.items() if (ceiling := part.ceiling)}

    @property
    def is_queued(self) -> bool:
        """Whether a queue of AWS Batch gets all parts at once."""
        return any(site.queue for placement in self.placements.values() for site in placement.sites)

    @property
    def num_runs(self) -> int:
        """The most runs."""
        return sum(part.num_runs for part in self.parts.values())

    @property
    def directory(self) -> "WorkingDirectory | None":
        """The files that travel with a script."""
        return next((placement.directory for placement in self.placements.values()), None)

    @property
    def scripts(self) -> dict[str, Script]:
        """The script's variants by label, as they travel."""
        return {script.label: script for at in self.placements.values() for script in at.jobs.scripts}


#: Shows a sweep's plan before it starts.
Announce = Callable[[SweepPlan], None]


def plan_sweep(options: Options, world: World) -> tuple[SweepPlan, World]:
    """Return the sweep of the options, and the world with their settings."""
    is_here, repeats = backend_name(options, world) == "local", options.repeats
    if options.until_best and repeats is not None:
        raise UserError(
            "--until-best says itself how often each cell runs",
            f"leave out --repeats, or give --max-rounds {max(repeats, FIRST_LOOK)}",
        )
    if is_here and options.instances:
        raise UserError("--local sweeps this machine", "leave out --instance, or --local")
    if not is_here and options.purchase == "capacity-block":
        raise UserError("a capacity block is of one instance type", "type: fastlaunch submit")
    # Without --repeats, the rounds follow the planned rule.
    options, world = settle(replace(options, until_resolved=repeats is None), world)
    types = matrix(options, world)
    searches = _searches(types, options, world) if AUTO in options.batch_sizes else {}
    search_parts = {
        f"{BATCH_SEARCH} on {name}" if number else BATCH_SEARCH: PlannedPart(options=search)
        for number, (name, search) in enumerate(searches.items())
    }
    parts, directory = {**search_parts, **types}, None
    for name, part in parts.items():
        if part.options:
            # Check everything with an arbitrary batch size in place of the one to be found.
            is_unknown = is_here and AUTO in part.options.batch_sizes
            jobs = build(with_batch(part.options, 1 if is_unknown else None), world)
            placement = choose_sites(jobs, world, directory)
            directory = placement.directory
            expected = expected_of(placement, world) if part.cells else ""
            parts[name] = replace(part, placement=placement, expected=expected)
    plan = SweepPlan(
        parts=parts,
        is_until_best=options.until_best,
        searched_on=() if is_here else tuple(searches),
        max_cost_usd=None if is_here else world.settings.budget_usd(options.max_cost_usd),
    )
    _check_budget(plan)
    placements = plan.placements.values()
    if is_here and options.command is None:
        for placement in placements:
            check_installed(placement.jobs, world)
    old = age_note(chain(*(placement.price_dates for placement in placements)), world.today)
    caveats = dict.fromkeys(chain(*(placement.jobs.caveats for placement in placements)))
    return replace(plan, warnings=(*caveats, *([old] if old else ()))), world


def matrix(options: Options, world: World) -> dict[str, PlannedPart]:
    """Return the cells by instance type as typed, or for this machine.

    Raises UserError if none runs a cell.
    """
    types: dict[str | None, InstanceType | None] = {None: None}
    kinds: Sequence[Capabilities] = ()
    if options.service in BACKENDS:
        types = dict(zip(options.instances, instances_of(options, world.catalogue), strict=True))
    elif options.command is None:
        kinds = world.machine.capabilities(world.catalogue if world.machine.devices else None)
    is_on_gpus = options.service in BACKENDS or (options.command is None and world.machine.devices)
    parts: dict[str, PlannedPart] = {}
    for name, instance in types.items():
        kept = options if name is None else replace(options, instances=(name,))
        if options.command is not None:
            labels = [script.label for script in scripts_of(options)]
            cells = [Cell(instance=name, label=label, batch_size=None) for label in labels]
        else:
            variants = variants_of(options, GPU_WORKLOAD if is_on_gpus else CPU_WORKLOAD)
            cells = []
            recipes: dict[str, None] = {}
            for variant in variants:
                if instance:
                    error = problem_on(instance, variant, options, world.catalogue, variants=(variant,))
                    why = error.message if error else None
                else:
                    why = missing_on(variant.recipe, kinds)
                label, batch_size = variant.recipe.label, variant.batch_size
                cells.append(Cell(instance=name, label=label, batch_size=batch_size, skipped=why))
                if why is None:
                    recipes[variant.recipe.name] = None
            kept = replace(kept, recipes=tuple(recipes))
        num_left = sum(cell.skipped is None for cell in cells)
        parts[name or HERE] = PlannedPart(
            cells=tuple(cells), options=_with_rounds(kept, num_left) if num_left else None
        )
    if not any(part.options for part in parts.values()):
        reasons = dict.fromkeys(str(cell.skipped) for part in parts.values() for cell in part.cells)
        raise UserError(f"no cell can run: {'; '.join(reasons)}", "name other recipes or instance types")
    return parts


def _with_rounds(options: Options, num_cells: int) -> Options:
    """Return the options, with a cell alone on its type repeated only up to the first look.

    With `until_best` it competes with cells of other types, so it is repeated at most as often as these.
    """
    if num_cells > 1 or not options.until_resolved:
        return options
    repeats = (options.planned_rounds or 1) if options.until_best else FIRST_LOOK
    return replace(options, until_resolved=False, max_rounds=None, repeats=repeats)


def _searches(types: Mapping[str, PlannedPart], options: Options, world: World) -> dict[str, Options]:
    """Return the options of the runs that find the batch size for `auto`, by instance type.

    Each recipe is fitted on the type with the least GPU memory among those that run it, the first among
    equals. So one batch size fits all types: the smallest that the searches find, unless a recipe takes more
    memory on a larger GPU.
    """
    if options.service not in BACKENDS:
        return {name: search_options(part.options) for name, part in types.items() if part.options}
    memory_gib = {
        name: world.catalogue.accelerator_of(instance.name).memory_gib
        for name, instance in zip(options.instances, instances_of(options, world.catalogue), strict=True)
    }
    left = {name for part in types.values() if part.options for name in part.options.recipes}
    searches = {}
    for name in sorted(types, key=lambda name: memory_gib[name]):
        kept = types[name].options
        if kept and (fits := tuple(recipe for recipe in kept.recipes if recipe in left)):
            searches[name] = search_options(replace(kept, recipes=fits))
            left -= {*fits}
    return searches


def search_options(options: Options) -> Options:
    """Return the options of the short run that finds the largest batch that fits all recipes of `options`."""
    return replace(
        options,
        batch_sizes=(),
        batch_size=AUTO,
        max_minutes=min(SEARCH_MINUTES, options.max_minutes),
        steps=FEWEST_TIMED_STEPS,
        epochs=None,
        repeats=1,
        until_resolved=False,
        max_rounds=None,
        eval_every=None,
        step_profile=False,
    )


def with_batch(options: Options, batch_size: int | None) -> Options:
    """Return the options with the batch size that was found in place of `auto`, each size once."""
    if batch_size is None:
        return options
    sizes = dict.fromkeys(batch_size if size == AUTO else size for size in options.batch_sizes)
    return replace(options, batch_sizes=tuple(sizes))


def _check_budget(plan: SweepPlan) -> None:
    """Raise UserError if no instance type fits into the budget, or not all that go into a queue at once."""
    if plan.max_cost_usd is None:
        return
    searches_usd = [ceiling.usd for name, ceiling in plan.ceilings.items() if is_batch_search(name)]
    types_usd = [ceiling.usd for name, ceiling in plan.ceilings.items() if not is_batch_search(name)]
    first_usd = sum(searches_usd)
    all_usd = first_usd + sum(types_usd)
    if plan.is_queued and round(all_usd, 2) > plan.max_cost_usd:
        raise UserError(
            f"the queue gets all instance types at once, and they may cost ${all_usd:,.2f} together, above "
            f"{BUDGET} of ${plan.max_cost_usd:,.2f}",
            f"give --max-cost {math.ceil(all_usd)}, fewer types, or shorter --max-hours",
        )
    least_usd = first_usd + min(types_usd)
    if round(least_usd, 2) > plan.max_cost_usd:
        searches = f", of which ${first_usd:,.2f} to find the batch size" if first_usd else ""
        raise UserError(
            f"no instance type fits into {BUDGET} of ${plan.max_cost_usd:,.2f}: the cheapest may cost "
            f"${least_usd:,.2f}{searches}",
            "give more --max-cost, or shorter --max-hours",
        )


def make_parts(
    plan: SweepPlan, started: Collection[str], world: World
) -> tuple[list[Part], dict[str, UserError]]:
    """Return the parts to carry out, and the errors of parts that cannot be started.

    AWS is asked about parts that have not started. Raises UserError or a subclass if a search for the batch
    size, or every part, cannot be started.
    """

    parts, refused = [], {}
    warnings: dict[str, None] = {}
    for name, offline in plan.placements.items():
        ceiling = plan.parts[name].ceiling
        try:
            is_looked_up = name not in started and offline.sites
            placement = ask_aws(offline, world) if is_looked_up else offline
        except UserError as error:
            refused[name] = error
            if is_batch_search(name) or len(refused) == len(plan.placements):
                raise
            continue
        warnings |= dict.fromkeys(warnings_of(placement))
        submission = partial(_submission, name, plan.parts[name], placement, world)
        parts.append(Part(name=name, ceiling_usd=ceiling.usd if ceiling else 0.0, submission=submission))
    for line in warnings:
        world.report(line)
    return parts, refused


def _submission(
    name: str, part: PlannedPart, placement: Placement, world: World, batch_size: int | None
) -> "Submission":
    """Return the part's submission, with the batch size that was found in place of `auto`."""
    if batch_size is not None and part.options and not placement.jobs.scripts:
        placement = replace(placement, jobs=build(with_batch(part.options, batch_size), world))
    if placement.sites:
        upload_code(placement, world.aws)
    submission = submission_of(placement, world)
    if not is_batch_search(name):
        return submission
    # One run finds the batch size that fits all recipes.
    return replace(submission, jobs_at=lambda site: placement.jobs_at(site)[:1])


def plan_lines(plan: SweepPlan) -> list[str]:
    """Return lines on what the matrix leaves out and why, and the ceilings of each type and of the sweep."""
    from fastlaunch.report.cost import evidence_text
    from fastlaunch.report.text import number

    skipped = {
        (f"{cell.label} on {name}", cell.skipped)
        for name, part in plan.types.items()
        for cell in part.cells
        if cell.skipped
    }
    lines = [f"left out: {reason}" for reason in by_reason(sorted(skipped))]
    if any(cell.batch_size == AUTO for part in plan.types.values() for cell in part.cells):
        where = f" on {' and '.join(plan.searched_on)}" if plan.searched_on else ""
        least = ", each where the types that run it have the least GPU memory" if where else ""
        lines.append(f"auto: a short run{where} first finds the largest batch that fits all recipes{least}")
    if plan.is_until_best:
        lines.append(
            "--until-best: a cell runs only as long as it may be the best of its global batch, and a type "
            "starts only if one of its cells may be; what follows is the most"
        )
    if plan.directory:
        lines += [" ".join(["travels:", *travels_text(plan.directory)[:-1], "--output json lists all."])]
    for name, ceiling in plan.ceilings.items():
        expected, probably = plan.parts[name].expected, ""
        if not isinstance(expected, str):
            evidence = " and ".join(dict.fromkeys(job.rate.evidence_text for job in expected.jobs))
            usd = f"${number(expected.usd.value)}{range_in_brackets(expected.usd, number)}"
            probably = f"; expected: probably {usd}, {evidence_text(evidence, expected.assumed_s)}"
        lines.append(f"{name}: {ceiling}{probably}")
    if not plan.ceilings:
        return [*lines, "on this machine, for which nothing is billed"]
    total_usd = sum(ceiling.usd for ceiling in plan.ceilings.values())
    total = f"all together: at most ${total_usd:,.2f}"
    if plan.max_cost_usd is not None and total_usd > plan.max_cost_usd:
        total += (
            f", of which the budget allows ${plan.max_cost_usd:,.2f}: a type whose ceiling does not fit "
            "into what those before it leave is not started"
        )
    return [*lines, total, NOT_COUNTED]
