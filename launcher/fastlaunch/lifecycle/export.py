"""Runs as files to keep, send and import elsewhere: compressed record files and the ledger's data.

What is shared leaves out the words typed after `--`, since they may be secrets and paths.
"""

import json
import lzma
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from fastlaunch.analysis.pooling import Group
from fastlaunch.analysis.pricing import PriceRequest, price_row
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import unwritable
from fastlaunch.core.terminal import as_warning
from fastlaunch.jobs.job import Script
from fastlaunch.ledger.ids import recorded_run_id
from fastlaunch.ledger.ledger import IMPORT, Ledger, Run
from fastlaunch.lifecycle.describe import all_to_dict, run_to_dict
from fastlaunch.lifecycle.evidence import measured_run
from fastlaunch.lifecycle.importer import ARCHIVE_SUFFIXES, RUN_FILE, RUN_SCHEMA, unpacked
from fastlaunch.lifecycle.world import World
from fastlaunch.measure.outcome import read_records
from fastlaunch.measure.record_files import SUFFIXES, DamagedFile, RecordError, open_unpacked, read_header
from fastlaunch.measure.steptime import RankSeries, read_series
from fastlaunch.measure.summary import WORDS
from fastlaunch.report.trackers import TrackedRun, tracked_run
from fastlaunch_train.records.records import FROM_CACHE

#: A folder with such a name would be taken for an archive.
_OTHER_ARCHIVES = (".zip", ".tar", ".gz", ".xz", ".bz2", ".zst", ".tbz2", ".7z")
#: Fields with text of a program, which may repeat its arguments.
_TEXTS = ("reason", "ended", "problems", "warnings", "uncounted", "message", "detail")
#: Shorter parts of words, and numbers, stay in the text.
_LEAST = 4
_PART = re.compile(r"[^\s=]+")
#: A message may quote a word escaped, or only a piece of it, such as the password in a URL.
_PIECE = re.compile(r"\w+")
_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?", re.IGNORECASE)


def export_runs(
    ledger: Ledger, runs: Sequence[Run], destination: Path, *, home: Path, now: datetime
) -> list[str]:
    """Write a folder per run, with its record files (xz) and `run.json`; return sentences on missing files.

    destination: a `.tar.gz` or `.tar.xz` file that does not exist yet, or a folder, made if need be. Raises
    UserError for a destination that already has one of the runs, or cannot be written. The cost of an
    attempt under way counts until `now`.
    """
    try:
        if not destination.name.endswith(ARCHIVE_SUFFIXES):
            if destination.suffix in _OTHER_ARCHIVES and not destination.is_dir():
                raise UserError(
                    f"runs are not exported to {destination.suffix}",
                    "give --to a folder, or a .tar.gz or .tar.xz",
                )
            return _write_folders(ledger, runs, destination, home=home, now=now)
        if destination.exists():
            raise UserError(f"{destination} exists already", "give another name, or remove it first")
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Packed under another name and then renamed, so that a file of this name is complete.
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".export-") as temporary:
            missing = _write_folders(ledger, runs, Path(temporary, "runs"), home=home, now=now)
            packed = Path(temporary, "packed")
            # Compress lightly, since the files are compressed already.
            mode: dict[str, Any] = {"mode": "w:gz", "compresslevel": 1}
            if destination.suffix == ".xz":
                mode = {"mode": "w:xz", "preset": 0}
            with tarfile.open(packed, **mode) as archive:
                archive.add(Path(temporary, "runs"), arcname="runs")
            packed.rename(destination)
        return missing
    except DamagedFile as error:
        raise UserError(f"a record file cannot be read: {error.strerror}", "leave its run out") from None
    except OSError as error:
        raise unwritable(destination, error, "give another --to") from None


def _write_folders(
    ledger: Ledger, runs: Sequence[Run], destination: Path, *, home: Path, now: datetime
) -> list[str]:
    taken = [run.id for run in runs if Path(destination, run.id).exists()]
    if taken:
        raise UserError(f"{destination} holds run {taken[0]} already", "give another --to")
    missing = []
    for run in runs:
        folder = Path(destination, run.id)
        folder.mkdir(parents=True)
        with record_files(run) as files:
            for file in files:
                compress(file, folder)
        if not files and (run.summary is None or run.summary.setup.kind == "records"):
            why = "its record files are gone; only what the ledger knows is exported"
            if run.summary is None:
                why = f"it is {run.state} and recorded nothing; `runs import` will pass over it"
            missing.append(f"run {run.id}: {why}")
        run_file = {"schema": RUN_SCHEMA, **all_to_dict(ledger, run, home=home, now=now)}
        Path(folder, RUN_FILE).write_text(json.dumps(run_file, indent=2) + "\n", encoding="utf-8")
    return missing


@contextmanager
def record_files(run: Run) -> Iterator[Sequence[Path]]:
    """Give the run's record files, wherever they are. They are readable within the context."""
    with _record_files_at(run.directory, [run]) as files:
        yield files.get(run.id, ())


def series_of(runs: Sequence[Run]) -> dict[str, tuple[RankSeries, ...]]:
    """Return the ranks' series by run id, without the runs whose record files are gone or cannot be read.

    An archive with many of the runs is unpacked once.
    """
    places: dict[Path | None, list[Run]] = {}
    for run in runs:
        places.setdefault(run.directory, []).append(run)
    series: dict[str, tuple[RankSeries, ...]] = {}
    for place, of_place in places.items():
        with suppress(UserError, OSError), _record_files_at(place, of_place) as files:
            series |= {id: ranks for id, of_run in files.items() if (ranks := read_series(of_run))}
    return series


@contextmanager
def _record_files_at(place: Path | None, runs: Sequence[Run]) -> Iterator[Mapping[str, Sequence[Path]]]:
    """Give the record files of runs in one place, by the runs' ids."""
    if place is None or not place.exists():
        yield {}
    elif runs[0].backend != IMPORT:
        # The folder is the run's alone, so unreadable files are exported too, for a person to look at.
        yield {run.id: _records(place.iterdir()) for run in runs}
    elif place.name.endswith(ARCHIVE_SUFFIXES):
        with unpacked(place) as folder:
            yield _by_run(folder.rglob("*"), runs)
    else:
        yield _by_run(place.rglob("*") if place.is_dir() else (place,), runs)


def _records(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.name.endswith(SUFFIXES) and path.is_file())


def _by_run(paths: Iterable[Path], runs: Sequence[Run]) -> dict[str, list[Path]]:
    """Return the record files by run id. If a run lies in several folders, the first counts."""
    files: dict[str, list[Path]] = {}
    for path in _records(paths):
        with suppress(OSError, RecordError):
            of_run = files.setdefault(recorded_run_id(read_header(path)), [])
            if not of_run or of_run[0].parent == path.parent:
                of_run.append(path)
    return {run.id: files.get(run.recorded_id, []) for run in runs}


def compress(file: Path, folder: Path) -> None:
    """Write a record file into `folder`, compressed by xz."""
    with lzma.open(Path(folder, f"{plain_name(file)}.xz"), "wb") as target, open_unpacked(file) as source:
        shutil.copyfileobj(source, target)


def plain_name(file: Path) -> str:
    """Return the record file's name without the suffix of its compression."""
    return file.name.removesuffix(".xz").removesuffix(".gz")


def tracked_runs(runs: Sequence[Run], world: World) -> Iterator[TrackedRun]:
    """Yield the runs, which all have summaries, in the form for trackers, priced as in `compare`."""
    request = PriceRequest(today=world.today, region=world.settings.region)
    for run in runs:
        measured = measured_run(run, world.settings.region)
        assert run.summary is not None and measured is not None
        price, _ = price_row(Group(runs=[measured], measure=None), request, world.catalogue)
        with record_files(run) as files:
            records, unread = read_records(files)
        for problem in unread:
            world.report(as_warning(f"run {run.id}: {problem.message}"))
        if not records and run.summary.setup.kind == "records":
            world.report(as_warning(f"run {run.id}: its record files are gone; no metrics by step"))
        yield tracked_run(run_to_dict(run), run.summary, records, price)


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words of a script's command, to be replaced by a digest of them."""

    name: str  # of the script: its path in the repository
    digest: str
    parts: tuple[str, ...]  # of the words, and pieces of those, the longest first

    @classmethod
    def of(cls, name: str, script: Script) -> Self:
        """Return the words that started the script of this name."""
        words = " ".join((*script.command, *script.argv))
        pieces = {*_PART.findall(words), *_PIECE.findall(words)}
        shown = {name, name.rpartition("/")[2], *(text for _, text in script.variant)}
        parts = {piece for piece in pieces - shown if len(piece) >= _LEAST and not _NUMBER.fullmatch(piece)}
        return cls(
            name=name,
            digest=script.digest_under(name),
            parts=tuple(sorted(parts, key=lambda part: (-len(part), part))),
        )

    def hidden_in_run(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of a run file without the words."""
        hidden: dict[str, Any] = self._hidden(dict(data))
        hidden["spec"] = {**data["spec"], "script": {**data["spec"]["script"], "command": [self.name]}}
        setup = hidden["summary"]["setup"]
        setup["fingerprint"] = {**setup.get("fingerprint", {}), WORDS: self.digest}
        return hidden

    def hidden_in_line(self, line: bytes) -> bytes:
        """Return a line of a record without the words; empty if it cannot be read."""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return b""
        hidden = self._hidden(data)
        if isinstance(data, dict) and isinstance(data.get("script"), dict):
            hidden["script"] = {**data["script"], "command": [self.name], WORDS: self.digest}
        return line if hidden == data else json.dumps(hidden, separators=(",", ":")).encode() + b"\n"

    def _hidden(self, data: Any, *, is_text: bool = False) -> Any:
        if isinstance(data, dict):
            return {key: self._hidden(value, is_text=key in _TEXTS) for key, value in data.items()}
        if isinstance(data, list):
            return [self._hidden(value, is_text=is_text) for value in data]
        if is_text and isinstance(data, str) and self.parts and data != FROM_CACHE:
            return re.sub("|".join(map(re.escape, self.parts)), "...", data, flags=re.IGNORECASE)
        return data


@contextmanager
def without_words(files: Sequence[Path], words: Words | None) -> Iterator[Sequence[Path]]:
    """Give copies of the record files without the words, or the files themselves if there are no words."""
    if words is None:
        yield files
        return
    with tempfile.TemporaryDirectory(prefix="fastlaunch-") as temporary:
        copies = []
        for file in files:
            copies.append(Path(temporary, plain_name(file)))
            with open_unpacked(file) as source, copies[-1].open("wb") as target:
                target.writelines(words.hidden_in_line(line) for line in source)
        yield copies
