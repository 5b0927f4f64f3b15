"""A base image in place of AWS's, from this machine's own Python: made in seconds, with no network.

torch is not in it: whoever runs a container mounts the site-packages of this Python at PACKAGES.
"""

import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from pathlib import Path

import torch

PACKAGES = "/opt/packages"
WORKLOADS = "/opt/workloads"
_TINY = Path(__file__).parents[1] / "train" / "workloads" / "tiny.py"
#: What run_train.sh, and the line that unpacks the code of a training job, call, and every image has.
_TOOLS = (
    *("bash", "sh", "env", "dirname", "cat", "grep", "head", "tail", "sort", "timeout", "sleep", "mkdir"),
    *("sha256sum", "tar", "gzip", "tee"),
)
_LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip")


def packages() -> Path:
    """The folder to mount at PACKAGES."""
    return Path(torch.__file__).parents[1]


def base_image(*, holding: Sequence[str] = ()) -> bytes:
    """A tar of its file system, for `docker import`. holding: packages of this Python that are in it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for folder in ("tmp", "root", "proc", "dev", "sys", "etc", "out"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        python = Path(sys.executable).resolve()
        standard = Path(sysconfig.get_path("stdlib"))
        archive.add(python, "usr/local/bin/python")
        archive.add(standard, f"usr/local/lib/{standard.name}", filter=_needed)
        _add_text(archive, f"usr/local/lib/{standard.name}/site-packages/torch.pth", f"{PACKAGES}\n")
        _add_text(archive, "etc/passwd", "root:x:0:0:root:/root:/bin/bash\n")
        archive.add(_TINY, f"{WORKLOADS[1:]}/tiny.py")
        tools = [Path(found) for tool in _TOOLS if (found := shutil.which(tool))]
        for tool in tools:
            archive.add(tool.resolve(), f"bin/{tool.name}")
        compiled = [
            *standard.glob("lib-dynload/*.so"),
            *Path(torch.__file__).parent.glob("lib/*.so*"),
            *Path(torch.__file__).parent.glob("_C*.so"),
        ]
        for name in holding:
            archive.add(packages() / name, f"{PACKAGES[1:]}/{name}")
        for library in _libraries([python, *tools, *compiled]):
            archive.add(library.resolve(), str(library)[1:])
    return content.getvalue()


def _needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(entry.name).name in _LEFT_OUT else entry


def _libraries(files: list[Path]) -> list[Path]:
    """This system's shared libraries that the files load, by the paths at which they look for them."""
    told = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"(?:=> |^\s+)(/\S+) \(0x", told, re.MULTILINE)
    own = packages()
    return sorted({Path(name) for name in found if not Path(name).is_relative_to(own)})


def _add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(entry, io.BytesIO(text.encode()))
