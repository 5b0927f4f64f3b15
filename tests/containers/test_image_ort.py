"""Dockerfile.ort: that every builder can build it."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_daemon import DockerDaemon, daemon_with_base
from small_base import base_image

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "containers" / "Dockerfile.ort"

#: Stands for the base's Python, and writes down what it was asked for.
PYTHON = '#!/bin/sh\necho "$@" >>/asked\n'


def test_it_uses_nothing_that_only_one_builder_knows() -> None:
    lines = DOCKERFILE.read_text().splitlines()
    assert not any(line.startswith("# syntax") or "<<" in line for line in lines)
    assert not any("--mount" in line or "--chmod" in line or "--link" in line for line in lines)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerDaemon]:
    yield from daemon_with_base("base:small", base_image())


def context() -> bytes:
    """As `git archive --format tar.gz` makes it, of the checkout as it is; docker takes no plain one."""
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for folder in ("train/fastlaunch_train", "containers"):
                tar.add(ROOT / folder, folder, filter=lambda i: None if "__pycache__" in i.name else i)
        return buffer.getvalue()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("buildkit", [False, True], ids=["classic", "buildkit"])
def test_it_builds_from_an_archive_and_installs_before_it_configures(
    daemon: DockerDaemon, tmp_path: Path, buildkit: bool
) -> None:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "Dockerfile").write_text("FROM base:small\nCOPY python /usr/local/bin/python\n")
    daemon.docker("build", "-t", "base:python", tmp_path, buildkit=buildkit)
    daemon.docker(
        *("build", "-t", "ort", "-f", "containers/Dockerfile.ort", "--build-arg", "BASE_IMAGE=base:python"),
        *("--network", "none", "-"),
        stdin=context(),
        buildkit=buildkit,
    )
    asked = daemon.docker("run", "--rm", "--network", "none", "--entrypoint", "/bin/cat", "ort", "/asked")
    pip = "-m pip install --no-cache-dir"
    assert asked.splitlines() == [
        f"{pip} -r /fastlaunch/ort-requirements.txt onnxruntime-training==1.19.2",
        f"{pip} --no-deps torch-ort==1.19.2",
        f"{pip} --no-build-isolation deepspeed==0.19.8",
        "-m torch_ort.configure",
    ]
    config = json.loads(daemon.docker("inspect", "-f", "{{json .Config}}", "ort"))
    assert config["Entrypoint"] == ["/bin/bash", "/fastlaunch/run_train.sh"]
    assert config["WorkingDir"] == "/fastlaunch/user"
    files = ["run_train.sh", "run_sagemaker.sh", "train/fastlaunch_train/__main__.py"]
    daemon.docker(
        *("run", "--rm", "--network", "none", "--entrypoint", "/bin/cat", "ort"),
        *(f"/fastlaunch/{file}" for file in files),
    )
