"""A docker daemon and a registry of a test's own, in a temporary folder, without a network of their own."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_READY_S = 30.0
_PROGRAMS = {"dockerd": "docker.io", "docker": "docker.io", "docker-registry": "docker-registry"}


class CannotStart(Exception):
    """Why there is no daemon on this machine."""


class DockerDaemon:
    """dockerd on a socket of its own, and a registry on loopback. Raises CannotStart."""

    def __init__(self) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise CannotStart("a docker daemon needs root on Linux")
        missing = {package for name, package in _PROGRAMS.items() if shutil.which(name) is None}
        if missing:
            raise CannotStart(f"needs Debian's packages {', '.join(sorted(missing))}")
        # Short: a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="docker-"))
        self.socket = self.folder / "docker.sock"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start_daemon()
            self.registry = self._start_registry()
        except BaseException:
            self.close()
            raise

    def docker(
        self,
        *arguments: str | Path,
        check: bool = True,
        stdin: bytes | None = None,
        buildkit: bool | None = None,
    ) -> str:
        """What the client prints on stdout; AssertionError with the rest if it fails and `check`."""
        environment = {"DOCKER_HOST": f"unix://{self.socket}", "HOME": str(self.folder)}
        if buildkit is not None:
            environment["DOCKER_BUILDKIT"] = str(int(buildkit))
        done = subprocess.run(
            [client(buildkit=bool(buildkit)), *map(str, arguments)],
            capture_output=True,
            input=stdin,
            env={**os.environ, **environment},
            timeout=200,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout.decode().strip()

    def close(self) -> None:
        """End both, and remove everything."""
        # A daemon that has to wait for a container leaves its mounts, and the container itself.
        if self.socket.exists():
            self.remove_containers()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_containers(self) -> None:
        """Remove every container, and those that `--rm` is still about to remove."""
        while left := self.docker("ps", "-aq", check=False).split():
            self.docker("rm", "-f", *left, check=False)
            time.sleep(0.2)

    def _start_daemon(self) -> None:
        folder = self.folder
        arguments = [
            *("--host", f"unix://{self.socket}", "--data-root", folder / "data"),
            *("--exec-root", folder / "exec", "--pidfile", folder / "pid", "--storage-driver", "overlay2"),
            *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
        ]
        process = self._run("dockerd", *map(str, arguments))
        end = time.monotonic() + _READY_S
        while not self.socket.exists() or not self.docker(
            "version", "-f", "{{.Server.Version}}", check=False
        ):
            if process.poll() is not None or time.monotonic() > end:
                raise CannotStart(f"no docker daemon starts here: {self._last_line('dockerd')}")
            time.sleep(0.1)

    def _start_registry(self) -> str:
        """Its host and port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        settings = self.folder / "registry.yml"
        settings.write_text(
            "version: 0.1\nlog: {level: warn}\nhttp:\n"
            f"  addr: {address}\nstorage:\n  filesystem: {{rootdirectory: {self.folder / 'registry'}}}\n"
        )
        process = self._run("docker-registry", "serve", str(settings))
        end = time.monotonic() + _READY_S
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/v2/", timeout=5).close()
            except (urllib.error.URLError, OSError):
                if process.poll() is not None or time.monotonic() > end:
                    told = self._last_line("docker-registry")
                    raise CannotStart(f"no registry starts here: {told}") from None
                time.sleep(0.1)
            else:
                return address

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{program}.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._processes.append(process)
        return process

    def _last_line(self, program: str) -> str:
        lines = (self.folder / f"{program}.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it says nothing"


def daemon_with_base(name: str, image: bytes) -> Iterator[DockerDaemon]:
    """For a fixture: a daemon that holds `image`, a file system as tar, under `name`; or skips."""
    try:
        daemon = DockerDaemon()
    except CannotStart as reason:
        pytest.skip(str(reason))
    daemon.docker("import", "-", name, stdin=image)
    yield daemon
    daemon.close()


def client(*, buildkit: bool = False) -> str:
    """The docker client. Newer ones build with BuildKit only through a plugin; Debian's needs none."""
    debians = "/usr/bin/docker"
    found = debians if buildkit and Path(debians).exists() else shutil.which("docker")
    assert found is not None
    return found
