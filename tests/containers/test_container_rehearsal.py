"""`submit --local --container --backend sagemaker`: the SageMaker SDK's local mode on a real docker daemon.

The SDK is large and has dependencies of its own: it lies in an environment of its own, `make sagemaker-sdk`.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from docker_daemon import DockerDaemon, daemon_with_base
from small_base import base_image

from fastlaunch.catalog.container_images import find_base_image, public_uri
from fastlaunch.measure.record_files import read_record

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sagemaker" / "bin" / "python"
WORKLOADS = ROOT / "tests" / "train" / "workloads" / "tiny.py"
#: What training tiny needs.
PACKAGES = (
    *("torch", "torchgen", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("filelock", "fsspec", "typing_extensions.py"),
)


@dataclass(frozen=True, kw_only=True)
class Here:
    """A folder with the user's workload, and the real command in it."""

    folder: Path
    daemon: DockerDaemon

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PYTHON, "-m", "fastlaunch", *self.command, *options],
            cwd=self.folder,
            env={
                **os.environ,
                "DOCKER_HOST": f"unix://{self.daemon.socket}",
                "PYTHONPATH": f"{ROOT / 'launcher'}:{ROOT / 'train'}",
                "FASTLAUNCH_HOME": str(self.folder / "home"),
                "FASTLAUNCH_CONFIG": str(self.folder / "config.yaml"),
                # What the wheels hold is in the image.
                "FASTLAUNCH_WHEELS": str(self.folder / "wheels.txt"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def command(self) -> tuple[str, ...]:
        training = ("--recipe", "fp32", "--batch-size", "4", "--output", "json")
        return ("submit", "--local", "--container", "--backend", "sagemaker", *training)

    def run_folder(self) -> Path:
        (found,) = (self.folder / "home" / "runs").glob("2*")
        return found


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerDaemon]:
    if not PYTHON.exists():
        pytest.skip("needs the SageMaker SDK: make sagemaker-sdk")
    if shutil.which("docker-compose") is None:
        pytest.skip("needs docker compose: Debian's package docker-compose")
    base = find_base_image(None, flavour="ec2", today=datetime.now(UTC).date())
    yield from daemon_with_base(public_uri(base), base_image(holding=PACKAGES))


@pytest.fixture
def here(tmp_path: Path, daemon: DockerDaemon) -> Here:
    shutil.copy(WORKLOADS, tmp_path / "tiny.py")
    (tmp_path / "wheels.txt").write_text("")
    (tmp_path / "config.yaml").write_text("")
    return Here(folder=tmp_path, daemon=daemon)


def test_a_job_is_rehearsed_with_its_own_request(here: Here) -> None:
    started = here.start("--workload", "./tiny.py:build", "--steps", "60")
    out, err = started.communicate(timeout=120)
    assert started.returncode == 0, err
    (run,) = json.loads(out)["runs"]
    assert run["state"] == "completed"
    record = read_record(here.run_folder() / "rank-00000-attempt-1.jsonl")
    assert record.header["steps"] == 60 and record.header["instance"] is None
    # What the console would draw.
    assert "fastlaunch: step=60 loss=" in (here.run_folder() / "log.txt").read_text()


def test_two_hosts_find_each_other(here: Here) -> None:
    started = here.start("--workload", "./tiny.py:build", "--steps", "20", "--num-nodes", "2")
    _, err = started.communicate(timeout=240)
    assert started.returncode == 0, err
    assert "here: 1" not in err
    records = [read_record(path) for path in sorted(here.run_folder().glob("rank-*.jsonl"))]
    assert [record.header["rank"] for record in records] == [0, 1]
    assert {record.header["num_nodes"] for record in records} == {2}


def test_a_signal_stops_the_containers_and_keeps_a_checkpoint(here: Here) -> None:
    options = ("--workload", "./tiny.py:slow", "--steps", "100000", "--checkpoint-every", "50")
    started = here.start(*options)
    while not list((here.folder / "home" / "runs").glob("2*/rank-*.jsonl")):
        assert started.poll() is None, started.communicate()
        time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=120)
    assert json.loads(out)["runs"][0]["state"] == "interrupted", err
    assert not here.daemon.docker("ps", "-q")
    record = read_record(here.run_folder() / "rank-00000-attempt-1.jsonl")
    assert record.end is not None and record.end.status == "interrupted"
