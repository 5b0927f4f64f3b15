"""Decides what another attempt at a run can go on with: a checkpoint, the minutes left, sites.

Also warns where checkpoints were too slow for spot, and where runs hung.
"""

import glob
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.backends.site import Site
from fastlaunch.core.data import read
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import MIN_MINUTES
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.core.units import duration_text
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.attempt_cost import minutes_used
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.collect import checkpoints
from fastlaunch_train.node.protocol import LEAST_USE, newest_checkpoint

#: Subfolder of a run's folder for what a script writes: its $FASTLAUNCH_OUTPUT.
OUTPUT = "output"
#: The longest time for a checkpoint on spot. EC2 gives two minutes; the rest is for the step under way and
#: the upload.
LONGEST_S = 60.0
#: A run whose GPUs did nothing for so long, until one of these ended it, hung.
_LONG_IDLE_S = 600.0
_STOPPED_BY_OTHERS = (Ending.TIME_LIMIT, Ending.STOPPED, Ending.CANCELLED)
#: How long to wait after a request that got no machine.
_RETRY_AFTER = timedelta(minutes=10)
#: The consequence of a slower checkpoint. SageMaker documents 120 s between SIGTERM and the end for jobs that
#: are stopped (API_StoppingCondition), but for jobs that lose their spot machine only that they start again
#: from what had been copied to S3 (model-checkpoints).
_CONSEQUENCES = {
    "ec2": "EC2 gives a spot instance two minutes, upload included; a checkpoint under way may be lost",
    "sagemaker": (
        "SageMaker promises no time for a checkpoint before it takes a spot instance; the job goes on from"
        " the last that reached S3"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """How another attempt can go on with a run."""

    #: Name of the checkpoint to go on from; None to begin anew, if a lost machine, a faulty GPU or the spot
    #: interruption of a script came before the first one.
    checkpoint: str | None
    #: Where on AWS; empty on this machine, which has no limit either.
    placements: tuple[Site, ...] = ()
    #: Machines per attempt.
    num_nodes: int = 1
    #: Limit over all attempts, and what is left of it.
    max_minutes: int = 0
    minutes_left: int = 0

    @property
    def origin(self) -> str:
        """`step-00000020.pt`, or the beginning."""
        return self.checkpoint or "the beginning"


def resumable(run: Run, *, backends: Mapping[str, CloudBackend], ledger: Ledger) -> Resumable:
    """Return what it takes to go on with `run`. Raises UserError if that is impossible."""
    is_local = run.backend == "local"
    if run.spec is None or (run.plan is None if is_local else run.backend not in backends):
        raise UserError(f"run {run.id} was imported", "submit it again")
    if run.state not in (RunState.INTERRUPTED, RunState.FAILED, RunState.LOST):
        raise UserError(f"run {run.id} is {run.state}", "only an interrupted, failed or lost run can go on")
    if ledger.launcher_lives(run):
        raise UserError(
            f"another fastlaunch follows runs of run {run.id}'s submission", "resume it when that has ended"
        )
    if is_local:
        return Resumable(checkpoint=_checkpoint_here(run))
    attempts = [attempt for attempt in ledger.attempts_of(run.id) if attempt.handle]
    if any(attempt.ended_at is None for attempt in attempts):
        raise UserError(f"run {run.id} still has a machine", f"look again: fastlaunch status {run.id}")
    if not attempts:
        raise UserError(f"run {run.id} never had a machine", "submit it again")
    spec = run.job
    limit = spec.terms.max_minutes or 0
    backend = backends[run.backend]
    minutes = int(limit - minutes_used(attempts, backend.now()))
    if minutes < MIN_MINUTES:
        raise UserError(
            f"of the {limit} minutes of run {run.id}, {max(0, minutes)} are left: too few",
            "submit it again with a larger --max-hours",
        )
    last = attempts[-1]
    stored = (read(Site, site, "site") for site in ledger.sites_of(run.submission_id))
    saved = checkpoints(run, [last], backends)
    newest = saved.newest if saved else None
    is_fresh = newest is None and not has_begun(last, backend.home)
    placements = tuple(
        site for site in stored if can_go_on(last, site) or (is_fresh and site.instance.name == last.instance)
    )
    # Nobody knows beforehand whether a script saves anything: without a checkpoint it begins anew on spot.
    is_anew = (last.ending is not None and last.ending.is_replaced) or (
        spec.script is not None and last.ending is Ending.RECLAIMED
    )
    if newest is None and not is_anew:
        how = "and have the script save in $FASTLAUNCH_OUTPUT" if spec.script else "with --checkpoint-every"
        raise UserError(f"run {run.id} saved no checkpoint", f"submit it again, {how}")
    if not placements:
        raise UserError(
            f"no place of run {run.id}'s submission has {last.instance} and its bucket", "submit it again"
        )
    return Resumable(
        placements=placements,
        num_nodes=spec.num_nodes,
        max_minutes=limit,
        minutes_left=minutes,
        checkpoint=newest.rpartition("/")[2] if newest else None,
    )


def _checkpoint_here(run: Run) -> str:
    """Return the name of the checkpoint that a run of this machine goes on from; for a script, its output's.

    Raises UserError if there is none.
    """
    if run.job.allow_tcp:
        raise UserError(f"run {run.id} was a rehearsal in containers", "submit it again")
    newest = _newest_saved(run)
    if newest is None and run.job.script:
        raise UserError(
            f"run {run.id} wrote nothing to $FASTLAUNCH_OUTPUT that it could go on from",
            "submit it again; a script goes on that saves its checkpoints there, and looks for them",
        )
    if newest is None:
        raise UserError(f"run {run.id} saved no checkpoint", "submit it again, with --checkpoint-every")
    return newest


def _newest_saved(run: Run) -> str | None:
    assert run.directory is not None
    if "script" in (run.spec or {}):
        return OUTPUT if any(run.directory.glob(f"{OUTPUT}/*")) else None
    names = (path.name for path in run.directory.glob("checkpoints/*"))
    return next(iter(newest_checkpoint(names)), None)


def is_worth_resuming(run: Run) -> bool:
    """Return whether the run was interrupted after it saved a checkpoint; on AWS, if it was to save any."""
    if run.state is not RunState.INTERRUPTED or run.spec is None or run.directory is None:
        return False
    if run.backend == "local":
        return not run.spec.get("allow_tcp") and _newest_saved(run) is not None
    return "script" in run.spec or bool(run.spec.get("checkpoint_every"))


def jobs_of(runs: Iterable[Run]) -> Callable[[Site], dict[str, Job]]:
    """Return a function of a site that gives the runs' jobs there, by run id.

    The site has the instance type that the jobs were planned for.
    """
    jobs = {run.id: run.job for run in runs}
    return lambda site: {
        run_id: replace(job, region=site.region, image=site.image) for run_id, job in jobs.items()
    }


def left_runs(ledger: Ledger) -> list[tuple[Run, ...]]:
    """Return the runs to resume, by attempt, that nobody follows and whose machine can be replaced."""
    by_attempt: dict[int, list[Run]] = {}
    for run in map(ledger.get, ledger.goes_on()):
        attempts = ledger.attempts_of(run.id)
        last = next((attempt for attempt in reversed(attempts) if attempt.handle), None)
        has_ended = all(attempt.ended_at for attempt in attempts) and not ledger.launcher_lives(run)
        if has_ended and last and last.ending and last.ending.can_go_on:
            by_attempt.setdefault(last.id, []).append(run)
    return [tuple(runs) for runs in by_attempt.values()]


def is_too_soon(attempt: Attempt, now: datetime) -> bool:
    """Return whether the attempt got no machine just now, and another one would get none either."""
    return attempt.handle is None and now - datetime.fromisoformat(attempt.started_at) < _RETRY_AFTER


def is_undone(run: Run, attempts: Sequence[Attempt]) -> bool:
    """Return whether the run ended before it was done, and neither failed by itself nor was cancelled."""
    if run.ending in (Ending.CANCELLED, Ending.NOT_NEEDED, Ending.EARLIER_FAILED):
        return False
    if run.state is RunState.FAILED:
        # On AWS, no site had a machine for it, or its request was never sent.
        return run.backend != "local" and not any(attempt.handle for attempt in attempts)
    return run.state in (RunState.CANCELLED, RunState.INTERRUPTED, RunState.LOST)


def has_begun(attempt: Attempt, home: Path) -> bool:
    """Return whether records of one of the attempt's runs are here."""
    return any(s3_sync.record_paths(home, run_id) for run_id in attempt.run_ids)


def can_go_on(attempt: Attempt, site: Site) -> bool:
    """Return whether `site` has the attempt's instance type, and the bucket with its checkpoints."""
    folder = f"s3://{site.bucket}/" + (f"{site.prefix}/" if site.prefix else "")
    has_bucket = (attempt.output or "").startswith(f"{folder}runs/")
    return has_bucket and site.instance.name == attempt.instance


def root_of(attempts: Sequence[Attempt]) -> str | None:
    """Return the id of the run under which the first of the attempts wrote; None without attempts.

    attempts: at a run, oldest first. Their output is `<prefix>/runs/<run id>/<name of the attempt>`.
    """
    output = next((attempt.output for attempt in attempts if attempt.output), None)
    return output.rsplit("/", 2)[1] if output else None


def slow_checkpoint(ledger: Ledger, jobs: Iterable[Job], *, backend: str) -> str | None:
    """Return a warning if a run of the same workload and recipe took long to write a checkpoint."""
    on_spot = {(job.workload, job.recipe.label) for job in jobs if job.terms.purchase == "spot"}
    if not on_spot:
        return None
    workloads = sorted({f"workload={glob.escape(workload)}" for workload, _ in on_spot})
    measured = [
        (run.summary.checkpoints.longest_s, run)
        for run in ledger.fetch_comparable(workloads)
        if (run.workload, run.recipe) in on_spot
        and run.summary
        and run.summary.checkpoints.longest_s is not None
    ]
    longest_s, run = max(measured, key=lambda item: item[0], default=(0.0, None))
    if run is None or longest_s <= LONGEST_S:
        return None
    return (
        f"a checkpoint of {run.recipe} on {run.workload} took {longest_s:.0f} s to write (run {run.id}): "
        f"{_CONSEQUENCES[backend]}"
    )


def idle_end(ledger: Ledger, jobs: Sequence[Job], home: Path) -> str | None:
    """Return a warning if a run of the same workload and recipe idled until something else ended it.

    None if the jobs have --idle-timeout, which ends such a run.
    """
    like = {(job.workload, job.label): job for job in jobs if job.terms.idle_timeout_s is None}
    workloads = sorted({f"workload={glob.escape(workload)}" for workload, _ in like})
    for run in reversed(ledger.fetch_comparable(workloads) if workloads else ()):
        job = like.get((run.workload, run.recipe))
        if job is None or run.ending not in _STOPPED_BY_OTHERS:
            continue
        least = LEAST_USE / max(1, job.num_gpus // job.num_nodes)
        for attempt in ledger.attempts_of(run.id)[-1:]:
            uses = s3_sync.gpu_uses(home, attempt.token)
            busy = [at for at, use in enumerate(uses) if use is None or use >= least]
            num_idle = len(uses) - 1 - max(busy, default=-1)
            idle_s = num_idle / len(uses) * (attempt.billing.lived_s or 0.0) if uses else 0.0
            if idle_s >= _LONG_IDLE_S:
                return (
                    f"run {run.id} of {run.recipe} on {run.workload} did nothing in its last "
                    f"{duration_text(idle_s)}, and was billed for it: --idle-timeout 15min ends such a run"
                )
    return None
