"""A `docker` on PATH that builds nothing and notes what it was asked."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = """#!{python}
import json, os, pathlib, sys
call = {{"argv": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]}}
call["buildkit"] = os.environ.get("DOCKER_BUILDKIT")
call["stdin"] = sys.stdin.read() if "--password-stdin" in sys.argv else None
if "build" in sys.argv and "--file" in sys.argv:
    context = pathlib.Path(sys.argv[-1])
    call["context"] = sorted(str(path.relative_to(context)) for path in context.rglob("*") if path.is_file())
with open({log!r}, "a") as log:
    print(json.dumps(call), file=log)
if sys.argv[1:] == ["buildx", "version"]:
    sys.exit(0 if {buildx} else 1)
if sys.argv[1] in {failing}:
    print({says!r}, file=sys.stderr)
    sys.exit(1)
print("did", sys.argv[1])
"""


@dataclass(frozen=True, kw_only=True)
class FakeBuilder:
    """log: what was asked, a JSON object a line."""

    log: Path

    @property
    def calls(self) -> list[dict[str, Any]]:
        """What was asked, but for the probe."""
        if not self.log.exists():
            return []
        calls = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [call for call in calls if call["argv"][1:] != ["buildx", "version"]]


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *names: str,
    buildx: bool = True,
    failing: Sequence[str] = (),
    says: str = "",
) -> FakeBuilder:
    """The only programs on PATH from here on. failing: the subcommands that end badly, after `says`."""
    programs = folder / "programs"
    programs.mkdir(parents=True)
    log = folder / "calls"
    for name in names:
        path = programs / name
        path.write_text(
            _PROGRAM.format(
                python=os.path.realpath(sys.executable),
                log=str(log),
                buildx=buildx,
                failing=list(failing),
                says=says,
            )
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    return FakeBuilder(log=log)
