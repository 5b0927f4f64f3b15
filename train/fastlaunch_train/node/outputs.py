"""Training's files, opened without following links and only if they are regular.

The agent is root on its machine, and a container may put a link, a pipe or a device where its output is
expected: a link would lead to files of the host, and a pipe would block for ever.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class NotRegular(OSError):
    """A file that is a link, a pipe, a device or a folder, or lies behind a link."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def opened(path: Path, *, below: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    below: a folder above it that training cannot replace; no part of the path after it may be a link.
    Raises NotRegular, and OSError where the file is missing or cannot be read.
    """
    with _folder_of(path, below) as folder:
        # O_PATH does not open the file itself, since merely opening a device can have an effect.
        place = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise NotRegular(path)
        descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(place)
    with os.fdopen(descriptor, "rb") as file:
        yield file


def hold(path: Path, link: Path, *, below: Path) -> None:
    """Make `link` another name of a regular file, so that it stays when training removes `path`.

    link: a path on the same file system, in a folder that training does not see. Raises as `opened` does.
    """
    with _folder_of(path, below) as folder:
        # Checked before, since a folder cannot be linked, and after, since training may be quick.
        if not stat.S_ISREG(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise NotRegular(path)
        os.link(path.name, link, src_dir_fd=folder, follow_symlinks=False)
    if not is_regular(link):
        link.unlink()
        raise NotRegular(path)


def is_regular(path: Path) -> bool:
    """Return whether `path` is a regular file and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


@contextmanager
def _folder_of(path: Path, below: Path) -> Iterator[int]:
    """Open the folder of `path`, without following links."""
    folder = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.relative_to(below).parts[:-1]:
            try:
                inner = os.open(name, _FOLDER, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise NotRegular(path) from None
                raise
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)
