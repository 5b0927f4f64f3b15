"""Pack the training code, which a container needs in addition to AWS's image, as an object named by its hash.

    run_train.sh           the entrypoint
    run_sagemaker.sh       what a training job's container starts instead
    train/fastlaunch_train the installed training package
    site/                  the pinned pure-Python wheels, unpacked
    user/                  the user's own workload file, if there is one; the container's working directory

A script's bundle has in user/ what travels of its working directory, and no wheels.

Wheels are pinned by hash and fetched once. FASTLAUNCH_WHEELS names a list in place of the shipped
containers/wheels.txt: for another version, or for what your own workload file imports.

The same files make the same bytes, so equal code is stored, and recorded, once.
"""

import gzip
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.catalog.container_images import BaseImage
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.paths import read_text, shipped, training_package
from fastlaunch.core.plan import CodeBundle
from fastlaunch.core.settings import Settings
from fastlaunch.jobs.working_directory import WorkingDirectory

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws
    from fastlaunch.jobs.data_sources import DataFile

PROGRAMS = ("run_train.sh", "run_sagemaker.sh")
#: 1980-01-01, the first day that a wheel can name. tar warns of 0.
_MTIME_S = 315532800
#: Three times faster than zlib's default, for 5% more bytes.
_COMPRESSION = 4
_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[\w.!+]+) +--hash=sha256:(?P<sha256>[0-9a-f]{64})"
)
_FETCH_LIMIT_S = 600
#: Options of pip, wherever it runs.
QUIETLY = ("--disable-pip-version-check", "--no-input")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The code, packed."""

    #: The tar.gz.
    data: bytes = field(repr=False)
    #: The digest of these bytes, in hex.
    sha256: str
    #: The commit of the checkout; None if it is not known.
    commit: str | None = None

    def stored(self, prefix: str) -> CodeBundle:
        """Return where it lies in a bucket."""
        return CodeBundle.under(prefix, sha256=self.sha256, commit=self.commit)


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


def make_bundle(
    base: BaseImage,
    *,
    user_file: Path | None,
    commit: str | None,
    wheels: Path,
    pins: Sequence[Pin] | None = None,
) -> Bundle:
    """Return the bundle for an image; fetch the wheels that the folder `wheels` lacks. Raises UserError.

    user_file: relative to the current folder. pins: instead of the usual ones.
    """
    pins = wanted_pins() if pins is None else pins
    fetch_wheels(pins, wheels, python=base.python)
    bundle = cached_bundle(wheels, pins, user_file=user_file, commit=commit)
    assert bundle is not None, "the wheels have just been fetched"
    return bundle


def cached_bundle(
    wheels: Path, pins: Sequence[Pin], *, user_file: Path | None = None, commit: str | None = None
) -> Bundle | None:
    """Return the bundle with the wheels of the folder; None if a wheel is missing. See `make_bundle`."""
    site = site_files(wheels, pins)
    if site is None:
        return None
    files = {**code_files(), **site}
    if user_file is not None:
        assert not user_file.is_absolute() and ".." not in user_file.parts, "checked with the request"
        files[f"user/{user_file.as_posix()}"] = _read(user_file)
    return bundle_of(pack(files), commit)


def script_bundle(directory: WorkingDirectory) -> Bundle:
    """Return the bundle of a script, for any image. Raises BadFile for a file that cannot be read."""
    return bundle_of(pack(code_files(), directory))


def bundle_of(data: bytes, commit: str | None = None) -> Bundle:
    """Return a tar.gz with the digest that names it."""
    return Bundle(data=data, sha256=hashlib.sha256(data).hexdigest(), commit=commit)


def upload_bundle(
    aws: "Aws", region: str, bucket: str, prefix: str, bundle: "Bundle | DataFile"
) -> CodeBundle:
    """Store the bundle, or the data, in the bucket, once; return where it is."""
    stored = bundle.stored(prefix)
    aws.put_object(region, bucket, stored.key, bundle.data, only_new=True)
    return stored


def code_files() -> dict[str, bytes]:
    """Return the container's programs and the modules of the training package, by path in the bundle."""
    package = training_package()
    files = {name: shipped(f"containers/{name}").read_bytes() for name in PROGRAMS}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in inside.parts):
            files[f"train/{package.name}/{inside.as_posix()}"] = path.read_bytes()
    return files


def site_files(wheels: Path, pins: Sequence[Pin]) -> dict[str, bytes] | None:
    """Return the files of the pinned wheels by path in the bundle; None if the folder lacks a wheel."""
    files: dict[str, bytes] = {}
    for pin in pins:
        content = cached_wheel(pin, wheels)
        if content is None:
            return None
        files |= {f"site/{name}": data for name, data in unpack_wheel(pin, content).items()}
    return files


def pack(
    files: Mapping[str, bytes],
    directory: WorkingDirectory | None = None,
    *,
    folder: str = "user",
    wheels: Sequence[Path] = (),
) -> bytes:
    """Return a tar.gz of the files: sorted, with no owner, one time and fixed modes.

    directory: more files for user/. folder: packed even if it is empty. wheels: more files for that folder.
    """
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.GNU_FORMAT) as archive:
        # The container starts in user/.
        _add(archive, folder, tarfile.DIRTYPE, 0o755)
        for name in sorted(files):
            _add(archive, name, tarfile.REGTYPE, 0o755 if name in PROGRAMS else 0o644, files[name])
        if directory is not None:
            for file in directory.files:
                name, mode = f"user/{file.path}", 0o755 if file.is_executable else 0o644
                if file.target is None:
                    _add(archive, name, tarfile.REGTYPE, mode, _read(directory.root / file.path))
                else:
                    _add(archive, name, tarfile.SYMTYPE, 0o777, target=file.target)
        for path in wheels:
            _add(archive, f"{folder}/{path.name}", tarfile.REGTYPE, 0o644, _read(path))
    compressed = BytesIO()
    # Wheels are compressed already.
    with gzip.GzipFile("", "wb", 0 if wheels else _COMPRESSION, compressed, mtime=0) as stream:
        stream.write(content.getbuffer())
    return compressed.getvalue()


def _add(
    archive: tarfile.TarFile, name: str, kind: bytes, mode: int, data: bytes = b"", target: str = ""
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.mtime = kind, mode, _MTIME_S
    member.size, member.linkname = len(data), target
    archive.addfile(member, BytesIO(data))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror}") from None


# Wheels


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
