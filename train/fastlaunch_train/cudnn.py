"""The cuDNN that is really loaded, and whether its attention can be trusted."""

import ctypes
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from fastlaunch_train.recipes.requirements import dotted

#: Before this version cuDNN's attention is wrong at lengths that are no multiple of 128, such as 197.
SAFE_CUDNN = (9, 15, 1)


def guard_cudnn_attention() -> tuple[tuple[int, ...] | None, str | None]:
    """The version of the cuDNN that is really loaded, and a warning; both None where there is nothing to say.

    If it is older than 9.15.1, torch's cuDNN attention is switched off. If several are loaded (importing
    Transformer Engine can load the system's beside torch's own), the oldest counts.
    """
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None, None
    versions = loaded_cudnn_versions(Path("/proc/self/maps"), _cudnn_version_of)
    if not versions:
        try:
            number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            number = None
            warnings.warn(f"torch cannot tell its cuDNN version: {error}", stacklevel=2)
        versions = [] if number is None else [decode_cudnn_version(number)]
    warning = cudnn_warning(versions)
    if versions and min(versions) < SAFE_CUDNN:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return (min(versions) if versions else None), warning


def cudnn_warning(versions: list[tuple[int, ...]]) -> str | None:
    """What a reader of the record must know of the loaded cuDNN versions."""
    parts = []
    if len(versions) > 1:
        parts.append(f"several cuDNN are loaded: {', '.join(map(dotted, versions))}")
    if versions and min(versions) < SAFE_CUDNN:
        parts.append(
            f"cuDNN {dotted(min(versions))} is older than {dotted(SAFE_CUDNN)}, whose predecessors compute "
            "attention wrongly at lengths that are no multiple of 128: torch's cuDNN attention is off"
        )
    return "; ".join(parts) or None


def loaded_cudnn_versions(maps: Path, version_of: Callable[[str], int | None]) -> list[tuple[int, ...]]:
    """Versions of the cuDNN libraries loaded by the process of `maps` (/proc/PID/maps), oldest first."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libcudnn.so" in line}
    numbers = {version_of(path) for path in paths}
    return sorted(decode_cudnn_version(number) for number in numbers if number is not None)


def decode_cudnn_version(number: int) -> tuple[int, ...]:
    """(major, minor, patch) of cudnnGetVersion's number: 91501 is 9.15.1, 8907 is 8.9.7."""
    major, rest = divmod(number, 10000 if number >= 90000 else 1000)
    return (major, *divmod(rest, 100))


def _cudnn_version_of(path: str) -> int | None:
    try:
        library = ctypes.CDLL(path)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        return int(library.cudnnGetVersion())
    except (OSError, AttributeError):
        return None
