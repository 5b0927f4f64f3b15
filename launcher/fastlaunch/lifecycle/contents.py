"""The digests and commit of a script, taken when it travels or just before it starts on this machine."""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.jobs.contents import contents_of, is_source, may_count, names_in
from fastlaunch.jobs.job import Job, Script
from fastlaunch.jobs.scripts import script_file
from fastlaunch.jobs.working_directory import WorkingDirectory, commit_of, files_of
from fastlaunch.measure.headers import changed_files
from fastlaunch_train.records.contents import digests_of, root_of

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run

#: Larger files are data, not source or configuration.
_MOST_BYTES = 2**20


def all_with_contents(
    scripts: Sequence[Script], *, home: Path, directory: WorkingDirectory | None = None
) -> tuple[Script, ...]:
    """Return variants of a script as `with_contents` does. Those that name the same files share a look."""
    by_names: dict[tuple[object, ...], Script] = {}
    for script in scripts:
        if (names := names_in(script.argv)) not in by_names:
            by_names[names] = with_contents(script, home=home, directory=directory)
    known = ((script, by_names[names_in(script.argv)]) for script in scripts)
    return tuple(replace(script, files=read.files, commit=read.commit) for script, read in known)


def with_contents(
    script: Script,
    *,
    home: Path,
    directory: WorkingDirectory | None = None,
    runs: Sequence[tuple[datetime, datetime]] = (),
) -> Script:
    """Return the script with the current digests and commit of its files.

    directory: the part of the current directory that travels; None where the script runs here. runs: see
    `script_now`. Unreadable files have no digest, and do not keep the script from running.
    """
    path = Path(os.path.realpath(script_file(script.argv) or "-"))
    root = root_of(path)
    try:
        listed = files_of(root, home=home)
        if directory is not None:
            travels = {os.path.relpath(directory.root / file.path, root) for file in directory.files}
            listed = [name for name in listed if name in travels]
        counted = {name: root / name for name in listed if may_count(name) and _is_read(root / name)}
        contents = contents_of(script.argv, counted)
        files = digests_of({name: path for name, path in contents.items() if not _is_written_by(path, runs)})
    except OSError:
        return script
    return replace(script, files=tuple(files.items()), commit=commit_of(root) if files else None)


def script_now(
    job: Job, folder: str | Path, *, home: Path, runs: Sequence[tuple[datetime, datetime]] = ()
) -> Script | None:
    """Return a job's script, or the file of the user's workload, as it is now; None for a shipped workload.

    folder: where the job starts; its paths are relative to it. A script that travels is returned unchanged.
    runs: start and end of the runs here. A configuration that was last written within one is its output.
    """
    module, is_own, _ = job.workload.rpartition(".py:")
    script = job.script or (Script(command=("python", f"{module}.py")) if is_own else None)
    if script is None or script.files:
        return script
    try:
        with contextlib.chdir(folder):
            return with_contents(script, home=home, runs=runs)
    except OSError:
        return script


def _is_written_by(path: Path, runs: Sequence[tuple[datetime, datetime]]) -> bool:
    """Return whether the file is not a source and was last written during one of the runs."""
    if is_source(path.name):
        return False
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return any(began <= written <= ended for began, ended in runs)


def edited_since(runs: Iterable["Run"], label: str, script: Script) -> str:
    """Return which files of a script changed since the last run with that label; empty if none."""
    known = [files for run in runs if run.recipe == label and (files := _files_of(run))]
    return changed_files(dict(script.files), known[-1]) if known and script.files else ""


def _is_read(path: Path) -> bool:
    """Return whether a file exists and is small enough to be written by hand."""
    return path.is_file() and path.stat().st_size <= _MOST_BYTES


def _files_of(run: "Run") -> Mapping[str, str]:
    """Return the digests of a run's files; empty if they are unknown."""
    ran = run.summary.environment.files if run.summary else None
    return ran or dict(run.script.files if run.script else ())
