"""The SageMaker backend over HTTP: what it sends, and what it makes of what comes back."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_cloud import Clock
from moto_cloud import _connect
from moto_server import MotoServer
from moto_training_jobs import TrainingJobs
from sagemaker_builders import training_job, training_site

from fastlaunch.aws.client import Aws
from fastlaunch.backends.protocol import FORGOTTEN_AFTER
from fastlaunch.backends.sagemaker.sagemaker import STOP_WAIT_S, SageMakerBackend
from fastlaunch.core.errors import CloudRefused, Throttled
from fastlaunch.core.plan import Plan

REGION = "us-east-1"
RUN_ID = "20261121-090312-k3f9"
NAME = f"{RUN_ID}-a1"


@pytest.fixture
def clock() -> Clock:
    return Clock(moment=datetime.now(UTC))


@pytest.fixture
def jobs(aws_server: MotoServer, clock: Clock) -> TrainingJobs:
    aws_server.training_jobs.now = clock.now
    return aws_server.training_jobs


@pytest.fixture
def backend(aws_server: MotoServer, jobs: TrainingJobs, clock: Clock, tmp_path: Path) -> SageMakerBackend:
    bucket = aws_server.set_up_region(REGION).bucket
    assert bucket is not None
    aws = Aws(sleep=clock.sleep, now=clock.now, connect=_connect)
    place = training_site(bucket=bucket, role=jobs.role())
    assert place.code is not None
    aws.put_object(REGION, bucket, place.code.key, b"code")
    made = SageMakerBackend(aws=aws, home=tmp_path, sleep=clock.sleep, now=clock.now)
    return made.at(place, 120)


def plan(backend: SageMakerBackend, *, attempt: int = 1, run_id: str = RUN_ID, **job: Any) -> Plan:
    return backend.plan({run_id: training_job(**job)}, attempt=attempt)


def put(backend: SageMakerBackend, handle: Any, name: str, body: bytes) -> None:
    """Let SageMaker copy a file of the attempt's to S3."""
    bucket, _, key = handle["output"].removeprefix("s3://").partition("/")
    backend.aws.put_object(REGION, bucket, f"{key}/{name}", body)


def test_exactly_the_plans_request_is_sent(backend: SageMakerBackend, aws_server: MotoServer) -> None:
    planned = plan(backend)
    handle = backend.execute(planned)
    (sent,) = aws_server.sent("CreateTrainingJob")
    assert sent.parameters == planned.request
    assert handle == {
        "region": REGION,
        "job_name": NAME,
        "arn": f"arn:aws:sagemaker:{REGION}:123456789012:training-job/{NAME}",
        "token": NAME,
        "output": f"s3://runs-{REGION}/fastlaunch/runs/{RUN_ID}/{NAME}",
        "launched_at": backend.now().isoformat(),
        "num_nodes": 1,
    }
    assert backend.resource_name(handle) == f"training job {NAME} in {REGION}"


def test_a_later_attempt_writes_under_the_first_ones_root(backend: SageMakerBackend) -> None:
    assert backend.site is not None
    later = backend.at(backend.site, 60, root="20261120-000000-root")
    assert plan(later, attempt=2).request["StoppingCondition"]["MaxRuntimeInSeconds"] == 3600
    output = later.execute(plan(later, attempt=2))["output"]
    assert backend.checkpoint_folder(output, RUN_ID) == (
        f"s3://runs-{REGION}/fastlaunch/runs/20261120-000000-root/{RUN_ID}/checkpoints/"
    )


def test_the_same_plan_starts_one_job(backend: SageMakerBackend, jobs: TrainingJobs) -> None:
    first = backend.execute(plan(backend))
    assert backend.execute(plan(backend))["arn"] == first["arn"]
    assert len(jobs.jobs) == 1
    # Even after its end, the name is its own.
    jobs.end(NAME)
    assert backend.execute(plan(backend))["arn"] == first["arn"]
    with pytest.raises(CloudRefused) as error:
        backend.execute(plan(backend, steps=7))
    assert error.value.code == "ResourceInUse"
    assert len(jobs.jobs) == 1


def test_a_job_is_found_by_its_name_once_it_is_shown(backend: SageMakerBackend, jobs: TrainingJobs) -> None:
    jobs.hidden_describes = 2
    assert backend.find(plan(backend)) is None
    handle = backend.execute(plan(backend))
    assert [backend.find(plan(backend)) for _ in range(2)] == [None, None]
    found = backend.find(plan(backend))
    assert found is not None and {**found, "launched_at": ""} == {**handle, "launched_at": ""}
    other = plan(backend, attempt=2)
    assert backend.find_all([plan(backend), other]) == {NAME: found}


def test_a_job_of_our_name_that_uploads_elsewhere_is_not_ours(backend: SageMakerBackend) -> None:
    assert backend.site is not None
    theirs = backend.at(backend.site, 60, root="20261120-000000-root")
    theirs.execute(plan(theirs))
    assert backend.find(plan(backend)) is None and backend.find_all([plan(backend)]) == {}
    assert theirs.find(plan(theirs)) is not None


def test_a_jobs_life_is_seen_and_billed(backend: SageMakerBackend, jobs: TrainingJobs, clock: Clock) -> None:
    handle = backend.execute(plan(backend))
    jobs.move(NAME, "Pending", message="Insufficient capacity error from EC2, retrying")
    (waiting,) = backend.describe([handle])
    assert (waiting.is_live, waiting.is_up, waiting.launched_at) == (True, False, None)
    clock.sleep(600)
    jobs.move(NAME, "Downloading")
    begun = clock.now()
    clock.sleep(60)
    jobs.move(NAME, "Training")
    (training,) = backend.describe([handle])
    assert (training.is_up, training.instance_type) == (True, "p5.48xlarge")
    assert training.launched_at is not None
    assert abs(training.launched_at - begun) < timedelta(milliseconds=1)
    clock.sleep(840)
    jobs.end(NAME)
    (ended,) = backend.describe([handle])
    assert (ended.has_ended, ended.is_live, ended.problem) == (True, False, None)
    bill = backend.billed(launched_at=begun, max_minutes=120, aws_status=ended, status=None)
    assert (bill.billed_s, round(bill.lived_s), bill.billing) == (900, 900, "times")


def test_a_job_that_is_not_shown_has_not_ended(
    backend: SageMakerBackend, jobs: TrainingJobs, clock: Clock
) -> None:
    handle = backend.execute(plan(backend))
    jobs.jobs.clear()
    clock.sleep((FORGOTTEN_AFTER + timedelta(seconds=1)).total_seconds())
    (aws_status,) = backend.describe([handle])
    assert (aws_status.has_ended, aws_status.is_seen, aws_status.num_unseen) == (False, False, 1)


def test_stopping_waits_for_what_the_job_saves(
    backend: SageMakerBackend, jobs: TrainingJobs, clock: Clock
) -> None:
    handle = backend.execute(plan(backend))
    jobs.move(NAME, "Training")

    def save(region: str, name: str) -> None:
        said = json.dumps({"token": NAME, "outcome": "interrupted", "node": 0}).encode()
        clock.at(90, lambda: put(backend, handle, "node-0/status.json", said))
        clock.at(100, lambda: jobs.end(name, "Stopped"))

    jobs.stopping_describes = None
    jobs.when_stopping.append(save)
    before = clock.now()
    backend.stop(handle)
    assert timedelta(seconds=100) <= clock.now() - before < timedelta(seconds=130)
    assert jobs.job(NAME).status == "Stopped"
    status = backend.sync(handle).status
    assert status is not None and status["outcome"] == "interrupted"
    # It has ended already, which is no error.
    backend.stop(handle)
    backend.kill(handle)


def test_a_job_that_stops_for_ever_is_left_to_sagemaker(
    backend: SageMakerBackend, jobs: TrainingJobs, clock: Clock
) -> None:
    handle = backend.execute(plan(backend))
    jobs.stopping_describes = None
    before = clock.now()
    backend.stop(handle)
    assert STOP_WAIT_S <= (clock.now() - before).total_seconds() < STOP_WAIT_S + 60
    assert jobs.job(NAME).status == "Stopping"


def test_a_bucket_that_refuses_does_not_keep_a_job_alive(
    backend: SageMakerBackend, jobs: TrainingJobs, aws_server: MotoServer
) -> None:
    handle = backend.execute(plan(backend))
    aws_server.refuse("ListObjectsV2", "AccessDenied", status=403)
    backend.stop(handle)
    assert jobs.job(NAME).status == "Stopped"


def test_killing_is_repeated_until_it_is_seen(
    backend: SageMakerBackend, jobs: TrainingJobs, aws_server: MotoServer
) -> None:
    jobs.hidden_describes = 3
    handle = backend.execute(plan(backend))
    aws_server.refuse("StopTrainingJob", "ThrottlingException", times=2)
    backend.kill(handle)
    assert jobs.job(NAME).status in ("Stopping", "Stopped")


def test_a_job_that_cannot_be_stopped_is_told(
    backend: SageMakerBackend, jobs: TrainingJobs, aws_server: MotoServer
) -> None:
    handle = backend.execute(plan(backend))
    deaf = aws_server.refuse(
        "StopTrainingJob", "ValidationException", "The request was rejected because ... is in status X"
    )
    with pytest.raises(CloudRefused, match="told to end"):
        backend.kill(handle)
    aws_server.allow(deaf)
    aws_server.refuse("StopTrainingJob", "ThrottlingException")
    with pytest.raises(Throttled):
        backend.kill(handle)


def test_what_the_containers_printed_is_kept(
    backend: SageMakerBackend, jobs: TrainingJobs, tmp_path: Path
) -> None:
    handle = backend.execute(plan(backend))
    assert backend.console_log(handle).read_text() == ""
    jobs.write_log(NAME, "no Python with torch in this image")
    path = backend.console_log(handle)
    assert path == tmp_path / "runs" / RUN_ID / "console-a1.log"
    assert path.read_text() == "no Python with torch in this image\n"
    jobs.write_log(NAME, "hello", host=2)
    assert "==> algo-2-" in backend.console_log(handle).read_text()
