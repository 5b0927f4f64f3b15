"""SageMaker's training jobs on the AWS of the tests, in place of moto's, which are completed at once.

A job stays in progress until a test moves or ends it; a stopped one is seen stopping first; a name can be
used once; what the request said can be read back. What SageMaker refuses is refused, by the same rules that
the launcher's own plans are held to.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import moto_gaps
from sent_request import SentRequest

from fastlaunch.aws.sagemaker import ENDED, LOG_GROUP
from fastlaunch.backends.validate import request_problems
from fastlaunch.core.plan import Plan

if TYPE_CHECKING:
    from moto_server import Answer

#: What spot costs of the on-demand price, as a part of the time that is billed.
SPOT_SHARE = 0.3
#: Not told again by DescribeTrainingJob.
_NOT_TOLD = ("Tags",)


@dataclass(kw_only=True)
class Job:
    """One training job. request: as it was sent. times: None until then."""

    region: str
    request: Mapping[str, Any]
    arn: str
    created_at: datetime
    status: str = "InProgress"
    secondary: str = "Starting"
    started_at: datetime | None = None
    ended_at: datetime | None = None
    changed_at: datetime | None = None
    transitions: list[dict[str, Any]] = field(default_factory=list)
    failure_reason: str | None = None
    billable_s: int | None = None
    training_s: int | None = None
    hidden: int = 0
    stopping: int | None = None

    @property
    def name(self) -> str:
        return str(self.request["TrainingJobName"])

    @property
    def tags(self) -> dict[str, str]:
        return {tag["Key"]: tag["Value"] for tag in self.request.get("Tags", ())}

    @property
    def is_live(self) -> bool:
        return self.status not in ENDED


_TRUST = json.dumps(
    {
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "sagemaker.amazonaws.com"},
                "Action": "sts:AssumeRole",
            }
        ]
    }
)


class TrainingJobs:
    """All training jobs of the account, and what SageMaker answers about them.

    hidden_describes: how often a new job is not found. stopping_describes: how often one that was told to
    stop is seen so before it is stopped; None to leave its end to the test. now: what time it is.
    when_created, when_stopping: called with the job's region and name.
    """

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], Job] = {}
        self.hidden_describes = 0
        self.stopping_describes: int | None = 1
        self.now: Callable[[], datetime] = lambda: datetime.now(UTC)
        self.when_created: list[Callable[[str, str], None]] = []
        self.when_stopping: list[Callable[[str, str], None]] = []

    # What tests do

    def role(self, name: str = "fastlaunch-job") -> str:
        """ARN of an execution role that is there, and that SageMaker may take on."""
        from moto_server import backend

        iam = backend("iam", "aws")
        if name not in {role.name for role in iam.roles.values()}:
            iam.create_role(name, _TRUST, "/", None, "", [], None)
        return str(next(role.arn for role in iam.roles.values() if role.name == name))

    def job(self, name: str) -> Job:
        """The job of this name, of whatever region."""
        return next(job for job in self.jobs.values() if job.name == name)

    def live(self) -> list[Job]:
        """The jobs that are in progress or stopping."""
        return [job for job in [*self.jobs.values()] if job.is_live]

    def move(self, name: str, *secondary: str, message: str | None = None) -> None:
        """Let a job in progress go through these: Pending, Downloading, Training, Interrupted, ..."""
        job = self.job(name)
        for each in secondary:
            if each not in ("Starting", "Pending") and job.started_at is None:
                job.started_at = self.now()
            self._to(job, each, message)

    def end(
        self,
        name: str,
        status: str = "Completed",
        *,
        secondary: str | None = None,
        reason: str | None = None,
        billable_s: int | None = None,
    ) -> None:
        """End a job. secondary: such as MaxRuntimeExceeded. reason: FailureReason, 1,024 characters of it.

        billable_s: by default the time on its machines, or SPOT_SHARE of it. A job that got none has no time.
        """
        job, now = self.job(name), self.now()
        job.status, job.ended_at = status, now
        job.failure_reason = reason[:1024] if reason else None
        if job.started_at is not None:
            job.training_s = max(1, round((now - job.started_at).total_seconds()))
            share = SPOT_SHARE if job.request.get("EnableManagedSpotTraining") else 1
            job.billable_s = max(1, round(job.training_s * share)) if billable_s is None else billable_s
        self._to(job, secondary or status, None)

    def write_log(self, name: str, text: str, *, host: int = 1) -> None:
        """Let a host of the job print lines."""
        from moto_server import backend

        logs, stream = backend("logs", self.job(name).region), f"{name}/algo-{host}-1700000000"
        if LOG_GROUP not in logs.groups:
            logs.create_log_group(LOG_GROUP, {})
        if stream not in logs.groups[LOG_GROUP].streams:
            logs.create_log_stream(LOG_GROUP, stream)
        at_ms = int(datetime.now(UTC).timestamp() * 1000)
        events = [{"timestamp": at_ms, "message": line} for line in text.splitlines()]
        logs.put_log_events(LOG_GROUP, stream, events)

    # What SageMaker answers

    def answer(self, request: SentRequest) -> "Answer | None":
        """The answer to what is asked of training jobs and their tags; None for all else."""
        make = _ANSWERS.get(request.action)
        return make(self, request) if make else None

    def create(self, request: SentRequest) -> "Answer":
        asked = request.parameters
        name = asked["TrainingJobName"]
        if (request.region, name) in self.jobs:
            arn = self.jobs[request.region, name].arn
            told = "Training job names must be unique within an AWS account and region, and a training job"
            return _error(request, "ResourceInUse", f"{told} with this name already exists ({arn})")
        if refused := _refused(request):
            return _error(request, "ValidationException", refused[0])
        from moto_server import ACCOUNT

        job = Job(
            region=request.region,
            request=asked,
            arn=f"arn:aws:sagemaker:{request.region}:{ACCOUNT}:training-job/{name}",
            created_at=self.now(),
            hidden=self.hidden_describes,
        )
        self.jobs[request.region, name] = job
        self._to(job, "Starting", None)
        for call in self.when_created:
            call(request.region, name)
        return _json({"TrainingJobArn": job.arn})

    def describe(self, request: SentRequest) -> "Answer":
        job = self._seen(request)
        if job is None:
            return _error(request, "ValidationException", "Requested resource not found.")
        self.look_at(job)
        return _json(_described(job))

    def look_at(self, job: Job) -> None:
        """Count a look at a job that is stopping: after some it is stopped."""
        if job.status == "Stopping" and job.stopping is not None:
            job.stopping -= 1
            if job.stopping < 0:
                self.end(job.name, "Stopped")

    def list(self, request: SentRequest) -> "Answer":
        asked = request.parameters
        found = [
            job
            for job in sorted(self.jobs.values(), key=lambda job: job.created_at, reverse=True)
            if job.region == request.region
            and not job.hidden
            and asked.get("StatusEquals") in (None, job.status)
            and asked.get("NameContains", "") in job.name
        ]
        start, size = int(asked.get("NextToken", "0")), asked.get("MaxResults", 10)
        page = [
            {
                "TrainingJobName": job.name,
                "TrainingJobArn": job.arn,
                "CreationTime": job.created_at.timestamp(),
                "TrainingJobStatus": job.status,
                "SecondaryStatus": job.secondary,
            }
            for job in found[start : start + size]
        ]
        rest = {"NextToken": str(start + size)} if found[start + size :] else {}
        return _json({"TrainingJobSummaries": page, **rest})

    def list_tags(self, request: SentRequest) -> "Answer | None":
        arn = request.parameters["ResourceArn"]
        job = next((job for job in self.jobs.values() if job.arn == arn), None)
        if job is None:
            return _error(request, "ValidationException", "Requested resource not found.")
        return _json({"Tags": [{"Key": key, "Value": value} for key, value in job.tags.items()]})

    def stop(self, request: SentRequest) -> "Answer":
        job = self._seen(request)
        if job is None:
            return _error(request, "ValidationException", "Requested resource not found.")
        if job.status != "InProgress":
            told = f"The request was rejected because the training job is in status {job.status}"
            return _error(request, "ValidationException", told)
        job.status, job.stopping = "Stopping", self.stopping_describes
        self._to(job, "Stopping", None)
        for call in self.when_stopping:
            call(job.region, job.name)
        return 200, _HEADERS, b""

    def _seen(self, request: SentRequest) -> Job | None:
        job = self.jobs.get((request.region, request.parameters["TrainingJobName"]))
        if job is not None and job.hidden:
            job.hidden -= 1
            return None
        return job

    def _to(self, job: Job, secondary: str, message: str | None) -> None:
        now = self.now().timestamp()
        if job.transitions:
            job.transitions[-1]["EndTime"] = now
        told = {"StatusMessage": message} if message else {}
        job.transitions.append({"Status": secondary, "StartTime": now, **told})
        job.secondary, job.changed_at = secondary, self.now()


_HEADERS = [("Content-Type", "application/x-amz-json-1.1")]

_ANSWERS = {
    "CreateTrainingJob": TrainingJobs.create,
    "DescribeTrainingJob": TrainingJobs.describe,
    "ListTrainingJobs": TrainingJobs.list,
    "ListTags": TrainingJobs.list_tags,
    "StopTrainingJob": TrainingJobs.stop,
}


def _refused(request: SentRequest) -> list[str]:
    """What SageMaker refuses of the request: by its rules, else a role, bucket or code that is not there."""
    from moto_server import backend

    asked = request.parameters
    plan = Plan(backend="sagemaker", operation="CreateTrainingJob", request=asked, region=request.region)
    problems = request_problems(plan)
    if problems:
        return problems
    if asked["RoleArn"] not in {role.arn for role in backend("iam", "aws").roles.values()}:
        told = "Please ensure that the role exists and allows principal 'sagemaker.amazonaws.com' to assume"
        return [f"Could not assume role {asked['RoleArn']}. {told} the role."]
    buckets: Mapping[str, Any] = backend("s3", "aws").buckets
    for uri in (asked["OutputDataConfig"]["S3OutputPath"], asked["CheckpointConfig"]["S3Uri"]):
        bucket = buckets.get(uri.removeprefix("s3://").partition("/")[0])
        if bucket is None or bucket.region_name != request.region:
            return [f"The S3 bucket of {uri} does not exist in {request.region}"]
    for channel in asked.get("InputDataConfig", ()):
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        name, _, key = uri.removeprefix("s3://").partition("/")
        if name not in buckets or not any(stored.startswith(key) for stored in buckets[name].keys):
            told = (
                "Please ensure that the bucket exists in the selected region, that objects exist under that"
            )
            return [f'No S3 objects found under S3 URL "{uri}" given in input data source. {told} S3 prefix']
    return []


def _described(job: Job) -> dict[str, Any]:
    told = {key: value for key, value in job.request.items() if key not in _NOT_TOLD}
    times = {
        "CreationTime": job.created_at,
        "TrainingStartTime": job.started_at,
        "TrainingEndTime": job.ended_at if job.started_at else None,
        "LastModifiedTime": job.changed_at,
    }
    others = {
        "FailureReason": job.failure_reason,
        "BillableTimeInSeconds": job.billable_s,
        "TrainingTimeInSeconds": job.training_s,
        **{name: at.timestamp() for name, at in times.items() if at},
    }
    artifacts = f"{told['OutputDataConfig']['S3OutputPath']}/{job.name}/output/model.tar.gz"
    return {
        **told,
        "TrainingJobArn": job.arn,
        "TrainingJobStatus": job.status,
        "SecondaryStatus": job.secondary,
        "SecondaryStatusTransitions": job.transitions,
        "ModelArtifacts": {"S3ModelArtifacts": artifacts},
        **{name: value for name, value in others.items() if value is not None},
    }


def _error(request: SentRequest, code: str, message: str) -> "Answer":
    return moto_gaps.error(request, code, message, 400)


def _json(data: Mapping[str, Any]) -> "Answer":
    return 200, _HEADERS, json.dumps(data).encode()
