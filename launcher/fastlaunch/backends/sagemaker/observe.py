"""What SageMaker says of a training job, made into how it stands, what went wrong, what is billed. Pure."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.backends.protocol import Billed, Sight
from fastlaunch.backends.sagemaker.plan import MAX_PENDING_S
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity
from fastlaunch.placement.cost_ceiling import MARGIN_MINUTES

#: In words, by secondary status: docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.
#: Those of a job that has ended keep SageMaker's own name.
_WORDS = {
    "Starting": "preparing machines",
    "Pending": "waiting for capacity",
    "LaunchingMLInstances": "preparing machines",
    "PreparingTrainingStack": "preparing machines",
    "Downloading": "downloading the image and the code",
    "DownloadingTrainingImage": "downloading the image",
    "Training": "training",
    "Uploading": "uploading what the job leaves",
    "Interrupted": "interrupted: SageMaker took the machines back and restarts",
    "Restarting": "restarting",
    "Updating": "training",
    "Stopping": "stopping",
    "Stopped": "Stopped: someone asked it to stop",
    "Completed": "completed",
    "Failed": "failed",
    "MaxRuntimeExceeded": "MaxRuntimeExceeded: the time limit was reached",
    "MaxWaitTimeExceeded": "MaxWaitTimeExceeded: there were no spot machines for long enough",
}
#: By how much a job's end may miss the limit of its waiting.
_PENDING_SLACK_S = 120
#: While these are told, a container runs.
_UP = ("Training", "Uploading", "Updating")
_ELSEWHERE = (
    "allow another instance type or region (`--instance T1,T2`, `--region R1,R2`), try later, or buy a "
    "training plan and give --training-plan ARN"
)
_LOOK = "see what its container printed: fastlaunch logs RUN"
_CORRECT = "correct what the message names; what the container printed shows `fastlaunch logs RUN`"
_LONGER = "give --max-hours more, and go on from the last checkpoint: fastlaunch resume RUN"
_FAULT = "SageMaker's own fault; `fastlaunch resume RUN` goes on from the last checkpoint in another job"

#: Kind and hint by how a FailureReason begins.
_REASONS: tuple[tuple[str, type[CloudRefused], str], ...] = (
    ("CapacityError", NoCapacity, _ELSEWHERE),
    ("InsufficientCapacityError", NoCapacity, _ELSEWHERE),
    ("AlgorithmError", CloudRefused, _LOOK),
    ("InternalServerError", CloudRefused, _FAULT),
    ("ClientError", BadConfiguration, _CORRECT),
    ("ConfigurationError", BadConfiguration, _CORRECT),
)


def sight_of(job: TrainingJob | None, *, is_old: bool) -> Sight:
    """How the job stands. is_old: asked for so long ago that one which SageMaker does not show is no more.

    launched_at is when it began on its machines, None while it waits for them, which costs nothing.
    """
    if job is None:
        return Sight(has_ended=is_old, is_seen=False)
    return Sight(
        has_ended=job.has_ended,
        is_live=not job.has_ended,
        is_up=job.status == "InProgress" and job.secondary_status in _UP,
        is_spot=job.is_spot,
        instance_type=job.ec2_type,
        launched_at=job.started_at,
        ended_at=job.ended_at if job.has_ended else None,
        billable_s=_billable_s(job),
        training_s=job.training_s,
        problem=problem_of(job),
        told=_told(job),
    )


def problem_of(job: TrainingJob) -> CloudRefused | None:
    """What went wrong with a job that has ended, as an error whose code is SageMaker's own word; else None.

    NoCapacity where it got no machines, BadConfiguration where they could not do what was asked for; plain
    where its program failed, or its time was up.
    """
    if not job.has_ended:
        return None
    reason, name = job.failure_reason or "", f"training job {job.name}"
    if job.secondary_status == "MaxRuntimeExceeded":
        return _made(CloudRefused, f"{name} was ended: its time limit was reached", _LONGER, job)
    if job.secondary_status == "MaxWaitTimeExceeded":
        told = f"{name} was ended: there were no spot machines for long enough"
        return _made(NoCapacity, told, _ELSEWHERE, job)
    if _waited_too_long(job):
        told = f"{name} was ended: there were no machines for {MAX_PENDING_S // 60} minutes"
        return _made(NoCapacity, told, _ELSEWHERE, job, "MaxPendingTimeExceeded")
    if job.status != "Failed":
        return None
    for start, kind, hint in _REASONS:
        if reason.startswith(start):
            words = "got no machines" if kind is NoCapacity else "failed"
            return _made(kind, f"{name} {words}: {reason}", hint, job, start)
    if "not enough capacity" in reason or "pending time" in reason.lower():
        return _made(NoCapacity, f"{name} got no machines: {reason}", _ELSEWHERE, job, "CapacityError")
    return _made(BadConfiguration, f"{name} failed: {reason or 'SageMaker does not say why'}", _CORRECT, job)


def billed_on_sagemaker(
    *, launched_at: datetime, max_minutes: int, sight: Sight, status: Mapping[str, Any] | None
) -> Billed:
    """What one machine of a job that has ended is billed, without its warm pool. status: the last object.

    By SageMaker's own count, which holds the spot discount, where it is there; else by when the job ended; of
    a job that SageMaker shows no more, by what its container said last.
    """
    started_at = sight.launched_at or launched_at
    lived_s = None
    if sight.is_seen and sight.launched_at is None:
        # It waited for machines, and got none.
        return Billed(lived_s=0.0, billed_s=sight.billable_s or 0.0, billing="times")
    if sight.is_spot and sight.training_s:
        # Between its start and its end a spot job also waits for machines, after each interruption.
        lived_s = sight.training_s
    elif sight.ended_at is not None and sight.ended_at >= started_at:
        lived_s = (sight.ended_at - started_at).total_seconds()
    if sight.billable_s is not None:
        return Billed(
            lived_s=sight.billable_s if lived_s is None else lived_s,
            billed_s=sight.billable_s,
            billing="times",
        )
    if lived_s is not None:
        return Billed(lived_s=lived_s, billed_s=lived_s, billing="times")
    if (said_s := _last_said_s(status, started_at)) is not None:
        return Billed(lived_s=said_s, billed_s=said_s, billing="node")
    limit_s = (max_minutes + MARGIN_MINUTES) * 60.0
    return Billed(lived_s=limit_s, billed_s=limit_s, billing="limit")


def _waited_too_long(job: TrainingJob) -> bool:
    """Whether SageMaker stopped it for its MaxPendingTimeInSeconds, of which no status tells.

    One that somebody stopped at that very time passes for it.
    """
    if job.secondary_status != "Stopped" or job.is_spot or job.started_at is not None or job.ended_at is None:
        return False
    return abs((job.ended_at - job.created_at).total_seconds() - MAX_PENDING_S) < _PENDING_SLACK_S


def _billable_s(job: TrainingJob) -> float | None:
    if job.billable_s is None and job.has_ended and job.started_at is None:
        return 0.0
    return job.billable_s


def _told(job: TrainingJob) -> str:
    words = _WORDS.get(job.secondary_status, job.secondary_status)
    if job.status == "Stopping":
        words = "stopping"
    return f"{words} ({job.status_message})" if job.status_message and not job.has_ended else words


def _last_said_s(status: Mapping[str, Any] | None, started_at: datetime) -> float | None:
    """How long the job lasted by its container's last word, which is a little older than its machines."""
    told = status or {}
    with suppress(ValueError):
        until = datetime.fromisoformat(str(told.get("billed_until")))
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        if until >= started_at:
            return (until - started_at).total_seconds()
    uptime_s = told.get("uptime_s")
    is_number = isinstance(uptime_s, int | float) and not isinstance(uptime_s, bool)
    return float(told["uptime_s"]) if is_number else None


def _made(
    kind: type[CloudRefused], message: str, hint: str, job: TrainingJob, code: str | None = None
) -> CloudRefused:
    error = kind(f"{message} (in {job.region})", hint)
    error.code = code or job.secondary_status
    return error
