"""Files that ship with fastlaunch and live at the top of the source tree: in a wheel, under `shipped/`."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Path of a shipped file or folder: `instance_prices.yaml`, `measurements`, `containers/Dockerfile`."""
    installed = _PACKAGE / "shipped" / name
    if installed.exists():
        return installed
    in_checkout = {"measurements": Path("train", "measurements")}.get(name, Path(name))
    return _PACKAGE.parents[1] / in_checkout
