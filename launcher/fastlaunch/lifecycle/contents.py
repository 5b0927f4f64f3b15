"""What a script is as it lies here: looked at when it travels, or just before it starts on this machine."""

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

#: The most that a source or a configuration has; what is larger is data.
_MOST_BYTES = 2**20


def all_with_contents(
    scripts: Sequence[Script], *, home: Path, directory: WorkingDirectory | None = None
) -> tuple[Script, ...]:
    """Return variants of a script as `with_contents` does, looked at once where they name the same files."""
    found: dict[tuple[object, ...], Script] = {}
    for script in scripts:
        if (names := names_in(script.argv)) not in found:
            found[names] = with_contents(script, home=home, directory=directory)
    known = ((script, found[names_in(script.argv)]) for script in scripts)
    return tuple(replace(script, files=of.files, commit=of.commit) for script, of in known)


def with_contents(
    script: Script,
    *,
    home: Path,
    directory: WorkingDirectory | None = None,
    runs: Sequence[tuple[datetime, datetime]] = (),
) -> Script:
    """Return the script with the digests of its files, and their commit, as they are now.

    directory: what of the current one travels; None where the script runs here. runs: see `script_now`. What
    cannot be read is not known, and keeps nothing from running.
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
    """Return a job's script, or the file of one's own workload, as it is now; None for what is ours.

    folder: where the job starts, from which its paths are. What travels stays as it was. runs: when runs
    began and ended here: a configuration that was last written meanwhile is what one of them wrote.
    """
    own, is_own, _ = job.workload.rpartition(".py:")
    script = job.script or (Script(command=("python", f"{own}.py")) if is_own else None)
    if script is None or script.files:
        return script
    try:
        with contextlib.chdir(folder):
            return with_contents(script, home=home, runs=runs)
    except OSError:
        return script


def _is_written_by(path: Path, runs: Sequence[tuple[datetime, datetime]]) -> bool:
    """Return whether it is no source and was last written while one of the runs went on."""
    if is_source(path.name):
        return False
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return any(began <= written <= ended for began, ended in runs)


def edited_since(runs: Iterable["Run"], label: str, script: Script) -> str:
    """Return the files in which a script is not what the last of the runs of that label ran; else nothing."""
    known = [files for run in runs if run.recipe == label and (files := _files_of(run))]
    return changed_files(dict(script.files), known[-1]) if known and script.files else ""


def _is_read(path: Path) -> bool:
    """Return whether a file is there, and no larger than what people write."""
    return path.is_file() and path.stat().st_size <= _MOST_BYTES


def _files_of(run: "Run") -> Mapping[str, str]:
    """Return the digests of what a run ran, or is to run; none where that is not known."""
    ran = run.summary.environment.files if run.summary else None
    return ran or dict(run.script.files if run.script else ())
