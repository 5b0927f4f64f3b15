"""The processes of one run: start them, ask them to end, and end them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fastlaunch_train.node.commands import Commands, end_group

_PR_SET_CHILD_SUBREAPER = 36
_DOCKER_LIMIT_S = 30.0


class Training(ABC):
    """A run under way."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """Return the exit code as a shell does, 137 after SIGKILL; None while the run goes on."""

    @abstractmethod
    def ask(self, grace_s: float) -> None:
        """Ask it to save a checkpoint and end within `grace_s` seconds."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it at once, with everything that it started."""

    @abstractmethod
    def close(self) -> None:
        """Make sure, after its end, that none of its processes are left and its log is complete."""


class ContainerTraining(Training):
    """Training in a Docker container named NAME, which prints into the file `log`.

    secrets: variables of the container. Docker reads them from its own environment, so that no list of
    processes shows their values.
    """

    NAME = "fastlaunch"

    def __init__(
        self,
        options: Sequence[str],
        image: str,
        command: Sequence[str],
        *,
        log: Path,
        secrets: Mapping[str, str],
    ) -> None:
        self._commands = Commands()
        variables = [word for name in secrets for word in ("-e", name)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["docker", "run", "--rm", "--name", self.NAME, *options, *variables, image, *command],
                env={**os.environ, **secrets},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._asking: threading.Thread | None = None

    def exit_code(self) -> int | None:
        return _as_shell(self._process.poll())

    def ask(self, grace_s: float) -> None:
        # The thread waits for the container's end, and asks again while there is no container yet.
        self._asking = threading.Thread(target=self._stop, args=(grace_s,), daemon=True)
        self._asking.start()

    def kill(self) -> None:
        self._commands.run("docker", "kill", self.NAME, limit_s=_DOCKER_LIMIT_S, is_quiet=True)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
            return
        # Docker itself hangs. The container may go on until the machine is off.
        end_group(self._process, 1)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        if self._asking is not None:
            self._asking.join(_DOCKER_LIMIT_S)

    def _stop(self, grace_s: float) -> None:
        for _ in range(20):
            stop = ["docker", "stop", "-t", f"{grace_s:.0f}", self.NAME]
            done = self._commands.run(*stop, limit_s=grace_s + _DOCKER_LIMIT_S, is_quiet=True)
            if done.is_ok or done.code == 124 or self._process.poll() is not None:
                return
            time.sleep(1)


class ProcessTraining(Training):
    """Training as a child of this process, whose output goes to stdout and to the file `log`."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            # Training has its own session, so that a signal to this process's group does not reach it.
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._pump.start()

    def exit_code(self) -> int | None:
        return _as_shell(self._process.poll())

    def ask(self, grace_s: float) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        kill_descendants()

    def close(self) -> None:
        kill_descendants()
        self._process.wait()
        # No other process waits for adopted children that have ended.
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        self._pump.join(timeout=10)
        self._log.close()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 65536):
            with suppress(OSError, ValueError):
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            # A full disk must not end the training, which says so itself.
            with suppress(OSError, ValueError):
                self._log.write(data)
                self._log.flush()


def adopt_orphans() -> None:
    """Make this process adopt its orphaned descendants, as process 1 of a container does."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill all descendants of this process; it adopts those that are orphaned, and kills them next."""
    for _ in range(100):
        children = list(_children())
        for pid in children:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not children:
            return
        time.sleep(0.05)


def _as_shell(code: int | None) -> int | None:
    return 128 - code if code is not None and code < 0 else code


def _children() -> Iterator[int]:
    """Yield the ids of this process's children that have not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                # The name, in parentheses, may contain anything.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state not in "ZX":
                    yield int(entry.name)
