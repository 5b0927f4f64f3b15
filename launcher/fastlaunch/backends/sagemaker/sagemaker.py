"""The SageMaker backend: an attempt is one CreateTrainingJob request, whose job does its runs and ends.

Handles also have `job_name`, which is the attempt's token, and `arn`. That of a job in a queue of AWS Batch
has the service job's `arn` and its id, `service_job`; the name of the `queue`; `num_starts`, how often Batch
may start the job. Once a look has shown them, it has `training_jobs`, the ARNs of what Batch has started;
`restarted_at`, since when the live one has machines (ISO 8601, or None); and `earlier_s`, the billed seconds
of the others.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.backends.node_agent import store_objects
from fastlaunch.backends.protocol import AttemptStatus, CloudBackend
from fastlaunch.backends.sagemaker.observe import attempt_status, billed_on_sagemaker
from fastlaunch.core.errors import Throttled, Unreachable, UserError
from fastlaunch.core.ownership import JOB_WAIT_MINUTES, OUTPUT_TAG
from fastlaunch.core.plan import Plan
from fastlaunch.jobs.job import Job

#: Between asking a job to stop and giving up waiting for it: 120 s for the container, then SageMaker copies
#: its checkpoints.
STOP_WAIT_S = 600.0
LOOK_INTERVAL_S = 10.0


@dataclass(kw_only=True)
class SageMakerBackend(CloudBackend):
    """Runs plans as training jobs."""

    name: ClassVar[str] = "sagemaker"
    #: Waiting for machines is not billed, and a container that does not start fails its job.
    boot_limit: ClassVar[timedelta | None] = None
    wait_limit: ClassVar[timedelta] = timedelta(minutes=JOB_WAIT_MINUTES)

    _look_command: ClassVar[str] = "aws sagemaker describe-training-job --region {region} --training-job-name"
    billed = staticmethod(billed_on_sagemaker)

    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        from fastlaunch.backends.sagemaker.plan import plan_sagemaker

        assert self.site is not None
        return plan_sagemaker(
            jobs, attempt=attempt, site=self.site, max_minutes=self.max_minutes, root=self.root
        )

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        assert plan.region is not None
        store_objects(self.aws, plan)
        if plan.is_queued:
            job = self.aws.submit_service_job(plan.region, plan.request)
            return _handle(plan, job.arn, job.created_at, job.service_job)
        arn = self.aws.create_training_job(plan.region, plan.request)
        return _handle(plan, arn, self.now())

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        # By its name and folder.
        assert plan.region is not None
        find = self.aws.queued_job_of if plan.is_queued else self.aws.training_job_of
        job = find(plan.region, plan.request)
        return _handle(plan, job.arn, job.created_at, job.service_job) if job else None

    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        # A request for each.
        handles = {plan.payload["TrainingJobName"]: self.find(plan) for plan in plans}
        return {token: handle for token, handle in handles.items() if handle is not None}

    def describe(self, handles: Sequence[Mapping[str, Any]]) -> list[AttemptStatus]:
        # A request for each job.
        jobs = {
            key: self.aws.training_job(*key)
            for key in {(handle["region"], handle["token"]) for handle in handles if not _is_queued(handle)}
        }
        queued = [handle for handle in handles if _is_queued(handle)]
        for region in {handle["region"] for handle in queued}:
            here = {handle["service_job"]: handle for handle in queued if handle["region"] == region}
            for handle, job in zip(here.values(), self.aws.queued_jobs(region, list(here)), strict=True):
                jobs[region, handle["token"]] = job
        return [attempt_status(jobs[handle["region"], handle["token"]]) for handle in handles]

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Stop the job, and bring what its containers save until it has ended.

        A job that still stops after ten minutes is left to SageMaker, which ends it in any case.
        """
        self.kill(handle)
        deadline = self.now() + timedelta(seconds=STOP_WAIT_S)
        while self.now() < deadline:
            with suppress(Throttled, Unreachable):
                (aws_status,) = self.describe([handle])
                if aws_status.has_ended:
                    break
            self._try_to_sync(handle)
            self.pause(handle, LOOK_INTERVAL_S, until=deadline)
        self._try_to_sync(handle)

    def resource_name(self, handle: Mapping[str, Any]) -> str:
        if _is_queued(handle):
            return f"job {handle['token']} of queue {handle['queue']} in {handle['region']}"
        return f"training job {handle['token']} in {handle['region']}"

    def checkpoint_folder(self, output: str, run_id: str) -> str:
        # Beside what the attempt uploads, as all attempts share one folder.
        return f"{output.rstrip('/').rpartition('/')[0]}/{run_id}/checkpoints/"

    def _console_text(self, handle: Mapping[str, Any]) -> str:
        name = handle["token"]
        if _is_queued(handle):
            job = self._look(handle)
            if job is None or not job.training_jobs:
                return ""
            name = job.training_jobs[-1].rpartition("/")[2]
        return self.aws.training_log(handle["region"], name)

    def _order_end(self, handle: Mapping[str, Any]) -> list[str]:
        """Stop the job: SageMaker sends SIGTERM to its containers, and kills them 120 s later."""
        region, name = handle["region"], handle["service_job" if _is_queued(handle) else "token"]
        if _is_queued(handle):
            self.aws.terminate_service_job(region, name)
        else:
            self.aws.stop_training_job(region, name)
        job = self._look(handle)
        has_ended = self._is_old(handle) if job is None else job.has_ended or job.status == "Stopping"
        return [] if has_ended else [name]

    def _look(self, handle: Mapping[str, Any]) -> TrainingJob | None:
        if not _is_queued(handle):
            return self.aws.training_job(handle["region"], handle["token"])
        (job,) = self.aws.queued_jobs(handle["region"], [handle["service_job"]])
        return job

    def _look_command_for(self, handle: Mapping[str, Any]) -> str:
        if _is_queued(handle):
            return f"aws batch describe-service-job --region {handle['region']} --job-id"
        return super()._look_command_for(handle)

    def _try_to_sync(self, handle: Mapping[str, Any]) -> None:
        # Wait for the job's end even if the bucket refuses or the disk is full.
        with suppress(UserError):
            self.sync(handle)


def _is_queued(handle: Mapping[str, Any]) -> bool:
    # What is left of a job whose launcher noted nothing has only its token.
    return handle.get("service_job") is not None


def _handle(plan: Plan, arn: str, launched_at: datetime, service_job: str | None = None) -> dict[str, Any]:
    request = plan.payload
    tags = {tag["Key"]: tag["Value"] for tag in request["Tags"]}
    handle = {
        "region": plan.region,
        "job_name": request["TrainingJobName"],
        "arn": arn,
        "token": request["TrainingJobName"],
        "output": tags[OUTPUT_TAG],
        "launched_at": launched_at.astimezone(UTC).isoformat(),
        "num_nodes": request["ResourceConfig"]["InstanceCount"],
    }
    if plan_arn := request["ResourceConfig"].get("TrainingPlanArn"):
        handle["training_plan"] = plan_arn
    if service_job is None:
        return handle
    return {
        **handle,
        "service_job": service_job,
        "queue": plan.request["jobQueue"],
        "num_starts": plan.request["retryStrategy"]["attempts"],
    }
