"""Processes that a test started and did not end: a failing one leaves them, and they would train for ever.

They are found by a variable that they inherit. Their process groups would not do: torchrun starts each rank
in a session of its own.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

#: Its value is the test's own: each process that the test starts, directly or not, has it in its environment.
MARK = "STARTED_BY_TEST"
#: Shared by the tests that follow; what they fork for one test are children of `multiprocessing`. torch waits
#: for ever for a compile worker that was killed, and those of a process that is gone end by themselves.
_SHARED = (
    b"multiprocessing.forkserver",
    b"multiprocessing.resource_tracker",
    b"torch/_inductor/compile_worker",
)

_num_started = 0


def _count(event: str, arguments: tuple[object, ...]) -> None:
    global _num_started
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        _num_started += 1


# Looking at all processes takes milliseconds, and most tests start none.
sys.addaudithook(_count)


def num_started() -> int:
    """How many processes this one has started so far, without those of `multiprocessing`."""
    return _num_started


def kill_leftovers(mark: str, *, look: bool = True) -> list[int]:
    """End every process of the test with this mark; the ids of those that it did not fork.

    look: at all processes there are, or only at those of `multiprocessing`, which would be waited for at the
    end of all tests. Where there is no /proc there are none to look at.
    """
    for child in multiprocessing.active_children():
        # The others are data workers, which end with what reads from them.
        if not child.daemon:
            child.kill()
            child.join()
    killed: list[int] = []
    # What it has started meanwhile is found the next time.
    while look and (found := list(_marked(f"{MARK}={mark}".encode()))):
        for process_id in found:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
                killed.append(process_id)
        time.sleep(0.01)
    return killed


def _marked(variable: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        # It may have ended, or be another user's.
        with suppress(OSError):
            if int(folder.name) != os.getpid() and variable in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes()
                if not any(name in command for name in _SHARED):
                    yield int(folder.name)
