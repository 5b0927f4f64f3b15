"""Which files make a script what it is: those that it imports, and those that configure it.

We take their digests and commit when the script travels, or just before it starts on this machine. We follow
the import statements of a script. Where it imports names that it makes up, or is not Python, all sources
count.
"""

import ast
import contextlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path, PurePosixPath

from fastlaunch.jobs.job import Job, Script
from fastlaunch.jobs.scripts import script_file
from fastlaunch.jobs.working_directory import WorkingDirectory, commit_of, files_of
from fastlaunch_train.records.contents import digests_of, path_of, root_of

_PYTHON = ".py"
_SOURCES = (_PYTHON, ".pyx", ".sh", ".bash", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")
_CONFIGS = (".yaml", ".yml", ".toml", ".ini", ".cfg")
#: Some scripts read such files as configuration, others write them. One counts if its path has `conf` in it.
_JSON = ".json"
#: Configurations of tools, not of training.
_OF_TOOLS = ("pyproject.toml", "setup.cfg", "tox.ini", "mkdocs.yml")
#: Folders that tools fill, and folders to which training writes configurations.
_FILLED = ("wandb", "lightning_logs", "mlruns", "multirun", "__pycache__", "venv", "node_modules")
_WRITTEN = (
    *("output", "outputs", "out", "result", "results", "log", "logs", "runs", "checkpoint", "checkpoints"),
    "tb_logs",
)
#: Names in a source that imports or runs what nobody else can tell.
_DYNAMIC = {
    *("exec", "execfile", "import_module", "__import__", "run_path", "run_module", "walk_packages", "hydra"),
    *("iter_modules", "spec_from_file_location", "subprocess", "system", "load_source", "jsonargparse"),
}
#: Modules that Python and we bring, unless the script has a module of that name beside it.
_NOT_FOLLOWED = {*sys.stdlib_module_names, "fastlaunch", "fastlaunch_train"}
#: An option whose file a command writes.
_WRITES = re.compile(r"^-.*(out|result|save|log|metric|write|export|dump)", re.IGNORECASE)
#: A class or function of a module, such as `models.resnet.ResNet`, and not a file.
_DOTTED = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.\w+)+(?![\w/.])")
#: Larger files are data, not source or configuration.
_MOST_BYTES = 2**20


def may_count(path: str) -> bool:
    """Return whether a file may be part of a script's contents, by its path."""
    pure = PurePosixPath(path)
    folders = {part.lower() for part in pure.parts[:-1]}
    if pure.name in _OF_TOOLS or any(part.startswith(".") for part in pure.parts):
        return False
    is_config = pure.suffix in _CONFIGS or (pure.suffix == _JSON and "conf" in path.lower())
    return folders.isdisjoint(_FILLED) and (
        pure.suffix in _SOURCES or (is_config and folders.isdisjoint(_WRITTEN))
    )


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
    if path.name.endswith(_SOURCES):
        return False
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return any(began <= written <= ended for began, ended in runs)


def _is_read(path: Path) -> bool:
    """Return whether a file exists and is small enough to be written by hand."""
    return path.is_file() and path.stat().st_size <= _MOST_BYTES


def contents_of(argv: Sequence[str], files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files that make up a command's contents, by path. Raises OSError for an unreadable file.

    files: those that may count, by their paths in the repository. argv: as typed in the current directory.
    """
    named = {path_of(path): path for path in _files_in(argv)}
    file = script_file(argv)
    if file is not None and Path(file).is_file():
        named[path_of(file)] = Path(file)
    files = {**files, **named}
    reached = _reached(named, files, argv) if file is not None and file.endswith(_PYTHON) else None
    if reached is None:
        reached = {path for path in files if path.endswith(_SOURCES)}
    others = _beside(reached, files)
    return {path: file for path, file in files.items() if path in reached or path in others}


def _beside(reached: Collection[str], files: Collection[str]) -> set[str]:
    """Return the files other than Python that are beside or above these, or in folders without Python."""
    with_python = {PurePosixPath(path).parent for path in files if path.endswith(_PYTHON)}
    folders = {folder for path in reached for folder in PurePosixPath(path).parents}
    others = set()
    for path in files:
        folder = PurePosixPath(path).parent
        if path.endswith(_PYTHON) or (
            path.endswith(_JSON) and folder not in with_python and "conf" not in str(folder).lower()
        ):
            continue
        nearest = next((up for up in (folder, *folder.parents) if up in with_python), None)
        if nearest is None or nearest in folders:
            others.add(path)
    return others


def names_in(argv: Sequence[str]) -> tuple[object, ...]:
    """Return what `contents_of` reads of a command: equal for commands with the same contents."""
    return script_file(argv), *_files_in(argv), *_DOTTED.findall(" ".join(argv))


def _files_in(argv: Sequence[str]) -> Iterator[Path]:
    """Yield the sources and configurations that a command names, as in `--config=a.json`.

    A file that an option such as `--out` names is written, and does not count.
    """
    for option, word in pairwise(["", *argv]):
        if _WRITES.search(word.partition("=")[0] if word.startswith("-") else option):
            continue
        for text in {word, word.partition("=")[2]}:
            if text.endswith((*_SOURCES, *_CONFIGS, _JSON)) and Path(text).is_file():
                yield Path(text)


def _reached(named: Mapping[str, Path], files: Mapping[str, Path], argv: Sequence[str]) -> set[str] | None:
    """Return the named files and all that they import, directly or not; None if nobody can tell."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in files:
        if path.endswith(_PYTHON):
            parts = PurePosixPath(path.removesuffix("/__init__.py").removesuffix(_PYTHON)).parts
            # The import path may begin at any folder.
            for at in range(len(parts)):
                modules[".".join(parts[at:])].append(path)
    beside = {PurePosixPath(path).parent for path in named}
    configs = [path for path in _beside(named, files) if path.endswith(_CONFIGS)]
    configured = " ".join([*argv, *(_text(files[path]) for path in configs)])
    # A configuration may name a class.
    classes = [name for name in _DOTTED.findall(configured) if not name.endswith(_PYTHON)]
    left = [*named, *(path for name in classes for path in modules.get(name.rpartition(".")[0], ()))]
    reached: set[str] = set()
    while left:
        path = left.pop()
        if path in reached:
            continue
        reached.add(path)
        if not path.endswith(_PYTHON):
            continue
        try:
            names = _imports(ast.parse(files[path].read_bytes()), path)
        except (SyntaxError, ValueError, RecursionError):
            return None
        if names is None:
            return None
        for name in names:
            modules_of_name = modules.get(name, [])
            nearest = [
                candidate
                for candidate in modules_of_name
                if _base(candidate, name) in (*beside, PurePosixPath(path).parent)
            ]
            is_elsewhere = name.partition(".")[0] not in _NOT_FOLLOWED
            left += nearest or (modules_of_name if is_elsewhere else [])
    return reached


def _base(path: str, module: str) -> PurePosixPath:
    """Return the folder from which a module of this name is at the path."""
    return PurePosixPath(path).parents[module.count(".") + path.endswith("/__init__.py")]


def _imports(tree: ast.AST, path: str) -> set[str] | None:
    """Return the modules that a source imports, and names in them that may be modules.

    Return None if it imports by other means.
    """
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = PurePosixPath(path).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *filter(None, [node.module])])
            names += [".".join(filter(None, [module, alias.name])) for alias in node.names]
        elif (getattr(node, "id", None) or getattr(node, "attr", None)) in _DYNAMIC:
            return None
    if any(name.partition(".")[0] in _DYNAMIC for name in names):
        return None
    # With `a.b.c` also `a` and `a.b`.
    return {
        ".".join(parts[: at + 1]) for name in names if (parts := name.split(".")) for at in range(len(parts))
    }


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
