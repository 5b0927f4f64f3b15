"""AWS Batch's queues for training jobs, and the service jobs in them.

A service job holds a CreateTrainingJob request, which Batch sends once it is the job's turn, and again for
each retry. Batch names these training jobs itself: `AWSBatch`, the name in the request, and a digest.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from fastlaunch.aws.sagemaker import TOKEN, SageMakerCalls, TrainingJob
from fastlaunch.core.errors import BadConfiguration, CloudRefused, Unreachable
from fastlaunch.core.ownership import OUTPUT_TAG, RUN_TAG
from fastlaunch.core.terminal import printable

#: The type of queues for training jobs, and of their jobs.
TRAINING = "SAGEMAKER_TRAINING"
#: What a service job's secondary status is while it has no training job.
QUEUED = "Queued"
#: Statuses of a service job that has not ended.
_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
_LIVE = (*_WAITING, "SCHEDULED", "STARTING", "RUNNING")
#: Batch's error for everything that a client can mend, unknown names included.
_REFUSED = "ClientException"
#: How long a training job may not be shown before it counts as deleted. Batch itself deletes none but those
#: that found no capacity, of which it keeps the newest.
_HIDDEN = timedelta(hours=2)
#: What Batch puts before SageMaker's words.
_FROM_SAGEMAKER = "Received status from SageMaker: "


class Sharing(StrEnum):
    """How a queue's scheduling policy shares its capacity."""

    FAIR = "fair-share"
    QUOTA = "quota-share"


@dataclass(frozen=True, kw_only=True)
class JobQueue:
    """One of Batch's queues."""

    name: str
    # Such as SAGEMAKER_TRAINING or ECS.
    kind: str
    is_enabled: bool
    # VALID once jobs can be submitted; CREATING, UPDATING, INVALID, ...
    status: str
    # None for a queue where the first job is served first.
    sharing: Sharing | None = None


class BatchCalls(SageMakerCalls):
    def job_queue(self, region: str, name: str) -> JobQueue | None:
        """Return the queue of this name; None if there is none."""
        answer = self.call("batch", region, "DescribeJobQueues", subject=name, jobQueues=[name])
        queue = next((queue for queue in answer["jobQueues"] if queue["status"] != "DELETED"), None)
        if queue is None:
            return None
        sharing = None
        if arn := queue.get("schedulingPolicyArn"):
            policies = self.call("batch", region, "DescribeSchedulingPolicies", subject=name, arns=[arn])
            for policy in policies["schedulingPolicies"]:
                sharing = Sharing.QUOTA if "quotaSharePolicy" in policy else Sharing.FAIR
        return JobQueue(
            name=queue["jobQueueName"],
            # Batch does not always tell the type of a queue for containers.
            kind=queue.get("jobQueueType", "ECS"),
            is_enabled=queue["state"] == "ENABLED",
            status=queue.get("status", "VALID"),
            sharing=sharing,
        )

    def submit_service_job(self, region: str, request: Mapping[str, Any]) -> TrainingJob:
        """Send `request` as it is; return the job that it puts into the queue, or put there before.

        Raises Unreachable where nobody knows whether the job was put there.
        """
        name = request["jobName"]
        try:
            answer = self.call("batch", region, "SubmitServiceJob", subject=name, **request)
        except BadConfiguration as error:
            # Batch refuses the second request with a token, and its error is the one for everything else.
            if error.code != _REFUSED:
                raise
            existing = self.queued_job_of(region, request)
            if existing is None and "token" in error.message.lower():
                raise Unreachable(
                    f"there is a service job {name} in {region}, and Batch does not show it yet",
                    "type the same again in a minute",
                ) from None
            if existing is None:
                raise
            return existing
        return TrainingJob(
            name=name,
            arn=answer["jobArn"],
            region=region,
            status="InProgress",
            secondary_status=QUEUED,
            created_at=self._now(),
            service_job=answer["jobId"],
            queue=request["jobQueue"],
        )

    def queued_job_of(self, region: str, request: Mapping[str, Any]) -> TrainingJob | None:
        """Return the job that the request put into its queue; None if there is none (yet)."""
        name, queue = request["jobName"], request["jobQueue"]
        filters = [{"name": "JOB_NAME", "values": [name]}]
        try:
            summaries = list(self._summaries(region, jobQueue=queue, filters=filters))
        except BadConfiguration as error:
            if error.code != _REFUSED:
                raise
            # There is no such queue (any more): it can be deleted once no job is left in it.
            return None
        for summary in summaries:
            answer = self._describe_service_job(region, summary["jobId"])
            # A job of this name is the request's only if both upload to the same place.
            output = request["tags"][OUTPUT_TAG]
            if summary["jobName"] == name and answer is not None and _tags(answer).get(OUTPUT_TAG) == output:
                return self._merged(region, answer, {})
        return None

    def queued_jobs(self, region: str, ids: Sequence[str]) -> list[TrainingJob | None]:
        """Return the service jobs, each with its training jobs as one; None for what Batch does not show.

        While a job waits, its message says where in the queue it is.
        """
        answers = [self._describe_service_job(region, job_id) for job_id in ids]
        waiting = {
            _queue_of(answer) for answer in answers if answer is not None and answer["status"] in _WAITING
        }
        positions: dict[str, int] = {}
        for queue in waiting:
            positions |= self._positions(region, queue)
        return [answer and self._merged(region, answer, positions) for answer in answers]

    def live_queued_jobs(self, region: str) -> list[TrainingJob]:
        """Return the region's service jobs that have not ended and carry the tag `fastlaunch:run`."""
        queues = self.items("batch", region, "DescribeJobQueues", "jobQueues")
        names = [queue["jobQueueName"] for queue in queues if queue.get("jobQueueType") == TRAINING]
        summaries = {
            summary["jobId"]
            for name in names
            for status in _LIVE
            for summary in self._summaries(region, jobQueue=name, jobStatus=status)
            if TOKEN.fullmatch(summary["jobName"])
        }
        answers = (self._describe_service_job(region, job_id) for job_id in sorted(summaries))
        return [
            replace(self._merged(region, answer, {}), tags=_tags(answer))
            for answer in answers
            if answer is not None and answer["status"] in _LIVE and RUN_TAG in _tags(answer)
        ]

    def terminate_service_job(self, region: str, job_id: str) -> None:
        """End a job: it leaves the queue, or its training job is stopped, and it is not tried again.

        A job that has ended, or that Batch does not know yet, is no error.
        """
        ask = {"jobId": job_id, "reason": "ended by fastlaunch"}
        self.call_or_none("batch", region, "TerminateServiceJob", absent=(_REFUSED,), subject=job_id, **ask)

    def _summaries(self, region: str, **which: Any) -> Iterator[Any]:
        return self.items("batch", region, "ListServiceJobs", "jobSummaryList", **which)

    def _describe_service_job(self, region: str, job_id: str) -> Any | None:
        return self.call_or_none(
            "batch", region, "DescribeServiceJob", absent=(_REFUSED,), subject=job_id, jobId=job_id
        )

    def _positions(self, region: str, queue: str) -> dict[str, int]:
        """Return the positions of the first 100 waiting jobs of a queue, from 1, by ARN."""
        try:
            answer = self.call("batch", region, "GetJobQueueSnapshot", subject=queue, jobQueue=queue)
        except CloudRefused:
            # Where it waits is worth no error.
            return {}
        jobs = answer.get("frontOfQueue", {}).get("jobs", ())
        return {job["jobArn"]: number for number, job in enumerate(jobs, start=1)}

    def _merged(self, region: str, answer: Any, positions: Mapping[str, int]) -> TrainingJob:
        """Return a service job as one training job: the state of its latest one, and the bill of all."""
        arns = _training_jobs(answer)
        jobs = [job for arn in arns if (job := self.training_job(region, arn.rpartition("/")[2]))]
        latest = jobs[-1] if jobs and jobs[-1].arn == arns[-1] else None
        has_ended, is_terminated = answer["status"] not in _LIVE, answer.get("isTerminated", False)
        stopped_at = _moment(answer.get("stoppedAt"))
        is_hidden = has_ended and bool(arns) and latest is None
        if is_hidden and stopped_at and self._now() - stopped_at < _HIDDEN:
            # SageMaker does not show yet what its training job is billed.
            has_ended = False
        message = None
        if has_ended:
            status = "Completed" if answer["status"] == "SUCCEEDED" else "Failed"
            if status == "Failed" and (is_terminated or (latest and latest.status == "Stopped")):
                status = "Stopped"
            secondary = latest.secondary_status if latest and latest.status == status else status
        else:
            status = "Stopping" if is_terminated or is_hidden else "InProgress"
            is_placed = latest is not None and not latest.has_ended
            secondary = latest.secondary_status if latest and is_placed else QUEUED
            message = latest.status_message if latest and is_placed else _place(answer, positions)
        reason = printable(answer.get("statusReason", "")).removeprefix(_FROM_SAGEMAKER)
        payload = json.loads(answer["serviceRequestPayload"])
        begun = [job.started_at for job in jobs if job.started_at]
        if has_ended and is_hidden:
            # Somebody has deleted its training job; Batch's times may include waiting.
            begun.append(_moment(answer["startedAt"]) or self._now())
        is_billed = has_ended and bool(begun) and not is_hidden
        return TrainingJob(
            name=answer["jobName"],
            arn=answer["jobArn"],
            region=region,
            status=status,
            secondary_status=secondary,
            created_at=_moment(answer.get("createdAt")) or self._now(),
            started_at=min(begun, default=None),
            ended_at=((latest and latest.ended_at) or stopped_at) if has_ended else None,
            instance_type=payload["ResourceConfig"].get("InstanceType"),
            num_instances=payload["ResourceConfig"].get("InstanceCount", 1),
            is_spot=payload.get("EnableManagedSpotTraining", False),
            billable_s=sum(map(_billable_s, jobs)) if is_billed else None,
            training_s=sum(job.training_s or _lived_s(job) for job in jobs) if is_billed else None,
            failure_reason=(latest.failure_reason if latest else None) or reason or None,
            status_message=message,
            service_job=answer["jobId"],
            queue=_queue_of(answer),
            training_jobs=tuple(arns),
            placed_at=latest.created_at if latest and not latest.has_ended else None,
            restarted_at=latest.started_at if latest and not latest.has_ended else None,
            earlier_s=sum(_billable_s(job) for job in jobs if job.has_ended),
        )


def _place(answer: Any, positions: Mapping[str, int]) -> str:
    """Return `RUNNABLE, position 3 in queue team`."""
    if answer["status"] not in _LIVE:
        return "SageMaker does not show its training job"
    position = positions.get(answer["jobArn"])
    where = f"position {position} in" if position else "in"
    return f"{answer['status']}, {where} queue {_queue_of(answer)}"


def _queue_of(answer: Any) -> str:
    """Return the queue's name, from its ARN."""
    return str(answer["jobQueue"]).rpartition("/")[2]


def _tags(answer: Any) -> dict[str, str]:
    return {printable(key): printable(value) for key, value in answer.get("tags", {}).items()}


def _training_jobs(answer: Any) -> list[str]:
    """Return the ARNs of the job's training jobs, oldest first."""
    starts = [*answer.get("attempts", ()), answer.get("latestAttempt") or {}]
    arns = (start.get("serviceResourceId", {}).get("value") for start in starts)
    return list(dict.fromkeys(arn for arn in arns if arn))


def _billable_s(job: TrainingJob) -> float:
    return _lived_s(job) if job.billable_s is None else job.billable_s


def _lived_s(job: TrainingJob) -> float:
    if job.started_at is None or job.ended_at is None:
        return 0.0
    return max(0.0, (job.ended_at - job.started_at).total_seconds())


def _moment(milliseconds: int | None) -> datetime | None:
    return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, UTC)
