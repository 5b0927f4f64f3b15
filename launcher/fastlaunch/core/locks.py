"""Locks that show whether a process is alive: the kernel releases them however the process ends.

A process id cannot show that, since ids are reused and mean nothing after a reboot.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def take(path: Path) -> int:
    """Take the lock file `path`; return its descriptor. A process that inherits it holds the lock, too.

    Raises OSError if the file cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The last holder may have removed the file, and nobody sees a lock on a removed file.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the lock file `path` in this process, and remove it at the end."""
    descriptor = take(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Return whether some process holds the lock file `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two processes that check at once do not mistake each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
