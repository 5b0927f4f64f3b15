"""`fastlaunch status`, `logs`, `cancel` and `collect` for training jobs of SageMaker, over HTTP."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from cloud_commands import aws, cloud
from fake_records import write_run
from sagemaker_builders import training_job, training_site

from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

if TYPE_CHECKING:
    from moto_server import MotoServer
    from moto_training_jobs import TrainingJobs

BUCKET = "acme"


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """A training job under way: its name, its runs, and the jobs of the server."""

    name: str
    run_ids: tuple[str, ...]
    jobs: "TrainingJobs"

    def upload(self, name: str, body: bytes) -> None:
        """Store an object of the attempt's output, as SageMaker copies it."""
        aws().put_object("us-east-1", BUCKET, f"fastlaunch/runs/{self.run_ids[0]}/{self.name}/{name}", body)

    def say(self, name: str, **values: Any) -> None:
        self.upload(name, json.dumps({"schema": 1, "token": self.name, **values}).encode())

    def record(self, run_id: str, **values: Any) -> None:
        with TemporaryDirectory() as folder:
            paths = write_run(Path(folder), run_id=run_id, world_size=8, batch_size=64, steps=20, **values)
            for path in paths:
                self.upload(f"node-0/{run_id}/{path.name}.000000000000", path.read_bytes())

    def end(self) -> None:
        runs = [{"run_id": run_id, "state": "completed", "exit_code": 0} for run_id in self.run_ids]
        self.say("node-0/status.json", outcome="completed", reason=None, runs=runs, node=0)
        self.jobs.end(self.name, billable_s=600)


def started(server: "MotoServer", *recipes: str) -> JobRun:
    """A job that does a run of each recipe on an ml.p5.48xlarge, as a launcher leaves it that is gone."""
    server.set_up_region("us-east-1", bucket=BUCKET)
    place = training_site(bucket=BUCKET, role=server.training_jobs.role())
    assert place.code is not None
    aws().put_object("us-east-1", BUCKET, place.code.key, b"code")
    settings = load_settings()
    backend = SageMakerBackend(aws=aws(), home=settings.home).at(place, 60)
    with open_ledger(settings) as ledger:
        jobs = {ledger.new_run_id(): training_job(recipe, steps=20) for recipe in recipes or ("bf16",)}
        submission = ledger.add_submission("fastlaunch submit")
        for run_id, job in jobs.items():
            ledger.add_run(
                submission,
                run_id,
                spec=job.to_json(),
                plan=None,
                workload=job.workload,
                recipe=job.recipe.label,
                instance=job.instance,
                backend="sagemaker",
                directory=settings.home / "runs" / run_id,
            )
        attempt_id, token = ledger.add_attempt(
            list(jobs),
            max_minutes=60,
            usd_per_hour=60.0,
            account="123456789012",
            partition="aws",
            make_plan=lambda n: backend.plan(jobs, attempt=n),
        )
        plan = ledger.plan_of(attempt_id)
        assert plan is not None
        ledger.set_handle(attempt_id, backend.execute(plan))
        for run_id in jobs:
            ledger.set_state(run_id, RunState.RUNNING)
    return JobRun(name=token, run_ids=tuple(jobs), jobs=server.training_jobs)


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cloud(*argv) == 0
    return capsys.readouterr().out


def status(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (run,) = json.loads(told(capsys, "status", "--output", "json"))["runs"]
    assert isinstance(run, dict)
    return run


def test_status_tells_what_a_job_waits_for_what_it_does_and_what_it_cost(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    run.jobs.move(run.name, "Pending")
    assert status(capsys)["doing"] == "waiting for capacity"
    # Nothing is billed for that.
    assert status(capsys)["cost_usd"] == 0
    run.jobs.move(run.name, "Downloading")
    assert status(capsys)["doing"].startswith("downloading the image")
    run.jobs.now = lambda: datetime.now(UTC) - timedelta(minutes=10)
    run.jobs.move(run.name, "Training")
    assert status(capsys)["doing"] == "waiting for the job's container"
    run.say("boot.json")
    run.record(run.run_ids[0], status=None)
    assert status(capsys)["doing"].startswith("step 20/20")
    run.record(run.run_ids[0])
    run.end()
    found = status(capsys)
    assert (found["state"], found["doing"], found["cost_is_final"]) == ("completed", None, True)
    assert found["cost_usd"] == pytest.approx(10.0)
    assert found["attempts"][0]["job_name"] == run.name


def test_logs_are_followed_until_the_job_ends(
    aws_server: "MotoServer", capsys: pytest.CaptureFixture[str]
) -> None:
    run = started(aws_server)
    run.jobs.move(run.name, "Pending")
    own = f"node-0/{run.run_ids[0]}/log.txt"

    def finish() -> None:
        run.upload(f"{own}.000000000007", b"done\n")
        run.record(run.run_ids[0])
        run.end()

    steps: list[Callable[[], None]] = [
        lambda: run.jobs.move(run.name, "Downloading", "Training"),
        lambda: run.upload("node-0/log.txt.000000000000", b"starting\n"),
        lambda: run.upload(f"{own}.000000000000", b"step 1\n"),
        finish,
    ]
    assert cloud("logs", "-f", sleep=lambda _: steps.pop(0)()) == 0
    out, err = capsys.readouterr()
    assert out == "starting\nstep 1\ndone\n"
    assert "nothing is printed yet: waiting for capacity" in err
    assert steps == [] and err.endswith("next: fastlaunch compare\n")
