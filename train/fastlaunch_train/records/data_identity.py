"""What a run's samples are, as far as two runs can be told apart by it: `data_identity` of a record's header.

Every rank finds it out from what it has read or listed anyway, without a word to the others: that costs
little beside reading, and it is what shows, when records are compared, that two machines had other files.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Hex digits of SHA-256 that are kept: by chance two of a million sources agree in one case of ten million.
DIGITS = 16
#: Contents are read of so many files of so many bytes in all: a second on a local disk, ten over a network.
#: Of larger folders the sizes of so many files are asked for.
MOST_FILES = 10_000
MOST_BYTES = 256 * 2**20
#: Of a larger file so many pieces of so many bytes are read, evenly spread, the first and last among them.
NUM_PIECES, PIECE_BYTES = 64, 2**20

CONTENTS, PIECES, NAMES_AND_SIZES = "contents", "size and pieces", "names and sizes"


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """What the samples of a run are.

    digest: of what was read, None for samples that are made up; covers: what it is of. num_samples: to train
    on, None where they have no end. generator: what makes samples up, generator_version: of one of ours;
    seeded_by: what it draws them from. tokenizer: what turned text into tokens, where it did.
    """

    digest: str | None = None
    covers: str | None = None
    num_samples: int | None = None
    generator: str | None = None
    generator_version: int | None = None
    seeded_by: str | None = None
    tokenizer: str | None = None

    def to_record(self) -> dict[str, Any]:
        """Plain data; no name of a file or folder is in it."""
        return dict(vars(self))


def digest_of(parts: Iterable[bytes]) -> str:
    """The digest of `parts` in this order; another division into parts is another digest."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big"))
        whole.update(part)
    return whole.hexdigest()[:DIGITS]


def digest_of_file(path: Path) -> tuple[str, str]:
    """(digest, what it covers) of one file: its contents, or of a large one its size and pieces of it.

    Raises OSError if it cannot be read.
    """
    whole = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole.update(size.to_bytes(8, "big"))
        if size <= MOST_BYTES:
            for piece in iter(lambda: file.read(PIECE_BYTES), b""):
                whole.update(piece)
            return whole.hexdigest()[:DIGITS], CONTENTS
        for number in range(NUM_PIECES):
            file.seek(number * (size - PIECE_BYTES) // (NUM_PIECES - 1))
            whole.update(file.read(PIECE_BYTES))
    return whole.hexdigest()[:DIGITS], PIECES


def digest_of_files(files: Mapping[str, str]) -> tuple[str, str]:
    """(digest, what it covers) of files, whose paths are given by names that count, as their order does not.

    Contents where they are few and small; else all names, and sizes of at most MOST_FILES of them, evenly
    spread: a file that was replaced by one as large is not noticed then. Raises OSError.
    """
    names = sorted(files)
    looked_at = names[:: -(-len(names) // MOST_FILES) or 1]
    sizes = [Path(files[name]).stat().st_size for name in looked_at]
    told = [os.fsencode(name) for name in names]
    if len(names) <= MOST_FILES and sum(sizes) <= MOST_BYTES:
        return digest_of([*told, *(_contents_digest(files[name]) for name in names)]), CONTENTS
    return digest_of([*told, *(size.to_bytes(8, "big") for size in sizes)]), NAMES_AND_SIZES


def identity_of_own(workload: str, arm: str) -> DataIdentity:
    """Of a user's own workload, `./file.py:function`, which says nothing of its data.

    Its file stands for what makes the samples, though not what that imports; what `--data` names is looked
    at as a file or a folder, where it is one. Raises OSError.
    """
    file = Path(workload.rpartition(":")[0])
    digest = covers = None
    path = Path(arm.partition(":")[2]).expanduser()
    if arm.startswith("file:") and path.is_file():
        digest, covers = digest_of_file(path)
    elif arm.startswith("folder:") and path.is_dir():
        # Text alone, as in `image_loader.folder_identity`: there may be a million.
        digest, covers = digest_of_files({file.removeprefix(str(path)): file for file in _below(str(path))})
    return DataIdentity(digest=digest, covers=covers, generator=f"own {digest_of_file(file)[0]}")


def _below(folder: str) -> Iterator[str]:
    """The files below `folder`, linked folders' too: a folder of a class may be a link to where it lies."""
    followed: set[str] = set()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        yield from (f"{place}/{name}" for name in names)
        # Links may lead in a circle; which of two to one folder counts must not depend on the machine.
        found, subfolders[:] = sorted(subfolders), []
        for name in found:
            if Path(place, name).is_symlink():
                if (target := os.path.realpath(f"{place}/{name}")) in followed:
                    continue
                followed.add(target)
            subfolders.append(name)


def _contents_digest(path: str) -> bytes:
    whole = hashlib.sha256()
    with Path(path).open("rb") as file:
        for piece in iter(lambda: file.read(PIECE_BYTES), b""):
            whole.update(piece)
    return whole.digest()
