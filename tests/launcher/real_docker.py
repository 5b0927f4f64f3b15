"""A docker daemon and a registry of a test's own, on a socket and a port of its own."""

import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_READY_LIMIT_S = 60
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_INDEXES = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, kw_only=True)
class RealDocker:
    """host: DOCKER_HOST. registry: host and port of an empty registry that needs no login."""

    host: str
    registry: str

    def docker(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """What `docker ARGUMENTS` prints."""
        told = subprocess.run(
            ["docker", *arguments],
            input=stdin,
            capture_output=True,
            env={**os.environ, "DOCKER_HOST": self.host},
            check=False,
        )
        assert told.returncode == 0, told.stderr.decode()
        return told.stdout

    def import_tiny(self, name: str) -> None:
        """Make an image of one empty file: a base that nothing is run in."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("base"))
        self.docker("import", "--platform", "linux/amd64", "-", name, stdin=content.getvalue())

    def manifest(self, repository: str, tag: str) -> tuple[str, dict[str, Any]]:
        """Media type and content of what the registry has, of whatever type it is."""
        request = urllib.request.Request(
            f"http://{self.registry}/v2/{repository}/manifests/{tag}",
            headers={"Accept": f"{_MANIFEST}, {_INDEXES}"},
        )
        with urllib.request.urlopen(request) as answer:
            return answer.headers["Content-Type"], json.load(answer)


@contextmanager
def real_docker(folder: Path) -> Iterator[RealDocker]:
    """Started, and stopped at the end. Skips the test, with the reason, where docker cannot run."""
    for program in ("docker", "dockerd", "docker-registry"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here: apt-get install docker.io docker-registry")
    if os.geteuid() != 0:
        pytest.skip("a docker daemon needs root")
    sock, port = folder / "docker.sock", _free_port()
    with ExitStack() as stack:
        daemon = [
            *("dockerd", "--host", f"unix://{sock}", "--data-root", str(folder / "data")),
            *("--exec-root", str(folder / "exec"), "--pidfile", str(folder / "dockerd.pid")),
            *("--storage-driver", "vfs", "--iptables=false", "--ip6tables=false", "--bridge=none"),
        ]
        config = folder / "registry.yaml"
        config.write_text(
            f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}}}\n"
            f"http: {{addr: '127.0.0.1:{port}'}}\n"
        )
        docker = RealDocker(host=f"unix://{sock}", registry=f"127.0.0.1:{port}")
        process = _start(stack, daemon, folder / "dockerd.log")
        _wait(process, lambda: _accepts(socket.AF_UNIX, str(sock)), folder / "dockerd.log")
        registry = _start(stack, ["docker-registry", "serve", str(config)], folder / "registry.log")
        _wait(registry, lambda: _accepts(socket.AF_INET, ("127.0.0.1", port)), folder / "registry.log")
        yield docker


def _start(stack: ExitStack, argv: list[str], log: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(argv, stdout=stack.enter_context(log.open("wb")), stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _wait(process: "subprocess.Popen[bytes]", ready: Any, log: Path) -> None:
    until = time.monotonic() + _READY_LIMIT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            pytest.skip(f"{process.args[0]} does not start here: {' '.join(last)}")  # type: ignore[index]
        time.sleep(0.2)


def _accepts(family: int, address: Any) -> bool:
    with socket.socket(family) as probe:
        return probe.connect_ex(address) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
