"""What a submission will probably cost, by the step times of runs like its own. No network."""

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import TYPE_CHECKING

from fastlaunch.catalog.hardware import Accelerator
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.units import counted
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.measure.memory import USABLE_MEMORY, memory_line, peaks_by_batch
from fastlaunch.measure.published import DATA
from fastlaunch.measure.summary import RunSummary
from fastlaunch_train.recipes.rules import batch_multiple, batch_problem
from fastlaunch_train.workloads.registry import workload_info

if TYPE_CHECKING:
    from fastlaunch.backends.placements import Placement
    from fastlaunch.ledger.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Source:
    """Measured runs from one place. name: what they are in words, such as `in your ledger`."""

    name: str
    summaries: Sequence[RunSummary]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What jobs will take on one machine, or on its nodes, one after another."""

    usd: float
    # Build, compile and warm up where that was measured, then the steps.
    training_s: float
    # Boot, then code and image; None if no run like these tells.
    start_s: float | None
    # For each job that differs in more than its seed: its name, its step time in seconds, whose that is.
    steps: tuple[tuple[str, float, str], ...]


def ledger_summaries(ledger: "Ledger", jobs: Iterable[JobSpec]) -> list[RunSummary]:
    """Return the summaries of the user's own runs of the same workloads and recipes."""
    selectors = dict.fromkeys(
        f"{field}={glob.escape(value)}"
        for job in jobs
        for field, value in (("workload", job.workload), ("recipe", job.recipe.label))
    )
    runs = ledger.fetch_comparable(list(selectors))
    return [run.summary for run in runs if run.summary and run.owner is None]


def expected(
    jobs: Sequence[JobSpec], site: "Placement", *, sources: Sequence[Source], catalogue: Catalogue
) -> Expected | str:
    """Return what the jobs will take at the site; in words what it is not known for, if that is any of them.

    Of each job the first source counts that has runs of the same workload, recipe, data, batch per GPU and
    number of GPUs on the same instance type, or on as many of its GPUs.
    """
    if any(job.script for job in jobs):
        return "as only the script says how long it runs"
    training_s, starts_s, steps = 0.0, [], []
    unknown: list[str] = []
    for kind in dict.fromkeys(job.without_seed for job in jobs):
        name = f"{kind.recipe.label} on {kind.workload} at batch {kind.batch_size or 'auto'}"
        source, like = next(_like(kind, site, sources, catalogue), (None, []))
        if source is None or kind.steps is None:
            unknown.append(name)
            continue
        times_s = [each.timing.step_time_s.value for each in like if each.timing.step_time_s]
        step_time_s = geometric_mean(times_s)
        before_s = [
            each.startup.build_s + (each.startup.compile_s or 0.0) + (each.timing.warmup_s or 0.0)
            for each in like
            if each.startup.build_s is not None
        ]
        num_runs = sum(job.without_seed == kind for job in jobs)
        training_s += num_runs * (kind.steps * step_time_s + (fmean(before_s) if before_s else 0.0))
        starts_s += [
            each.startup.boot_s + (each.startup.pull_s or 0.0)
            for each in like
            if each.startup.boot_s is not None
        ]
        steps.append((name, step_time_s, _which(like, source)))
    if unknown:
        return _unknown(jobs, unknown)
    start_s = fmean(starts_s) if starts_s else None
    hours = jobs[0].num_nodes * (training_s + (start_s or 0.0)) / 3600
    return Expected(
        usd=hours * site.max_usd_per_hour,
        training_s=training_s,
        start_s=start_s,
        steps=tuple(steps),
    )


def too_large(
    jobs: Sequence[JobSpec], site: "Placement", *, sources: Sequence[Source], catalogue: Catalogue
) -> Iterator[str]:
    """Yield which jobs' batches will probably not fit in the memory of the site's GPUs, by runs' peaks."""
    accelerator = catalogue.accelerators[site.instance.accelerator]
    for workload, recipe, batch_size in dict.fromkeys(
        (job.workload, job.recipe, job.batch_size) for job in jobs if not job.script
    ):
        alike = [
            summary
            for source in sources
            for summary in source.summaries
            if (summary.setup.workload, summary.setup.recipe) == (workload, recipe.label)
        ]
        peaks = peaks_by_batch((each.setup.batch_size_per_gpu, each.peak_memory_gib) for each in alike)
        if not peaks or not batch_size or _has_fitted(alike, batch_size, accelerator, catalogue):
            continue
        fixed_gib, gib_per_sample = memory_line(peaks, workload_info(workload).num_parameters)
        need_gib = fixed_gib + batch_size * gib_per_sample
        room_gib = USABLE_MEMORY * accelerator.memory_gib
        if need_gib > room_gib:
            most = int((room_gib - fixed_gib) / gib_per_sample)
            parts = recipe.grad_accumulation
            # A size that suits the recipe, else one that it takes at all.
            sizes = [most // each * each for each in (parts * batch_multiple(recipe), parts)]
            fits = next((size for size in sizes if size > 0 and not batch_problem(recipe, size)), None)
            advice = f"--batch-size {fits} may fit" if fits else "no batch may fit"
            yield (
                f"{recipe.label} on {workload} at batch {batch_size} takes about {need_gib:,.0f} GiB, by"
                f" other runs, and {accelerator.name} has {room_gib:.3g} that can be used: {advice}"
            )


def _has_fitted(
    runs: Iterable[RunSummary], batch_size: int, accelerator: Accelerator, catalogue: Catalogue
) -> bool:
    """Return whether one of the runs had such a batch, or a larger one, on this accelerator."""
    return any(
        each.setup.device_name
        and catalogue.accelerator_of_device(each.setup.device_name) == accelerator
        and (each.setup.batch_size_per_gpu or 0) >= batch_size
        and each.peak_memory_gib is not None
        for each in runs
    )


def _like(
    job: JobSpec, site: "Placement", sources: Sequence[Source], catalogue: Catalogue
) -> Iterator[tuple[Source, list[RunSummary]]]:
    """Yield each source that has completed runs like the job, with these."""
    for source in sources:
        if like := [summary for summary in source.summaries if _is_like(summary, job, site, catalogue)]:
            yield source, like


def _is_like(summary: RunSummary, job: JobSpec, site: "Placement", catalogue: Catalogue) -> bool:
    setup = summary.setup
    if setup.instance is None:
        accelerator = catalogue.accelerator_of_device(setup.device_name) if setup.device_name else None
        is_same_machine = accelerator is not None and accelerator.name == site.instance.accelerator
    else:
        is_same_machine = setup.instance == site.instance.name
    return (
        is_same_machine
        and summary.status == "completed"
        and not summary.problems
        and summary.timing.step_time_s is not None
        and (setup.workload, setup.recipe) == (job.workload, job.recipe.label)
        and (setup.num_nodes, setup.num_gpus) == (job.num_nodes, job.num_gpus)
        and setup.batch_size_per_gpu == job.batch_size
        and setup.data in (DATA, job.inputs.data.partition(":")[0])
        and job.inputs.model is None
        and job.inputs.sequence_length in (None, setup.sequence_length)
    )


def _which(like: Sequence[RunSummary], source: Source) -> str:
    """`by 3 runs in your ledger, the last of 2026-11-21`."""
    days = [each.environment.measured_on for each in like if each.environment.measured_on]
    last = f", {'the last ' if len(like) > 1 else ''}of {max(days)}" if days else ""
    published = next((each.figures.source for each in like if each.figures.source), None)
    if published:
        return f"by the {published.partition(',')[0]}{last}"
    return f"by {counted(len(like), 'run')} {source.name}{last}"


def _unknown(jobs: Sequence[JobSpec], names: Sequence[str]) -> str:
    if all(job.epochs is not None for job in jobs):
        return "how many steps an epoch has is known when the data are read"
    more = f", nor were {len(names) - 2} more of these" if len(names) > 2 else ""
    return f"no run of {' or '.join(names[:2])} on such data and machines was measured{more}"
