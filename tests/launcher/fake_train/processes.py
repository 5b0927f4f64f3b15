"""Launchers as processes, and waiting for what they do."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import Run, open_ledger

LAUNCHER = Path(__file__).parent / "launcher.py"


def launcher(*argv: str, **environment: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """`fastlaunch ARGV`, training with the fake, in a process of its own; killed at the end if it lives."""
    return started([sys.executable, str(LAUNCHER), *argv], **environment)


def real_launcher(*argv: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """`fastlaunch ARGV`, training for real, in a process of its own that sees no GPU."""
    return started([sys.executable, "-m", "fastlaunch", *argv], CUDA_VISIBLE_DEVICES="")


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def runs() -> list[Run]:
    """Every run of the ledger, as it is, with nothing brought up to date."""
    with open_ledger(load_settings()) as ledger:
        return ledger.select()


def is_training() -> bool:
    """Whether some run has recorded a step."""
    return any(
        '"kind":"step"' in path.read_text()
        for path in load_settings().home.glob("runs/*/rank-00000-attempt-1.jsonl")
    )


def wait_until(holds: Callable[[], bool]) -> None:
    """Return as soon as `holds` does; fail after a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.02)
