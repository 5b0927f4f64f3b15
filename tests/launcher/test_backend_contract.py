"""What every backend promises, asked of each of them: the local one, and EC2 and SageMaker over HTTP."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import job, site
from fake_cloud import Clock
from fake_training import FakeJob
from moto_cloud import MotoCloud, Objects, _connect
from moto_server import MotoServer
from moto_training_jobs import TrainingJobs
from sagemaker_builders import training_job, training_site

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.measure.outcome import read_records
from fastlaunch_train.recipes.recipes import resolve_recipe

RUN_ID = "20261121-090312-k3f9"
FAKE = Path(__file__).parent / "fake_train" / "entrypoint.py"


@dataclass
class Subject:
    """A backend, a job for it, and how to wait for `seconds` of its time."""

    backend: Any
    job: JobSpec
    wait: Callable[[float], None]
    hangs: Callable[[Plan], Plan]

    def plan(self) -> Plan:
        plan: Plan = self.backend.plan({RUN_ID: self.job})
        return plan

    def start_hanging(self) -> Any:
        """The handle of a job that runs until it is stopped, once it has written something."""
        handle = self.backend.execute(self.hangs(self.plan()))
        self._until(lambda: bool(self.records(handle)))
        return handle

    def wait_for_end(self, handle: Any) -> None:
        self._until(lambda: self.has_ended(handle))

    def has_ended(self, handle: Any) -> bool:
        if isinstance(self.backend, CloudBackend):
            return self.backend.describe([handle])[0].has_ended
        return bool(self.backend.state(handle) is not RunState.RUNNING)

    def records(self, handle: Any) -> tuple[Path, ...]:
        """The job's record files, brought here."""
        if isinstance(self.backend, CloudBackend):
            files = self.backend.sync(handle).files
            return tuple(path for path in files if path.name.startswith("rank-") and path.is_file())
        return tuple(self.backend.collect(handle))

    def _until(self, holds: Callable[[], bool]) -> None:
        for _ in range(600):
            if holds():
                return
            self.wait(10.0)
        raise AssertionError("it never came to be so")


def local(tmp_path: Path) -> Subject:
    settings = LocalSettings(
        home=tmp_path,
        working_directory=tmp_path,
        launch=(sys.executable, str(FAKE), "--nproc", "{nproc}"),
        pythonpath=os.pathsep.join(path for path in sys.path if path),
        stop_wait_s=30,
    )

    def hangs(plan: Plan) -> Plan:
        environment = {**plan.request["env"], "FAKE_STEP_S": "0.5"}
        return replace(plan, request={**plan.request, "env": environment})

    spec = JobSpec(workload="vit-tiny", recipe=resolve_recipe("bf16"), batch_size=8, steps=20, num_gpus=1)
    return Subject(LocalBackend(settings), spec, lambda seconds: time.sleep(seconds / 500), hangs)


def ec2(tmp_path: Path, server: MotoServer) -> Subject:
    cloud = MotoCloud(server)
    settings = cloud.settings
    zone, subnet = next(iter(settings.subnets.items()))
    place = site(
        zone=zone,
        subnet=subnet,
        bucket=settings.bucket,
        instance_profile=settings.instance_profile,
        security_groups=settings.security_groups,
        ami=cloud.aws.machine_image("us-east-1", cloud.aws.parameter("us-east-1", settings.ami_parameter)).id,
    )
    backend = Ec2Backend(aws=cloud.aws, home=tmp_path, sleep=cloud.clock.sleep, now=cloud.clock.now)

    cloud.node = lambda node: node.train(how=lambda run_id: {"world_size": 1})

    def hangs(plan: Plan) -> Plan:
        how = {"steps": 80, "header": {"steps": 200}, "status": "interrupted", "world_size": 1}
        cloud.node = lambda node: node.train(upto=1, how=lambda run_id: how)
        return plan

    return Subject(backend.at(place, 120), job(num_gpus=1), cloud.clock.sleep, hangs)


@dataclass
class Trainings:
    """What a `FakeJob` acts on. job: what a job does, called when it was created."""

    jobs: TrainingJobs
    objects: Objects
    clock: Clock
    job: Callable[[FakeJob], None]

    def created(self, region: str, name: str) -> None:
        self.job(FakeJob(aws=self, instance_id=name, request=self.jobs.job(name).request))


def sagemaker(tmp_path: Path, server: MotoServer) -> Subject:
    clock = Clock(moment=datetime.now(UTC))
    bucket, jobs = server.set_up_region("us-east-1").bucket, server.training_jobs
    # Its container says its last before it is stopped.
    jobs.now, jobs.stopping_describes = clock.now, None
    aws = Aws(sleep=clock.sleep, now=clock.now, connect=_connect)
    place = training_site(bucket=bucket, role=jobs.role())
    assert place.code is not None and bucket is not None
    aws.put_object("us-east-1", bucket, place.code.key, b"code")
    one_rank: dict[str, Any] = {"world_size": 1}
    played = Trainings(jobs, Objects(aws), clock, lambda job: job.train(how=lambda run_id: one_rank))
    jobs.when_created.append(played.created)

    def hangs(plan: Plan) -> Plan:
        how = {"steps": 80, "header": {"steps": 200}, "status": "interrupted", **one_rank}
        played.job = lambda job: job.train(upto=1, how=lambda run_id: how)
        return plan

    backend = SageMakerBackend(aws=aws, home=tmp_path, sleep=clock.sleep, now=clock.now)
    return Subject(backend.at(place, 120), training_job(num_gpus=1), clock.sleep, hangs)


CLOUD = [pytest.param(name, marks=pytest.mark.cloud) for name in ("ec2", "sagemaker")]


@pytest.fixture(params=["local", *CLOUD])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    if request.param == "local":
        return local(tmp_path)
    on_aws = {"ec2": ec2, "sagemaker": sagemaker}[request.param]
    return on_aws(tmp_path, request.getfixturevalue("aws_server"))


def test_planning_is_pure(subject: Subject, tmp_path: Path) -> None:
    plan = subject.plan()
    assert plan == subject.plan()
    assert plan.backend == subject.backend.name
    assert list(tmp_path.iterdir()) == []
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_job_is_found_once_it_was_started_and_leaves_the_records_of_every_rank(subject: Subject) -> None:
    plan = subject.plan()
    assert subject.backend.find(plan) is None
    handle = subject.backend.execute(plan)
    assert json.loads(json.dumps(handle)) == handle
    found = subject.backend.find(plan)
    assert found is not None and not subject.has_ended(found)
    # Another process, which has the ledger's text alone, gets to the same end.
    subject.wait_for_end(found)
    assert subject.has_ended(handle)
    paths = subject.records(handle)
    records, problems = read_records(paths)
    assert problems == [] and len(records) == subject.job.num_gpus
    before = [path.read_bytes() for path in paths]
    assert subject.records(handle) == paths
    assert [path.read_bytes() for path in paths] == before


def test_a_stopped_job_writes_its_end(subject: Subject) -> None:
    handle = subject.start_hanging()
    subject.backend.stop(handle)
    subject.wait_for_end(handle)
    records, _ = read_records(subject.records(handle))
    assert {record.end.status for record in records if record.end} == {"interrupted"}
    # It has ended already, which is no error.
    subject.backend.stop(handle)
    subject.backend.kill(handle)
    assert subject.has_ended(handle)


def test_a_killed_job_is_gone(subject: Subject) -> None:
    handle = subject.start_hanging()
    subject.backend.kill(handle)
    subject.wait_for_end(handle)
