"""Record files, CSV files of published figures, archives and folders of them, as runs for the ledger."""

import json
import lzma
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

from fastlaunch.catalog.prices import Price
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.ids import published_run_ids, recorded_run_id
from fastlaunch.measure.outcome import contradictions
from fastlaunch.measure.published import read_published
from fastlaunch.measure.summarize import RunSummary, summarize
from fastlaunch_train.records.records import SUFFIXES, RankRecord, RecordError, read_record

ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.xz")
#: What an archive may hold, unpacked: far beyond any export, and little enough for a disk.
MAX_ARCHIVE_BYTES = 2 << 30
MAX_ARCHIVE_FILES = 100_000
#: What an archive may claim to hold for each of its own bytes, beyond a size that is written in no time:
#: xz makes records some 30 times smaller, gzip anything at most some 1,000 times.
MAX_UNPACKED_RATIO = 300
UNPACKED_IN_NO_TIME = 64 << 20
#: A name too long for its header, or a file's pax fields; read whole, and before the file is known of.
MAX_HEADER_BYTES = 1 << 20
_HEADERS = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
RUN_FILE = "run.json"
#: What a run file begins with; a file of that name with anything else is not ours, and is left alone.
RUN_SCHEMA = "fastlaunch-run/1"
#: What a damaged archive raises, besides OSError and ValueError; KeyError is a link to what is not in it.
_DAMAGED = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, KeyError)
_RUN_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run that files tell of. source: the file, folder or archive. files: its record files, if any.

    price: what it was billed at, if a run file says so.
    """

    run_id: str
    summary: RunSummary
    source: Path
    files: tuple[Path, ...] = ()
    price: Price | None = None


@dataclass(kw_only=True)
class Found:
    """What was found: runs, each id once, and what could not be used, in words that begin with its path."""

    runs: dict[str, FoundRun] = field(default_factory=dict)
    skipped: list[BadFile] = field(default_factory=list)

    def add(self, run: FoundRun) -> None:
        """Keep a run, unless there is one of its id: then the first counts, and the other is told of."""
        first = self.runs.setdefault(run.run_id, run)
        if first is not run and first.summary != run.summary:
            self.skipped.append(BadFile(run.source, f"run {run.run_id} again, differing from {first.source}"))


def find_runs(paths: Sequence[Path]) -> Found:
    """The runs that files and folders (searched to their depth) hold.

    The rank files in one folder with one run id are one run. Of a run that is in an archive too, the files
    count: they stay. What cannot be read is skipped and told of, except that a single file that cannot be
    read raises BadFile. Raises UserError for a path that is not there or of no kind that can be read, and
    where nothing at all is found.
    """
    found = Found()
    folders: dict[Path, dict[Path, None]] = {}
    archives: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UserError(
                f"{path} does not exist", "give record files, CSV files, exports or folders of them"
            )
        if path.is_dir():
            for file in _walk(path, found, (*SUFFIXES, ".csv", *ARCHIVE_SUFFIXES)):
                if file.name.endswith(ARCHIVE_SUFFIXES):
                    archives[file] = None
                else:
                    _add_all(folders, [file])
        elif not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder", "give record files or CSV files")
        elif path.name.endswith((*SUFFIXES, ".csv")):
            _add_all(folders, [path])
        elif path.name.endswith(ARCHIVE_SUFFIXES):
            archives[path] = None
        else:
            kinds = ", ".join((*SUFFIXES, ".csv", *ARCHIVE_SUFFIXES))
            raise UserError(
                f"{path} is of no kind that can be imported", f"its name must end in one of {kinds}"
            )
    for folder, files in folders.items():
        _read_folder(folder, list(files), found)
    for archive in archives:
        try:
            _read_archive(archive, found)
        except BadFile as error:
            if archive in paths:
                raise
            found.skipped.append(error)
    if found.skipped and len(paths) == 1 and paths[0].name.endswith((*SUFFIXES, ".csv")):
        raise found.skipped[0]
    if not found.runs:
        if found.skipped:
            raise found.skipped[0]
        raise UserError(
            f"no record file and no CSV in {', '.join(map(str, paths))}",
            f"record files end in {', '.join(SUFFIXES)}",
        )
    return found


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """A temporary folder with what is in an export or in packed records.

    Raises BadFile for a file that is none, that would write elsewhere, or that holds absurdly much.
    """
    with tempfile.TemporaryDirectory(prefix="fastlaunch-") as folder:
        try:
            _unpack(archive, folder)
        except (*_DAMAGED, OSError, ValueError) as error:
            raise BadFile(archive, f"cannot be unpacked: {error}") from None
        yield Path(folder)


def _unpack(archive: Path, folder: str) -> None:
    """Unpack member by member, so that nothing of what is too much is read. Raises ValueError for that."""
    num_bytes, packed = 0, archive.stat().st_size
    with tarfile.open(archive, tarinfo=_Header) as file:
        for number, member in enumerate(file, start=1):
            num_bytes += member.size
            if num_bytes > MAX_ARCHIVE_BYTES or number > MAX_ARCHIVE_FILES:
                raise ValueError(
                    f"it holds more than {MAX_ARCHIVE_BYTES >> 30} GiB or {MAX_ARCHIVE_FILES:,} files"
                )
            if num_bytes > max(UNPACKED_IN_NO_TIME, MAX_UNPACKED_RATIO * packed):
                raise ValueError(
                    f"it claims to hold {num_bytes >> 20:,} MiB, more than {MAX_UNPACKED_RATIO} times its own"
                    f" {packed:,} bytes"
                )
            file.extract(member, folder, filter="data")


class _Header(tarfile.TarInfo):
    """A header that is refused for the size it claims, before any of what follows it is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise ValueError(f"a header claims {header.size:,} bytes")
        if header.type in _HEADERS and header.size > MAX_HEADER_BYTES:
            raise ValueError(f"a header claims a name or fields of {header.size:,} bytes")
        return header


def _read_archive(archive: Path, found: Found) -> None:
    """Add what is in an archive, but for archives within it. Raises BadFile for one that is none."""
    with unpacked(archive) as folder:
        _read_unpacked(archive, folder, found)


def _read_unpacked(archive: Path, folder: Path, found: Found) -> None:
    inside = Found()
    folders: dict[Path, dict[Path, None]] = {}
    _add_all(folders, _walk(folder, inside, (*SUFFIXES, ".csv")))
    for place, files in folders.items():
        _read_folder(place, list(files), inside)
    for run in inside.runs.values():
        found.add(replace(run, source=archive, files=()))
    for problem in inside.skipped:
        path = str(problem.path).replace(str(folder), str(archive))
        text = problem.message.replace(str(folder), str(archive))
        _, _, what = text.removeprefix(path).partition(": ")
        found.skipped.append(BadFile(path, what, line=problem.line))


def _walk(folder: Path, found: Found, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files under `folder` that may be imported, by their names, in order of these."""

    def tell(error: OSError) -> None:
        found.skipped.append(BadFile(error.filename, f"cannot be read: {error.strerror}"))

    for place, subfolders, names in os.walk(folder, onerror=tell):
        subfolders.sort()
        for name in sorted(names):
            if name.endswith(suffixes) or name == RUN_FILE:
                path = Path(place, name)
                # A pipe or a device would be read for ever; a link to nothing is told of when it is opened.
                if path.exists() and not path.is_file():
                    found.skipped.append(BadFile(path, "is not a file"))
                else:
                    yield path


def _add_all(folders: dict[Path, dict[Path, None]], files: Iterable[Path]) -> None:
    for file in files:
        folders.setdefault(file.parent, {})[file] = None


def _read_folder(folder: Path, files: Sequence[Path], found: Found) -> None:
    """Add the runs in `files`, which lie in `folder` itself."""
    ranks: dict[str, list[RankRecord]] = {}
    told: Mapping[str, Any] = {}
    for path in files:
        try:
            if path.name == RUN_FILE:
                told = _read_run_file(path)
            elif path.suffix == ".csv":
                rows = read_published(path)
                for run_id, row in zip(published_run_ids(rows), rows, strict=True):
                    found.add(FoundRun(run_id=run_id, summary=row, source=path))
            else:
                record = read_record(path)
                ranks.setdefault(record.header["run_id"], []).append(record)
        except BadFile as error:
            found.skipped.append(error)
        except RecordError as error:
            found.skipped.append(BadFile(error.path, error.problem, line=error.line))
        except OSError as error:
            found.skipped.append(BadFile(path, f"cannot be read: {error.strerror or error}"))
    for records in ranks.values():
        found.add(_recorded(folder, records, told))
    if told and not ranks and told["summary"]:
        summary = RunSummary.from_json(told["summary"])
        found.add(FoundRun(run_id=told["id"], summary=summary, source=folder, price=_price(told)))


def _recorded(folder: Path, records: list[RankRecord], told: Mapping[str, Any]) -> FoundRun:
    records.sort(key=lambda record: (record.header["attempt"], record.header["rank"]))
    summary, run_id = summarize(records), recorded_run_id(records[0].header)
    if told and told["id"] != run_id:
        told = {}
    if told and told["spec"]:
        problems = contradictions(JobSpec.from_json(told["spec"]), records)
        summary = replace(summary, problems=(*summary.problems, *problems))
    if told and told["summary"]:
        # What its machine took to start stands in no record.
        known = RunSummary.from_json(told["summary"])
        summary = replace(summary, boot_s=known.boot_s, pull_s=known.pull_s)
    if told.get("backend") == "sagemaker" and summary.instance:
        # Nor whose machine it was, in an older one.
        summary = replace(summary, service="sagemaker")
    files = tuple(record.path for record in records)
    return FoundRun(
        run_id=run_id,
        summary=summary,
        source=files[0] if len(files) == 1 else folder,
        files=files,
        price=_price(told),
    )


def _price(told: Mapping[str, Any]) -> Price | None:
    """What the run of a run file was billed at; None if it does not say. Raises UserError."""
    return Price.from_json(told["price"]) if told.get("price") is not None else None


def _read_run_file(path: Path) -> Mapping[str, Any]:
    """What `fastlaunch runs export` wrote; empty for a file that only has that name. Raises BadFile."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(told, dict) or told.get("schema") != RUN_SCHEMA:
            return {}
        # It becomes the name of a folder when the run is exported again.
        if not isinstance(told["id"], str) or not _RUN_ID.fullmatch(told["id"]):
            raise BadFile(path, f"id is {told['id']!r}")
        if told["spec"] is not None:
            JobSpec.from_json(told["spec"])
        if told["summary"] is not None:
            _check_summary(RunSummary.from_json(told["summary"]))
        if (price := _price(told)) is not None and not all(isinstance(text, str) for text in price.key[:4]):
            raise ValueError(f"price is {told['price']!r}")
    except BadFile:
        raise
    except UserError as error:
        raise BadFile(path, error.message) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(path, f"not a run file: {error!r}") from None
    return told


def _check_summary(summary: RunSummary) -> None:
    """Nothing, if every value is of its field's type and can be stored; else ValueError."""
    for name, kind in get_type_hints(RunSummary).items():
        value = getattr(summary, name)
        if name in ("warnings", "problems"):
            fits = all(isinstance(text, str) for text in value)
        elif name in ("evals", "checks"):
            fits = all(
                _is_of_type(getattr(line, field), of)
                for line in value
                for field, of in get_type_hints(type(line)).items()
            )
        elif name == "fingerprint":
            fits = isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
        else:
            fits = _is_of_type(value, kind)
        if not fits:
            raise ValueError(f"{name} is {value!r}")
    if summary.kind not in ("records", "published"):
        raise ValueError(f"kind is {summary.kind!r}")
    if min(summary.num_gpus, summary.num_nodes, summary.batch_size_per_gpu) < 1:
        raise ValueError("a number of GPUs, nodes or samples is below 1")
    step = summary.step_time_s
    for seconds in (step.value, step.low, step.high) if step else ():
        if seconds is not None and not (isinstance(seconds, float | int) and seconds > 0):
            raise ValueError(f"step_time_s holds {seconds!r}")
    # What is no number, and what is no text, can be written in JSON but not be stored.
    json.dumps(summary.to_json(), allow_nan=False, ensure_ascii=False).encode()


def _is_of_type(value: object, kind: Any) -> bool:
    return isinstance(value, kind | int if kind in (float, float | None) else kind)
