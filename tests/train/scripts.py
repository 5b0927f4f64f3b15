"""Run a user's script as text, with and without the command that records it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from fastlaunch.measure.record_files import RankRecord, read_record

TRAIN = Path(__file__).resolve().parents[2] / "train"


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what fastlaunch sets, and with the training package."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("FASTLAUNCH_")}
    return {**own, "PYTHONPATH": str(TRAIN), "PYTHONUNBUFFERED": "1", **changes}


def script(folder: Path, body: str) -> Path:
    """A file train.py in `folder`."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(body))
    return path


def start(folder: Path, body: str, *wrapper: str, **changes: str) -> "subprocess.Popen[str]":
    """Start a script of `body`, recorded into the folder `run` there by the command with its arguments."""
    argv = [sys.executable, "-m", "fastlaunch_train.script", "--output", str(folder / "run"), *wrapper, "--"]
    return subprocess.Popen(
        [*argv, sys.executable, str(script(folder, body)), "--lr", "1e-3"],
        cwd=folder,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="latin-1",  # which has a character for every byte
    )


def run(folder: Path, body: str, *wrapper: str, **changes: str) -> tuple[int, str]:
    """Exit code and output of a script that `start` starts."""
    process = start(folder, body, *wrapper, **changes)
    output, _ = process.communicate(timeout=110)
    return process.returncode, output


def record(folder: Path, rank: int = 0) -> RankRecord:
    """What a rank of the run left."""
    return read_record(folder / "run" / f"rank-{rank:05d}-attempt-1.jsonl")
