"""Pack `--requirements FILE` as one object: what pip installs on the node, and the wheels for that.

pip resolves the file here once, for the node's Python, so the node needs no index. There pip installs by the
file itself: what the image holds stays, unless the file forbids it. The image's torch stays, too, so neither
torch nor what comes with it travels, unless the file pins another one: `torch==2.11.0`.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastlaunch.catalog.container_images import BaseImage
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text
from fastlaunch.core.units import counted, size_text
from fastlaunch.jobs.code_bundle import QUIETLY, Bundle, bundle_of, pack, run_pip

#: The most bytes of all wheels together.
MAX_WHEEL_BYTES = 2**30
#: Options of pip that say where to look for packages. They count here, not on a node without an index.
_WITH_ADDRESS = ("-i", "--index-url", "--extra-index-url", "-f", "--find-links")
#: One option a line: pip takes several, and any of them may name a file.
_OPTIONS = re.compile(
    rf"(?P<name>{'|'.join(_WITH_ADDRESS)}|--trusted-host)[ =]*(?P<value>\S+)|--no-index|--prefer-binary|--pre"
)
_INCLUDE = re.compile(r"(?:-r|--requirement)[ =]*(.+)")
_VERSION = r"(?:===?|[~!<>]=|[<>])\s*[\w.*+!-]+"
#: A requirement by PEP 508, without the form `name @ address`; then the options that pip takes behind it.
_PACKAGE = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)\s*(?:\[[\w.,\s-]*\])?\s*"
    rf"(?P<versions>\(?\s*(?:{_VERSION}\s*(?:,\s*{_VERSION}\s*)*,?)?\s*\)?)\s*(?:;(?:(?!\s-).)*)?"
    r"(?:\s--(?:hash|config-settings?|global-option)[ =]+\S+)*",
    re.ASCII,
)
#: Requirements that pip looks for on this machine, or at an address: `./a`, `a.whl`, `a @ file:b`.
_ELSEWHERE = re.compile(
    r".*://.*|[./\\].*|\S+\.(whl|zip|t[bglx]z\d?|tar(\.\w+)?)(\W.*)?|[\w.-]+\s*(\[[^]]*\])?\s*@.*",
    re.IGNORECASE,
)
#: The address of an index, with or without a login; and a login that ends in a variable of the environment.
_ADDRESS = re.compile(r"https?://(?P<login>[^/]*@)?.*", re.IGNORECASE)
_VARIABLE = r"\$\{\w+\}"
_LOGIN = re.compile(rf"([^:]*:)?{_VARIABLE}@")
_FROM_VARIABLE = re.compile(rf"{_VARIABLE}[^@:]*")
#: Packages that are built for one torch.
_WITH_TORCH = ("torch", "torchvision", "torchaudio")
#: Packages that torch brings for its GPUs.
_OF_TORCH = re.compile(r"nvidia-|cuda-|triton$|pytorch-triton")
#: Versions of glibc that all of AWS's images support, as wheels name them.
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"),
)
#: pip judges `; python_version < "3.12"` by the Python that runs it. This pip judges by the node's Python.
_PIP = """
import json, runpy, sys
from pip._vendor.packaging import markers
own, nodes = markers.default_environment, json.loads(sys.argv.pop(1))
markers.default_environment = lambda: {**own(), **nodes}
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
#: The most of pip's errors that are shown.
_MOST = 3


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """A file in pip's format, and those that it includes."""

    #: Packages with their versions.
    packages: tuple[str, ...]
    #: Options that say where pip looks for them.
    options: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the packages."""
        return tuple(match["name"] for package in self.packages if (match := _PACKAGE.match(package)))

    @property
    def pins_torch(self) -> bool:
        matches = filter(None, map(_PACKAGE.match, self.packages))
        return any(
            match["name"].lower() == "torch" and match["versions"].startswith("==") for match in matches
        )


def read_requirements(path: Path, *, from_index: bool = False) -> Requirements:
    """Return what the file requires. Raises BadFile for what cannot travel, and for an empty file.

    from_index: whether the node's pip, which sees no folder of this machine, looks for the packages.
    """
    folders = path.resolve().parents
    # No file above it is included: what that holds may be private.
    root = next((folder for folder in folders if (folder / ".git").exists()), folders[0])
    lines = list(_lines(path, root, from_index=from_index))
    packages = [line for line in lines if not line.startswith("-")]
    options = [line for line in lines if line.startswith("-")]
    if not packages:
        raise BadFile(path, "it names no package", hint="write a name a line, or leave out --requirements")
    return Requirements(packages=tuple(packages), options=tuple(options))


def requirements_bundle(path: Path, base: BaseImage | None) -> Bundle:
    """Return what a node needs to install the file's packages.

    base: the image to resolve wheels for; None to leave that to the node's pip and its index. Raises
    UserError if pip cannot resolve the file, or if the wheels are too large.
    """
    required = read_requirements(path, from_index=base is None)
    if base is None:
        text = "".join(f"{line}\n" for line in (*required.options, *required.packages))
        return bundle_of(pack({"requirements.txt": text.encode()}, folder="requirements"))
    return _wheels(path, required, base)


@lru_cache(maxsize=1)
def _wheels(path: Path, required: Requirements, base: BaseImage) -> Bundle:
    """Return the bundle with wheels. All instance types of a sweep get the same one."""
    with tempfile.TemporaryDirectory(prefix="fastlaunch-wheels-") as scratch:
        wheels = Path(scratch, "wheels")
        wheels.mkdir()
        _fetch(path, required, base, wheels)
        sizes = {wheel.name: wheel.stat().st_size for wheel in wheels.iterdir()}
        if (total := sum(sizes.values())) > MAX_WHEEL_BYTES:
            largest = sorted(sizes, key=lambda name: -sizes[name])[:_MOST]
            named = ", ".join(f"{name} {size_text(sizes[name])}" for name in largest)
            raise UserError(
                f"{path} resolves to {counted(len(sizes), 'wheel')} of {size_text(total)}, and at most "
                f"{size_text(MAX_WHEEL_BYTES)} travel; the largest: {named}",
                "choose the --base-image that has the torch it pins; or add --requirements-from-index, which "
                "installs from the index of the machine's pip",
            )
        text = "".join(f"{line}\n" for line in required.packages)
        packed = {"requirements.txt": text.encode()}
        return bundle_of(pack(packed, folder=wheels.name, wheels=sorted(wheels.iterdir())))


def _lines(path: Path, root: Path, above: tuple[Path, ...] = (), *, from_index: bool) -> Iterator[str]:
    """Yield the lines that say something, also those of included files. Raises BadFile.

    Everything but packages of an index is refused. root: the folder of all files that may be included. above:
    the files that include this one.
    """
    # A line that goes on in the next one counts as the first of both. A comment ends with its line.
    text = re.sub(r"(?m)^([ \t]*#.*?)\\+(?=\r?$)", r"\1", read_text(path))
    joined = re.sub(r"\\\r?\n", "\0", text)
    number = 1
    for line in joined.splitlines():
        at, number = number, number + 1 + line.count("\0")
        text = re.sub(r"(^|\s)#.*", "", line.replace("\0", " ")).strip()
        if not text:
            continue
        if include := _INCLUDE.fullmatch(text):
            file = path.parent / include[1]
            if path.resolve() in above:
                raise BadFile(path, "includes itself", line=at)
            if not file.resolve().is_relative_to(root):
                hint = "include files of the same repository, or copy its lines"
                raise BadFile(path, f"includes a file outside {root}", line=at, hint=hint)
            yield from _lines(file, root, (*above, path.resolve()), from_index=from_index)
        elif text.startswith("-"):
            yield _option(path, at, text, from_index=from_index)
        elif _ELSEWHERE.fullmatch(text):
            raise BadFile(
                path,
                "it names a file or an address, and only packages of an index travel",
                line=at,
                hint="code of your own travels with the working directory",
            )
        elif not _PACKAGE.fullmatch(text):
            raise BadFile(path, f"{text!r} names no package", line=at)
        else:
            yield text


def _option(path: Path, at: int, text: str, *, from_index: bool) -> str:
    """Return the option as it travels, or as pip takes it here. Raises BadFile if it does neither."""
    option = _OPTIONS.fullmatch(text)
    if option is None:
        hint = "name packages and their versions, and give one option a line"
        raise BadFile(path, f"{text.split()[0]} cannot travel", line=at, hint=hint)
    value = option["value"] or ""
    if value and not from_index:
        is_here = option["name"] in ("-f", "--find-links") and (path.parent / value).exists()
        return f"--find-links {(path.parent / value).resolve()}" if is_here else text
    address = _ADDRESS.fullmatch(value)
    if option["name"] in _WITH_ADDRESS and address is None and not _FROM_VARIABLE.fullmatch(value):
        raise BadFile(
            path,
            f"{option['name']} names no address of http or https, and the job sees no folder of yours",
            line=at,
            hint="leave out --requirements-from-index: then the pip that is here looks there",
        )
    if address and address["login"] and not _LOGIN.fullmatch(address["login"]):
        raise BadFile(
            path,
            f"the address of {option['name']} has a password in it, which would be stored with the job",
            line=at,
            hint="give the address as a secret: --secret PIP_INDEX_URL=ARN",
        )
    return text


def _fetch(path: Path, required: Requirements, base: BaseImage, to: Path) -> None:
    """Let pip resolve the file for the image, and download the wheels that travel. Raises UserError."""
    python = ".".join(base.python.split(".")[:2])
    environment = {
        **{"python_version": python, "python_full_version": f"{python}.0"},
        **{"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"},
        **{"platform_machine": "x86_64", "implementation_name": "cpython"},
        "platform_python_implementation": "CPython",
    }
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    pip = ["-c", _PIP, json.dumps(environment)]
    names = ("report.json", "torch.txt", "listed.txt", "checked.txt")
    report, constraints, listed, checked = (to.parent / name for name in names)
    constraints.write_text("" if required.pins_torch else f"torch=={base.torch}\n")
    report_only = ["--dry-run", "--ignore-installed", "--target", str(to), "--report", str(report)]
    # pip may read more of the file than was checked, so it gets what was checked.
    checked.write_text("\n".join([*required.options, *required.packages]), encoding="utf-8")
    sources = ["--requirement", str(checked), "--constraint", str(constraints)]
    problem = run_pip(*pip, "install", *report_only, *QUIETLY, *target, *sources)
    if not problem:
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
        pins = [
            f"{item['metadata']['name']}=={item['metadata']['version']} "
            f"--hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}"
            for item in _travelling(items, base.torch)
        ]
        if pins:
            listed.write_text("\n".join([*required.options, *pins]), encoding="utf-8")
            pinned = ["--no-deps", "--requirement", str(listed), "--dest", str(to)]
            problem = run_pip(*pip, "download", *QUIETLY, *target, *pinned)
    if problem:
        raise UserError(
            "\n  ".join(
                [f"pip cannot resolve {path} into wheels for Python {python} on Linux:", *problem[-_MOST:]]
            ),
            f"correct it; the image has torch {base.torch}, which stays unless it pins another (torch==...)",
        )


def _travelling(items: list[dict[str, Any]], torch: str) -> list[dict[str, Any]]:
    """Return the items of pip's report that the image may lack."""
    by_name = {_normal(item["metadata"]["name"]): item for item in items}
    if "torch" not in by_name or by_name["torch"]["metadata"]["version"].partition("+")[0] != torch:
        return items
    of_image, names = set(), {*_WITH_TORCH} & by_name.keys()
    while names:
        of_image |= names
        needs = {need for name in names for need in _needs(by_name[name]["metadata"])}
        names = {name for name in needs & by_name.keys() if _OF_TORCH.match(name)} - of_image
    return [item for name, item in by_name.items() if name not in of_image]


def _needs(metadata: Mapping[str, Any]) -> Iterator[str]:
    for need in metadata.get("requires_dist", ()):
        if match := _PACKAGE.match(need):
            yield _normal(match["name"])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
