"""Find machines and schedules that nobody stops, by tags and names alone, and decide which must go.

They are instances, training jobs, and schedules whose machines are gone. This is the last way to stop
paying, and needs no ledger. A ledger can add facts, but never keeps alive what is over its time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal, TypeVar

from fastlaunch.aws.account import Schedule
from fastlaunch.aws.client import Aws
from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.aws.types import Identity, Instance
from fastlaunch.backends.node_report import time_of
from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.core.errors import CloudRefused, NotAuthorised, UserError
from fastlaunch.core.ownership import (
    JOB_WAIT_MINUTES,
    MARGIN_MINUTES,
    MAX_MINUTES_TAG,
    RUN_TAG,
    instance_ends_at,
    job_ends_at,
    owner_in,
    token_of,
)
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import Settings
from fastlaunch.core.units import utc_minute
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.schedules import schedule_token, starts_machines

#: A younger schedule may belong to machines that DescribeInstances does not show yet.
YOUNG_SCHEDULE = timedelta(minutes=15)
#: The longest time from an attempt's end, or the final report, until its machine is gone.
LINGER = timedelta(minutes=10)

#: Why a machine with the run tag, but without all other tags in the right form, is left alone.
NOT_OURS = "it does not carry all of fastlaunch's tags in their form: nothing here ends it"

Kind = Literal["instance", "job", "schedule"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class KnownAttempt:
    """A ledger's knowledge of the attempt of an instance or a training job."""

    id: int
    #: When the attempt ended, by itself, all its runs or the final report; None while it goes on.
    over_since: datetime | None
    #: Whether its launcher is alive.
    is_followed: bool
    #: Whether it was given up because AWS did not show it.
    is_lost: bool = False
    #: The price of one machine, at its start.
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything alive in the regions: instances and jobs with the run tag, and fastlaunch's schedules."""

    instances: tuple[Instance, ...]
    jobs: tuple[TrainingJob, ...]
    schedules: tuple[Schedule, ...]
    #: What could not be listed.
    refused: tuple["Refusal", ...]


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A machine, job or schedule that is alive, and whether it must go."""

    kind: Kind
    #: Id of an instance; name of a schedule or a job.
    id: str
    region: str
    must_go: bool
    #: Why it must go or stays.
    why: str
    #: Whether it has all of fastlaunch's tags; nothing else is ended.
    is_ours: bool
    #: When it was started, or made.
    began_at: datetime
    #: When its time is over, margin included; None for a schedule.
    ends_at: datetime | None = None
    #: Its first run; None if its name does not tell it.
    run_id: str | None = None
    #: Its tag `Owner`.
    owner: str | None = None
    instance_type: str | None = None
    num_machines: int = 0
    zone: str | None = None
    is_spot: bool = False
    state: str | None = None
    #: Its id at AWS Batch, if it is in a queue.
    service_job: str | None = None
    #: Billed hours per machine.
    hours: float = 0.0
    #: None if its attempt is in another ledger.
    known: KnownAttempt | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refusal by AWS to list a kind in a region or, with an id, to end one resource."""

    kind: Kind
    region: str
    error: CloudRefused
    id: str | None = None


def take_inventory(
    aws: Aws, regions: Sequence[str], *, begin: Callable[[str], None] = lambda step: None
) -> Inventory:
    """Return everything alive in the regions, oldest first. A refusal in one region does not hide the others.

    begin: called with the name of each list before it is requested.
    """
    refused: list[Refusal] = []

    def listed(kind: Kind, list_region: Callable[[str], Iterable[T]]) -> list[T]:
        resources: list[T] = []
        for region in regions:
            begin(f"{kind}s in {region}")
            try:
                resources += list_region(region)
            except CloudRefused as error:
                refused.append(Refusal(kind=kind, region=region, error=error))
        return resources

    instances = listed("instance", lambda region: live_instances(aws, region))
    queued = listed("job", lambda region: _queued_jobs(aws, region))
    # A service job stands for its training jobs.
    of_queues = {arn for job in queued for arn in job.training_jobs}
    jobs = [*queued, *(job for job in listed("job", aws.live_training_jobs) if job.arn not in of_queues)]
    schedules = listed("schedule", aws.list_schedules)
    return Inventory(
        instances=tuple(sorted(instances, key=lambda instance: (instance.launch_time, instance.id))),
        jobs=tuple(sorted(jobs, key=lambda job: (job.created_at, job.name))),
        schedules=tuple(sorted(schedules, key=lambda schedule: (schedule.created_at, schedule.name))),
        refused=tuple(refused),
    )


def usual_regions(settings: Settings, ledger: Ledger | None) -> list[str]:
    """Return the regions of the config file and of the ledger, those where all has ended by it too."""
    noted = ledger.attempt_regions("ec2") | ledger.attempt_regions("sagemaker") if ledger else ()
    return sorted({settings.region, *settings.aws, *noted})


def live_instances(aws: Aws, region: str) -> list[Instance]:
    """Return the instances of the region that are alive and have the run tag."""
    seen = aws.describe_instances(region, tags={RUN_TAG: ()})
    return [instance for instance in seen if instance.is_live and RUN_TAG in instance.tags]


def _queued_jobs(aws: Aws, region: str) -> list[TrainingJob]:
    # Whoever may not look into queues cannot end what waits there, which costs nothing; what a queue has
    # started is found among the training jobs, and not started again once it is stopped.
    with suppress(NotAuthorised):
        return aws.live_queued_jobs(region)
    return []


def judge_instance(instance: Instance, known: KnownAttempt | None, *, now: datetime) -> Orphan:
    """Judge an instance: it must go if it is fastlaunch's and over its time, or its attempt has ended.

    known: from this ledger; None if the attempt is not in it.
    """
    must_go, why = False, NOT_OURS
    if ends_at := instance_ends_at(instance.tags, instance.token, instance.launch_time):
        minutes = instance.tags[MAX_MINUTES_TAG]
        over = f"over its time: {minutes} minutes, and {MARGIN_MINUTES} more, ended at {utc_minute(ends_at)}"
        must_go, why = _judged(known, over=over, ends_at=ends_at, now=now, by="its own timer stops it")
    return Orphan(
        kind="instance",
        id=instance.id,
        region=instance.region,
        must_go=must_go,
        why=why,
        is_ours=ends_at is not None,
        began_at=instance.launch_time,
        ends_at=ends_at,
        run_id=instance.tags[RUN_TAG],
        owner=owner_in(instance.tags),
        instance_type=instance.instance_type,
        num_machines=1,
        zone=instance.zone,
        is_spot=instance.is_spot,
        state=instance.state,
        hours=_hours(instance.launch_time, now),
        known=known,
    )


def judge_job(job: TrainingJob, known: KnownAttempt | None, *, now: datetime) -> Orphan:
    """Judge a training job: it must go if SageMaker did not end it in time, or if its attempt has ended.

    SageMaker itself enforces MaxRuntimeInSeconds, which counts from when the job has machines. A job that is
    stopping is left to SageMaker.
    """
    must_go, why = False, NOT_OURS
    placed_at, where = job.placed_at, f"queue {job.queue}"
    if job.training_plan and not job.queue:
        placed_at, where = job.started_at, "the queue of its training plan"
    ends_at = job_ends_at(job.tags, job.name, placed_at or job.created_at)
    if ends_at and (job.queue or job.training_plan) and placed_at is None:
        # Its time has not begun. It costs nothing while it waits, and will cost once it is started.
        over_since = known.over_since if known and not known.is_followed else None
        must_go = over_since is not None
        why = f"it waits in {where}, which costs nothing"
        if over_since:
            why = f"its runs ended at {utc_minute(over_since)}, and it waits in {where} still"
    elif ends_at:
        minutes = job.tags[MAX_MINUTES_TAG]
        over = (
            f"over its time: {minutes} minutes, and {JOB_WAIT_MINUTES} of waiting and {MARGIN_MINUTES} more, "
            f"ended at {utc_minute(ends_at)}"
        )
        must_go, why = _judged(known, over=over, ends_at=ends_at, now=now, by="SageMaker stops it")
    if job.status == "Stopping":
        must_go, why = False, "it is being stopped"
    return Orphan(
        kind="job",
        id=job.name,
        region=job.region,
        must_go=must_go,
        why=why,
        is_ours=ends_at is not None,
        began_at=job.created_at,
        ends_at=ends_at,
        # It costs nothing until it has machines.
        hours=_hours(job.started_at, now) if job.started_at else 0.0,
        is_spot=job.is_spot,
        run_id=job.tags.get(RUN_TAG),
        owner=owner_in(job.tags),
        instance_type=job.ec2_type,
        num_machines=job.num_instances,
        state=job.status,
        service_job=job.service_job,
        known=known,
    )


def judge_schedule(
    schedule: Schedule,
    *,
    live_tokens: Sequence[str],
    is_known: bool = True,
    is_ended: bool = False,
    is_over: bool = False,
    now: datetime,
) -> Orphan:
    """Judge a schedule: it must go if no machine that it would end is alive.

    live_tokens: of attempts in its region whose machines are alive and stay. is_known: whether these machines
    could be listed. is_ended: whether all machines of its attempt were just ended. is_over: whether nothing
    may start its attempt any more.
    """
    must_go, token = False, schedule_token(schedule.name)
    if token is None:
        why = "its name is not in fastlaunch's form: left alone"
    elif not is_known:
        why = "whether its machine lives is not known"
    elif starts_machines(schedule.name):
        # It is there until it has run.
        must_go = is_over
        why = "what it starts is not wanted any more" if is_over else "it starts its attempt later"
    elif token in live_tokens:
        why = "its machine lives"
    elif now - schedule.created_at < YOUNG_SCHEDULE and not is_ended:
        why = "made a moment ago: its machine may not be seen yet"
    else:
        must_go, why = True, "its machine is gone"
    return Orphan(
        kind="schedule",
        id=schedule.name,
        region=schedule.region,
        must_go=must_go,
        why=why,
        is_ours=token is not None,
        began_at=schedule.created_at,
    )


def owner_of(identity: Identity) -> str:
    """Return the `Owner` tag of the caller's machines. Raises UserError if other people may share it."""
    if identity.is_shared:
        raise UserError(
            f"--mine: as {identity.arn} you have the owner {identity.owner!r}, and so may other people",
            "name the run: fastlaunch reap --run ID; `fastlaunch reap --dry-run` lists them",
        )
    return identity.owner


def end_now(orphan: Orphan) -> Orphan:
    """Return the judgement for a user who ends machines within their time: the machine goes if it is ours."""
    if orphan.must_go or not orphan.is_ours or orphan.state == "Stopping":
        return orphan
    return replace(orphan, must_go=True, why="you want it to end now")


def end(aws: Aws, orphans: Sequence[Orphan]) -> list[Refusal]:
    """Terminate, stop or delete the orphans; return what AWS refused to end.

    Sends a request per orphan, so that a missing permission for one does not keep the others alive.
    """
    refused = []
    for orphan in orphans:
        try:
            if orphan.kind == "instance":
                aws.terminate(orphan.region, [orphan.id])
            elif orphan.service_job is not None:
                aws.terminate_service_job(orphan.region, orphan.service_job)
            elif orphan.kind == "job":
                aws.stop_training_job(orphan.region, orphan.id)
            else:
                aws.delete_schedule(orphan.region, orphan.id)
        except CloudRefused as error:
            refused.append(Refusal(kind=orphan.kind, region=orphan.region, error=error, id=orphan.id))
    return refused


def note_ends(ledger: Ledger, orphans: Sequence[Orphan]) -> None:
    """Note in the ledger why the instances and jobs among `orphans` end."""
    for orphan in orphans:
        if orphan.known:
            ledger.note_stop(orphan.known.id, f"fastlaunch reap, {orphan.why}")


def known_attempts(
    ledger: Ledger,
    backends: Mapping[str, CloudBackend],
    instances: Sequence[Instance],
    jobs: Sequence[TrainingJob] = (),
) -> dict[str, KnownAttempt]:
    """Return the ledger's knowledge of the attempts, by instance id or job name.

    Resources that are not fastlaunch's are left out, whatever token they carry.
    """
    tokens = {
        instance.id: token for instance in instances if (token := token_of(instance.tags, instance.token))
    }
    tokens |= {job.name: token for job in jobs if (token := token_of(job.tags, job.name))}
    attempts = ledger.attempts_by_token(list(tokens.values()))
    return {
        name: _known(ledger, backends.get(attempts[token].backend), attempts[token])
        for name, token in tokens.items()
        if token in attempts
    }


def _known(ledger: Ledger, backend: CloudBackend | None, attempt: Attempt) -> KnownAttempt:
    # An empty list would select every run.
    runs = ledger.select(attempt.run_ids) if attempt.run_ids else []
    is_followed = any(ledger.launcher_lives(run) for run in runs)
    is_lost = attempt.state is RunState.LOST
    over_since = None
    if attempt.ended_at is not None:
        over_since = None if is_lost else datetime.fromisoformat(attempt.ended_at)
    elif all(run.state.is_final for run in runs):
        ends = [ledger.history(run.id)[-1].at for run in runs]
        over_since = datetime.fromisoformat(max(ends, default=attempt.started_at))
    elif backend is not None and attempt.handle is not None and not is_followed:
        # An unreadable bucket must not end a machine.
        with suppress(UserError):
            over_since = time_of(backend.sync_reports(attempt.handle).status, "billed_until")
    return KnownAttempt(
        id=attempt.id,
        over_since=over_since,
        is_followed=is_followed,
        is_lost=is_lost,
        usd_per_hour=attempt.billing.usd_per_hour,
    )


def _judged(
    known: KnownAttempt | None, *, over: str, ends_at: datetime, now: datetime, by: str
) -> tuple[bool, str]:
    if now > ends_at:
        return True, over
    if known and known.over_since and not known.is_followed:
        ended = f"it ended at {utc_minute(known.over_since)}"
        if now - known.over_since > LINGER:
            return True, f"{ended} by the ledger or its own word, and still runs"
        return False, f"{ended}, and may be shutting down"
    if known is None:
        who = "of another ledger"
    elif known.is_followed:
        who = "followed by its launcher"
    elif known.is_lost:
        who = f"it counted as lost, and is taken back; {by}"
    else:
        who = f"nobody follows it, but {by}"
    return False, f"{who}; within its time until {utc_minute(ends_at)}"


def _hours(since: datetime, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds() / 3600)
