"""Training jobs of SageMaker: asked for, looked at, stopped, and what their containers printed.

SageMaker has no client token. A job's name is one: it can be used once in an account and region, even after
the job has ended. A job that was created a moment ago may not be found yet.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fastlaunch.aws.ec2 import Aws
from fastlaunch.aws.errors import is_unknown_job
from fastlaunch.core.errors import BadConfiguration, Unreachable

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
#: Newest lines that are fetched of every host's log. GetLogEvents takes up to 10,000.
LOG_LINES = 1_000
#: Statuses of a job that has ended; it is in progress, stopping or being deleted otherwise.
ENDED = ("Completed", "Failed", "Stopped")
#: A job of ours is named by its attempt's token, so that others need not be asked for their tags.
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*-a[0-9]+")
#: What tells one request from another, and comes back from SageMaker as it was sent.
_SAME = ("HyperParameters", "Environment", "RoleArn")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training job as DescribeTrainingJob tells it.

    status: InProgress, Completed, Failed, Stopping, Stopped or Deleting. secondary_status: Starting, Pending,
    Downloading, Training, Interrupted, ... status_message: SageMaker's words for it. started_at, ended_at: on
    its machines. instance_type: the one that it got, as SageMaker names it (`ml.p5.48xlarge`), None until
    SageMaker has chosen. billable_s, training_s: of one machine, None until they are known; billable time
    holds the spot discount. pool_billable_s: for which a warm pool was kept after it, of one machine.
    keeps_pool: whether its machines are, or will be, kept after it, for keep_alive_s. tags: only those of
    `live_training_jobs` and `kept_pools` have them.
    """

    name: str
    arn: str
    region: str
    status: str
    secondary_status: str
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    instance_type: str | None = None
    num_instances: int = 1
    is_spot: bool = False
    billable_s: float | None = None
    training_s: float | None = None
    failure_reason: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    pool_billable_s: float | None = None
    keeps_pool: bool = False
    keep_alive_s: int = 0
    status_message: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it is over for good; a warm pool may still be kept after it."""
        return self.status in ENDED

    @property
    def ec2_type(self) -> str | None:
        """The instance type that it got as EC2 names it, None until SageMaker has chosen."""
        return self.instance_type.removeprefix("ml.") if self.instance_type else None


def create_training_job(aws: Aws, region: str, request: Mapping[str, Any]) -> str:
    """ARN of the job that `request` starts, as it is; or started before, by the same request.

    Raises BadConfiguration, code ResourceInUse, if another request has used the name; Unreachable where it is
    not known whether the job was started.
    """
    name = request["TrainingJobName"]
    try:
        told = aws.ask("sagemaker", region, "CreateTrainingJob", subject=_subject(request), **request)
    except BadConfiguration as error:
        if error.code != "ResourceInUse":
            raise
        # Perhaps this very request, sent again after an answer that did not come.
        there = _described(aws, region, name)
        if there is None:
            raise Unreachable(
                f"there is a training job {name} in {region}, and SageMaker does not show it yet",
                "type the same again in a minute",
            ) from None
        if not _is_of(there, request):
            raise
        return str(there["TrainingJobArn"])
    return str(told["TrainingJobArn"])


def training_job(aws: Aws, region: str, name: str) -> TrainingJob | None:
    """The job of this name, without its tags; None if there is none, or SageMaker does not show it yet."""
    told = _described(aws, region, name)
    return None if told is None else _job(region, told)


def training_job_of(aws: Aws, region: str, request: Mapping[str, Any]) -> TrainingJob | None:
    """The job that the request started; None if there is none (yet), or one that uploads elsewhere.

    Only where it uploads is compared: a job of ours that were not found would be billed unseen.
    """
    told = _described(aws, region, request["TrainingJobName"])
    return _job(region, told) if told is not None and _folder(told) == _folder(request) else None


def live_training_jobs(aws: Aws, region: str) -> list[TrainingJob]:
    """The jobs of the region that are in progress or stopping and carry the tag `fastlaunch:run`."""
    return [job for job in _ours(aws, region, _live(aws, region)) if not job.has_ended]


def kept_pools(aws: Aws, region: str) -> list[TrainingJob]:
    """The jobs of the region that have ended, whose machines are kept, and that carry `fastlaunch:run`."""
    pages = aws.pages(
        "sagemaker", region, "ListTrainingJobs", WarmPoolStatusEquals="Available", MaxResults=100
    )
    return [job for job in _ours(aws, region, _listed(pages)) if job.has_ended and job.keeps_pool]


def stop_training_job(aws: Aws, region: str, name: str) -> None:
    """Ask a job to stop: its containers get SIGTERM, and 120 s. It is no error if it has ended already.

    Nor if SageMaker does not know it yet: look again at one that was created a moment ago.
    """
    try:
        aws.ask("sagemaker", region, "StopTrainingJob", subject=name, TrainingJobName=name)
    except BadConfiguration as error:
        if not is_unknown_job(error) and "is in status" not in error.message:
            raise


def end_warm_pool(aws: Aws, region: str, name: str) -> None:
    """Have the machines that are kept after a job let go: they are even after one that was stopped.

    docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html
    """
    none = {"KeepAlivePeriodInSeconds": 0}
    aws.ask("sagemaker", region, "UpdateTrainingJob", subject=name, TrainingJobName=name, ResourceConfig=none)


def training_log(aws: Aws, region: str, name: str) -> str:
    """What the job's containers printed, the newest LOG_LINES lines of each log; empty if there is none.

    Where there are several logs, of hosts or of restarts, each begins with a line that names it.
    """
    streams = sorted(_log_streams(aws, region, name))
    texts = [(stream, _log_end(aws, region, stream)) for stream in streams]
    if len(texts) == 1:
        return texts[0][1]
    return "".join(f"==> {stream.partition('/')[2]} <==\n{text}" for stream, text in texts)


def _described(aws: Aws, region: str, name: str) -> Any | None:
    try:
        return aws.ask("sagemaker", region, "DescribeTrainingJob", subject=name, TrainingJobName=name)
    except BadConfiguration as error:
        if is_unknown_job(error):
            return None
        raise


def _live(aws: Aws, region: str) -> Iterator[tuple[str, str]]:
    """Name and ARN of all jobs that are not over, whoever started them."""
    for status in ("InProgress", "Stopping"):
        yield from _listed(
            aws.pages("sagemaker", region, "ListTrainingJobs", StatusEquals=status, MaxResults=100)
        )


def _listed(pages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for page in pages:
        for each in page["TrainingJobSummaries"]:
            yield each["TrainingJobName"], each["TrainingJobArn"]


def _ours(aws: Aws, region: str, listed: Iterable[tuple[str, str]]) -> Iterator[TrainingJob]:
    """Those that carry our tag, with their tags."""
    for name, arn in listed:
        tags = _tags(aws, region, arn) if _TOKEN.fullmatch(name) else {}
        if "fastlaunch:run" in tags:
            job = training_job(aws, region, name)
            if job is not None:
                yield replace(job, tags=tags)


def _tags(aws: Aws, region: str, arn: str) -> dict[str, str]:
    pages = aws.pages("sagemaker", region, "ListTags", subject=arn, ResourceArn=arn)
    return {tag["Key"]: tag["Value"] for page in pages for tag in page.get("Tags", ())}


def _log_streams(aws: Aws, region: str, name: str) -> Iterator[str]:
    given: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
    while True:
        try:
            page = aws.ask("logs", region, "DescribeLogStreams", subject=name, **given)
        except BadConfiguration as error:
            # The group comes with the account's first job.
            if error.code == "ResourceNotFoundException":
                return
            raise
        yield from (each["logStreamName"] for each in page["logStreams"])
        if not page.get("nextToken"):
            return
        given["nextToken"] = page["nextToken"]


def _log_end(aws: Aws, region: str, stream: str) -> str:
    told = aws.ask(
        "logs",
        region,
        "GetLogEvents",
        subject=stream,
        logGroupName=LOG_GROUP,
        logStreamName=stream,
        limit=LOG_LINES,
        startFromHead=False,
    )
    return "".join(f"{event['message']}\n" for event in told["events"])


def _subject(request: Mapping[str, Any]) -> str:
    resources: Mapping[str, Any] = request.get("ResourceConfig", {})
    types = [one["InstanceType"] for one in resources.get("InstancePreferences", ())]
    return " or ".join(types) or str(resources.get("InstanceType", ""))


def _is_of(told: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether the job that SageMaker tells of was started by this request."""
    return _folder(told) == _folder(request) and all(
        told.get(name, {}) == request.get(name, {}) for name in _SAME
    )


def _folder(job: Mapping[str, Any]) -> str | None:
    """Where its checkpoints, and all that it uploads, go."""
    uri: str | None = job.get("CheckpointConfig", {}).get("S3Uri")
    return uri


def _job(region: str, told: Mapping[str, Any]) -> TrainingJob:
    resources: Mapping[str, Any] = told.get("ResourceConfig", {})
    transitions = told.get("SecondaryStatusTransitions") or [{}]
    return TrainingJob(
        name=told["TrainingJobName"],
        arn=told["TrainingJobArn"],
        region=region,
        status=told["TrainingJobStatus"],
        secondary_status=told["SecondaryStatus"],
        created_at=told["CreationTime"],
        started_at=told.get("TrainingStartTime"),
        # A job that never got a machine has no end on one.
        ended_at=told.get("TrainingEndTime")
        or (told.get("LastModifiedTime") if told["TrainingJobStatus"] in ENDED else None),
        instance_type=resources.get("SelectedInstanceType") or resources.get("InstanceType"),
        num_instances=resources.get("SelectedInstanceCount") or resources.get("InstanceCount") or 1,
        is_spot=told.get("EnableManagedSpotTraining", False),
        billable_s=told.get("BillableTimeInSeconds"),
        training_s=told.get("TrainingTimeInSeconds"),
        failure_reason=told.get("FailureReason") or None,
        keeps_pool=told.get("WarmPoolStatus", {}).get("Status") in ("InUse", "Available"),
        keep_alive_s=resources.get("KeepAlivePeriodInSeconds") or 0,
        pool_billable_s=told.get("WarmPoolStatus", {}).get("ResourceRetainedBillableTimeInSeconds"),
        status_message=transitions[-1].get("StatusMessage") or None,
    )
