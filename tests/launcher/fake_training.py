"""SageMaker in memory, on the clock of `fake_cloud`: jobs wait, train, upload and end as a test has them do.

What crosses the wire is tested against moto; the jobs themselves are those of `moto_training_jobs`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fake_cloud import SHUTDOWN_S, Clock, FakeAws, FakeNode, listed_runs
from moto_batch import Queues
from moto_training_jobs import Job, TrainingJobs
from sent_request import SentRequest

from fastlaunch.aws.client import Aws
from fastlaunch.aws.errors import ApiCall, refusal
from fastlaunch.core.errors import CloudRefused, Unreachable

#: Until a job waits for capacity, has its machines, and trains.
PENDING_S, DOWNLOADING_S, TRAINING_S = 30, 120, 240
_TIMES = ("CreationTime", "TrainingStartTime", "TrainingEndTime", "LastModifiedTime")


class _Jobs(TrainingJobs):
    """Training jobs that need no role, bucket or code of moto's."""

    def answer(self, request: SentRequest) -> Any:
        return self.create(request) if request.action == "CreateTrainingJob" else super().answer(request)

    def create(self, request: SentRequest) -> Any:
        name = request.parameters["TrainingJobName"]
        if (request.region, name) in self.jobs:
            return super().create(request)
        arn = f"arn:aws:sagemaker:{request.region}:123456789012:training-job/{name}"
        job = Job(region=request.region, request=request.parameters, arn=arn, created_at=self.now())
        self.jobs[request.region, name] = job
        self._to(job, "Starting", None)
        for call in self.when_created:
            call(request.region, name)
        return 200, [], json.dumps({"TrainingJobArn": arn}).encode()


class FakeTrainingAws(FakeAws):
    """An AWS whose SageMaker answers too. answers: to the next CreateTrainingJob, as to RunInstances.

    job: what a job does, called when it was created.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.jobs = _Jobs()
        self.jobs.now = clock.now
        self.queues = Queues(self.jobs)
        self.job: Callable[[FakeJob], None] = lambda job: job.train()
        self.jobs.when_created.append(self._created)

    #: By what SageMaker answers.
    live_training_jobs = Aws.live_training_jobs

    def call(self, service: str, region: str, action: str, *, subject: str = "", **given: Any) -> Any:
        assert service in ("sagemaker", "batch"), action
        self._called(action)
        asked = ApiCall(service=service, action=action, region=region, subject=subject)
        answer = None
        if action in ("CreateTrainingJob", "SubmitServiceJob"):
            self.requests.append((region, given))
            answer = self.answers.pop(0) if self.answers else None
            if isinstance(answer, CloudRefused):
                raise answer
        told = self._answer(asked, given)
        if answer == "lost":
            raise Unreachable(f"no answer to {service}:{action}")
        return told

    def _answer(self, asked: ApiCall, given: Mapping[str, Any]) -> Any:
        request = SentRequest(
            method="POST",
            path="/",
            service=asked.service,
            region=asked.region,
            action=asked.action,
            parameters=given,
            headers={"x-amz-target": asked.action},
            body=b"",
            size=0,
        )
        answer = (self.queues if asked.service == "batch" else self.jobs).answer(request)
        assert answer is not None, asked.action
        status, _, body = answer
        told = json.loads(body or b"{}")
        if status != 200:
            raise refusal(asked, told["__type"], told["message"], status=status)
        times = {name: datetime.fromtimestamp(told[name], tz=UTC) for name in _TIMES if name in told}
        return {**told, **times}

    def running(self) -> list[str]:
        """Names of the jobs that are not over."""
        return [job.name for job in self.jobs.live()]

    def _created(self, region: str, name: str) -> None:
        self.job(FakeJob(aws=self, instance_id=name, request=self.jobs.jobs[region, name].request))


@dataclass
class FakeJob(FakeNode):
    """The container of a job; its id is the job's name."""

    @property
    def token(self) -> str:
        return str(self.request["Environment"]["FASTLAUNCH_TOKEN"])

    @property
    def output(self) -> tuple[str, str]:
        tags = {tag["Key"]: tag["Value"] for tag in self.request["Tags"]}
        bucket, _, key = tags["fastlaunch:output"].removeprefix("s3://").partition("/")
        return bucket, key

    @property
    def num_nodes(self) -> int:
        return int(self.request["ResourceConfig"]["InstanceCount"])

    def put(self, name: str, body: bytes) -> None:
        if self.aws.jobs.job(self.instance_id).is_live:
            bucket, key = self.output
            self.aws.objects[bucket, f"{key}/{name}"] = body

    def run_ids(self) -> list[str]:
        return listed_runs(self.aws.objects, *self.output)

    def turn_off(self) -> None:
        status = self.aws.jobs.job(self.instance_id).status
        self.aws.clock.at(SHUTDOWN_S, lambda: self.end("Stopped" if status == "Stopping" else "Completed"))

    def end(self, status: str, **how: Any) -> None:
        """End the job, unless it has."""
        if self.aws.jobs.job(self.instance_id).is_live:
            self.aws.jobs.end(self.instance_id, status, **how)

    def move(self, seconds: float, *secondary: str) -> None:
        """Let SageMaker tell these of it, so many seconds from now."""

        def go_on() -> None:
            if self.aws.jobs.job(self.instance_id).status == "InProgress":
                self.aws.jobs.move(self.instance_id, *secondary)

        self.aws.clock.at(seconds, go_on)

    def get_machines(self) -> None:
        """Wait for capacity, get it, download and train."""
        for seconds, word in ((PENDING_S, "Pending"), (DOWNLOADING_S, "Downloading")):
            self.move(seconds, word)
        self.move(TRAINING_S, "Training")

    def find_no_capacity(self, *, after_s: float = 1800) -> None:
        """Wait, and end without ever having had a machine."""
        self.move(PENDING_S, "Pending")
        reason = "CapacityError: Unable to provision requested ML compute capacity. Please retry."
        self.aws.clock.at(after_s, lambda: self.end("Failed", reason=reason))

    def train(self, **how: Any) -> None:
        """As `FakeNode.train`, when it has got its machines. ApiCall to stop, it ends as SageMaker has it."""
        self.get_machines()
        self.aws.clock.at(TRAINING_S, lambda: FakeNode.train(self, **how))

    def _watch_abort(self, done: Mapping[str, str], runs: list[str]) -> None:  # type: ignore[override]
        def look() -> None:
            job = self.aws.jobs.job(self.instance_id)
            if job.status == "Stopping" and self.stops:
                states = {run_id: done.get(run_id, "interrupted") for run_id in runs}
                self.say_last("interrupted", states, reason="stop")
                self.turn_off()
            elif job.is_live:
                self.aws.clock.at(10, look)

        self.aws.clock.at(10, look)


def at_second_start(job: FakeJob) -> None:
    """Train, unless it is the first job that SageMaker was given: that finds no capacity."""
    if len(job.aws.jobs.jobs) == 1:
        job.find_no_capacity(after_s=600)
    else:
        job.train()
