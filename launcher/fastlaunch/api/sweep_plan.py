"""A sweep before anything is asked of AWS: its matrix and ceilings; how its parts are made."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from fastlaunch.api.announcement import range_in_brackets, travels_text
from fastlaunch.api.context import AppContext
from fastlaunch.api.submission import check_installed
from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Catalogue, age_note
from fastlaunch.core.errors import UserError
from fastlaunch.core.units import by_reason
from fastlaunch.jobs.build import CloudRequest, build_cloud_request, build_jobs
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.spec import Script
from fastlaunch.jobs.sweep import (
    AUTO,
    SweptType,
    search_options,
    searches,
    types_here,
    types_on_aws,
    with_batch,
)
from fastlaunch.ledger.ids import BATCH_SEARCH, is_batch_search
from fastlaunch.placement.cost_ceiling import BUDGET, NOT_COUNTED, CostCeiling

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Expected
    from fastlaunch.jobs.working_directory import WorkingDirectory
    from fastlaunch.lifecycle.launcher import Submission
    from fastlaunch.lifecycle.sweep import Part
    from fastlaunch.placement.prepare import Prepared


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep before anything is asked of AWS."""

    types: Mapping[str, SweptType]
    #: What is to be known before.
    warnings: tuple[str, ...]
    #: Makes the parts, the search for the batch size first, and tells which cannot be started and why.
    #: Takes the names of those that have started already.
    make: "Callable[[Collection[str]], tuple[list[Part], dict[str, UserError]]]"
    #: By part, the most that it costs; empty on this machine.
    ceilings: "Mapping[str, CostCeiling]" = field(default_factory=dict)
    #: By instance type, what its runs will probably take and cost, or why that is not known.
    expected: "Mapping[str, Expected | str]" = field(default_factory=dict)
    #: The instance types on which the batch size is searched for.
    searched_on: tuple[str, ...] = ()
    #: For all parts together.
    max_cost_usd: float | None = None
    #: What travels with a script.
    directory: "WorkingDirectory | None" = None
    #: The script's variants by label, as they travel.
    scripts: Mapping[str, Script] = field(default_factory=dict)

    @property
    def num_runs(self) -> int:
        """The most runs."""
        return sum(swept.num_runs for swept in self.types.values())

    @property
    def total_usd(self) -> float:
        return sum(ceiling.usd for ceiling in self.ceilings.values())


def plan_here(context: AppContext, options: Options) -> SweepPlan:
    catalogue = load_catalogue(*context.settings.price_files()) if context.machine.devices else None
    types = types_here(options, context.machine, catalogue)
    ((name, swept),) = types.items()
    assert swept.options is not None
    options, build = swept.options, partial(build_jobs, machine=context.machine, catalogue=catalogue)
    # Checks all of it, with any batch size in place of what will be found.
    jobs = build(with_batch(options, 1 if AUTO in options.batch_sizes else None))
    if options.command is None:
        check_installed(context, jobs)

    def make(started: Collection[str]) -> "tuple[list[Part], dict[str, UserError]]":
        from fastlaunch.api.comparison import looks_of
        from fastlaunch.lifecycle.launcher import Submission
        from fastlaunch.lifecycle.sweep import Part

        def submission(batch_size: int | None) -> Submission:
            specs = build(with_batch(options, batch_size)).specs
            return Submission(jobs_at=lambda _: specs, verdicts=looks_of(context, options))

        def search(_: int | None) -> Submission:
            first = build(search_options(options)).specs[:1]
            return Submission(jobs_at=lambda _: first)

        searches = [Part(name=BATCH_SEARCH, submission=search)] if AUTO in options.batch_sizes else []
        return [*searches, Part(name=name, submission=submission)], {}

    return SweepPlan(types=types, warnings=jobs.caveats, make=make)


def plan_on_aws(context: AppContext, options: Options) -> SweepPlan:
    from fastlaunch.api.cloud import (
        ceiling_of,
        directory_of,
        expected_at,
        jobs_of,
        price_dates,
        resolve_offline,
        with_contents_of,
    )

    catalogue = load_catalogue(*context.settings.price_files())
    types = types_on_aws(options, catalogue)
    max_cost_usd = context.settings.budget_usd(options.max_cost_usd)
    requests = {
        name: build_cloud_request(swept.options, catalogue=catalogue)
        for name, swept in types.items()
        if swept.options
    }
    directory = None
    if options.command is not None:
        directory = directory_of(next(iter(requests.values())), context.settings.home)
        home = context.settings.home
        requests = {name: with_contents_of(each, directory, home) for name, each in requests.items()}
    searched = searches(types, options, catalogue) if AUTO in options.batch_sizes else {}
    requests = {**_search_requests(searched, catalogue), **requests}
    resolutions = {name: resolve_offline(context, request, catalogue) for name, request in requests.items()}
    ceilings = {name: ceiling_of(request, resolutions[name].placements) for name, request in requests.items()}
    expected = {
        name: expected_at(context, jobs_of(request, site), site, catalogue)
        for name, request in requests.items()
        if name in types and (site := resolutions[name].placements[0])
    }
    old = age_note(chain(*map(price_dates, resolutions.values())), context.today)
    if max_cost_usd is not None:
        first_usd = sum(ceiling.usd for name, ceiling in ceilings.items() if is_batch_search(name))
        least_usd = first_usd + min(ceilings[name].usd for name in ceilings if not is_batch_search(name))
        if round(least_usd, 2) > max_cost_usd:
            raise UserError(
                f"no instance type fits into {BUDGET} of ${max_cost_usd:,.2f}: the cheapest may cost "
                f"${least_usd:,.2f}"
                + f", of which ${first_usd:,.2f} to find the batch size"
                * bool(first_usd),
                "give more --max-cost, or shorter --max-hours",
            )
    caveats = [each for request in requests.values() for each in request.caveats]
    return SweepPlan(
        types=types,
        warnings=(*dict.fromkeys(caveats), *([old] if old else ())),
        make=partial(_parts_on_aws, context, requests, catalogue, ceilings, directory),
        ceilings=ceilings,
        expected=expected,
        searched_on=tuple(searched),
        max_cost_usd=max_cost_usd,
        directory=directory,
        scripts={script.label: script for each in requests.values() for script in each.scripts},
    )


def _search_requests(options: Mapping[str, Options], catalogue: Catalogue) -> dict[str, CloudRequest]:
    """Return the requests of the runs that find the batch size, by part. options: by instance type."""
    return {
        f"{BATCH_SEARCH} on {name}" if number else BATCH_SEARCH: build_cloud_request(
            typed, catalogue=catalogue
        )
        for number, (name, typed) in enumerate(options.items())
    }


def _parts_on_aws(
    context: AppContext,
    requests: Mapping[str, CloudRequest],
    catalogue: Catalogue,
    ceilings: "Mapping[str, CostCeiling]",
    directory: "WorkingDirectory | None",
    started: Collection[str],
) -> "tuple[list[Part], dict[str, UserError]]":
    """Return the parts, and which cannot be started: those to be started are looked up at AWS now.

    Raises UserError's kinds if a search for the batch size, or every part, is one of these.
    """
    from fastlaunch.api.cloud import check_plans, submission_of, warnings_of
    from fastlaunch.api.comparison import looks_of
    from fastlaunch.lifecycle.launcher import Submission
    from fastlaunch.lifecycle.sweep import Part
    from fastlaunch.placement.prepare import prepare, upload_code

    def submission(name: str, prepared: "Prepared | None", batch_size: int | None) -> "Submission":
        request = requests[name]
        if prepared is None:
            return Submission(
                jobs_at=lambda _: (),
                max_minutes=request.options.max_minutes,
                max_replacements=request.options.max_replacements,
                account_timer=request.options.account_timer,
                verdicts=looks_of(context, request.options),
            )
        options = with_batch(request.options, batch_size)
        if not request.scripts:
            request = build_cloud_request(options, catalogue=catalogue)
        upload_code(prepared, context.aws)
        made = submission_of(context, replace(prepared, request=request))
        if not is_batch_search(name):
            return made
        # One run finds what fits all recipes.
        return replace(made, jobs_at=lambda at: made.jobs_at(at)[:1])

    parts, refused = [], {}
    warnings: dict[str, None] = {}
    for name, request in requests.items():
        prepared = None
        try:
            if name not in started:
                prepared = prepare(
                    request,
                    aws=context.aws,
                    settings=context.settings,
                    catalogue=catalogue,
                    now=context.now(),
                    commit=context.commit,
                    directory=directory,
                )
                check_plans(prepared.request, prepared.placements)
        except UserError as error:
            refused[name] = error
            if is_batch_search(name) or len(refused) == len(requests):
                raise
            continue
        warnings |= dict.fromkeys(warnings_of(prepared) if prepared else ())
        made = partial(submission, name, prepared)
        parts.append(Part(name=name, ceiling_usd=ceilings[name].usd, submission=made))
    for line in warnings:
        context.report(line)
    return parts, refused


def in_lines(plan: SweepPlan) -> list[str]:
    """Return what the matrix leaves out and why, and what each type and all of it may cost."""
    from fastlaunch.report.text import dollars

    skipped = {
        (f"{cell.label} on {name}", cell.skipped)
        for name, swept in plan.types.items()
        for cell in swept.cells
        if cell.skipped
    }
    lines = [f"left out: {reason}" for reason in by_reason(sorted(skipped))]
    if any(cell.batch_size == AUTO for swept in plan.types.values() for cell in swept.cells):
        where = f" on {' and '.join(plan.searched_on)}" if plan.searched_on else ""
        least = ", each where the types that run it have the least GPU memory" if where else ""
        lines.append(f"auto: a short run{where} first finds the largest batch that fits all recipes{least}")
    if any(swept.is_until_best for swept in plan.types.values()):
        lines.append(
            "--until-best: a cell runs only as long as it may be the best of its global batch, and a type "
            "starts only if one of its cells may be; what follows is the most"
        )
    if plan.directory:
        lines += [" ".join(["travels:", *travels_text(plan.directory)[:-1], "--output json lists all."])]
    for name, ceiling in plan.ceilings.items():
        expected = plan.expected.get(name)
        probably = ""
        if expected is not None and not isinstance(expected, str):
            evidence = " and ".join(dict.fromkeys(job.rate.evidence_text for job in expected.jobs))
            usd = f"${dollars(expected.usd.value)}{range_in_brackets(expected.usd, dollars)}"
            probably = f"; expected: probably {usd}, {evidence}"
        lines.append(f"{name}: {ceiling}{probably}")
    if plan.ceilings:
        total = f"all together: at most ${plan.total_usd:,.2f}"
        if plan.max_cost_usd is not None and plan.total_usd > plan.max_cost_usd:
            total += (
                f", of which the budget allows ${plan.max_cost_usd:,.2f}: a type whose ceiling does not fit "
                "into what those before it leave is not started"
            )
        lines += [total, NOT_COUNTED]
    else:
        lines.append("on this machine, for which nothing is billed")
    return lines
