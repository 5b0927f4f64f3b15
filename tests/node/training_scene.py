"""What a test of a training job starts from and looks at: an account, a plan's request, what arrives."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moto_server import MotoServer
from node_scene import FIRST, REGION, SECOND, code_bundle
from sagemaker_builders import training_job, training_site
from server_client import server_client
from simulated_training_job import SimulatedTrainingJob

from fastlaunch.backends.node_agent import agent_archive
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.core.plan import CodeBundle, Plan
from fastlaunch.jobs.spec import JobSpec
from fastlaunch_train.records.records import RankRecord, read_record

BUCKET = f"runs-{REGION}"
RUNS = f"s3://{BUCKET}/fastlaunch/runs"


def tiny_job(recipe: str = "fp32", *, num_nodes: int = 1, **changes: Any) -> JobSpec:
    """What trains vit-tiny on a CPU for a moment, with one rank on each node."""
    small = {"workload": "vit-tiny", "batch_size": 4, "steps": 5, "instance": "g5.xlarge", "max_minutes": 60}
    nodes = {"num_nodes": num_nodes, "num_gpus": num_nodes, "allow_tcp": num_nodes > 1}
    return training_job(recipe, **{**small, **nodes, **changes})


def training_plan(
    *jobs: JobSpec, attempt: int = 1, root: str | None = None, environment: Mapping[str, str] | None = None
) -> Plan:
    """The plan of these jobs with the code of this checkout, and what the training is told besides."""
    site = replace(
        training_site("g5.xlarge", bucket=BUCKET, prefix="fastlaunch"),
        code=CodeBundle.under("fastlaunch", sha256=code_bundle().sha256, commit="ab" * 20),
    )
    by_run = dict(zip((FIRST, SECOND), jobs or (tiny_job(),), strict=False))
    plan = plan_sagemaker(by_run, attempt=attempt, placement=site, max_minutes=60, root=root)
    told = {**plan.request["Environment"], **(environment or {})}
    return replace(plan, request={**plan.request, "Environment": told})


@dataclass(kw_only=True)
class TrainingScene:
    """An account with a bucket, a role and the code. Jobs that a test starts are taken away after it."""

    moto: MotoServer
    folder: Path
    started: list[SimulatedTrainingJob] = field(default_factory=list)

    def launch(self, plan: Plan, *, code: bytes | None = None, **job: Any) -> SimulatedTrainingJob:
        """Send the plan's request, and get machines for it. code: instead of what the bundle's name says."""
        bundle = code_bundle()
        key = CodeBundle.under("fastlaunch", sha256=bundle.sha256, commit=None).key
        self.client("s3").put_object(Bucket=BUCKET, Key=key, Body=bundle.data if code is None else code)
        for one in plan.objects:
            data = agent_archive() if one.text is None else one.text.encode()
            self.client("s3").put_object(Bucket=one.bucket, Key=one.key, Body=data)
        self.client("sagemaker").create_training_job(
            **{**plan.request, "RoleArn": self.moto.training_jobs.role()}
        )
        return self.simulate(plan.request["TrainingJobName"], **job)

    def simulate(self, name: str, **job: Any) -> SimulatedTrainingJob:
        """Get machines for a job that is there."""
        folder = self.folder / name
        folder.mkdir()
        simulated = SimulatedTrainingJob(self.moto, name, folder=folder, **job)
        self.started.append(simulated)
        return simulated.start()

    def client(self, service: str) -> Any:
        return server_client(self.moto, service, REGION)

    def objects(self, job: SimulatedTrainingJob) -> dict[str, bytes]:
        """What the bucket holds of all jobs at these runs."""
        s3, prefix = job.bucket.s3, job.bucket.prefix + "/"
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {key[len(prefix) :]: s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}

    def wait_for(self, job: SimulatedTrainingJob, pattern: str, timeout_s: float = 120.0) -> str:
        """The first name in the bucket that matches, once there is one."""
        end = time.monotonic() + timeout_s
        while not (found := [name for name in self.objects(job) if re.fullmatch(pattern, name)]):
            assert time.monotonic() < end, f"no {pattern}:\n{job.told()}"
            time.sleep(0.1)
        return found[0]

    def joined(self, job: SimulatedTrainingJob) -> dict[str, bytes]:
        """Files of this job's own, put together from segments that must fit."""
        files: dict[str, bytes] = {}
        objects = self.objects(job)
        for name in sorted(objects):
            match = re.fullmatch(rf"{job.name}/(.+)\.(\d{{12}})", name)
            if match:
                assert len(files.setdefault(match[1], b"")) == int(match[2]), name
                files[match[1]] += objects[name]
        return files

    def status(self, job: SimulatedTrainingJob, node: int = 0) -> dict[str, Any]:
        """What the host said last."""
        found: dict[str, Any] = json.loads(self.objects(job)[f"{job.name}/node-{node}/status.json"])
        return found

    def record(
        self,
        job: SimulatedTrainingJob,
        run_id: str = FIRST,
        *,
        rank: int = 0,
        node: int = 0,
        attempt: int = 1,
    ) -> RankRecord:
        """A record as it arrived."""
        name = f"rank-{rank:05d}-attempt-{attempt}.jsonl"
        path = self.folder / f"{job.name}-{run_id}-{name}"
        path.write_bytes(self.joined(job)[f"node-{node}/{run_id}/{name}"])
        return read_record(path)
