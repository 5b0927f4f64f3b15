"""Fetch the pure-Python wheels that travel with the training code.

Wheels are pinned by hash and fetched once. FASTLAUNCH_WHEELS names a list in place of the shipped
containers/wheels.txt: for another version, or for what your own workload file imports.
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
from pathlib import Path

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text, shipped
from fastlaunch.core.settings import Settings

_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[\w.!+]+) +--hash=sha256:(?P<sha256>[0-9a-f]{64})"
)
_FETCH_LIMIT_S = 600
#: Options of pip, wherever it runs.
QUIETLY = ("--disable-pip-version-check", "--no-input")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One wheel, by project, version and hash."""

    name: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        """How its file's name starts, as PyPA's wheel format has it."""
        return f"{re.sub(r'[-_.]+', '_', self.name).lower()}-{self.version}"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def wheel_folder(settings: Settings) -> Path:
    """Return where fetched wheels are kept."""
    return settings.home / "wheels"


def wanted_pins() -> tuple[Pin, ...]:
    """Return the wheels of the list that FASTLAUNCH_WHEELS names, else of the shipped list."""
    named = os.environ.get("FASTLAUNCH_WHEELS")
    return read_pins(Path(named) if named else shipped("containers/wheels.txt"))


def read_pins(path: Path) -> tuple[Pin, ...]:
    """Return the pins of a file in pip's format, `name==version --hash=sha256:...` a line. Raises BadFile."""
    pins = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line.strip())
        if match is None:
            raise BadFile(path, "is not `name==version --hash=sha256:...`", line=number)
        pins.append(Pin(**match.groupdict()))
    return tuple(pins)


def cached_wheel(pin: Pin, folder: Path) -> bytes | None:
    """Return the wheel's bytes from the folder; None if it is missing or has another hash."""
    for path in sorted(folder.glob(f"{pin.stem}-*-none-any.whl")):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() == pin.sha256:
            return content
    return None


def fetch_wheels(pins: Sequence[Pin], folder: Path, *, python: str) -> None:
    """Fetch the wheels that the folder lacks, through pip as it is configured here.

    python: version of the interpreter that will import them. Raises UserError if pip cannot get them.
    """
    missing = [pin for pin in pins if cached_wheel(pin, folder) is None]
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # On the same file system, so that a wheel appears in the folder whole or not at all.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            listed = Path(scratch, "wheels.txt")
            lines = [f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n" for pin in missing]
            listed.write_text("".join(lines), encoding="utf-8")
            errors = run_pip(
                *("-m", "pip", "download", "--quiet", *QUIETLY),
                *("--no-deps", "--only-binary=:all:", "--platform", "any"),
                *("--python-version", ".".join(python.split(".")[:2])),
                *("--require-hashes", "--requirement", str(listed), "--dest", scratch),
            )
            for path in sorted(Path(scratch).glob("*.whl")):
                path.replace(folder / path.name)
    except OSError as error:
        raise BadFile(folder, f"cannot be written: {error.strerror}") from None
    lacking = [pin for pin in missing if cached_wheel(pin, folder) is None]
    if lacking:
        files = " and ".join(f"{pin.stem}-py3-none-any.whl" for pin in lacking)
        raise UserError(
            f"cannot get {' and '.join(map(str, lacking))} for the container: "
            f"{errors[-1] if errors else 'it is not there'}",
            f"with a network, try again; or put {files} of the Python Package Index into {folder}",
        )


def run_pip(*arguments: str) -> list[str]:
    """Run Python with arguments that start pip, as it is configured here.

    Return its errors, or its last line if it names none; nothing if it succeeded.
    """
    # pip gets neither the launcher's Python path nor (-P) the current folder, which may be a stranger's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_FETCH_LIMIT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return [f"pip had not finished after {_FETCH_LIMIT_S} s"]
    if done.returncode == 0:
        return []
    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    if conflict := done.stdout.partition("The conflict is caused by:")[2]:
        # pip's last error is the address of a page about conflicts.
        errors[-1:] = conflict.strip().partition("\n\n")[0].splitlines()
    return [line.removeprefix("ERROR:").strip() for line in errors]


def unpack_wheel(pin: Pin, content: bytes) -> dict[str, bytes]:
    """Return the wheel's files by path. Raises UserError if it is not pure Python."""
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        files = {
            entry.filename: wheel.read(entry)
            for entry in wheel.infolist()
            if not entry.is_dir() and not entry.filename.endswith(".pyc")
        }
    (metadata,) = (text for name, text in files.items() if name.endswith(".dist-info/WHEEL"))
    if b"Root-Is-Purelib: true" not in metadata:
        raise UserError(
            f"the wheel of {pin} is not pure Python",
            "only pure Python can travel with the training code; the rest is the image's: fastlaunch build",
        )
    return files
