"""The pure-Python wheels that travel with the training code: pinned by hash, fetched once by pip.

FASTLAUNCH_WHEELS names a list to take instead of the shipped containers/wheels.txt: for another version, or
for what a workload file of the user's own imports.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import shipped
from fastlaunch.core.settings import Settings

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[\w.!+]+) +--hash=sha256:(?P<sha256>[0-9a-f]{64})"
)
#: Compiled code, which the container's Python might not load and which no `none-any` wheel may hold.
_COMPILED = (".so", ".pyd", ".dylib", ".dll", ".a")
#: The images have their own, which a second copy would shadow.
_NEVER = frozenset({"torch", "torchvision", "torchaudio", "transformer-engine", "numpy"})
_FETCH_LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One wheel: of this project and version, with these bytes."""

    name: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        """What its file's name starts with, as PyPA's wheel format has it."""
        return f"{re.sub(r'[-_.]+', '_', self.name).lower()}-{self.version}"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def wheel_folder(settings: Settings) -> Path:
    """Where wheels are kept once they were fetched."""
    return settings.home / "wheels"


def wanted_pins() -> tuple[Pin, ...]:
    """The wheels of the list that FASTLAUNCH_WHEELS names, else of the shipped one."""
    named = os.environ.get("FASTLAUNCH_WHEELS")
    return read_pins(Path(named) if named else shipped("containers/wheels.txt"))


def read_pins(path: Path) -> tuple[Pin, ...]:
    """The pins of a file in pip's format, `name==version --hash=sha256:...` a line. Raises BadFile."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    pins = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line.strip())
        if match is None:
            raise BadFile(path, "is not `name==version --hash=sha256:...`", line=number)
        pin = Pin(**match.groupdict())
        if re.sub(r"[-_.]+", "-", pin.name).lower() in _NEVER:
            raise BadFile(path, f"{pin.name} is the image's own", line=number)
        pins.append(pin)
    return tuple(pins)


def cached_wheel(pin: Pin, folder: Path) -> bytes | None:
    """The wheel's bytes from the folder, None if it is not there or is another one than was pinned."""
    for path in sorted(folder.glob(f"{pin.stem}-*-none-any.whl")):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == pin.sha256:
            return content
    return None


def fetch_wheels(pins: Sequence[Pin], folder: Path, *, python: str) -> None:
    """Put the wheels that the folder lacks into it, through pip as it is configured here.

    python: version of the interpreter that will import them. Raises UserError where pip cannot get them.
    """
    missing = [pin for pin in pins if cached_wheel(pin, folder) is None]
    if not missing:
        return
    try:
        problem = _fetch(missing, folder, python)
    except OSError as error:
        raise BadFile(folder, f"cannot be written: {error.strerror}") from None
    lacking = [pin for pin in missing if cached_wheel(pin, folder) is None]
    if lacking:
        files = " and ".join(f"{pin.stem}-py3-none-any.whl" for pin in lacking)
        raise UserError(
            f"cannot get {' and '.join(map(str, lacking))} for the container: {problem}",
            f"with a network, try again; or put {files} of the Python Package Index into {folder}",
        )


def _fetch(missing: Sequence[Pin], folder: Path, python: str) -> str:
    """What pip said where it failed, in one line. What it got is in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that a wheel appears in the folder whole or not at all.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        wanted = Path(scratch, "wheels.txt")
        lines = [f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n" for pin in missing]
        wanted.write_text("".join(lines), encoding="utf-8")
        problem = _download(wanted, Path(scratch), python)
        for path in sorted(Path(scratch).glob("*.whl")):
            path.replace(folder / path.name)
    return problem


def pip_arguments(wanted: Path, to: Path, python: str) -> list[str]:
    """pip's arguments that download the wheels of `wanted`, for any platform, into `to`."""
    short = ".".join(python.split(".")[:2])
    return [
        *("download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
        *("--only-binary=:all:", "--platform", "any", "--python-version", short),
        *("--require-hashes", "--requirement", str(wanted), "--dest", str(to)),
    ]


def _download(wanted: Path, to: Path, python: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *pip_arguments(wanted, to, python)],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_FETCH_LIMIT_S,
            check=False,
            # A Python path of the launcher's is none of pip's business.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    except subprocess.TimeoutExpired:
        return f"pip had not done so after {_FETCH_LIMIT_S} s"
    if "No module named pip" in done.stderr:
        return f"there is no pip in {sys.prefix}"
    told = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    return told[-1].removeprefix("ERROR:").strip() if told else f"pip ended with exit code {done.returncode}"


def unpack_wheel(pin: Pin, content: bytes) -> dict[str, bytes]:
    """The wheel's files by path. Raises UserError for one that is not pure Python."""
    files: dict[str, bytes] = {}
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        for entry in wheel.infolist():
            path = PurePosixPath(entry.filename)
            if entry.is_dir() or path.suffix == ".pyc":
                continue
            outside = path.is_absolute() or ".." in path.parts or path.parts[0].endswith(".data")
            if outside or path.name.endswith(_COMPILED) or ".so." in path.name:
                raise _impure(pin, f"it holds {entry.filename}")
            files[str(path)] = wheel.read(entry)
    told = [text for name, text in files.items() if name.endswith(".dist-info/WHEEL")]
    if len(told) != 1 or b"Root-Is-Purelib: true" not in told[0]:
        raise _impure(pin, "its WHEEL file does not say `Root-Is-Purelib: true`")
    return files


def _impure(pin: Pin, why: str) -> UserError:
    return UserError(
        f"the wheel of {pin} is not pure Python: {why}",
        "only pure Python can travel with the training code; the rest is the image's: fastlaunch build",
    )
