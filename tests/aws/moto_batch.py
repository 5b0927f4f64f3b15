"""AWS Batch's queues for training jobs on the AWS of the tests: moto has no service jobs.

A queue gives its jobs their turn as its instances become free, by share, priority and age, whenever Batch is
asked anything, or `settle` is called. What goes in and out is held to botocore's model.
"""

import fnmatch
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import moto_gaps
from moto_training_jobs import TrainingJobs
from sent_request import SentRequest

if TYPE_CHECKING:
    from moto_server import Answer

_HEADERS = [("Content-Type", "application/json")]
_ENDED = ("SUCCEEDED", "FAILED")
#: Bytes. docs.aws.amazon.com/batch, "AWS Batch service quotas".
_MAX_PAYLOAD = 10 * 1024


@dataclass(kw_only=True)
class Queue:
    """num_instances: how many may run at once. sharing: `fairsharePolicy`, `quotaSharePolicy` or None."""

    name: str
    region: str
    arn: str
    num_instances: int = 4
    state: str = "ENABLED"
    kind: str = "SAGEMAKER_TRAINING"
    sharing: str | None = None


@dataclass(kw_only=True)
class ServiceJob:
    """request: as it was sent. training_jobs: names, one for each start."""

    id: str
    arn: str
    queue: Queue
    request: Mapping[str, Any]
    created_at: datetime
    status: str = "RUNNABLE"
    status_reason: str | None = None
    num_attempts: int = 0
    is_terminated: bool = False
    stopped_at: datetime | None = None
    training_jobs: list[str] = field(default_factory=list)
    hidden: int = 0

    @property
    def payload(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.request["serviceRequestPayload"])
        return data

    @property
    def num_instances(self) -> int:
        return int(self.payload["ResourceConfig"]["InstanceCount"])

    @property
    def is_waiting(self) -> bool:
        return self.status == "RUNNABLE"


class Queues:
    """All queues of the account. jobs: where their turns lead to.

    hidden_looks: how often a new job is not found or listed.
    """

    def __init__(self, jobs: TrainingJobs) -> None:
        self.jobs = jobs
        self.queues: dict[tuple[str, str], Queue] = {}
        self.service_jobs: dict[str, ServiceJob] = {}
        self.hidden_looks = 0

    # What tests do

    def add(self, name: str, region: str = "us-east-1", **how: Any) -> Queue:
        """Create a queue."""
        from moto_server import ACCOUNT

        arn = f"arn:aws:batch:{region}:{ACCOUNT}:job-queue/{name}"
        self.queues[region, name] = queue = Queue(name=name, region=region, arn=arn, **how)
        return queue

    def job(self, name: str) -> ServiceJob:
        """The newest service job of this name."""
        return [job for job in [*self.service_jobs.values()] if job.request["jobName"] == name][-1]

    def live(self) -> list[ServiceJob]:
        return [job for job in [*self.service_jobs.values()] if job.status not in _ENDED]

    def settle(self) -> None:
        """Follow the training jobs, and give jobs their turn."""
        for job in self.live():
            self._follow(job)
        for queue in self.queues.values():
            for job in self._in_order(queue):
                if job.num_instances > queue.num_instances - sum(self._in_use(queue).values()):
                    break
                self._start(job)

    # What Batch answers

    def answer(self, request: SentRequest) -> "Answer":
        """The answer to any request to Batch."""
        make = _ANSWERS.get(request.action)
        if make is None:
            return _error(request, f"the tests' Batch does not do {request.action}")
        if problems := _misfit(request.action, "input_shape", request.parameters):
            return _error(request, problems)
        self.settle()
        answer = make(self, request)
        self.settle()
        if answer[0] == 200:
            problems = _misfit(request.action, "output_shape", json.loads(answer[2]))
            assert not problems, problems
        return answer

    def describe_queues(self, request: SentRequest) -> "Answer":
        names = request.parameters.get("jobQueues")
        return _json(
            {
                "jobQueues": [
                    {
                        "jobQueueName": queue.name,
                        "jobQueueArn": queue.arn,
                        "state": queue.state,
                        "status": "VALID",
                        "priority": 1,
                        "computeEnvironmentOrder": [],
                        "jobQueueType": queue.kind,
                        **({"schedulingPolicyArn": f"{queue.arn}-policy"} if queue.sharing else {}),
                    }
                    for (region, _), queue in self.queues.items()
                    if region == request.region and (not names or {queue.name, queue.arn} & set(names))
                ]
            }
        )

    def describe_policies(self, request: SentRequest) -> "Answer":
        shapes = {
            "fairsharePolicy": {"shareDecaySeconds": 600},
            "quotaSharePolicy": {"idleResourceAssignmentStrategy": "FIFO"},
        }
        policies = [
            {"name": queue.name, "arn": arn, queue.sharing: shapes[queue.sharing]}
            for queue in self.queues.values()
            if queue.sharing and (arn := f"{queue.arn}-policy") in request.parameters["arns"]
        ]
        return _json({"schedulingPolicies": policies})

    def submit(self, request: SentRequest) -> "Answer":
        asked = request.parameters
        queue = self._queue(request)
        if queue is None or queue.kind != asked["serviceJobType"]:
            return _error(request, f"{asked['jobQueue']} is not a valid queue for service jobs")
        if queue.state != "ENABLED":
            return _error(request, f"Job queue {queue.name} is disabled and cannot accept jobs")
        if (queue.sharing == "fairsharePolicy") != ("shareIdentifier" in asked):
            return _error(request, "shareIdentifier is for queues with a fair-share policy, and needed there")
        if len(asked["serviceRequestPayload"].encode()) > _MAX_PAYLOAD:
            return _error(request, "serviceRequestPayload is too large")
        token = asked.get("clientToken")
        if any(job.request.get("clientToken") == token for job in [*self.service_jobs.values()]):
            return _error(request, f"A job with clientToken {token} was submitted already")
        from moto_server import ACCOUNT

        digest = hashlib.sha256(f"{request.region}{token}".encode()).hexdigest()
        job_id = f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-8{digest[17:20]}-{digest[20:32]}"
        job = ServiceJob(
            id=job_id,
            arn=f"arn:aws:batch:{request.region}:{ACCOUNT}:service-job/{job_id}",
            queue=queue,
            request=asked,
            created_at=self.jobs.now(),
            hidden=self.hidden_looks,
        )
        self.service_jobs[job_id] = job
        return _json({"jobArn": job.arn, "jobName": asked["jobName"], "jobId": job_id})

    def describe(self, request: SentRequest) -> "Answer":
        job = self._job(request)
        if job is None:
            return _error(request, f"Job {request.parameters['jobId']} does not exist")
        starts = [self._start_of(job, name) for name in job.training_jobs]
        asked = {name: job.request[name] for name in _TOLD if name in job.request}
        return _json(
            {
                **asked,
                **self._summary(job),
                "jobQueue": job.queue.arn,
                # Batch's model wants it of every job.
                "startedAt": _ms(job.created_at),
                "attempts": starts[: len(starts) - (job.status not in _ENDED and not job.is_waiting)],
            }
        )

    def list_jobs(self, request: SentRequest) -> "Answer":
        asked = request.parameters
        queue = self._queue(request)
        if queue is None:
            return _error(request, f"JobQueue {asked.get('jobQueue')} does not exist")
        names = [value for each in asked.get("filters", ()) for value in each["values"]]
        summaries = [
            self._summary(job)
            for job in [*self.service_jobs.values()]
            if job.queue is queue
            and self._is_shown(job)
            and (
                job.request["jobName"] in names if names else job.status == asked.get("jobStatus", "RUNNING")
            )
        ]
        return _json({"jobSummaryList": summaries})

    def terminate(self, request: SentRequest) -> "Answer":
        job = self._job(request)
        if job is None:
            return _error(request, f"Job {request.parameters['jobId']} does not exist")
        if job.status not in _ENDED:
            job.is_terminated, job.status_reason = True, request.parameters["reason"]
            live = job.training_jobs and self.jobs.job(job.training_jobs[-1])
            if live and live.status == "InProgress":
                self.jobs.answer(_to_sagemaker(job, "StopTrainingJob", {"TrainingJobName": live.name}))
        return _json({})

    def snapshot(self, request: SentRequest) -> "Answer":
        queue = self._queue(request)
        if queue is None:
            return _error(request, f"JobQueue {request.parameters['jobQueue']} does not exist")
        jobs = [
            {"jobArn": job.arn, "earliestTimeAtPosition": _ms(job.created_at)}
            for job in self._in_order(queue)
        ]
        return _json({"frontOfQueue": {"jobs": jobs[:100], "lastUpdatedAt": _ms(self.jobs.now())}})

    # Inside

    def _queue(self, request: SentRequest) -> Queue | None:
        name = request.parameters.get("jobQueue", "").rpartition("/")[2]
        return self.queues.get((request.region, name))

    def _job(self, request: SentRequest) -> ServiceJob | None:
        job = self.service_jobs.get(request.parameters["jobId"])
        return job if job and job.queue.region == request.region and self._is_shown(job) else None

    def _is_shown(self, job: ServiceJob) -> bool:
        if job.hidden:
            job.hidden -= 1
            return False
        return True

    def _in_order(self, queue: Queue) -> list[ServiceJob]:
        in_use = self._in_use(queue)

        def rank(job: ServiceJob) -> tuple[int, int, datetime]:
            share = in_use.get(job.request.get("shareIdentifier", ""), 0) if queue.sharing else 0
            return share, -job.request.get("schedulingPriority", 0), job.created_at

        waiting = [job for job in self.live() if job.queue is queue and job.is_waiting]
        return sorted(waiting, key=rank)

    def _in_use(self, queue: Queue) -> dict[str, int]:
        in_use: dict[str, int] = {}
        for job in self.live():
            if job.queue is queue and not job.is_waiting:
                share = job.request.get("shareIdentifier", "")
                in_use[share] = in_use.get(share, 0) + job.num_instances
        return in_use

    def _start(self, job: ServiceJob) -> None:
        digest = hashlib.sha256(f"{job.id}{len(job.training_jobs)}".encode()).hexdigest()[:32]
        name = f"AWSBatch{job.payload['TrainingJobName']}{digest}"[:63]
        job.training_jobs.append(name)
        job.status, job.num_attempts = "SCHEDULED", job.num_attempts + 1
        request = _to_sagemaker(job, "CreateTrainingJob", {**job.payload, "TrainingJobName": name})
        answer = self.jobs.answer(request)
        assert answer is not None
        if answer[0] != 200:
            job.training_jobs.pop()
            error = json.loads(answer[2])
            self._end(job, "FAILED", f"{error['__type']}: {error['message']}")

    def _follow(self, job: ServiceJob) -> None:
        if job.is_waiting:
            if job.is_terminated:
                self._end(job, "FAILED", None)
            return
        training = self.jobs.job(job.training_jobs[-1])
        # Its queue is all that is asked of it, if its launcher died while it was stopping.
        self.jobs.look_at(training)
        reason = training.failure_reason or training.secondary
        if training.is_live:
            statuses = {"Starting": "SCHEDULED", "Pending": "SCHEDULED", "Downloading": "STARTING"}
            job.status = statuses.get(training.secondary, "RUNNING")
        elif training.status == "Completed":
            self._end(job, "SUCCEEDED", reason)
        elif job.is_terminated or training.status == "Stopped":
            self._end(job, "FAILED", None if job.is_terminated else reason)
        elif reason.startswith("CapacityError"):
            # It does not count, and the job waits on.
            job.status, job.num_attempts = "RUNNABLE", job.num_attempts - 1
        elif job.num_attempts < job.request["retryStrategy"]["attempts"] and _is_retried(job, reason):
            job.status = "RUNNABLE"
        else:
            self._end(job, "FAILED", reason)

    def _end(self, job: ServiceJob, status: str, reason: str | None) -> None:
        job.status, job.stopped_at = status, self.jobs.now()
        if reason is not None:
            job.status_reason = f"Received status from SageMaker: {reason}"

    def _start_of(self, job: ServiceJob, name: str) -> dict[str, Any]:
        arn = f"arn:aws:sagemaker:{job.queue.region}:{job.arn.split(':')[4]}:training-job/{name}"
        return {"serviceResourceId": {"name": "TrainingJobArn", "value": arn}}

    def _summary(self, job: ServiceJob) -> dict[str, Any]:
        latest = [self._start_of(job, name) for name in job.training_jobs[-1:]]
        return {
            "jobArn": job.arn,
            "jobId": job.id,
            "jobName": job.request["jobName"],
            "serviceJobType": job.request["serviceJobType"],
            "createdAt": _ms(job.created_at),
            "status": job.status,
            "isTerminated": job.is_terminated,
            **({"latestAttempt": latest[0]} if latest else {}),
            **({"statusReason": job.status_reason} if job.status_reason else {}),
            **({"stoppedAt": _ms(job.stopped_at)} if job.stopped_at else {}),
        }


#: What DescribeServiceJob tells of the request.
_TOLD = ("serviceRequestPayload", "schedulingPriority", "shareIdentifier", "retryStrategy", "tags")
_ANSWERS = {
    "DescribeJobQueues": Queues.describe_queues,
    "DescribeSchedulingPolicies": Queues.describe_policies,
    "DescribeServiceJob": Queues.describe,
    "GetJobQueueSnapshot": Queues.snapshot,
    "ListServiceJobs": Queues.list_jobs,
    "SubmitServiceJob": Queues.submit,
    "TerminateServiceJob": Queues.terminate,
}


def _is_retried(job: ServiceJob, reason: str) -> bool:
    status_reason = f"Received status from SageMaker: {reason}"
    for rule in job.request["retryStrategy"].get("evaluateOnExit", ()):
        if fnmatch.fnmatchcase(status_reason, rule["onStatusReason"]):
            return bool(rule["action"] == "RETRY")
    return True


def _to_sagemaker(job: ServiceJob, action: str, parameters: Mapping[str, Any]) -> SentRequest:
    return SentRequest(
        method="POST",
        path="/",
        service="sagemaker",
        region=job.queue.region,
        action=action,
        parameters=parameters,
        headers={"x-amz-target": action},
        body=b"",
        size=0,
    )


@cache
def _shape(action: str, shape: str) -> Any:
    import botocore.session

    model = botocore.session.get_session().get_service_model("batch")
    return getattr(model.operation_model(action), shape)


def _misfit(action: str, shape: str, data: Mapping[str, Any]) -> str:
    """What botocore's model of Batch has against a request or an answer; empty for nothing."""
    from botocore.validate import ParamValidator

    errors = ParamValidator().validate(data, _shape(action, shape))
    return str(errors.generate_report())


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _error(request: SentRequest, message: str) -> "Answer":
    return moto_gaps.error(replace(request, service="batch"), "ClientException", message, 400)


def _json(data: Mapping[str, Any]) -> "Answer":
    return 200, _HEADERS, json.dumps(data).encode()
