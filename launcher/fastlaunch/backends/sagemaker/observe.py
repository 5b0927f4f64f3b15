"""The status of a training job, what went wrong with it, and what it is billed. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fastlaunch.aws.batch import QUEUED
from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.backends.node_report import time_of, uptime_of
from fastlaunch.backends.protocol import AttemptStatus, Billed
from fastlaunch.backends.sagemaker.plan import MAX_PENDING_S
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NoCapacity
from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.core.plan import Ending

#: Words by secondary status: docs.aws.amazon.com/sagemaker/latest/APIReference/API_DescribeTrainingJob.
#: For a job that has ended they begin with SageMaker's own name.
_WORDS = {
    # Ours, of a job in a queue of AWS Batch; see `aws/batch.py`.
    QUEUED: "queued",
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
#: A job without machines that ends this close to its waiting limit is taken to have reached the limit.
_PENDING_SLACK_S = 120
#: Secondary statuses of a job whose container runs.
_UP = ("Training", "Uploading", "Updating")
_ELSEWHERE = (
    "allow another instance type or region (`--instance T1,T2`, `--region R1,R2`), try later, or buy a "
    "training plan and give --training-plan ARN"
)
_LOOK = "see what its container printed: fastlaunch logs RUN"
_CORRECT = "correct what the message names; `fastlaunch logs RUN` shows what the container printed"
_LONGER = "raise --max-hours, and go on from the last checkpoint: fastlaunch resume RUN"
_FAULT = "SageMaker's own fault; `fastlaunch resume RUN` goes on from the last checkpoint in another job"

#: How a FailureReason begins, with the kind of error and its hint.
_REASONS: tuple[tuple[str, type[CloudRefused], str], ...] = (
    ("CapacityError", NoCapacity, _ELSEWHERE),
    ("InsufficientCapacityError", NoCapacity, _ELSEWHERE),
    ("AlgorithmError", CloudRefused, _LOOK),
    ("InternalServerError", CloudRefused, _FAULT),
    ("ClientError", BadConfiguration, _CORRECT),
    ("ConfigurationError", BadConfiguration, _CORRECT),
)


def attempt_status(job: TrainingJob | None) -> AttemptStatus:
    """Return the job's status.

    launched_at is when it began on its machines, None while it waits for them, which costs nothing.
    """
    if job is None:
        return AttemptStatus(has_ended=False, is_seen=False, num_unseen=1)
    problem = problem_of(job)
    ending = {"MaxRuntimeExceeded": Ending.TIME_LIMIT, "Stopped": Ending.STOPPED}.get(job.secondary_status)
    if isinstance(problem, NoCapacity):
        ending = Ending.NO_CAPACITY
    is_free = job.billable_s is None and job.has_ended and job.started_at is None
    return AttemptStatus(
        has_ended=job.has_ended,
        is_live=not job.has_ended,
        is_up=job.status == "InProgress" and job.secondary_status in _UP,
        is_spot=job.is_spot,
        instance_type=job.ec2_type,
        launched_at=job.started_at,
        ended_at=job.ended_at if job.has_ended else None,
        billable_s=0.0 if is_free else job.billable_s,
        training_s=job.training_s,
        ending=ending,
        problem=problem,
        started_jobs=job.training_jobs,
        restarted_at=job.restarted_at,
        earlier_s=job.earlier_s,
        detail=_detail(job),
    )


def problem_of(job: TrainingJob) -> CloudRefused | None:
    """Return what went wrong with a job that has ended, if anything; the code is SageMaker's own word.

    NoCapacity if it got no machines, BadConfiguration if they could not carry out the request; plain
    CloudRefused if its program failed, or its time was up.
    """
    if not job.has_ended:
        return None
    reason, name = job.failure_reason or "", f"training job {job.name}"
    if job.secondary_status == "MaxRuntimeExceeded":
        return _error(CloudRefused, f"{name} was ended: its time limit was reached", _LONGER, job)
    if job.secondary_status == "MaxWaitTimeExceeded":
        message = f"{name} was ended: there were no spot machines for long enough"
        return _error(NoCapacity, message, _ELSEWHERE, job)
    if _waited_too_long(job):
        message = f"{name} was ended: there were no machines for {MAX_PENDING_S // 60} minutes"
        return _error(NoCapacity, message, _ELSEWHERE, job, "MaxPendingTimeExceeded")
    if job.status != "Failed":
        return None
    for start, kind, hint in _REASONS:
        if reason.startswith(start):
            words = "got no machines" if kind is NoCapacity else "failed"
            return _error(kind, f"{name} {words}: {reason}", hint, job, start)
    if "not enough capacity" in reason or "pending time" in reason.lower():
        return _error(NoCapacity, f"{name} got no machines: {reason}", _ELSEWHERE, job, "CapacityError")
    return _error(BadConfiguration, f"{name} failed: {reason or 'SageMaker does not say why'}", _CORRECT, job)


def billed_on_sagemaker(
    *, launched_at: datetime, max_minutes: int, aws_status: AttemptStatus, status: Mapping[str, Any] | None
) -> Billed:
    """Return what one machine of a job that has ended is billed. status: the last object.

    Use SageMaker's own count, which includes the spot discount, if there is one; else the time of the job's
    end; for a job that SageMaker no longer shows, the last report of its container.
    """
    started_at = aws_status.launched_at or launched_at
    lived_s = None
    if aws_status.is_seen and aws_status.launched_at is None:
        # The job waited for machines and got none.
        return Billed(lived_s=0.0, billed_s=aws_status.billable_s or 0.0, billing="times")
    if (aws_status.is_spot or aws_status.started_jobs) and aws_status.training_s:
        # Between its start and its end a spot job also waits for machines, after each interruption, and a job
        # in a queue to be started again.
        lived_s = aws_status.training_s
    elif aws_status.ended_at is not None and aws_status.ended_at >= started_at:
        lived_s = (aws_status.ended_at - started_at).total_seconds()
    if aws_status.billable_s is not None:
        return Billed(
            lived_s=aws_status.billable_s if lived_s is None else lived_s,
            billed_s=aws_status.billable_s,
            billing="times",
        )
    if lived_s is not None:
        return Billed(lived_s=lived_s, billed_s=lived_s, billing="times")
    # The container's last report comes a little before the end of its machines.
    until = time_of(status, "billed_until")
    lasted_s = (until - started_at).total_seconds() if until and until >= started_at else uptime_of(status)
    if lasted_s is not None:
        return Billed(lived_s=lasted_s, billed_s=lasted_s, billing="node")
    limit_s = (max_minutes + MARGIN_MINUTES) * 60.0
    return Billed(lived_s=limit_s, billed_s=limit_s, billing="limit")


def _waited_too_long(job: TrainingJob) -> bool:
    """Return whether SageMaker stopped it for its MaxPendingTimeInSeconds, for which there is no status.

    A job that somebody stopped at that very time counts, too.
    """
    if job.queue is not None:
        # It may wait in the queue for as long as it takes.
        return False
    if job.secondary_status != "Stopped" or job.is_spot or job.started_at is not None or job.ended_at is None:
        return False
    return abs((job.ended_at - job.created_at).total_seconds() - MAX_PENDING_S) < _PENDING_SLACK_S


def _detail(job: TrainingJob) -> str:
    words = _WORDS.get(job.secondary_status, job.secondary_status)
    if job.secondary_status == "Pending" and job.training_plan:
        words = "waiting for its training plan"
    if job.status == "Stopping":
        words = "stopping"
    return f"{words} ({job.status_message})" if job.status_message and not job.has_ended else words


def _error(
    kind: type[CloudRefused], message: str, hint: str, job: TrainingJob, code: str | None = None
) -> CloudRefused:
    error = kind(f"{message} (in {job.region})", hint)
    error.code = code or job.secondary_status
    return error
