"""Find what travels with a script: the files that git tracks, or that .fastlaunchignore leaves.

Without git and that file, all files of the working directory travel. fastlaunch's home never does.
"""

import contextlib
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text
from fastlaunch.core.units import counted, size_text

IGNORE_FILE = ".fastlaunchignore"
#: The most bytes of all files together, before they are packed.
MAX_BYTES = 200 * 2**20
#: Names that no job needs, where git does not decide.
_NEVER = (".git", "__pycache__")
_GIT_LIMIT_S = 60
#: A folder without git that has more files holds data.
_MOST_WALKED = 20_000
#: The most entries to name where files are too large.
_MOST = 4


@dataclass(frozen=True, kw_only=True)
class TravellingFile:
    """A file, or a link to another one."""

    #: From the working directory, with `/`.
    path: str
    num_bytes: int
    is_executable: bool = False
    #: Where a link points, from its own folder; None for a file.
    target: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorkingDirectory:
    """The files of a folder that travel."""

    root: Path
    #: Sorted by path.
    files: tuple[TravellingFile, ...]
    #: What decides: `git` or `.fastlaunchignore`; None where all files travel.
    rule: str | None
    #: Paths that git neither tracks nor ignores.
    untracked: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def largest(self) -> list[TravellingFile]:
        """The files, the largest first."""
        return sorted(self.files, key=lambda file: (-file.num_bytes, file.path))

    @property
    def why_not(self) -> tuple[str, str]:
        """Why a file that is here does not travel, and what to type, with `{}` for its path."""
        if self.rule == "git":
            return "git does not track it", "type: git add {}"
        if self.rule == IGNORE_FILE:
            return f"{IGNORE_FILE} names it", f"add a line `!/{{}}` to {IGNORE_FILE}"
        return "it is in a cache, or in fastlaunch's own home", "move it elsewhere"


def working_directory(root: Path, *, home: Path) -> WorkingDirectory:
    """Return the files of `root` that travel. home: fastlaunch's own.

    Raises UserError if none or too much would travel, a file cannot be read, or a link leads out of `root`.
    """
    root, home = root.resolve(), home.resolve()
    paths, rule, untracked = _paths(root)
    travelling = (_file(root, path) for path in paths if not (root / path).is_relative_to(home))
    files = tuple(sorted(filter(None, travelling), key=lambda file: file.path))
    if not files:
        why = {"git": "git tracks nothing here", IGNORE_FILE: f"{IGNORE_FILE} leaves nothing"}.get(rule or "")
        raise UserError(
            f"no file of {root} travels with the job: {why or 'there is none'}",
            f"`git add` what the script needs, or say in {IGNORE_FILE} what stays behind",
        )
    directory = WorkingDirectory(root=root, files=files, rule=rule, untracked=tuple(sorted(untracked)))
    if directory.num_bytes > MAX_BYTES:
        raise _too_large(directory)
    return directory


def files_of(root: Path, *, home: Path) -> list[str]:
    """Return the paths in a folder, without those that git or the ignore file ignores.

    Return none of an unreadable folder, or of one with very many files. home: fastlaunch's.
    """
    paths: Iterable[str] | None = None
    try:
        is_ignored = _ignored(root / IGNORE_FILE) if (root / IGNORE_FILE).exists() else lambda path: False
        if (root / ".git").exists():
            with contextlib.suppress(UserError):
                others = _git(root, "--others", "--exclude-standard")
                paths = others | _git(root, "--cached", "--recurse-submodules")
        if paths is None:
            paths = list(islice(_walk(root, is_ignored), _MOST_WALKED + 1))
            paths = paths if len(paths) <= _MOST_WALKED else []
    except UserError:
        return []
    return [path for path in paths if not is_ignored(path) and not (root / path).is_relative_to(home)]


def commit_of(root: Path) -> str | None:
    """Return the commit of a repository, `-dirty` if it was changed since; None without one."""
    try:
        return ask_git(root, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*").decode().strip()
    except UserError:
        return None


def shown(path: str) -> str:
    """Return a path that can be printed, whatever bytes its name has."""
    return os.fsencode(path).decode(errors="replace")


def _paths(root: Path) -> tuple[Iterable[str], str | None, Iterable[str]]:
    """Return the paths that travel, what decides so, and those that git does not know."""
    if (root / IGNORE_FILE).exists():
        return _walk(root, _ignored(root / IGNORE_FILE)), IGNORE_FILE, ()
    if any((folder / ".git").exists() for folder in (root, *root.parents)):
        tracked = _git(root, "--cached", "--recurse-submodules")
        return tracked, "git", _git(root, "--others", "--exclude-standard")
    if root in (Path.home().resolve(), *Path.home().resolve().parents):
        raise UserError(
            f"{root} does not travel as a whole: what is in it may be private",
            f"run this in the folder of the script, or say in {IGNORE_FILE} what stays behind",
        )
    return _walk(root, lambda path: False), None, ()


def _git(root: Path, *which: str) -> set[str]:
    """Return paths of git's list. Raises UserError if git cannot tell."""
    return {os.fsdecode(name) for name in ask_git(root, "ls-files", "-z", *which).split(b"\0") if name}


def ask_git(root: Path, *arguments: str) -> bytes:
    """Return what git prints. Raises UserError if it fails.

    Nothing runs that the repository's configuration names: no monitor of files, no hook, and none of the
    filters with which git compares changed files.
    """
    ours = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    names = _run_git(root, "config", "--local", "--includes", "--name-only", "--list", "-z").split(b"\0")
    filters = {name for name in map(os.fsdecode, names) if name.startswith("filter.")}
    return _run_git(
        root, *ours, *(word for name in sorted(filters) for word in ("-c", f"{name}=")), *arguments
    )


def _run_git(root: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_LIMIT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except FileNotFoundError:
        problem = "git is not installed"
    except subprocess.TimeoutExpired:
        problem = f"git had not said so after {_GIT_LIMIT_S} s"
    except subprocess.CalledProcessError as error:
        problem = next(iter(error.stderr.decode(errors="replace").splitlines()), "git failed")
    else:
        return done.stdout
    raise UserError(
        f"it is not known what of {root} travels with the job: {problem}",
        f"write a {IGNORE_FILE}, which says it instead of git",
    )


def _ignored(path: Path) -> Callable[[str], bool]:
    """Return a function that tells whether a path stays behind; a folder ends with `/`. Raises BadFile."""
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(read_text(path).splitlines()).match_file
    except ValueError as error:
        raise BadFile(path, f"cannot be understood: {error}") from None


def _walk(root: Path, is_ignored: Callable[[str], bool]) -> Iterator[str]:
    """Yield the paths of all files and links, less those that are ignored or in an ignored folder."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error.strerror)

    for folder, folders, names in os.walk(root, onerror=refuse):
        inside = PurePath(folder).relative_to(root)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = [
            name
            for name in folders
            if name not in (*_NEVER, *links) and not is_ignored(f"{(inside / name).as_posix()}/")
        ]
        for name in (*names, *links):
            path = (inside / name).as_posix()
            if name not in _NEVER and not is_ignored(path):
                yield path


def _file(root: Path, path: str) -> TravellingFile | None:
    """Return the file or link; None for anything else, and for a tracked file that is gone."""
    here = root / path
    try:
        status = here.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    folder = Path(os.path.realpath(here.parent))
    if not folder.is_relative_to(root) or ".git" in folder.relative_to(root).parts:
        # Git tracks the folder, which has become a link since.
        raise UserError(
            f"{shown(path)} lies behind a link that leads to {folder}, which does not travel",
            f"put the folder itself in the place of the link, or leave it out by {IGNORE_FILE}",
        )
    if stat.S_ISLNK(status.st_mode):
        real = Path(os.path.realpath(here))
        if not real.is_relative_to(root):
            raise UserError(
                f"the link {shown(path)} leads out of {root}, to {real}, which does not travel",
                f"put a copy in its place, or leave it behind with a line `/{shown(path)}` in {IGNORE_FILE}",
            )
        target = here.readlink()
        within = os.path.relpath(real, here.parent) if target.is_absolute() else str(target)
        return TravellingFile(path=path, num_bytes=0, target=within)
    if not stat.S_ISREG(status.st_mode):
        return None
    if not os.access(here, os.R_OK):
        raise _unreadable(here, "Permission denied")
    return TravellingFile(
        path=path, num_bytes=status.st_size, is_executable=bool(status.st_mode & stat.S_IXUSR)
    )


def _unreadable(path: Path, why: str | None) -> BadFile:
    return BadFile(
        path, f"cannot be read, to travel with the job: {why}", hint=f"leave it behind, by {IGNORE_FILE}"
    )


def _too_large(directory: WorkingDirectory) -> UserError:
    sizes: Counter[str] = Counter()
    for file in directory.files:
        first, is_below, _ = file.path.partition("/")
        sizes[first + ("/" if is_below else "")] += file.num_bytes
    largest = sizes.most_common(_MOST)
    named = ", ".join(f"{shown(name)} {size_text(num_bytes)}" for name, num_bytes in largest)
    # If git decided until now, keep its ignore rules.
    goes_on = directory.rule == "git" and (directory.root / ".gitignore").exists()
    command = f"cp .gitignore {IGNORE_FILE} && " * goes_on + f"echo /{shown(largest[0][0])} >> {IGNORE_FILE}"
    return UserError(
        f"{counted(len(directory.files), 'file')} of {size_text(directory.num_bytes)} would travel with the "
        f"job, and at most {size_text(MAX_BYTES)} do; the largest: {named}",
        f"say in {IGNORE_FILE} what stays behind, as in: {command}; "
        "the script has to fetch larger data itself",
    )
