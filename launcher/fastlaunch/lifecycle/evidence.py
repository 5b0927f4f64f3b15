"""Runs as evidence: in the form of comparisons, as known rates of a workload, as what a submission takes."""

import datetime
import glob
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from fastlaunch.analysis.anchors import Anchor, published_anchors
from fastlaunch.analysis.compare import Comparison, MeasuredRun, PriceRequest, Row, compare, rate_on_type
from fastlaunch.analysis.configurations import check_memory
from fastlaunch.analysis.cost import (
    Assumptions,
    Cost,
    Expected,
    ExpectedJob,
    Purchase,
    cost_of,
    together,
    training_of,
)
from fastlaunch.analysis.memory import FINE_TUNING, ModelSize
from fastlaunch.analysis.pooling import of_newest_version
from fastlaunch.analysis.pricing import SECONDS_PER_HOUR, accelerator_of
from fastlaunch.analysis.rate import Finder, Origin, Query, Rate, Subject, subject_of
from fastlaunch.backends.site import Site
from fastlaunch.catalog.prices import SERVICES, Catalogue, paid_usd_per_hour
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import counted, utc_day
from fastlaunch.jobs.data_sources import DataFile
from fastlaunch.jobs.job import Job
from fastlaunch.lifecycle.model_size import model_size
from fastlaunch.lifecycle.world import World
from fastlaunch.measure.published import shipped_runs, shipped_workloads
from fastlaunch.measure.summary import WORDS, Interval, RunSummary, Setup
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.workloads.registry import SHAPES, WorkloadError, function_arguments, workload_info

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run

#: JPEGs of 500 x 375 pixels that a CPU decodes, resizes and normalises a second, by tests/benchmarks/
#: jpeg_decode.py on one CPU of an AMD EPYC at 2.6 GHz, on 27 November 2026.
JPEGS_PER_VCPU_S = 330
#: What tokenizers of 32,000 to 150,000 entries make of English and of code: a rule of thumb, not measured.
_BYTES_PER_TOKEN = Interval(value=4.0, low=3.0, high=5.0)


def measured_runs(
    runs: Sequence["Run"], region: str, *, with_shared: bool
) -> tuple[list[MeasuredRun], list[str]]:
    """Return the measured runs as `compare` takes them, each once, and sentences on those left out.

    If an owner shared a run again, the last copy counts. with_shared: pool the runs of others with those of
    the user. If several owners have a run of one name, the user's counts, or else the one that was shared
    first, since whoever shares a run chooses its name.
    """
    last = {(run.owner, run.recorded_id): run for run in runs if run.owner is not None}
    owners: dict[str, str | None] = {}
    for run in sorted(runs, key=lambda run: run.owner is not None):
        owners.setdefault(run.recorded_id, run.owner)
    kept, left_out = [], []
    for run in runs:
        counts = run if run.owner is None else last[run.owner, run.recorded_id]
        if counts is not run:
            left_out.append(f"{run.id} is left out: {run.owner} shared it again, as {counts.id}")
        elif with_shared and owners[run.recorded_id] != run.owner:
            whose = owners[run.recorded_id]
            first = f"{whose} shared one of this name before" if whose else "a run of yours has its name"
            left_out.append(f"{run.id} of {run.owner} is left out: {first}")
        elif (measured := measured_run(run, region)) is not None:
            kept.append(_joined(measured) if with_shared else measured)
    return kept, left_out


def evidence_of(
    runs: Sequence["Run"], region: str, *, with_shared: bool
) -> tuple[list[MeasuredRun], list[str]]:
    """Return what `measured_runs` does; without `with_shared`, leave out the runs of others."""
    counted_runs = [run for run in runs if with_shared or run.owner is None]
    kept, left_out = measured_runs(counted_runs, region, with_shared=with_shared)
    if num_others := len(runs) - len(counted_runs):
        word = "counts" if num_others == 1 else "count"
        left_out.append(f"{counted(num_others, 'run')} that others shared {word} with --with-shared")
    return kept, left_out


def _joined(run: MeasuredRun) -> MeasuredRun:
    """Return the run in a form that pools with runs of others: a script's, by a digest of its command."""
    summary = run.summary
    if run.words and WORDS not in summary.setup.fingerprint:
        fingerprint = {**summary.setup.fingerprint, WORDS: run.words}
        summary = replace(summary, setup=replace(summary.setup, fingerprint=fingerprint))
    return replace(run, summary=summary, is_joined=True)


def measured_run(run: "Run", region: str) -> MeasuredRun | None:
    """Return the run as `compare` takes it; None if it measured nothing. region: of the user."""
    from fastlaunch.ledger.ledger import IMPORT

    if run.summary is None:
        return None
    # Without a noted price, the list price of its service counts, for the requested purchase option.
    if run.backend in SERVICES:
        service, region, purchase = run.backend, run.region or region, run.purchase or "on-demand"
    else:
        service, purchase = run.summary.environment.service or "ec2", "on-demand"
    return MeasuredRun(
        run_id=run.id,
        summary=run.summary,
        # Runs imported together may be of several sessions; a shared run names its session.
        session=None if run.backend == IMPORT and run.owner is None else run.submission_id,
        price=run.price,
        service=service,
        region=region,
        purchase=purchase,
        script=run.script.typed if run.script else (),
        words=run.script.digest_under(run.workload) if run.script else None,
        owner=run.owner,
    )


@dataclass(frozen=True, kw_only=True)
class Known:
    """The rows of a workload, from the user's ledger and as shipped."""

    workload: str
    comparisons: Mapping[Origin, Comparison]
    catalogue: Catalogue
    warnings: tuple[str, ...]
    # Runs of other workloads to predict from.
    others: Callable[[], Sequence[Anchor]]
    #: The size of a model that nobody ran, if it could be counted.
    size: ModelSize | None = None
    sequence_length: int | None = None  # tokens of a sample, if given

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for comparison in self.comparisons.values() for row in comparison.rows)

    @property
    def on_gpus(self) -> tuple[tuple[Origin, Row], ...]:
        """The rows with a speed on a GPU, with their origin."""
        return tuple(
            (origin, row)
            for origin, comparison in self.comparisons.items()
            for row in comparison.rows
            if rate_on_type(row.group) and accelerator_of(row.setup, self.catalogue)
        )

    def subject(self, reference: Setup | None) -> Subject:
        """Return the subject of predictions. reference: the setup that others must train like."""
        return subject_of(
            self.workload, self.rows, reference, self.catalogue, self.size, self.sequence_length
        )

    def finder(self, subject: Subject, *, scaling: float | None = None) -> Finder:
        """Return a finder of rates. scaling: as for `Finder`."""
        rows = {origin: comparison.rows for origin, comparison in self.comparisons.items()}
        return Finder(rows, subject, self.catalogue, self.others, scaling=scaling)

    @property
    def anchors(self) -> list[Anchor]:
        """The rows as runs to predict from, each recipe as a model of its own."""
        reference = next((row.setup for _, row in self.on_gpus), None)
        return self.finder(self.subject(reference)).anchors if reference else []


def measured_anchors(
    context: World,
    catalogue: Catalogue,
    *,
    shipped: bool,
    from_ledger: bool,
    without: str | None = None,
    units: Collection[str] = (),
) -> list[Anchor]:
    """Return measurements as runs to predict from: the shipped ones, those of the user's ledger, or both.

    without: a workload to leave out. units: of the samples of the shipped workloads, if given.
    """
    names = {name for name, unit in shipped_workloads().items() if shipped and (unit in units or not units)}
    if from_ledger and (context.settings.home / LEDGER_NAME).exists():
        from fastlaunch.ledger.ledger import open_ledger

        with open_ledger(context.settings, clock=context.now) as ledger:
            names |= ledger.measured_workloads()
    anchors: list[Anchor] = []
    for name in sorted(names - {without}):
        known = known_rows(context, name, catalogue, judges=False)
        kept = {Origin.SHIPPED: shipped, Origin.LEDGER: from_ledger}
        comparisons = {origin: known.comparisons[origin] for origin in Origin if kept[origin]}
        anchors += replace(known, comparisons=comparisons).anchors
    return anchors


def check_known(context: World, workload: str, recipes: Iterable[str] = ()) -> None:
    """Raise UserError for a workload or recipe that is neither ours nor of a run that was measured.

    It is quick, so that a mistyped name is reported before an option that is missing.
    """

    @cache
    def measured() -> list[Setup]:
        setups = [summary.setup for summary in shipped_runs(workload).values()]
        if (context.settings.home / LEDGER_NAME).exists():
            from fastlaunch.ledger.ledger import open_ledger

            with open_ledger(context.settings, clock=context.now) as ledger:
                runs = ledger.fetch_comparable([f"workload={glob.escape(workload)}"])
            setups += [run.summary.setup for run in runs if run.summary is not None]
        return setups

    is_script = False
    try:
        workload_info(workload)
    except WorkloadError as error:
        is_script = True
        if not measured():
            hint = "or a script that was measured, by its name in `fastlaunch runs list`"
            raise UserError(error.message, f"{error.hint}; {hint}") from None
    for recipe in recipes:
        name, *overrides = recipe.split(" ")
        problem: UserError | None = None
        if is_script:
            problem = UnknownName("variant", recipe, {setup.recipe for setup in measured()})
        elif name not in RECIPES:
            names = {setup.recipe for setup in measured()}
            problem = UnknownName("recipe", recipe, {*RECIPES, *names})
        else:
            try:
                resolve_recipe(name, overrides)
            except RecipeError as error:
                problem = UserError(error.message, error.hint)
        if problem and not any(setup.is_named(recipe) for setup in measured()):
            raise problem


def known_rows(
    context: World,
    workload: str,
    catalogue: Catalogue,
    *,
    day: datetime.date | None = None,
    allow_unverified: bool = False,
    reconciles: bool = False,
    with_shared: bool = False,
    judges: bool = True,
    counts: bool = False,
    sequence_length: int | None = None,
) -> Known:
    """Return the workload's measured rows. reconciles: first bring the ledger's runs up to date.

    with_shared: include runs that others shared. judges: see `compare`. counts: see `model_size`.
    sequence_length: tokens of a sample, if not as in the rows.
    """
    day, settings = day or context.today, context.settings
    request = PriceRequest(today=day, as_of=day, region=settings.region)

    def compared(runs: Sequence[MeasuredRun]) -> Comparison:
        return compare(
            runs, catalogue=catalogue, prices=request, allow_unverified=allow_unverified, judges=judges
        )

    left_out: list[str] = []
    in_ledger: list[MeasuredRun] = []
    if (settings.home / LEDGER_NAME).exists():
        from fastlaunch.ledger.ledger import open_ledger
        from fastlaunch.lifecycle.reconcile import reconcile

        with open_ledger(settings, clock=context.now) as ledger:
            if reconciles:
                reconcile(ledger, context.backends, context.settings)
            runs = ledger.fetch_comparable([f"workload={glob.escape(workload)}"])
        measured, left_out = evidence_of(runs, settings.region, with_shared=with_shared)
        in_ledger, older = of_newest_version(measured)
        left_out += [older] if older else []
    # Count runs that were imported from the shipped records once.
    imported = {_identity(run.summary) for run in in_ledger}
    shipped = [
        MeasuredRun(run_id=id, summary=summary)
        for id, summary in shipped_runs(workload).items()
        if _identity(summary) not in imported
    ]
    size = None
    if not (in_ledger or shipped) or workload.startswith((*FINE_TUNING,)):
        try:
            size = model_size(context, workload, counts=counts)
        except UserError as error:
            left_out.append(error.message)

    def others() -> list[Anchor]:
        units = {run.summary.setup.sample_unit for run in (*in_ledger, *shipped)}
        measured = measured_anchors(
            context, catalogue, shipped=True, from_ledger=True, without=workload, units=units
        )
        return [*published_anchors(), *measured]

    return Known(
        workload=workload,
        comparisons={Origin.LEDGER: compared(in_ledger), Origin.SHIPPED: compared(shipped)},
        catalogue=catalogue,
        warnings=tuple(left_out),
        size=size,
        sequence_length=sequence_length,
        others=others,
    )


def _identity(summary: RunSummary) -> Hashable:
    """Return a key that only a run and its copies share."""
    return summary.setup.recipe, summary.setup.num_gpus, summary.timing, summary.figures


def expected(
    context: World, jobs: Sequence[Job], site: Site, *, data: DataFile | None = None
) -> Expected | str:
    """Return the jobs' expected time and cost at the site, or the reason why they are unknown.

    Warn of batches that probably do not fit in the memory of the site's GPUs. data: the file that travels.
    """
    from fastlaunch.report.cost import beside_assumed

    if any(job.script for job in jobs):
        return "as only the script says how long it runs"
    catalogue = context.catalogue
    bought = _purchase(context, jobs[0], site, catalogue)
    known = {
        (name, length): known_rows(
            context,
            name,
            catalogue,
            judges=False,
            counts=name.startswith((*FINE_TUNING,)),
            sequence_length=length,
        )
        for name, length in dict.fromkeys((job.workload, job.inputs.sequence_length) for job in jobs)
    }
    first = Assumptions()
    totals: list[Cost] = []
    named: list[ExpectedJob] = []
    unknown: list[str] = []
    bytes_per_token: Interval | None = None
    has_length: list[bool] = []
    for kind in dict.fromkeys(job.without_seed for job in jobs):
        name = f"{kind.recipe.label} on {kind.workload} at batch {kind.batch_size or 'auto'}"
        query, rows = _query(kind, site), known[kind.workload, kind.inputs.sequence_length]
        subject, measured = rows.subject(_reference(rows, kind)), rows.rows
        if tuning := subject.tuning:
            rank = function_arguments(kind.workload, kind.inputs.workload_arguments).get("rank")
            if isinstance(rank, int):
                wide = replace(subject, tuning=replace(tuning, size=tuning.size.of_rank(rank)))
                # What was measured of adapters of another rank says nothing about the memory of these.
                subject, measured = wide, measured if wide == subject else ()
        fits = True
        try:
            check_memory(query, measured, subject, catalogue)
        except UserError as error:
            fits = False
            context.report(
                as_warning(f"{kind.recipe.label} on {kind.workload}: {error.message}: {error.hint}")
            )
        # Another model than the workload's own, and a batch that is searched for, are of unknown speed.
        rate: Rate | str | None = None
        samples = _samples(kind, data)
        has_length.append(samples is not None or kind.epochs is None)
        if not fits:
            rate = "its batch does not fit"
        elif kind.batch_size and samples and kind.inputs.model is None:
            rate = rows.finder(subject).rate(query)
        if rate is None or isinstance(rate, str):
            unknown.append(f"{name}{f' ({rate})' if rate else ''}")
            continue
        assert samples and kind.batch_size
        bytes_per_token = bytes_per_token or (None if kind.steps else _bytes_per_token(kind))
        if limit := _decoding_limit(kind, site, rate.samples_per_s.value, subject.unit):
            context.report(as_warning(f"{name}: {limit}"))
        batch = kind.batch_size * kind.num_gpus
        training = training_of(
            *(rate, kind.recipe, samples),
            num_nodes=kind.num_nodes,
            global_batch=float(batch),
            checkpoint_every=kind.checkpoint_every,
        )
        num_runs = sum(job.without_seed == kind for job in jobs)
        for number in range(num_runs):
            assumptions = first.for_next_job() if totals or number else first
            totals.append(cost_of(training, bought, assumptions=assumptions))
        step_time_s = batch / rate.samples_per_s.value
        named.append(ExpectedJob(name=name, num_runs=num_runs, step_time_s=step_time_s, rate=rate))
    if not any(has_length):
        return "as the number of steps in an epoch is known only once the data are read"
    if unknown:
        more = f", and of {len(unknown) - 2} more" if len(unknown) > 2 else ""
        return f"for want of a speed of {' and of '.join(unknown[:2])}{more}"
    hours = together([cost.hours for cost in totals])
    # A capacity block is paid as a whole, whatever the jobs use of it.
    usd = together([cost.effective_usd for cost in totals])
    assumed_s: Counter[str] = Counter()
    for cost in totals:
        assumed_s.update(cost.assumed_s)
    if beside_assumed(hours, sum(assumed_s.values()) / SECONDS_PER_HOUR).high is None:
        hours, usd = Interval(value=hours.value), Interval(value=usd.value)
    return Expected(
        hours=hours, usd=usd, assumed_s=dict(assumed_s), jobs=tuple(named), bytes_per_token=bytes_per_token
    )


def _samples(job: Job, data: DataFile | None) -> Interval | None:
    """Return how many samples the job trains on; None for epochs of data that are not here, or not text."""
    if job.steps and job.batch_size:
        return Interval(value=float(job.steps * job.batch_size * job.num_gpus))
    info = workload_info(job.workload)
    length = job.inputs.sequence_length or info.sequence_length
    if not (job.epochs and job.batch_size and data and info.is_fine_tuning and length):
        return None
    num_bytes, per_token = job.epochs * data.num_bytes_of_text / length, _bytes_per_token(job)
    high, low = (None if end is None else num_bytes / end for end in (per_token.low, per_token.high))
    return Interval(value=num_bytes / per_token.value, low=low, high=high)


def _bytes_per_token(job: Job) -> Interval:
    """Return the bytes of text in a token; 1 where a built-in shape has no tokenizer."""
    if job.inputs.tokenizer is None and job.workload.partition(":")[2] in SHAPES:
        return Interval(value=1.0)
    return _BYTES_PER_TOKEN


def _decoding_limit(job: Job, site: Site, samples_per_s: float, unit: str) -> str | None:
    """Return a clause if the hosts' CPUs decode image files more slowly than their GPUs train."""
    can = JPEGS_PER_VCPU_S * site.instance.vcpus * job.num_nodes
    if not job.inputs.data.startswith("folder:") or unit != "images" or can >= samples_per_s:
        return None
    return (
        f"{site.instance.vcpus} vCPUs decode about {can:,.0f} JPEGs of ImageNet's size a second, and its GPUs"
        f" train {samples_per_s:,.0f}: they will wait for data unless the images are smaller"
    )


def _query(job: Job, site: Site) -> Query:
    return Query(
        instance=site.instance,
        num_nodes=job.num_nodes,
        recipe=job.recipe,
        batch_size_per_gpu=job.batch_size,
        precision=job.recipe.precision,
        data=job.inputs.data.partition(":")[0],
        sequence_length=job.inputs.sequence_length,
    )


def _reference(rows: Known, job: Job) -> Setup | None:
    """Return the setup from which predictions take the unit and length of a sample."""
    alike = [row for _, row in rows.on_gpus if row.setup.recipe == job.recipe.label]
    return next((row.setup for row in alike or rows.rows), None)


def _purchase(context: World, job: Job, site: Site, catalogue: Catalogue) -> Purchase:
    """Return the purchase of the machine: by the hour, and spot at its price limit without losses."""
    assert site.price
    # The limit for spot may be the on-demand price, which differs from this account's spot price.
    is_on_demand = job.terms.purchase == "on-demand"
    paid = paid_usd_per_hour(site.price, context.settings) if is_on_demand else site.price.usd_per_hour
    volume = catalogue.find_volume_price(site.region, on=utc_day(context.now()))
    return Purchase(price=site.price, usd_per_hour=paid, volume=volume if site.backend == "ec2" else None)
