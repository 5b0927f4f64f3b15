"""SageMaker training jobs and their logs.

SageMaker has no client token. The job's name serves as one: an account can use it once in a region, even
after the job has ended. A job that was created a moment ago may not be found yet.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fastlaunch.aws.errors import is_unknown_job
from fastlaunch.aws.pricing import usd_of
from fastlaunch.aws.session import AwsSession
from fastlaunch.aws.types import BlockOffering
from fastlaunch.core.errors import BadConfiguration, Unreachable
from fastlaunch.core.ownership import BATCH_PREFIX, RUN_TAG
from fastlaunch.core.terminal import printable

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
#: Newest lines to fetch of every host's log. GetLogEvents returns up to 10,000.
LOG_LINES = 1_000
#: Statuses of a job that has ended.
ENDED = ("Completed", "Failed", "Stopped")
#: The form of our jobs' names, which are attempts' tokens. Other jobs' tags need not be fetched.
TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*-a[0-9]+")
#: Also those of training jobs that AWS Batch starts.
_NAME = re.compile(rf"{TOKEN.pattern}|{BATCH_PREFIX}[A-Za-z0-9-]*-a[0-9a-f]+")
#: Fields that tell requests apart and that SageMaker returns as they were sent.
_COMPARED = ("Environment", "RoleArn")


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training job, as DescribeTrainingJob shows it."""

    name: str
    arn: str
    region: str
    # InProgress, Completed, Failed, Stopping, Stopped or Deleting.
    status: str
    # Starting, Pending, Downloading, Training, Interrupted, ...
    secondary_status: str
    created_at: datetime
    # When it began and ended on its machines.
    started_at: datetime | None = None
    ended_at: datetime | None = None
    # As SageMaker names it, such as `ml.p5.48xlarge`; None until SageMaker has chosen.
    instance_type: str | None = None
    num_instances: int = 1
    is_spot: bool = False
    # Seconds of one machine, None until they are known. Billable time holds the spot discount.
    billable_s: float | None = None
    training_s: float | None = None
    failure_reason: str | None = None
    # SageMaker's words for the status.
    status_message: str | None = None
    # ARN of the plan whose machines it takes, and which it waits for.
    training_plan: str | None = None
    # Filled in where all live jobs are listed, alone.
    tags: Mapping[str, str] = field(default_factory=dict)
    # For a job in a queue of AWS Batch, which stands for all its training jobs: its id and queue, and their
    # ARNs, oldest first.
    service_job: str | None = None
    queue: str | None = None
    training_jobs: tuple[str, ...] = ()
    # When its live training job was created, and began on its machines; None while it waits in the queue.
    placed_at: datetime | None = None
    restarted_at: datetime | None = None
    # Billed seconds of its training jobs that have ended.
    earlier_s: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self.status in ENDED

    @property
    def ec2_type(self) -> str | None:
        """The instance type as EC2 names it, None until SageMaker has chosen."""
        return self.instance_type.removeprefix("ml.") if self.instance_type else None


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training plan that was bought."""

    name: str
    # Pending, Scheduled, Active, Expired or Failed.
    status: str
    num_instances: int
    num_free: int
    # Both with their time zone.
    starts_at: datetime | None
    ends_at: datetime | None


class SageMakerCalls(AwsSession):
    def create_training_job(self, region: str, request: Mapping[str, Any]) -> str:
        """Send `request` as it is; return the ARN of the job that it starts, or started before.

        Raises BadConfiguration, code ResourceInUse, if another request has used the name; Unreachable where
        nobody knows whether the job was started.
        """
        name, subject = request["TrainingJobName"], str(request["ResourceConfig"].get("InstanceType", ""))
        try:
            answer = self.call("sagemaker", region, "CreateTrainingJob", subject=subject, **request)
        except BadConfiguration as error:
            if error.code != "ResourceInUse":
                raise
            # Perhaps this very request, sent again because no answer came.
            existing = self._describe_training_job(region, name)
            if existing is None:
                raise Unreachable(
                    f"there is a training job {name} in {region}, and SageMaker does not show it yet",
                    "type the same again in a minute",
                ) from None
            is_same = all(existing.get(name, {}) == request.get(name, {}) for name in _COMPARED)
            if not is_same or _folder(existing) != _folder(request):
                raise
            return str(existing["TrainingJobArn"])
        return str(answer["TrainingJobArn"])

    def training_job(self, region: str, name: str) -> TrainingJob | None:
        """Return the job, without its tags; None if SageMaker does not show it (yet)."""
        answer = self._describe_training_job(region, name)
        return None if answer is None else _job(region, answer)

    def training_job_of(self, region: str, request: Mapping[str, Any]) -> TrainingJob | None:
        """Return the job that the request started; None if there is none (yet), or it uploads elsewhere.

        Only where it uploads is compared: a job of ours that is not found would be billed unseen.
        """
        answer = self._describe_training_job(region, request["TrainingJobName"])
        if answer is None or _folder(answer) != _folder(request):
            return None
        return _job(region, answer)

    def live_training_jobs(self, region: str) -> list[TrainingJob]:
        """Return the region's jobs, in progress or stopping, that carry the tag `fastlaunch:run`."""
        summaries = (
            summary
            for status in ("InProgress", "Stopping")
            for summary in self.items(
                *("sagemaker", region, "ListTrainingJobs", "TrainingJobSummaries"),
                StatusEquals=status,
                MaxResults=100,
            )
            if _NAME.fullmatch(summary["TrainingJobName"])
        )
        jobs = []
        for name, arn in ((summary["TrainingJobName"], summary["TrainingJobArn"]) for summary in summaries):
            pages = self.paginate("sagemaker", region, "ListTags", subject=arn, ResourceArn=arn)
            tags = {
                printable(tag["Key"]): printable(tag["Value"])
                for page in pages
                for tag in page.get("Tags", ())
            }
            if RUN_TAG in tags and (job := self.training_job(region, name)) and not job.has_ended:
                jobs.append(replace(job, tags=tags))
        return jobs

    def stop_training_job(self, region: str, name: str) -> None:
        """Ask a job to stop: its containers get SIGTERM, and 120 s.

        A job that has ended, or that SageMaker does not know yet, is no error: look again at a job that was
        created a moment ago.
        """
        try:
            self.call("sagemaker", region, "StopTrainingJob", subject=name, TrainingJobName=name)
        except BadConfiguration as error:
            if not is_unknown_job(error) and "is in status" not in error.message:
                raise

    def training_plan(self, region: str, arn: str) -> TrainingPlan | None:
        """Return the training plan; None if there is none of the name in the region."""
        name = arn.rpartition("/")[2]
        answer = self.call_or_none(
            *("sagemaker", region, "DescribeTrainingPlan"),
            absent=("ResourceNotFound", "ResourceNotFoundException"),
            subject=name,
            TrainingPlanName=name,
        )
        if answer is None:
            return None
        return TrainingPlan(
            name=name,
            status=answer["Status"],
            num_instances=answer.get("TotalInstanceCount", 0),
            num_free=answer.get("AvailableInstanceCount", 0),
            starts_at=answer.get("StartTime"),
            ends_at=answer.get("EndTime"),
        )

    def plan_offerings(
        self, region: str, instance_type: str, hours: int, num_instances: int = 1
    ) -> list[BlockOffering]:
        """Return the training plans of so many instances that SageMaker offers for so many hours."""
        answer = self.call(
            *("sagemaker", region, "SearchTrainingPlanOfferings"),
            subject=instance_type,
            InstanceType=instance_type,
            InstanceCount=num_instances,
            DurationHours=hours,
            TargetResources=["training-job"],
        )
        return [
            BlockOffering(
                id=plan["TrainingPlanOfferingId"],
                zone=capacity[0]["AvailabilityZone"],
                starts_at=capacity[0]["StartTime"],
                hours=plan["DurationHours"],
                fee_usd=fee_usd,
                num_instances=num_instances,
            )
            for plan in answer["TrainingPlanOfferings"]
            if plan.get("CurrencyCode", "USD") == "USD"
            and (capacity := plan.get("ReservedCapacityOfferings"))
            and (fee_usd := usd_of(plan["UpfrontFee"]))
        ]

    def training_log(self, region: str, name: str) -> str:
        """Return the newest LOG_LINES lines that each container printed; empty if there are none.

        Where there are several logs, of hosts or of restarts, each begins with a line that names it.
        """
        parameters = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
        streams = self.items("logs", region, "DescribeLogStreams", "logStreams", subject=name, **parameters)
        try:
            names = sorted(stream["logStreamName"] for stream in streams)
        except BadConfiguration as error:
            # The group comes with the account's first job.
            if error.code == "ResourceNotFoundException":
                return ""
            raise
        texts = {}
        for stream in names:
            answer = self.call(
                *("logs", region, "GetLogEvents"),
                subject=stream,
                logGroupName=LOG_GROUP,
                logStreamName=stream,
                limit=LOG_LINES,
                startFromHead=False,
            )
            texts[stream] = "".join(f"{event['message']}\n" for event in answer["events"])
        if len(texts) == 1:
            return texts[names[0]]
        return "".join(f"==> {stream.partition('/')[2]} <==\n{text}" for stream, text in texts.items())

    def _describe_training_job(self, region: str, name: str) -> Any | None:
        try:
            return self.call("sagemaker", region, "DescribeTrainingJob", subject=name, TrainingJobName=name)
        except BadConfiguration as error:
            if is_unknown_job(error):
                return None
            raise


def _folder(job: Mapping[str, Any]) -> str | None:
    """Return where its checkpoints, and all that it uploads, go."""
    uri: str | None = job.get("CheckpointConfig", {}).get("S3Uri")
    return uri


def _job(region: str, answer: Mapping[str, Any]) -> TrainingJob:
    resources: Mapping[str, Any] = answer.get("ResourceConfig", {})
    transitions = answer.get("SecondaryStatusTransitions") or [{}]
    return TrainingJob(
        name=answer["TrainingJobName"],
        arn=answer["TrainingJobArn"],
        region=region,
        status=answer["TrainingJobStatus"],
        secondary_status=answer["SecondaryStatus"],
        created_at=answer["CreationTime"],
        started_at=answer.get("TrainingStartTime"),
        # A job that never got a machine has no end on one.
        ended_at=answer.get("TrainingEndTime")
        or (answer.get("LastModifiedTime") if answer["TrainingJobStatus"] in ENDED else None),
        instance_type=resources.get("InstanceType"),
        num_instances=resources.get("InstanceCount", 1),
        training_plan=resources.get("TrainingPlanArn"),
        is_spot=answer.get("EnableManagedSpotTraining", False),
        billable_s=answer.get("BillableTimeInSeconds"),
        training_s=answer.get("TrainingTimeInSeconds"),
        failure_reason=printable(answer.get("FailureReason", "")) or None,
        status_message=printable(transitions[-1].get("StatusMessage") or "") or None,
    )
