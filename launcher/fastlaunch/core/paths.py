"""Find the files that ship with fastlaunch, in a checkout or a wheel's `shipped/`; read users' text files."""

import codecs
from importlib.util import find_spec
from pathlib import Path

from fastlaunch.core.errors import BadFile

MAX_TEXT_BYTES = 2**23
_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str) -> Path:
    """Return the path of a shipped file or folder, such as `measurements` or `docs/setup.md`."""
    installed = _PACKAGE / "shipped" / name
    if installed.exists():
        return installed
    in_checkout = {"measurements": Path("train", "measurements")}.get(name, Path(name))
    return _PACKAGE.parents[1] / in_checkout


def training_package() -> Path:
    """Return the folder of the training package, as it is installed: in a checkout or from a wheel."""
    spec = find_spec("fastlaunch_train")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def read_text(path: Path) -> str:
    """Return the text of a file, with its line endings unchanged.

    Raises BadFile if it cannot be read, or is larger than anybody writes by hand.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise BadFile(path, f"holds more than {MAX_TEXT_BYTES / 2**20:.0f} MiB")
    return decoded(path, data)


def decoded(path: Path, data: bytes) -> str:
    """Return a file's UTF-8 without the byte order mark that Windows puts first. Raises BadFile."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        problem = "is UTF-16, not UTF-8 text" if is_wide else "is not UTF-8 text"
        hint = "save it as UTF-8; in PowerShell: ... | Out-File -Encoding utf8 FILE" if is_wide else None
        raise BadFile(path, problem, hint=hint) from None
