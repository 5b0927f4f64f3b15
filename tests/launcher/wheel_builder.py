"""Tiny wheels for tests, made here byte by byte."""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from fastlaunch.jobs.code_bundle import Pin


def make_wheel(
    folder: Path,
    name: str = "tiny",
    *,
    files: Mapping[str, str] | None = None,
    pure: bool = True,
    needs: tuple[str, ...] = (),
    version: str = "1.2",
) -> Pin:
    """The pin of a wheel `name-VERSION-py3-none-any.whl` in the folder. files: besides its metadata.

    needs: requirements of others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    content = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in content.items():
            wheel.writestr(zipfile.ZipInfo(inside), text)
    return Pin(name=name, version=version, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
