"""Runs as files to keep, send and import elsewhere: compressed record files and the ledger's data."""

import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from fastlaunch.analysis.pooling import Group
from fastlaunch.analysis.pricing import PriceRequest, price_row
from fastlaunch.core.errors import UserError
from fastlaunch.core.terminal import as_warning
from fastlaunch.ledger.ledger import IMPORT, Ledger, Run
from fastlaunch.lifecycle.describe import all_to_dict, run_to_dict
from fastlaunch.lifecycle.importer import ARCHIVE_SUFFIXES, RUN_FILE, RUN_SCHEMA, find_runs, unpacked
from fastlaunch.lifecycle.measured import measured_run
from fastlaunch.lifecycle.world import World
from fastlaunch.measure.outcome import read_records
from fastlaunch.report.trackers import TrackedRun, tracked_run
from fastlaunch_train.records.records import SUFFIXES, DamagedFile, open_unpacked

#: A folder with such a name would be taken for an archive.
_OTHER_ARCHIVES = (".zip", ".tar", ".gz", ".xz", ".bz2", ".zst", ".tbz2", ".7z")


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
            with _new_archive(packed, destination.name) as archive:
                archive.add(Path(temporary, "runs"), arcname="runs")
            packed.rename(destination)
        return missing
    except DamagedFile as error:
        raise UserError(f"a record file cannot be read: {error.strerror}", "leave its run out") from None
    except OSError as error:
        raise UserError(
            f"{destination} cannot be written: {error.strerror or error}",
            "free some space, or give another --to",
        ) from None


def _new_archive(path: Path, name: str) -> tarfile.TarFile:
    """Return an empty archive at `path`, lightly compressed, since its files are compressed already."""
    if name.endswith(".xz"):
        return tarfile.open(path, "w:xz", preset=0)
    return tarfile.open(path, "w:gz", compresslevel=1)


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
            missing.append(f"run {run.id}: {_without_records(run)}")
        run_file = {"schema": RUN_SCHEMA, **all_to_dict(ledger, run, home=home, now=now)}
        Path(folder, RUN_FILE).write_text(json.dumps(run_file, indent=2) + "\n", encoding="utf-8")
    return missing


def _without_records(run: Run) -> str:
    if run.summary is None:
        return f"it is {run.state} and recorded nothing; `runs import` will pass over it"
    return "its record files are gone; only what the ledger knows is exported"


@contextmanager
def record_files(run: Run) -> Iterator[tuple[Path, ...]]:
    """Give the run's record files, wherever they are. They are readable within the context."""
    place = run.directory
    if place is None or not place.exists():
        yield ()
    elif run.backend != IMPORT:
        # The folder is the run's alone, so unreadable files are exported too, for a person to look at.
        yield tuple(sorted(file for file in place.iterdir() if file.name.endswith(SUFFIXES)))
    elif place.name.endswith(ARCHIVE_SUFFIXES):
        with unpacked(place) as folder:
            yield _files_of(run, folder)
    else:
        yield _files_of(run, place)


def _files_of(run: Run, place: Path) -> tuple[Path, ...]:
    try:
        imported = find_runs([place]).runs.get(run.recorded_id)
    except UserError:
        return ()
    return imported.files if imported else ()


def compress(file: Path, folder: Path) -> None:
    """Write a record file into `folder`, compressed by xz."""
    with (
        lzma.open(Path(folder, f"{plain_name(file)}.xz"), "wb") as target,
        open_unpacked(file) as source,
    ):
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
