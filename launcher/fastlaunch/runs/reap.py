"""Finds what nobody stops any more, by tags and names alone, and says what of it has to go.

Instances, training jobs, machines kept after jobs (warm pools), and schedules that were to end machines which
are gone. The last of the ways to stop paying: it needs no ledger. Where there is one, it tells more, and
never that what has had its time may go on.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from fastlaunch.aws.ec2 import Aws, Instance
from fastlaunch.aws.sagemaker import (
    TrainingJob,
    end_warm_pool,
    kept_pools,
    live_training_jobs,
    stop_training_job,
)
from fastlaunch.aws.scheduler import Schedule, delete_schedule, schedules
from fastlaunch.core.errors import CloudRefused
from fastlaunch.placement.cost_ceiling import MARGIN_MINUTES
from fastlaunch.runs.deadline_schedule import token_of
from fastlaunch.runs.finish import STOPPED_BY
from fastlaunch.submission import launcher_lives

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger

RUN_TAG = "fastlaunch:run"
ATTEMPT_TAG = "fastlaunch:attempt"
MAX_MINUTES_TAG = "fastlaunch:max-minutes"
#: Assumed where neither tag nor ledger tells a limit: what `submit` takes without --max-hours.
ASSUMED_MAX_MINUTES = 120
#: A training job's limit counts from when it has machines, for which it may wait so long, unbilled.
JOB_WAIT_MINUTES = 60
#: Before that a schedule may be of machines that DescribeInstances does not show yet.
YOUNG_SCHEDULE = timedelta(minutes=15)
#: More is no limit that anyone gave; a capacity block lasts half a year at most.
_MOST_MINUTES = 366 * 24 * 60

Kind = Literal["instance", "job", "pool", "schedule"]


@dataclass(frozen=True, kw_only=True)
class KnownAttempt:
    """What a ledger says of the attempt that an instance or a training job carries out.

    id: of the attempt. has_ended: the attempt, or all its runs. is_followed: its launcher lives. max_minutes:
    of the attempt. usd_per_hour: of one machine, at which it was started.
    """

    id: int
    has_ended: bool
    is_followed: bool
    max_minutes: int | None = None
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What lives in a region: every instance and job with the run tag, and every schedule of fastlaunch.

    pools: jobs that have ended, whose machines are kept. refused: what could not be looked at.
    """

    instances: tuple[Instance, ...]
    jobs: tuple[TrainingJob, ...]
    pools: tuple[TrainingJob, ...]
    schedules: tuple[Schedule, ...]
    refused: tuple["Refusal", ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that lives, whether it `must_go`, and why, in words. warning: what is odd about it.

    id: of an instance, name of a job (a pool has its job's) or a schedule. began_at: when it was started, or
    made. ends_at: when it will have had its time, its margin included; None for a schedule. run_id: of its
    first run, None where its name does not tell. hours: billed, of num_machines each. keeps_pool: whether
    machines are kept after a job. known: None for what is of another ledger.
    """

    kind: Kind
    id: str
    region: str
    must_go: bool
    why: str
    began_at: datetime
    ends_at: datetime | None = None
    run_id: str | None = None
    instance_type: str | None = None
    num_machines: int = 0
    zone: str | None = None
    is_spot: bool = False
    state: str | None = None
    hours: float = 0.0
    keeps_pool: bool = False
    known: KnownAttempt | None = None
    warning: str | None = None


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What AWS refused: to look at what is of a kind in a region, or (id) to end one of them there."""

    kind: Kind
    region: str
    error: CloudRefused
    id: str | None = None


def find(aws: Aws, regions: Sequence[str]) -> Found:
    """Everything that lives in the regions, the oldest first. What one region refuses hides nothing else."""
    instances: list[Instance] = []
    jobs: list[TrainingJob] = []
    pools: list[TrainingJob] = []
    timers: list[Schedule] = []
    refused: list[Refusal] = []
    looks: tuple[tuple[Kind, Callable[[str], object]], ...] = (
        ("instance", lambda region: instances.extend(_live_instances(aws, region))),
        ("job", lambda region: jobs.extend(live_training_jobs(aws, region))),
        ("pool", lambda region: pools.extend(kept_pools(aws, region))),
        ("schedule", lambda region: timers.extend(schedules(aws, region))),
    )
    for region in regions:
        for kind, look in looks:
            try:
                look(region)
            except CloudRefused as error:
                refused.append(Refusal(kind=kind, region=region, error=error))
    return Found(
        instances=tuple(sorted(instances, key=lambda one: (one.launch_time, one.id))),
        jobs=tuple(sorted(jobs, key=lambda one: (one.created_at, one.name))),
        pools=tuple(sorted(pools, key=lambda one: (one.created_at, one.name))),
        schedules=tuple(sorted(timers, key=lambda one: (one.created_at, one.name))),
        refused=tuple(refused),
    )


def _live_instances(aws: Aws, region: str) -> list[Instance]:
    seen = aws.describe_instances(region, tags={RUN_TAG: ()})
    return [one for one in seen if one.is_live and RUN_TAG in one.tags]


def judge_instance(instance: Instance, known: KnownAttempt | None, *, now: datetime) -> Finding:
    """Whether the instance must go: it is over its time, or the attempt that it carries out has ended.

    known: of the ledger at hand, None if the attempt is not in it.
    """
    minutes, warning = _limit(instance.tags, known)
    ends_at = instance.launch_time + timedelta(minutes=minutes + MARGIN_MINUTES)
    over = f"over its time: {minutes} minutes, and {MARGIN_MINUTES} more, ended at {_clock_time(ends_at)}"
    must_go, why = _judged(known, over=over, ends_at=ends_at, now=now, by="its own timer stops it")
    return Finding(
        kind="instance",
        id=instance.id,
        region=instance.region,
        must_go=must_go,
        why=why,
        began_at=instance.launch_time,
        ends_at=ends_at,
        run_id=instance.tags[RUN_TAG],
        instance_type=instance.instance_type,
        num_machines=1,
        zone=instance.zone,
        is_spot=instance.is_spot,
        state=instance.state,
        hours=_hours(instance.launch_time, now),
        known=known,
        warning=warning,
    )


def judge_job(job: TrainingJob, known: KnownAttempt | None, *, now: datetime) -> Finding:
    """Whether the training job must go: SageMaker did not end it in its time, or its attempt has ended.

    SageMaker keeps its limit, MaxRuntimeInSeconds, by itself; that counts from when the job has machines.
    A job that is being stopped is left to it.
    """
    minutes, warning = _limit(job.tags, known)
    ends_at = job.created_at + timedelta(minutes=JOB_WAIT_MINUTES + minutes + MARGIN_MINUTES)
    over = (
        f"over its time: {minutes} minutes, and {JOB_WAIT_MINUTES} of waiting and {MARGIN_MINUTES} more, "
        f"ended at {_clock_time(ends_at)}"
    )
    must_go, why = _judged(known, over=over, ends_at=ends_at, now=now, by="SageMaker stops it")
    if job.status == "Stopping":
        must_go, why = False, "it is being stopped"
    return Finding(
        kind="job",
        id=job.name,
        region=job.region,
        must_go=must_go,
        why=why,
        began_at=job.created_at,
        ends_at=ends_at,
        run_id=job.tags.get(RUN_TAG),
        instance_type=job.ec2_type,
        num_machines=job.num_instances,
        is_spot=job.is_spot,
        state=job.status,
        # Until it has machines it costs nothing.
        hours=_hours(job.started_at, now) if job.started_at else 0.0,
        keeps_pool=job.keeps_pool,
        known=known,
        warning=warning,
    )


def judge_pool(job: TrainingJob, *, now: datetime) -> Finding:
    """Whether the machines that are kept after the job must go: it did not complete, or they had their time.

    After a job that completed the next one is to find them, as was asked for; SageMaker ends that itself.
    """
    since = job.ended_at or job.created_at
    ends_at = since + timedelta(seconds=job.keep_alive_s, minutes=MARGIN_MINUTES)
    if job.status != "Completed":
        must_go, why = True, f"kept after a job that is {job.status.lower()}"
    elif now > ends_at:
        must_go, why = True, f"over its time, which ended at {_clock_time(ends_at)}"
    else:
        must_go, why = False, f"kept for the next job, as was asked for; at most until {_clock_time(ends_at)}"
    return Finding(
        kind="pool",
        id=job.name,
        region=job.region,
        must_go=must_go,
        why=why,
        began_at=since,
        ends_at=ends_at,
        run_id=job.tags.get(RUN_TAG),
        instance_type=job.ec2_type,
        num_machines=job.num_instances,
        state=job.status,
        hours=_hours(since, now),
    )


def judge_schedule(
    schedule: Schedule, *, live_tokens: Sequence[str], is_known: bool = True, now: datetime
) -> Finding:
    """Whether the schedule must go: no machine that it would end lives.

    live_tokens: of the attempts whose machines live and stay in its region. is_known: whether they are.
    """
    must_go = False
    if not is_known:
        why = "whether its machine lives is not known"
    elif token_of(schedule.name, live_tokens) is not None:
        why = "its machine lives"
    elif now - schedule.created_at < YOUNG_SCHEDULE:
        why = "made a moment ago: its machine may not be seen yet"
    else:
        must_go, why = True, "its machine is gone"
    return Finding(
        kind="schedule",
        id=schedule.name,
        region=schedule.region,
        must_go=must_go,
        why=why,
        began_at=schedule.created_at,
    )


def end(aws: Aws, findings: Sequence[Finding]) -> list[Refusal]:
    """Terminate, stop or delete every one of `findings`; what AWS refused to end is returned.

    One request for each, so that a right that is lacking for one keeps none of the others alive.
    """
    refused = []
    for one in findings:
        try:
            if one.kind == "instance":
                aws.terminate(one.region, [one.id])
            elif one.kind == "job":
                stop_training_job(aws, one.region, one.id)
                if one.keeps_pool:
                    # Where this comes too early the pool is found the next time.
                    with suppress(CloudRefused):
                        end_warm_pool(aws, one.region, one.id)
            elif one.kind == "pool":
                end_warm_pool(aws, one.region, one.id)
            else:
                delete_schedule(aws, one.region, one.id)
        except CloudRefused as error:
            refused.append(Refusal(kind=one.kind, region=one.region, error=error, id=one.id))
    return refused


def note_ends(ledger: "Ledger", findings: Sequence[Finding]) -> None:
    """Note in the ledger why the instances and jobs of `findings`, which were told to end, end."""
    for finding in findings:
        if finding.known:
            ledger.explain_attempt(finding.known.id, f"{STOPPED_BY}fastlaunch reap, {finding.why}")


def known_attempts(
    ledger: "Ledger", instances: Sequence[Instance], jobs: Sequence[TrainingJob] = ()
) -> dict[str, KnownAttempt]:
    """What the ledger says of the attempts of instances, by id, and of jobs, by name.

    An attempt is known by the token of its request, or by the tags that hold the token's parts.
    """
    tokens = {instance.id: tokens_of(instance) for instance in instances}
    tokens |= {job.name: [job.name] for job in jobs}
    attempts = ledger.attempts_by_token([token for of_one in tokens.values() for token in of_one])
    known = {}
    for name, of_one in tokens.items():
        attempt = next((attempts[token] for token in of_one if token in attempts), None)
        if attempt is not None:
            # No names would select every run.
            runs = ledger.select(attempt.run_ids) if attempt.run_ids else []
            known[name] = KnownAttempt(
                id=attempt.id,
                has_ended=attempt.ended_at is not None or all(run.state.is_final for run in runs),
                is_followed=any(launcher_lives(ledger, run) for run in runs),
                max_minutes=attempt.max_minutes,
                usd_per_hour=attempt.usd_per_hour,
            )
    return known


def tokens_of(instance: Instance) -> list[str]:
    """What the token of the instance's request may be: as EC2 tells it, and as its tags do."""
    tagged = f"{instance.tags[RUN_TAG]}-a{instance.tags.get(ATTEMPT_TAG)}"
    return [instance.token, tagged] if instance.token else [tagged]


def _judged(
    known: KnownAttempt | None, *, over: str, ends_at: datetime, now: datetime, by: str
) -> tuple[bool, str]:
    if now > ends_at:
        return True, over
    if known and known.has_ended and not known.is_followed:
        return True, "its attempt has ended, and it still runs"
    if known is None:
        who = "of another ledger"
    elif known.is_followed:
        who = "followed by its launcher"
    else:
        who = f"nobody follows it, but {by}"
    return False, f"{who}; within its time until {_clock_time(ends_at)}"


def _limit(tags: Mapping[str, str], known: KnownAttempt | None) -> tuple[int, str | None]:
    """Minutes that it may run, and what to say if the tag does not tell."""
    text = tags.get(MAX_MINUTES_TAG)
    if text is not None and text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_MINUTES:
        return int(text), None
    told = "without a time limit in its tags" if text is None else f"its time limit is no number: {text!r}"
    if known and known.max_minutes:
        return known.max_minutes, f"{told}; the ledger says {known.max_minutes} minutes"
    return ASSUMED_MAX_MINUTES, f"{told}; {ASSUMED_MAX_MINUTES} minutes are assumed"


def _hours(since: datetime, now: datetime) -> float:
    return max(0.0, (now - since).total_seconds() / 3600)


def _clock_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
