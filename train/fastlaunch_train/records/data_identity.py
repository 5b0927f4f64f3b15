"""Identify a run's samples, to tell runs on different data apart: a header's `data_identity`.

Every rank derives the identity from what it reads or lists anyway, without asking its peers. That costs
little, and the ranks' records show whether two machines had different files.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

#: Hex digits of SHA-256 to keep: among a million sources two agree by chance in one case of ten million.
DIGITS = 16
#: Up to this many files and bytes, contents are read: a second on a local disk, ten over a network. For
#: larger folders only the sizes of at most MOST_FILES files are read.
MOST_FILES = 10_000
MOST_BYTES = 256 * 2**20
#: Number of evenly spread pieces to read of a larger file, including its first and last bytes.
NUM_PIECES, PIECE_BYTES = 64, 2**20

CONTENTS, PIECES, NAMES_AND_SIZES = "contents", "size and pieces", "names and sizes"


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The identity of a run's samples."""

    digest: str | None = None  #: digest of what was read; None for synthetic samples
    covers: str | None = None  #: what the digest covers: CONTENTS, PIECES or NAMES_AND_SIZES
    num_samples: int | None = None  #: number of samples to train on; None: endless
    generator: str | None = None  #: what makes synthetic samples
    generator_version: int | None = None  #: of a generator of ours
    seeded_by: str | None = None  #: what the generator draws them from
    tokenizer: str | None = None  #: `identity` of the Tokenizer that turned text into tokens

    def to_record(self) -> dict[str, Any]:
        """Return plain data, without the name of any file or folder."""
        return dict(vars(self))


def digest_of(parts: Iterable[bytes]) -> str:
    """Return the digest of `parts` in this order; it depends on how the bytes are divided."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.hexdigest()[:DIGITS]


def digest_of_file(path: Path) -> tuple[str, str]:
    """Return (digest, what it covers) of one file: its contents, or the size and pieces of a large one.

    Raises OSError if it cannot be read.
    """
    whole = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole.update(size.to_bytes(8, "big"))
        if size <= MOST_BYTES:
            _add_contents(whole, file)
            return whole.hexdigest()[:DIGITS], CONTENTS
        for number in range(NUM_PIECES):
            file.seek(number * (size - PIECE_BYTES) // (NUM_PIECES - 1))
            whole.update(file.read(PIECE_BYTES))
    return whole.hexdigest()[:DIGITS], PIECES


def digest_of_files(files: Mapping[str, str]) -> tuple[str, str]:
    """Return (digest, what it covers) of the files at these paths; their names count, their order does not.

    It covers the contents if the files are few and small, else all names and the sizes of at most MOST_FILES
    evenly spread files: a file replaced by another of the same size goes unnoticed. Raises OSError.
    """
    names = sorted(files)
    sample = names[:: -(-len(names) // MOST_FILES) or 1]
    sizes = [Path(files[name]).stat().st_size for name in sample]
    encoded = [os.fsencode(name) for name in names]
    if len(names) <= MOST_FILES and sum(sizes) <= MOST_BYTES:
        return digest_of([*encoded, *(_contents_digest(files[name]) for name in names)]), CONTENTS
    return digest_of([*encoded, *(size.to_bytes(8, "big") for size in sizes)]), NAMES_AND_SIZES


def user_workload_identity(workload: str, source: str) -> DataIdentity:
    """Return the known data identity of a user's workload, `./file.py:function`, that gives none itself.

    Its file, without its imports, stands for what makes the samples. A file or folder that `--data` names is
    read if it exists. Raises OSError.
    """
    file = Path(workload.rpartition(":")[0])
    digest = covers = None
    path = Path(source.partition(":")[2]).expanduser()
    if source.startswith("file:") and path.is_file():
        digest, covers = digest_of_file(path)
    elif source.startswith("folder:") and path.is_dir():
        # Keep plain strings, as in `images.folder_identity`: there may be a million.
        digest, covers = digest_of_files({file.removeprefix(str(path)): file for file in _below(str(path))})
    return DataIdentity(digest=digest, covers=covers, generator=f"own {digest_of_file(file)[0]}")


def _below(folder: str) -> Iterator[str]:
    """Yield the files below `folder`, through links as well: a class's folder may be a link."""
    followed: set[str] = set()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        yield from (f"{place}/{name}" for name in names)
        # Links may form a circle. Sort them, so that every machine counts the same one of two links.
        candidates, subfolders[:] = sorted(subfolders), []
        for name in candidates:
            if Path(place, name).is_symlink():
                if (target := os.path.realpath(f"{place}/{name}")) in followed:
                    continue
                followed.add(target)
            subfolders.append(name)


def _contents_digest(path: str) -> bytes:
    whole = hashlib.sha256()
    with Path(path).open("rb") as file:
        _add_contents(whole, file)
    return whole.digest()


def _add_contents(whole: "hashlib._Hash", file: BinaryIO) -> None:
    for piece in iter(lambda: file.read(PIECE_BYTES), b""):
        whole.update(piece)
