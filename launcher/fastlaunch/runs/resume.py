"""What a run on AWS can go on with when its machine is gone: a checkpoint, minutes that are left, places."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends import RunState, s3_sync
from fastlaunch.backends.protocol import CloudBackend, Place
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.attempt_cost import minutes_used
from fastlaunch.placement.cost_ceiling import MIN_MINUTES, CostCeiling, cost_ceiling
from fastlaunch.stored_sites import site_from_json
from fastlaunch.submission import launcher_lives

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger, Run
    from fastlaunch.run_attempts import Attempt


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """A run that another attempt can go on with: where, as which job, and in how many minutes in all.

    minutes_left: of `max_minutes`. checkpoint: name of the one it goes on from. num_nodes: machines that it
    takes.
    """

    sites: tuple[Place, ...]
    jobs_at: Callable[[Place], Mapping[str, JobSpec]]
    num_nodes: int
    max_minutes: int
    minutes_left: int
    checkpoint: str


def resumable(
    run: "Run", *, backends: Mapping[str, CloudBackend], aws: Aws, ledger: "Ledger", now: datetime
) -> Resumable:
    """What it takes to go on with `run`. Raises UserError, with the reason, where that cannot be."""
    if run.backend not in backends or run.spec is None:
        raise UserError(
            f"run {run.id} ran on {run.backend}, and only runs on AWS are resumed",
            f"one of this machine goes on by its own command (`fastlaunch runs show {run.id}`) with --resume",
        )
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
    sites = tuple(own for site in stored if (own := site_to_go_on(site, last)))
    checkpoint = last_checkpoint(aws, run.id, last, backends[run.backend])
    if checkpoint is None:
        raise UserError(f"run {run.id} saved no checkpoint", "submit it again, with --checkpoint-every")
    if not sites:
        raise UserError(
            f"no place of run {run.id}'s submission has {last.instance} and its bucket", "submit it again"
        )
    return Resumable(
        sites=sites,
        jobs_at=lambda site: {run.id: replace(spec, region=site.region, image=site.image)},
        num_nodes=spec.num_nodes,
        max_minutes=limit,
        minutes_left=minutes,
        checkpoint=checkpoint,
    )


def site_to_go_on(site: Place, attempt: "Attempt") -> Place | None:
    """The site, for what the attempt began to go on at: on the same type, with the same bucket. Else None."""
    place = f"s3://{site.bucket}/" + (f"{site.prefix}/" if site.prefix else "")
    if not (attempt.output or "").startswith(f"{place}runs/"):
        return None
    if isinstance(site, TrainingSite):
        # Of several types only the one that it got: a checkpoint is of so many ranks, a speed of one GPU.
        got = next((one for one in (site.instance, *site.others) if one.name == attempt.instance), None)
        return replace(site, instance=got, others=()) if got else None
    return site if site.instance.name == attempt.instance else None


def root_of(attempts: "Sequence[Attempt]") -> str | None:
    """Id of the run under which the first of the attempts wrote; None if there is none yet.

    attempts: at a run, oldest first. Their output is `<prefix>/runs/<run id>/<name of the attempt>`.
    """
    output = next((attempt.output for attempt in attempts if attempt.output), None)
    return output.rsplit("/", 2)[1] if output else None


def last_checkpoint(aws: Aws, run_id: str, attempt: "Attempt", backend: CloudBackend) -> str | None:
    """Name of the newest complete checkpoint of the run, such as `step-00000040.pt`; None if it has none."""
    assert attempt.region is not None and attempt.output is not None
    bucket, prefix = s3_sync.split_uri(backend.checkpoint_folder(attempt.output, run_id))
    stored = aws.list_objects(attempt.region, bucket, f"{prefix}/")
    found = [one.key.rpartition("/")[2] for one in stored]
    return max((name for name in found if name.startswith("step-") and name.endswith(".pt")), default=None)


def ceiling_of(found: Resumable) -> CostCeiling:
    """The most that going on can cost."""
    return cost_ceiling(found.sites, num_nodes=found.num_nodes, max_minutes=found.minutes_left)
