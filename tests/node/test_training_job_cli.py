"""The command line and training jobs together: what a user types, and what arrives at home. Slow."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_train.processes import runs
from moto_server import MotoServer
from node_scene import IMAGE, REGION
from simulated_training_job import SimulatedTrainingJob, skip_without_namespaces
from training_scene import BUCKET, TrainingScene

from fastlaunch.core.plan import RunState
from fastlaunch_train.records.records import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), skip_without_namespaces]
#: Of an image that holds the code, so that nothing has to be fetched.
SUBMIT = (
    *("submit", "--backend", "sagemaker", "--instance", "g5.xlarge", "--image", IMAGE, "--yes"),
    *("--workload", "vit-tiny", "--batch-size", "4", "--steps", "60", "--checkpoint-every", "5"),
)


class Account:
    """Where what `fastlaunch` asks for is carried out. options: of the simulated jobs."""

    def __init__(self, scene: TrainingScene, home: Path) -> None:
        self.scene = scene
        self.home = home
        self.options: dict[str, Any] = {"environment": {"FAKE_STEP_S": "0.1"}}
        self._made = threading.Event()
        scene.moto.training_jobs.when_created.append(self._created)

    def _created(self, region: str, name: str) -> None:
        # In a thread of its own: it asks the server, which is still about to answer.
        threading.Thread(target=self._simulate, args=(name,), daemon=True).start()

    def _simulate(self, name: str) -> None:
        self.scene.simulate(name, **self.options)
        self._made.set()

    def job(self) -> SimulatedTrainingJob:
        """The first job that was asked for."""
        assert self._made.wait(120)
        return self.scene.started[0]


@pytest.fixture
def account(aws_server: MotoServer, isolated: Path, tmp_path: Path) -> Iterator[Account]:
    aws_server.set_up_region(REGION)
    for kind in ("", "spot "):
        aws_server.quotas[REGION, f"ml.g5.xlarge for {kind}training job usage"] = 2
    named = {"bucket": BUCKET, "role": aws_server.training_jobs.role()}
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump({"aws": {REGION: named}}))
    account = Account(TrainingScene(moto=aws_server, folder=tmp_path), isolated)
    yield account
    for job in account.scene.started:
        job.close()


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fastlaunch", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def fastlaunch(*argv: str) -> tuple[int, str]:
    return end(start(*argv))


def steps(account: Account, run_id: str) -> list[int]:
    """Steps of all records of the run's first rank at home."""
    paths = sorted((account.home / "runs" / run_id).glob("rank-00000-attempt-*.jsonl"))
    return [step.step for path in paths for step in read_record(path).steps]


def test_a_job_on_spot_is_interrupted_and_ends_as_if_it_had_not_been(account: Account) -> None:
    process = start(*SUBMIT, "--recipe", "fp32", "--purchase", "spot")
    job = account.job()
    account.scene.wait_for(job, r"[0-9a-z-]+/checkpoints/step-\d+\.pt")
    job.interrupt()
    code, out = end(process)
    assert code == 0, out + job.told()
    (run,) = runs()
    assert (run.state, run.backend) == (RunState.COMPLETED, "sagemaker")
    assert steps(account, run.id) == list(range(1, 61))
    assert job.rewritten() == []
    code, out = fastlaunch("status", run.id, "--output", "json")
    assert code == 0, out
    assert "completed" in json.dumps(json.loads(out))


def test_two_hosts_of_which_one_fails_are_told_with_their_cause(account: Account) -> None:
    failing = {"FAKE_FAIL_AT": "30", "FAKE_FAIL_RANK": "1"}
    account.options["environment"] |= failing
    code, out = fastlaunch(*SUBMIT, "--recipe", "fp32", "--num-nodes", "2", "--allow-tcp")
    assert code == 1, out
    (run,) = runs()
    assert run.state == RunState.FAILED
    assert "no such thing" in (run.reason or ""), run.reason
    folder = account.home / "runs" / run.id
    assert 'File "my.py", line 7' in (folder / "traceback-rank-00001-attempt-1.txt").read_text()
    assert account.job().failure_reason.startswith("AlgorithmError: ValueError: no such thing")


def test_a_job_that_is_cancelled_keeps_its_checkpoint(account: Account) -> None:
    process = start(*SUBMIT, "--recipe", "fp32", "--steps", "3000", "--checkpoint-every", "2000")
    job = account.job()
    account.scene.wait_for(job, rf"{job.name}/node-0/[0-9a-z-]+/rank-.*")
    (run,) = runs()
    code, out = fastlaunch("cancel", run.id)
    assert code == 0, out
    end(process)
    (run,) = runs()
    assert run.state in (RunState.INTERRUPTED, RunState.CANCELLED)
    last = steps(account, run.id)[-1]
    assert f"{run.id}/checkpoints/step-{last:08d}.pt" in account.scene.objects(job)
