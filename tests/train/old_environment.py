"""An environment with torch 1.13 and ORTModule, made once and kept in .build.

It is what Debian 12 has: torch 1.13.1 of its own packages, with the last releases of onnxruntime-training and
torch-ort, and a Transformers of their time. Making it takes minutes, most of them a compiler's.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "containers" / "ort-requirements.txt"
PYTHON = "/usr/bin/python3"
DEBIANS = ("python3-torch", "libtorch-dev", "pybind11-dev", "python3.11-dev", "python3.11-venv", "g++")


def run_quietly(argv: list[str], **env: str) -> None:
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, **env}, timeout=1000, check=False
    )
    assert done.returncode == 0, f"{argv}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def install_debians_torch() -> None:
    """Debian's torch 1.13 and what its extensions are built with; skips where there is no Debian 12."""
    if shutil.which("apt-get") is None:
        pytest.skip("needs apt-get, for Debian 12's python3-torch")

    def is_installed(package: str) -> bool:
        asked = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, check=False
        )
        return asked.stdout == b"installed"

    missing = [package for package in DEBIANS if not is_installed(package)]
    if missing:
        run_quietly(["apt-get", "update", "-qq"])
        policy = subprocess.run(["apt-cache", "policy", "python3-torch"], capture_output=True, check=True)
        if b"Candidate: 1.13.1" not in policy.stdout:
            pytest.skip("needs Debian 12, whose python3-torch is 1.13.1")
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        run_quietly(install, DEBIAN_FRONTEND="noninteractive")


def old_python() -> Path:
    """The interpreter of an environment with torch 1.13 and ORTModule, made if it is not there yet.

    Skips the test where it cannot be made.
    """
    build = ROOT / ".build"
    build.mkdir(exist_ok=True)
    environment, stamp = build / "ort", build / "ort" / "made-of"
    made_of = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    with (build / "ort.lock").open("w") as lock:
        # Other workers may want it at the same time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        install_debians_torch()
        if not stamp.exists() or stamp.read_text() != made_of:
            shutil.rmtree(environment, ignore_errors=True)
            make_environment(environment)
            stamp.write_text(made_of)
    return environment / "bin" / "python"


def make_environment(environment: Path) -> None:
    run_quietly([PYTHON, "-m", "venv", "--system-site-packages", str(environment)])
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Debian's protobuf is in sight, and would be taken for the one that is asked for.
    run_quietly([*pip, "--ignore-installed", *[line for line in pinned() if line.startswith("protobuf")]])
    run_quietly([*pip, "-r", str(REQUIREMENTS), "onnxruntime-training-cpu==1.19.2"])
    run_quietly([*pip, "--no-deps", "torch-ort==1.19.2"])
    headers = "/usr/include/torch/csrc/api/include"
    run_quietly([python, "-m", "torch_ort.configure"], CPLUS_INCLUDE_PATH=headers)


def pinned() -> list[str]:
    return [line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
