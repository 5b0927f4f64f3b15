"""The expected time and cost of a submission, as in `estimate`. No network."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastlaunch.catalog.prices import Catalogue, paid_usd_per_hour
from fastlaunch.core.errors import UserError
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import utc_day
from fastlaunch.jobs.job import Job
from fastlaunch.lifecycle.world import World
from fastlaunch.measure.summary import Interval

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Cost, Expected, Purchase
    from fastlaunch.analysis.rate import Query
    from fastlaunch.backends.site import Site
    from fastlaunch.lifecycle.rates import Known
    from fastlaunch.measure.summary import Setup


def expected(context: World, jobs: Sequence[Job], site: "Site") -> "Expected | str":
    """Return the jobs' expected time and cost at the site, or the reason why they are unknown.

    Warn of batches that probably do not fit in the memory of the site's GPUs.
    """
    from fastlaunch.analysis.configurations import check_memory
    from fastlaunch.analysis.cost import (
        Assumptions,
        Expected,
        ExpectedJob,
        cost_of,
        together,
        training_of,
    )
    from fastlaunch.lifecycle.rates import known_rows

    if any(job.script for job in jobs):
        return "as only the script says how long it runs"
    catalogue = context.catalogue
    bought = _purchase(context, jobs[0], site, catalogue)
    known = {
        name: known_rows(context, name, catalogue, judges=False)
        for name in dict.fromkeys(job.workload for job in jobs)
    }
    first = Assumptions()
    totals: list[Cost] = []
    named: list[ExpectedJob] = []
    unknown: list[str] = []
    for kind in dict.fromkeys(job.without_seed for job in jobs):
        name = f"{kind.recipe.label} on {kind.workload} at batch {kind.batch_size or 'auto'}"
        query, rows = _query(kind, site), known[kind.workload]
        subject = rows.subject(_reference(rows, kind))
        try:
            check_memory(query, rows.rows, subject, catalogue)
        except UserError as error:
            context.report(
                as_warning(f"{kind.recipe.label} on {kind.workload}: {error.message}: {error.hint}")
            )
        # Another model than the workload's own, and a batch that is searched for, are of unknown speed.
        rate = None
        if kind.batch_size and kind.steps and kind.inputs.model is None:
            rate = rows.finder(subject).rate(query)
        if rate is None or isinstance(rate, str):
            unknown.append(f"{name}{f' ({rate})' if rate else ''}")
            continue
        assert kind.steps and kind.batch_size
        batch = kind.batch_size * kind.num_gpus
        samples = Interval(value=float(kind.steps * batch))
        training = training_of(
            rate, kind.recipe, samples, num_nodes=kind.num_nodes, global_batch=float(batch)
        )
        num_runs = sum(job.without_seed == kind for job in jobs)
        for number in range(num_runs):
            assumptions = first.for_next_job() if totals or number else first
            totals.append(cost_of(training, bought, assumptions=assumptions, with_parts=False))
        step_time_s = batch / rate.samples_per_s.value
        named.append(ExpectedJob(name=name, num_runs=num_runs, step_time_s=step_time_s, rate=rate))
    if all(job.epochs is not None for job in jobs):
        return "how many steps an epoch has is known when the data are read"
    if unknown:
        more = f", nor of {len(unknown) - 2} more of these" if len(unknown) > 2 else ""
        return f"no speed of {' or '.join(unknown[:2])} is{more}"
    return Expected(
        hours=together([cost.hours for cost in totals]),
        # A capacity block is paid as a whole, whatever the jobs use of it.
        usd=together([cost.effective_usd for cost in totals]),
        jobs=tuple(named),
    )


def _query(job: Job, site: "Site") -> "Query":
    from fastlaunch.analysis.rate import Query

    return Query(
        instance=site.instance,
        num_nodes=job.num_nodes,
        recipe=job.recipe,
        batch_size_per_gpu=job.batch_size,
        precision=job.recipe.precision,
        data=job.inputs.data.partition(":")[0],
        sequence_length=job.inputs.sequence_length,
    )


def _reference(rows: "Known", job: Job) -> "Setup | None":
    """Return the setup from which predictions take the unit and length of a sample."""
    alike = [row for _, row in rows.on_gpus if row.setup.recipe == job.recipe.label]
    return next((row.setup for row in alike or rows.rows), None)


def _purchase(context: World, job: Job, site: "Site", catalogue: Catalogue) -> "Purchase":
    """Return the purchase of the machine: by the hour, and spot at its price limit without losses."""
    from fastlaunch.analysis.cost import Purchase

    assert site.price
    # The limit for spot may be the on-demand price, which differs from this account's spot price.
    is_on_demand = job.terms.purchase == "on-demand"
    paid = paid_usd_per_hour(site.price, context.settings) if is_on_demand else site.price.usd_per_hour
    volume = catalogue.find_volume_price(site.region, on=utc_day(context.now()))
    return Purchase(price=site.price, usd_per_hour=paid, volume=volume if site.backend == "ec2" else None)
