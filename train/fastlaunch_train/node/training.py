"""One run's processes: started through run_train.sh, heard while they run, and gone when they have ended."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of its descendants that lose theirs, as process 1 of a container is."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Training:
    """Runs `command`; what it prints goes to this process's stdout, as it comes, and to the file `log`."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log.open("ab")
        # A session of its own: a signal to this process's group is not for it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._pass_on, name="output", daemon=True)
        self._pump.start()

    def exit_code(self) -> int | None:
        """As a shell tells it, 137 for a killed one; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def ask(self) -> None:
        """Ask it to save a checkpoint and end."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with all that it started."""
        kill_descendants()

    def close(self) -> None:
        """After its end: nothing of it is left, and all that it printed is in its log."""
        kill_descendants()
        self._process.wait()
        # What was adopted and has ended is waited for by nobody else.
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


def kill_descendants() -> None:
    """Kill every process that this one started, or that those started."""
    for _ in range(100):
        found = list(_descendants(os.getpid(), _children()))
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _descendants(pid: int, children: Mapping[int, Sequence[int]]) -> Iterator[int]:
    for child in children.get(pid, ()):
        yield child
        yield from _descendants(child, children)


def _children() -> dict[int, list[int]]:
    """Ids of the processes that have not ended, by their parent's."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                # The name, in brackets, may hold anything.
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    found.setdefault(int(parent), []).append(int(entry.name))
    return found
