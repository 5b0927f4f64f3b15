"""Files that grow, as immutable segments named by their first byte: `log.txt.000000000000`, ..."""

import re
from pathlib import Path

from fastlaunch_train.node.shelf import Shelf

#: As the node of an EC2 attempt cuts them.
MAX_BYTES = 64 * 2**20
_SEGMENT = re.compile(r"(?P<name>.+)\.(?P<offset>\d{12})")


class Segments:
    """Cuts what files have grown by since the last time.

    A file that segments are there of already, left by a container before this one, goes on after their end.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        #: Where a file's own first byte stands among the segments, and how many of its bytes are cut.
        self._starts: dict[str, int] = {}
        self._cut: dict[str, int] = {}

    def cut(self, file: Path, name: str) -> None:
        """Leave what `file` has grown by as segments of `name`. Raises OSError where the disk refuses."""
        start = self._starts.setdefault(name, end_of(self._shelf.root / name))
        with file.open("rb") as source:
            while True:
                source.seek(self._cut.get(name, 0))
                data = source.read(MAX_BYTES)
                if not data:
                    return
                at = self._cut.get(name, 0)
                self._shelf.put(f"{name}.{start + at:012d}", data)
                self._cut[name] = at + len(data)


def end_of(name: Path) -> int:
    """The byte after the last segment of a file that lies there in segments; 0 if there is none."""
    found = [(match, path) for path in name.parent.glob(f"{name.name}.*") if (match := _match(path))]
    return max((int(match["offset"]) + path.stat().st_size for match, path in found), default=0)


def joined(name: Path) -> str | None:
    """The name of the file that a segment is of; None for what is no segment."""
    match = _match(name)
    return match["name"] if match else None


def _match(path: Path) -> re.Match[str] | None:
    return _SEGMENT.fullmatch(path.name)
