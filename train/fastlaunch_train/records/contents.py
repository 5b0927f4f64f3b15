"""Identify a run's script: its path in its repository, and its files' digests, `files` of a header."""

import json
import os
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path, PurePath

from fastlaunch_train.records.data_identity import digest_of, digest_of_file

#: The variable that gives a run its files' digests as JSON.
VARIABLE = "FASTLAUNCH_FILES"
#: Hex digits of a version: among a few hundred versions two agree by chance in one case of a billion.
_DIGITS = 12
#: If there are more files, each folder's files share one digest.
_MOST_FILES = 100


def repository_of(path: Path) -> Path | None:
    """Return the root of the git repository of `path`; a home folder in git does not count."""
    home = Path(os.environ.get("HOME") or "/")
    # Path.exists raises for a folder that may not be searched.
    roots = (folder for folder in path.parents if os.access(folder / ".git", os.F_OK))
    return next((root for root in roots if root != home), None)


def root_of(path: Path) -> Path:
    """Return the folder that a script's path is relative to: its repository, the current one, or its own."""
    here = Path.cwd().resolve()
    return repository_of(path) or (here if path.is_relative_to(here) else path.parent)


def path_of(script: str | Path) -> str:
    """Return a script's path in its repository, or else in the current directory, following links."""
    path = Path(os.path.realpath(script))
    return path.relative_to(root_of(path)).as_posix()


def digests_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the digests of files by their paths; for many files, of folders, `src/`. Raises OSError."""
    digests = {name: digest_of_file(files[name])[0] for name in sorted(files)}
    if len(digests) <= _MOST_FILES:
        return digests
    folders: dict[str, list[str]] = {}
    for name, digest in digests.items():
        first, *below = PurePath(name).parts
        folders.setdefault(f"{first}/" if below else first, []).append(f"{name} {digest}")
    folder_digests = {name: digest_of(map(os.fsencode, entries)) for name, entries in folders.items()}
    return folder_digests if len(folder_digests) <= _MOST_FILES else {"./": digest_of(_encoded(digests))}


def version_of(files: object) -> str | None:
    """Return one version for files with these digests; None if a header has none."""
    if not isinstance(files, Mapping) or not files:
        return None
    return digest_of(_encoded(dict(sorted((str(name), str(digest)) for name, digest in files.items()))))[
        :_DIGITS
    ]


def files_here(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return the digests from the launcher; else those of the script and of the modules it has imported.

    None if there is no script, or it cannot be read.
    """
    try:
        if given := environment.get(VARIABLE):
            files = json.loads(given)
            return {str(name): str(digest) for name, digest in files.items()}
        script = Path(os.path.realpath(sys.argv[0]))
        root = root_of(script)
        loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        paths = [Path(os.path.realpath(file)) for file in loaded if isinstance(file, str)]
        imported = {path for path in paths if path.is_relative_to(root) and not is_installed(path)}
        return digests_of({path.relative_to(root).as_posix(): path for path in {script, *imported}})
    except (OSError, ValueError, AttributeError):
        return None


def is_installed(path: Path) -> bool:
    """Return whether a file belongs to Python, or to a package that was installed."""
    is_package = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return is_package or path.is_relative_to(Path(os.__file__).resolve().parent)


def _encoded(digests: Mapping[str, str]) -> list[bytes]:
    return [os.fsencode(text) for text in chain.from_iterable(digests.items())]
