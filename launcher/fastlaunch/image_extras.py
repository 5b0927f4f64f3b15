"""What an image of one's own may hold beside AWS's and the training code: containers/extras.txt."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastlaunch.core.errors import BadFile, UnknownName
from fastlaunch.core.paths import shipped

_LINE = re.compile(r"(?P<name>[a-z][a-z0-9-]*) +(?P<wanted>[\w.-]+==[\w.]+( +[\w.-]+==[\w.]+)*)")
#: Where it comes in: before what changes with the training code, so that it is built once.
_BEFORE = b"COPY site/"
#: The Python that has torch, as run_train.sh finds it.
_PYTHONS = "python /opt/venv/bin/python /opt/conda/bin/python python3"
_HAS_TORCH = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"


def read_extras(path: Path | None = None) -> Mapping[str, tuple[str, ...]]:
    """What pip is asked for, by the name of the extra. path: instead of the shipped file. Raises BadFile."""
    path = path or shipped("containers/extras.txt")
    found: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match["name"] in found:
            raise BadFile(path, "is not `name package==version ...`, each name once", line=number)
        found[match["name"]] = tuple(match["wanted"].split())
    return found


def wanted_of(names: Sequence[str]) -> tuple[str, ...]:
    """What pip is asked for to have these extras, in their order. Raises UnknownName."""
    known = read_extras()
    for name in names:
        if name not in known:
            raise UnknownName("extra", name, known)
    return tuple(dict.fromkeys(one for name in names for one in known[name]))


def with_extras(dockerfile: bytes, wanted: Sequence[str]) -> bytes:
    """The Dockerfile that has pip install `wanted` too; as it is for nothing."""
    if not wanted:
        return dockerfile
    before, found, after = dockerfile.partition(_BEFORE)
    assert found, "the Dockerfile copies site/"
    install = f"-m pip install --no-cache-dir --disable-pip-version-check {shlex.join(wanted)}"
    run = (
        f"RUN for one in {_PYTHONS}; do \\\n"
        f'      "$one" -c "{_HAS_TORCH}" 2>/dev/null && exec "$one" {install}; \\\n'
        "    done; echo 'no Python with torch in this image' >&2; exit 1\n"
    )
    return before + run.encode() + found + after
