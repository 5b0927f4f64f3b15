"""Runs of the ledger as comparisons take them, and the verdicts on a submission's rows between its rounds."""

from collections.abc import Sequence
from dataclasses import replace

from fastlaunch.analysis.compare import MeasuredRun, compare
from fastlaunch.analysis.pooling import newest_version
from fastlaunch.analysis.pricing import PriceRequest
from fastlaunch.analysis.statistics import UNRESOLVED
from fastlaunch.analysis.verdicts import BASELINE, NO_INTERVAL
from fastlaunch.catalog.prices import SERVICES
from fastlaunch.core.units import counted
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.ledger import IMPORT, Run, open_ledger
from fastlaunch.lifecycle.rounds import RowVerdict, Verdicts
from fastlaunch.lifecycle.world import World
from fastlaunch.measure.summary import WORDS


def measured_runs(
    runs: Sequence[Run], region: str, *, with_shared: bool
) -> tuple[list[MeasuredRun], list[str]]:
    """Return the runs that measured something as `compare` takes them, each once; what is left out, in words.

    If its owner shared a run again, the last copy counts. with_shared: the runs of others count as the
    user's own; of one name then a run of the user's own counts, else what was shared first, since whoever
    shares a run chooses its name.
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
    runs: Sequence[Run], region: str, *, with_shared: bool
) -> tuple[list[MeasuredRun], list[str]]:
    """Return what `measured_runs` does, without the runs of others unless `with_shared`: no row is theirs."""
    counted_runs = [run for run in runs if with_shared or run.owner is None]
    kept, left_out = measured_runs(counted_runs, region, with_shared=with_shared)
    if num_others := len(runs) - len(counted_runs):
        word = "counts" if num_others == 1 else "count"
        left_out.append(f"{counted(num_others, 'run')} that others shared {word} with --with-shared")
    return kept, left_out


def _joined(run: MeasuredRun) -> MeasuredRun:
    """Return the run as one that pools with those of others: a script's by a digest of its command."""
    summary = run.summary
    if run.words and WORDS not in summary.setup.fingerprint:
        fingerprint = {**summary.setup.fingerprint, WORDS: run.words}
        summary = replace(summary, setup=replace(summary.setup, fingerprint=fingerprint))
    return replace(run, summary=summary, is_joined=True)


def measured_run(run: Run, region: str) -> MeasuredRun | None:
    """Return the run as `compare` takes it; None if it measured nothing. region: the user's own."""
    if run.summary is None:
        return None
    # Where nothing was noted that it was billed at, what its own service lists for what was asked for counts.
    if run.backend in SERVICES:
        service, region, purchase = run.backend, run.region or region, run.purchase or "on-demand"
    else:
        service, purchase = run.summary.environment.service or "ec2", "on-demand"
    return MeasuredRun(
        run_id=run.id,
        summary=run.summary,
        # What was imported together need not have been measured together; what is shared knows what was.
        session=None if run.backend == IMPORT and run.owner is None else run.submission_id,
        price=run.price,
        service=service,
        region=region,
        purchase=purchase,
        script=run.script.typed if run.script else (),
        words=run.script.digest_under(run.workload) if run.script else None,
        owner=run.owner,
    )


def verdicts_of(world: World, options: Options) -> Verdicts | None:
    """Return what judges a submission's rows after each round; None if all its rounds are run."""
    if not options.until_resolved:
        return None
    settings = world.settings

    def verdicts(runs: Sequence[Run]) -> dict[str, RowVerdict]:
        if options.add_to:
            with open_ledger(settings, clock=world.now) as ledger:
                runs = [*ledger.fetch_comparable(submission=options.add_to), *runs]
        comparison = compare(
            [measured for run in runs if (measured := measured_run(run, settings.region))],
            catalogue=world.catalogue,
            prices=PriceRequest(today=world.today, region=settings.region),
        )
        # A script that was edited meanwhile is judged by what it is now.
        now = {
            name: newest_version([run for row in rows for run in row.runs])
            for name, rows in comparison.by_workload.items()
        }
        judged = [
            (row, row.verdict.in_batch or row.verdict)
            for row in comparison.rows
            if row.setup.version == now[row.setup.workload]
        ]
        return {
            id: RowVerdict(
                kind=verdict.kind,
                ratio=verdict.ratio or verdict.speed_ratio,
                is_baseline=verdict.kind == BASELINE,
                is_open=verdict.kind in (UNRESOLVED, NO_INTERVAL),
                batch=(row.setup.global_batch, row.setup.sequence_length),
            )
            for row, verdict in judged
            for id in row.run_ids
        }

    return verdicts
