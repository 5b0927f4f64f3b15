"""Where files lie that ship with fastlaunch: those of the source tree's top, in a wheel under `shipped/`, and
the training package's.
"""

from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str) -> Path:
    """Path of a shipped file or folder: `instance_prices.yaml`, `measurements`, `docs/aws-setup.md`."""
    installed = _PACKAGE / "shipped" / name
    if installed.exists():
        return installed
    in_checkout = {"measurements": Path("train", "measurements")}.get(name, Path(name))
    return _PACKAGE.parents[1] / in_checkout


def training_package() -> Path:
    """Folder of the training package, as it is installed: in a checkout or from a wheel."""
    found = find_spec("fastlaunch_train")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent
