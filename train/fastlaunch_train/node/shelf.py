"""The folder that SageMaker copies to S3 while a job runs: files appear there whole, under their last name.

A file is written elsewhere on the same file system and renamed. If the folder is a mount of its own, the file
is written in a hidden folder inside it instead: nobody reads what SageMaker copies from there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from fastlaunch_train.node.protocol import SEGMENT
from fastlaunch_train.node.uploads import Store

#: Bytes to keep free for the last words on a full disk.
RESERVE_BYTES = 32 * 2**20
_HIDDEN = ".fastlaunch"


class Shelf(Store):
    """The folder `root`, which is copied, and `work`, the folder for all else, empty at first."""

    def __init__(self, root: Path, opt_ml: Path, scratch: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(root / _HIDDEN, ignore_errors=True)
        beside = opt_ml / "fastlaunch"
        # Beside the root, a checkpoint is renamed and not copied: at once, and without using space twice.
        is_beside = _can_rename(beside, root)
        self.work = beside if is_beside else scratch / "fastlaunch"
        _empty(self.work)
        super().__init__(root, (self.work if is_beside else root / _HIDDEN) / "staged")
        # The reserve is not copied. A container's folders are on one volume, however they are mounted.
        self._reserve = self.work / "reserve"
        with suppress(OSError), self._reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)

    def put_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write a JSON object, as `put` does."""
        self.put(name, json.dumps(data).encode() + b"\n")

    def move(self, file: Path, name: str) -> None:
        """Move a complete file into the folder. Raises as `put` does.

        Only one thread may call this at a time.
        """
        try:
            self._place(file, name)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        # The name is always the same, so that at most one partial copy stays behind.
        staged = self._staging / "moving"
        try:
            shutil.copyfile(file, staged)
            self._place(staged, name)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
        file.unlink(missing_ok=True)

    def flush(self) -> bool:
        # SageMaker copies the folder by itself.
        return True

    def has_room(self, num_bytes: int) -> bool:
        # What is put there stays on the disk beside the original.
        return shutil.disk_usage(self.root).free > num_bytes + RESERVE_BYTES

    def end_of(self, name: str) -> int:
        path = self.root / name
        paths = path.parent.glob(f"{escape(path.name)}.*")
        segments = [(SEGMENT.fullmatch(path.name), path) for path in paths]
        ends = (int(match["offset"]) + path.stat().st_size for match, path in segments if match)
        return max(ends, default=0)

    def release_reserve(self) -> None:
        """Free the space that was reserved."""
        self._reserve.unlink(missing_ok=True)


def _can_rename(source: Path, target: Path) -> bool:
    probe = source / "probe"
    try:
        _empty(source)
        probe.touch()
        probe.replace(target / f"{_HIDDEN}-probe")
        (target / f"{_HIDDEN}-probe").unlink()
    except OSError:
        shutil.rmtree(source, ignore_errors=True)
        return False
    return True


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
