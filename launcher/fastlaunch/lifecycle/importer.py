"""Read record files, CSV files of published figures, archives and folders as runs for the ledger."""

import errno
import json
import os
import re
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from fastlaunch.catalog.load import load_catalogue
from fastlaunch.catalog.prices import Price
from fastlaunch.core.data import read, to_data
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text
from fastlaunch.core.terminal import printable_data
from fastlaunch.jobs.job import Job
from fastlaunch.ledger.ids import published_run_id, recorded_run_id
from fastlaunch.lifecycle.collect import summarize_run
from fastlaunch.measure.outcome import read_records
from fastlaunch.measure.published import read_published
from fastlaunch.measure.record_files import (
    SUFFIXES,
    RankRecord,
    RecordError,
    is_storable,
    open_unpacked,
    read_header,
)
from fastlaunch.measure.summary import RunSummary, read_summary

ARCHIVE_SUFFIXES = (".tar.gz", ".tgz", ".tar.xz")
_SUFFIXES = (*SUFFIXES, ".csv", *ARCHIVE_SUFFIXES)
RUN_FILE = "run.json"
#: The start of a run file. A file of that name that begins otherwise is not ours and is ignored.
RUN_SCHEMA = "fastlaunch-run/1"
#: Limits of an archive, which may come from anybody. A member's headers hold its name and times.
MAX_UNPACKED_BYTES = 2**32
MAX_MEMBERS = 2**16
_MAX_HEADER_BYTES = 2**16
_MAX_DEPTH = 32
_CHUNK_BYTES = 2**16
#: The most characters in all summaries of one import; a usual summary has 4,000.
MAX_SUMMARIES = 2**28
_MAX_PROBLEM_LENGTH = 300
#: Fields of a summary that may be negative, and the shortest time of a step or a run.
_SIGNED = (
    "seed",
    "late",
    "loss",
    "first_loss",
    "final_loss",
    "loss_slope",
    "metric_value",
    "value",
    "limit",
    "low",
    "high",
)
_LEAST_S = 1e-9
#: Bounds of a plausible hourly price.
_LEAST_USD, _MOST_USD = 1e-6, 1e6
#: Forms of IAM's user and session names, of account numbers and of submission ids.
_ORIGIN = re.compile(r"[\w+=,.@:-]{1,100}", re.ASCII)
_RUN_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """The fields that are read from the run file of `fastlaunch runs export` and `push`."""

    id: str
    spec: dict[str, Any] | None = None
    summary: RunSummary | None = None
    price: Price | None = None
    backend: str | None = None
    owner: str | None = None
    account: str | None = None
    submission: str | None = None

    def __post_init__(self) -> None:
        # The id becomes a folder's name when the run is exported again.
        if not _RUN_ID.fullmatch(self.id):
            raise UserError(f"id is {self.id!r}")
        for name in filter(None, (self.owner, self.account, self.submission)):
            if not _ORIGIN.fullmatch(name):
                raise UserError(f"no user, account or submission is called {name!r}")
        if self.spec is not None:
            Job.from_json(self.spec)
        if self.summary is not None:
            _check_summary(self.summary)
        if self.price is not None and not _LEAST_USD < self.price.usd_per_hour < _MOST_USD:
            raise UserError(f"usd_per_hour is {self.price.usd_per_hour}")


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """A run read from files."""

    #: Without a run file, it has the id alone.
    run_file: RunFile
    #: By its records; without any, by its run file or the row of a CSV.
    summary: RunSummary
    #: The file, folder or archive.
    source: Path
    #: Its record files.
    files: tuple[Path, ...] = ()


@dataclass(kw_only=True)
class Imports:
    """The runs, with unique ids, and the errors of unusable files."""

    runs: dict[str, ImportedRun] = field(default_factory=dict)
    skipped: list[BadFile] = field(default_factory=list)
    #: By CSV file, the number of rows that repeat an earlier one. Equal rows are one run.
    copies: Counter[Path] = field(default_factory=Counter)
    _left: int = field(default_factory=lambda: MAX_SUMMARIES)
    _is_full: bool = False

    def add(self, run: ImportedRun) -> None:
        """Add a run. If its id is taken, keep the first run and report the second."""
        run_id = run.run_file.id
        first = self.runs.get(run_id)
        if first is None:
            self._left -= len(repr(run.summary))
            if self._left > 0:
                self.runs[run_id] = run
            elif not self._is_full:
                self._is_full = True
                self.skip(BadFile(run.source, "there are too many runs: the rest is left out"))
            return
        if run.summary.setup.kind == "published":
            self.copies[run.source] += 1
        elif first.summary != run.summary:
            self.skipped.append(BadFile(run.source, f"run {run_id} again, differing from {first.source}"))

    def skip(self, error: BadFile) -> None:
        # A new exception, since the traceback of the first keeps all that was read in memory.
        problem = error.problem[:_MAX_PROBLEM_LENGTH]
        self.skipped.append(BadFile(error.path, problem, line=error.line, hint=error.hint))


def find_runs(paths: Sequence[Path]) -> Imports:
    """Return the runs in files and folders, searched recursively.

    Rank files in one folder with the same run id are one run. If a run is in an archive too, its files take
    precedence, since they stay. Unreadable files are skipped and reported, but a single one raises BadFile.
    Raises UserError for a missing path, a path of an unknown kind, and where there is no run at all.
    """
    imports = Imports()
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(
                f"{path} does not exist", "give record files, CSV files, exports or folders of them"
            )
        if path.is_dir():
            files += _walk(path, imports)
        elif not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder", "give record files or CSV files")
        elif path.name.endswith(_SUFFIXES):
            files.append(path)
        elif len(paths) > 1:
            # A glob such as `folder/*` also names other files.
            imports.skipped.append(BadFile(path, "cannot be imported: its kind is unknown"))
        else:
            raise UserError(
                f"{path} cannot be imported: its kind is unknown",
                f"its name must end in one of {', '.join(_SUFFIXES)}",
            )
    archives = [file for file in dict.fromkeys(files) if file.name.endswith(ARCHIVE_SUFFIXES)]
    _read_files([file for file in files if file not in archives], imports)
    for archive in archives:
        try:
            _read_archive(archive, imports)
        except BadFile as error:
            if archive in paths:
                raise
            imports.skip(error)
    is_single_file = len(files) == 1 and list(paths) == files and not archives
    if imports.skipped and (is_single_file or not imports.runs):
        raise imports.skipped[0]
    if not imports.runs:
        raise UserError(
            f"no record file and no CSV in {', '.join(map(str, paths))}",
            f"record files end in {', '.join(SUFFIXES)}",
        )
    return imports


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """Give a temporary folder with the contents of an export or of packed records.

    Raises BadFile if it is not an archive, would write outside the folder, or exceeds the limits.
    """
    with tempfile.TemporaryDirectory(prefix="fastlaunch-") as folder:
        try:
            with open_unpacked(archive, MAX_UNPACKED_BYTES) as file:
                _unpack(_TarStream(file), Path(folder))
        except tarfile.FilterError as error:
            raise BadFile(archive, f"cannot be unpacked: {error}") from None
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise BadFile(
                    archive, f"unpacks to more than {MAX_UNPACKED_BYTES / 2**30:,.0f} GiB"
                ) from None
            raise BadFile(archive, f"cannot be unpacked: {error.strerror or error}") from None
        except (tarfile.TarError, ValueError, KeyError):
            # tarfile's message for a damaged file lists its attempts over several lines. KeyError means
            # a link to what is not in it.
            raise BadFile(archive, "cannot be unpacked: it is damaged, or no archive") from None
        yield Path(folder)


class _TarStream:
    """A forward-only stream for `tarfile` that reads no more than it is allowed to.

    A member's headers are read into memory, and may claim a size of terabytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._place = self._end = 0

    def allow(self, num_bytes: int) -> None:
        """Allow this many more bytes."""
        self._end = self._place + num_bytes

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        # Skip the rest of a member.
        while self._place < place and (piece := self._file.read(min(place - self._place, _CHUNK_BYTES))):
            self._place += len(piece)
            self._end += len(piece)
        if self._place != place:
            raise tarfile.ReadError("it ends too early")

    def read(self, size: int) -> bytes:
        if size > self._end - self._place:
            raise tarfile.ReadError("a header is too long")
        data = self._file.read(size)
        self._place += len(data)
        return data


def _unpack(stream: _TarStream, folder: Path) -> None:
    stream.allow(_MAX_HEADER_BYTES)
    # tarfile takes any object with these three methods.
    with tarfile.TarFile(fileobj=cast(Any, stream), errorlevel=1) as archive:
        num_members = num_bytes = 0
        while member := archive.next():
            num_members, num_bytes = num_members + 1, num_bytes + abs(member.size)
            if num_bytes > MAX_UNPACKED_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            if num_members > MAX_MEMBERS:
                raise OSError(None, f"it holds more than {MAX_MEMBERS:,} files")
            if len(Path(member.name).parts) > _MAX_DEPTH:
                raise OSError(errno.ENAMETOOLONG, "its folders lie too deep")
            stream.allow(member.size)
            archive.extract(member, folder, filter="data")
            stream.allow(_MAX_HEADER_BYTES)
            # tarfile would keep all members and their headers in memory.
            archive.members = []  # type: ignore[attr-defined]
            archive.pax_headers = {}


def _read_archive(archive: Path, imports: Imports) -> None:
    """Add the runs in an archive; skip archives within it. Raises BadFile if it is not an archive."""
    inside = Imports()
    with unpacked(archive) as folder:
        files = [file for file in _walk(folder, inside) if not file.name.endswith(ARCHIVE_SUFFIXES)]
        _read_files(files, inside)
    for run in inside.runs.values():
        imports.add(replace(run, source=archive, files=()))
    if num_copies := inside.copies.total():
        imports.copies[archive] += num_copies
    for error in inside.skipped:
        path, problem = (text.replace(str(folder), str(archive)) for text in (str(error.path), error.problem))
        imports.skipped.append(BadFile(path, problem, line=error.line))


def _walk(folder: Path, imports: Imports) -> Iterator[Path]:
    """Yield the files under `folder` whose names can be imported, in order."""

    def skip(error: OSError) -> None:
        imports.skipped.append(BadFile(error.filename, f"cannot be read: {error.strerror}"))

    for place, subfolders, names in os.walk(folder, onerror=skip):
        subfolders.sort()
        for name in sorted(names):
            if name.endswith(_SUFFIXES) or name == RUN_FILE:
                path = Path(place, name)
                # Reading a pipe or a device never ends. A dangling link is reported when it is opened.
                if path.exists() and not path.is_file():
                    imports.skipped.append(BadFile(path, "is not a file"))
                else:
                    yield path


def _read_files(files: Iterable[Path], imports: Imports) -> None:
    """Add the runs in record files, CSV files and run files."""
    folders: dict[Path, list[Path]] = {}
    for file in dict.fromkeys(files):
        folders.setdefault(file.parent, []).append(file)
    for folder, siblings in folders.items():
        _read_folder(folder, siblings, imports)


def _read_folder(folder: Path, files: Sequence[Path], imports: Imports) -> None:
    """Add the runs in `files`, which lie in `folder` itself."""
    ranks: dict[str, list[Path]] = {}
    run_file: RunFile | None = None
    for path in files:
        try:
            if path.name == RUN_FILE:
                run_file = _read_run_file(path)
            elif path.suffix == ".csv":
                for published in read_published(path):
                    # In the form in which the ledger returns it.
                    row = read_summary(to_data(published))
                    run_file_of_row = RunFile(id=published_run_id(row))
                    imports.add(ImportedRun(run_file=run_file_of_row, summary=row, source=path))
            else:
                ranks.setdefault(read_header(path)["run_id"], []).append(path)
        except BadFile as error:
            imports.skip(error)
        except RecordError as error:
            imports.skipped.append(BadFile(error.path, error.problem, line=error.line))
        except OSError as error:
            imports.skipped.append(BadFile(path, f"cannot be read: {error.strerror or error}"))
    for paths in ranks.values():
        records, problems = read_records(paths)
        imports.skipped += problems
        if records:
            _add(_recorded(folder, records, run_file), imports)
    if run_file and run_file.summary and not ranks:
        _add(ImportedRun(run_file=run_file, summary=run_file.summary, source=folder), imports)


def _add(run: ImportedRun, imports: Imports) -> None:
    try:
        imports.add(_with_possible_gpus(run))
    except BadFile as error:
        imports.skip(error)


def _with_possible_gpus(run: ImportedRun) -> ImportedRun:
    """Return the run, with a warning if it had more processes than its instances have GPUs.

    Raises BadFile if each process had its own GPU, since the run would be charged for too few nodes.
    """
    setup, catalogue = run.summary.setup, load_catalogue()
    lack = catalogue.lack_of_gpus(setup.instance, num_gpus=setup.num_gpus, num_nodes=setup.num_nodes)
    if lack is None:
        return run
    if setup.device_name is None or catalogue.accelerator_of_device(setup.device_name):
        raise BadFile(run.files[0] if run.files else run.source, f"its ranks are {lack}")
    warnings = (*run.summary.warnings, f"its processes are {lack}: perhaps there were more nodes")
    return replace(run, summary=replace(run.summary, warnings=warnings))


def _recorded(folder: Path, records: list[RankRecord], run_file: RunFile | None) -> ImportedRun:
    records.sort(key=lambda record: (record.header["attempt"], record.header["rank"]))
    run_id = recorded_run_id(records[0].header)
    if run_file is None or run_file.id != run_id:
        run_file = RunFile(id=run_id)
    summary, _ = summarize_run(run_file.spec, records)
    assert summary is not None
    if run_file.summary:
        # No record holds the start-up time of its machine.
        names = ("boot_s", "pull_s", "install_s", "inputs_s", "input_bytes")
        known = {name: getattr(run_file.summary.startup, name) for name in names}
        summary = replace(summary, startup=replace(summary.startup, **known))
    if run_file.backend == "sagemaker" and summary.setup.instance:
        # Older records do not name the service.
        summary = replace(summary, environment=replace(summary.environment, service="sagemaker"))
    files = tuple(record.path for record in records)
    source = files[0] if len(files) == 1 else folder
    return ImportedRun(run_file=run_file, summary=summary, source=source, files=files)


def _read_run_file(path: Path) -> RunFile | None:
    """Return what `fastlaunch runs export` wrote; None for another file of that name. Raises BadFile."""
    try:
        data = json.loads(read_text(path))
        if not isinstance(data, dict) or data.get("schema") != RUN_SCHEMA:
            return None
        if not is_storable(data):
            raise BadFile(path, "holds an absurd number, or is nested too deeply")
        names = {of.name for of in fields(RunFile)}
        shared = {name: value for name, value in data.items() if name in names}
        shared |= {name: printable_data(shared[name]) for name in {"summary", "price"} & shared.keys()}
        return read(RunFile, shared, "run file")
    except BadFile:
        raise
    except UserError as error:
        raise BadFile(path, error.message) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(path, f"not a run file: {error!r}") from None


def _check_summary(summary: RunSummary) -> None:
    """Raise UserError for an impossible number."""
    setup, step = summary.setup, summary.timing.step_time_s
    counts = (setup.num_gpus, setup.num_nodes, setup.batch_size_per_gpu)
    times_s = (step.value if step else None, summary.figures.total_time_s)
    if 0 in counts or any(time_s is not None and time_s < _LEAST_S for time_s in times_s):
        raise UserError("a number of GPUs, nodes or samples, or a time, is not positive")
    for name, number in _numbers("summary", summary):
        if number < 0 and name not in _SIGNED:
            raise UserError(f"{name} is {number!r}")


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a dataclass, however deep, with the names of their fields."""
    if is_dataclass(value):
        for of in fields(value):
            yield from _numbers(of.name, getattr(value, of.name))
    elif isinstance(value, tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(name, item)
    elif isinstance(value, int | float):
        yield name, value
