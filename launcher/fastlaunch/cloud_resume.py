"""What a run on AWS can go on with when its machine is gone: a checkpoint, minutes that are left, places."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from fastlaunch import s3_sync
from fastlaunch.attempt_cost import minutes_used
from fastlaunch.aws import Aws
from fastlaunch.backends import RunState
from fastlaunch.backends.ec2_site import Site
from fastlaunch.cost_ceiling import MIN_MINUTES, CostCeiling, cost_ceiling
from fastlaunch.errors import UserError
from fastlaunch.job import JobSpec
from fastlaunch.stored_sites import site_from_json
from fastlaunch.submission import launcher_lives

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger, Run


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """A run that another attempt can go on with: where, as which job, and in how many minutes in all.

    minutes_left: of `max_minutes`. checkpoint: name of the one it goes on from.
    """

    sites: tuple[Site, ...]
    jobs_at: Callable[[Site], Mapping[str, JobSpec]]
    max_minutes: int
    minutes_left: int
    checkpoint: str


def resumable(run: "Run", *, aws: Aws, ledger: "Ledger", now: datetime) -> Resumable:
    """What it takes to go on with `run`. Raises UserError, with the reason, where that cannot be."""
    if run.backend != "ec2" or run.spec is None:
        raise UserError(f"run {run.id} ran on {run.backend}", "only runs on EC2 can be resumed")
    if run.state not in (RunState.INTERRUPTED, RunState.FAILED, RunState.LOST):
        raise UserError(f"run {run.id} is {run.state}", "only an interrupted, failed or lost run can go on")
    if launcher_lives(ledger, run):
        raise UserError(
            f"another fastlaunch follows runs of run {run.id}'s submission", "resume it when that has ended"
        )
    attempts = [attempt for attempt in ledger.attempts_of(run.id) if attempt.handle]
    if any(attempt.ended_at is None for attempt in attempts):
        raise UserError(f"run {run.id} has a machine still", f"look again: fastlaunch status {run.id}")
    if not attempts:
        raise UserError(f"run {run.id} never had a machine", "submit it again")
    spec = JobSpec.from_json(run.spec)
    limit = spec.max_minutes or 0
    minutes = int(limit - minutes_used(attempts, now))
    if minutes < MIN_MINUTES:
        raise UserError(
            f"of the {limit} minutes of run {run.id}, {max(0, minutes)} are left: too few",
            "submit it again with a larger --max-hours",
        )
    last = attempts[-1]
    stored = [site_from_json(data) for data in ledger.sites_of(run.submission_id)]
    sites = tuple(site for site in stored if fits(site, last))
    checkpoint = last_checkpoint(aws, run.id, last)
    if checkpoint is None:
        raise UserError(f"run {run.id} saved no checkpoint", "submit it again, with --checkpoint-every")
    return Resumable(
        sites=sites,
        jobs_at=lambda site: {run.id: replace(spec, region=site.region, image=site.image)},
        max_minutes=limit,
        minutes_left=minutes,
        checkpoint=checkpoint,
    )


def fits(site: Site, attempt: "Attempt") -> bool:
    """Whether what the attempt began can go on there: on the same type, with the same bucket."""
    place = f"s3://{site.bucket}/" + (f"{site.prefix}/" if site.prefix else "")
    return site.instance.name == attempt.instance and (attempt.output or "").startswith(f"{place}runs/")


def last_checkpoint(aws: Aws, run_id: str, attempt: "Attempt") -> str | None:
    """Name of the newest complete checkpoint of the run, such as `step-00000040.pt`; None if it has none."""
    assert attempt.region is not None and attempt.output is not None
    bucket, prefix = s3_sync.split_uri(attempt.output)
    # `<prefix>/runs/<first run id>/attempt-<n>`
    runs = prefix.rsplit("/", 2)[0]
    folder = f"{runs}/{run_id}/checkpoints/"
    found = [one.key.rpartition("/")[2] for one in aws.list_objects(attempt.region, bucket, folder)]
    return max((name for name in found if name.startswith("step-") and name.endswith(".pt")), default=None)


def ceiling_of(found: Resumable) -> CostCeiling:
    """The most that going on can cost."""
    return cost_ceiling(found.sites, num_nodes=1, max_minutes=found.minutes_left)
