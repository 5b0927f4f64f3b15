"""The SageMaker backend: an attempt is one CreateTrainingJob request, whose job does its runs and ends.

Handles are `{"region", "job_name", "arn", "token", "output", "launched_at", "num_nodes"}`; `launched_at` is
when the job was asked for. A job's name is its attempt's token.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastlaunch.aws.ec2 import Aws
from fastlaunch.aws.sagemaker import (
    TrainingJob,
    create_training_job,
    end_warm_pool,
    stop_training_job,
    training_job,
    training_job_of,
    training_log,
)
from fastlaunch.backends import Plan, RunState, s3_sync
from fastlaunch.backends.cloud_state import records_of, states_of, sync_of
from fastlaunch.backends.protocol import Billed, Place, Sight
from fastlaunch.backends.sagemaker.observe import billed_on_sagemaker, sight_of
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.core.errors import CloudRefused, Throttled, Unreachable, UserError
from fastlaunch.jobs.spec import JobSpec

#: How long SageMaker may take to show a job that it took. After that one it does not know is no more.
FORGOTTEN_AFTER = timedelta(minutes=15)
#: Between asking a job to stop and giving up to wait for it: 120 s for the container, then SageMaker copies
#: its checkpoints.
STOP_WAIT_S = 600.0
LOOK_INTERVAL_S = 10.0
#: Until StopTrainingJob shows.
_KILL_WAIT_S = 180.0
_KILL_INTERVAL_S = 5.0


@dataclass(kw_only=True)
class SageMakerBackend:
    """Runs plans as training jobs, and keeps what they leave under `home`.

    site, max_minutes, root: what its plans are made for; see `at`. now: with its time zone.
    """

    aws: Aws
    home: Path
    site: TrainingSite | None = None
    max_minutes: int = 120
    root: str | None = None
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    name: str = "sagemaker"
    service: str = "SageMaker"
    # Waiting for machines is not billed, and a container that does not start fails its job.
    boot_limit: timedelta | None = None

    def at(self, site: Place, max_minutes: int, *, root: str | None = None) -> "SageMakerBackend":
        """This backend, making plans for `site`. root: id of the run under which earlier attempts wrote."""
        assert isinstance(site, TrainingSite)
        return replace(self, site=site, max_minutes=max_minutes, root=root)

    def plan(self, jobs: Mapping[str, JobSpec], *, attempt: int = 1) -> Plan:
        """The request that starts a training job for `jobs` at the backend's site."""
        assert self.site is not None
        return plan_sagemaker(
            jobs, attempt=attempt, site=self.site, max_minutes=self.max_minutes, root=self.root
        )

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Send the plan's request as it is; returns the handle. Raises CloudRefused's kinds."""
        assert plan.region is not None
        arn = create_training_job(self.aws, plan.region, plan.request)
        return _handle(plan, arn, self.now())

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """The handle of the plan's job, by its name and folder; None if SageMaker shows none (yet)."""
        assert plan.region is not None
        job = training_job_of(self.aws, plan.region, plan.request)
        return _handle(plan, job.arn, job.created_at) if job else None

    def find_all(self, plans: Sequence[Plan]) -> dict[str, Mapping[str, Any]]:
        """The handles of those plans whose job SageMaker shows, by token; a request for each."""
        found = {plan.request["TrainingJobName"]: self.find(plan) for plan in plans}
        return {token: handle for token, handle in found.items() if handle is not None}

    def see(self, handles: Sequence[Mapping[str, Any]]) -> list[Sight]:
        """What SageMaker says of the jobs now: a request for each."""
        jobs: dict[tuple[str, str], TrainingJob | None] = {}
        for handle in handles:
            region, name = handle["region"], handle["job_name"]
            if (region, name) not in jobs:
                jobs[region, name] = training_job(self.aws, region, name)
        return [
            sight_of(jobs[handle["region"], handle["job_name"]], is_old=self._is_old(handle))
            for handle in handles
        ]

    def state(self, handle: Mapping[str, Any]) -> RunState:
        return self.states([handle])[0]

    def states(self, handles: Sequence[Mapping[str, Any]]) -> list[RunState]:
        """Running until the jobs have ended; see `cloud_state`."""
        return states_of(self, handles)

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        """Record files of all runs of the attempt, with what is new brought here first."""
        return records_of(self, handle)

    def sync(self, handle: Mapping[str, Any]) -> s3_sync.Synced:
        """Bring what SageMaker has copied to S3 since the last time."""
        return sync_of(self, handle)

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Have SageMaker stop the job, and bring what its containers save until it has ended.

        No machines are kept after it. One that is still stopping after ten minutes is left to SageMaker,
        which ends it in any case.
        """
        self.kill(handle)
        deadline = self.now() + timedelta(seconds=STOP_WAIT_S)
        while self.now() < deadline:
            with suppress(Throttled, Unreachable):
                (sight,) = self.see([handle])
                if sight.has_ended:
                    break
            self._try_to_sync(handle)
            self.sleep(LOOK_INTERVAL_S)
        self._try_to_sync(handle)
        self._let_go(handle)

    def kill(self, handle: Mapping[str, Any]) -> None:
        """Have SageMaker stop the job, and see that it is stopping: there is nothing harder.

        Its containers get SIGTERM, and are killed 120 s later. Raises CloudRefused's kinds where the job is
        not seen to stop.
        """
        region, name = handle["region"], handle["job_name"]
        deadline = self.now() + timedelta(seconds=_KILL_WAIT_S)
        while True:
            try:
                # Again and again for one that SageMaker does not show yet: the order may miss it.
                stop_training_job(self.aws, region, name)
                if self._is_stopping(handle):
                    self._let_go(handle)
                    return
            except (Throttled, Unreachable):
                if self.now() >= deadline:
                    raise
            if self.now() >= deadline:
                raise CloudRefused(
                    f"training job {name} in {region} was told to stop, and is not seen to",
                    "look at it: aws sagemaker describe-training-job "
                    f"--region {region} --training-job-name {name}",
                )
            self.sleep(_KILL_INTERVAL_S)

    def diary(self, handle: Mapping[str, Any]) -> Path:
        """File with what the job's containers printed, kept beside the first run's records."""
        path = s3_sync.console_path(self.home, handle["token"])
        path.parent.mkdir(parents=True, exist_ok=True)
        text = training_log(self.aws, handle["region"], handle["job_name"])
        path.write_text(text, encoding="utf-8")
        return path

    def billed(
        self, *, launched_at: datetime, max_minutes: int, sight: Sight, status: Mapping[str, Any] | None
    ) -> Billed:
        """What one machine of a job that has ended is billed; see `sagemaker_sight`."""
        return billed_on_sagemaker(
            launched_at=launched_at, max_minutes=max_minutes, sight=sight, status=status
        )

    def told(self, handle: Mapping[str, Any]) -> str:
        """`training job 20261121-090312-k3f9-a1 in us-east-1`."""
        return f"training job {handle['job_name']} in {handle['region']}"

    def checkpoint_folder(self, output: str, run_id: str) -> str:
        """URI of the run's checkpoints: beside what the attempt uploads, as all attempts share one folder."""
        return f"{output.rstrip('/').rpartition('/')[0]}/{run_id}/checkpoints/"

    def _is_stopping(self, handle: Mapping[str, Any]) -> bool:
        job = training_job(self.aws, handle["region"], handle["job_name"])
        if job is None:
            return self._is_old(handle)
        return job.has_ended or job.status == "Stopping"

    def _is_old(self, handle: Mapping[str, Any]) -> bool:
        return self.now() - datetime.fromisoformat(handle["launched_at"]) > FORGOTTEN_AFTER

    def _let_go(self, handle: Mapping[str, Any]) -> None:
        """End its warm pool, which SageMaker keeps for a job that was stopped as well."""
        # Where that is refused the pool ends by itself, and what it costs is told.
        with suppress(CloudRefused):
            job = training_job(self.aws, handle["region"], handle["job_name"])
            if job is not None and job.keeps_pool:
                end_warm_pool(self.aws, handle["region"], handle["job_name"])

    def _try_to_sync(self, handle: Mapping[str, Any]) -> None:
        # Neither a bucket that refuses nor a full disk keeps anybody from waiting for the job's end.
        with suppress(UserError):
            self.sync(handle)


def _handle(plan: Plan, arn: str, launched_at: datetime) -> dict[str, Any]:
    tags = {tag["Key"]: tag["Value"] for tag in plan.request["Tags"]}
    return {
        "region": plan.region,
        "job_name": plan.request["TrainingJobName"],
        "arn": arn,
        "token": plan.request["TrainingJobName"],
        "output": tags["fastlaunch:output"],
        "launched_at": launched_at.astimezone(UTC).isoformat(),
        "num_nodes": plan.request["ResourceConfig"]["InstanceCount"],
    }
