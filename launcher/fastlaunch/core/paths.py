"""Where the files lie that ship with fastlaunch: at the top of a checkout, or in a wheel under `shipped/`."""

from importlib.util import find_spec
from pathlib import Path

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
