"""Files in FASTLAUNCH_HOME are private to the user: folders 0700, files 0600."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastlaunch.core.errors import UserError

#: File name of the ledger.
LEDGER_NAME = "ledger.sqlite"
ANOTHER_HOME = "set FASTLAUNCH_HOME to a folder that can be written"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
#: Free disk space needed before anything starts: more than the records of a few hundred steps take.
_PROBE_BYTES = 2**20


@contextmanager
def writing(path: Path, more: str = "") -> Iterator[None]:
    """Raise UserError if a file of the home cannot be written. more: added to the hint."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, f"{ANOTHER_HOME}{more}") from None


def unwritable(path: Path, error: OSError, elsewhere: str) -> UserError:
    """Return the error for a place that cannot be written, with what to do about it.

    elsewhere: how to choose another place, such as `give another --to`.
    """
    problem, remedy = error.strerror or str(error), elsewhere
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free some space, or {elsewhere}"
    elif error.errno in (errno.EEXIST, errno.ENOTDIR):
        for place in (path, *path.parents):
            if place.exists() and not place.is_dir():
                problem, remedy = f"{place} is no folder", f"move it away, or {elsewhere}"
                break
    return UserError(f"{path} cannot be written: {problem}", remedy)


def make_folder(path: Path) -> None:
    """Make a folder of the home and its missing parents. Raises OSError if that fails."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)


def private(path: str, flags: int) -> int:
    """Open a file of the home: the `opener` of `open`."""
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)


def replace_file(path: Path, body: bytes) -> None:
    """Write a file of the home atomically and sync it to the disk. Raises OSError if that fails."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    make_folder(path.parent)
    with open(partial, "wb", opener=private) as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def close_to_others(home: Path) -> None:
    """Make the home private if others can read it, where the file system has modes.

    A folder that is shared on purpose, such as /tmp, stays as it is.
    """
    with suppress(OSError):
        mode = home.stat().st_mode
        if mode & _OTHERS and not mode & stat.S_ISVTX:
            home.chmod(stat.S_IMODE(mode) & ~_OTHERS)


def check_home(home: Path) -> None:
    """Raise UserError if the home folder cannot take a run's files."""
    probe = home / "runs" / f".probe-{os.getpid()}"
    with writing(home):
        make_folder(probe.parent)
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
