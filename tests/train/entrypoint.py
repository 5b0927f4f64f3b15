"""Runs the real entrypoint in a process of its own and reads what it recorded."""

import os
import subprocess
import sys
from pathlib import Path

from fastlaunch_train.records import RankRecord, read_record

ROOT = Path(__file__).resolve().parents[2]
TINY = f"{Path(__file__).parent / 'workloads' / 'tiny.py'}"


def arguments(output: Path, *more: str, workload: str = f"{TINY}:build", recipe: str = "fp32") -> list[str]:
    given = [str(a) for a in more]
    defaults = {"--batch-size": "4", "--steps": "20"}
    for flag, value in defaults.items():
        if flag not in given:
            given += [flag, value]
    return ["--workload", workload, "--recipe", recipe, "--output", str(output), *given]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "train"), str(ROOT / "launcher"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(argv: list[str], *, nproc: int = 1, **env: str) -> subprocess.Popen[str]:
    prefix = [sys.executable, "-m"]
    if nproc > 1:
        prefix += ["torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m"]
    return subprocess.Popen(
        [*prefix, "fastlaunch_train", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**env),
    )


def run(argv: list[str], *, nproc: int = 1, timeout_s: float = 100, **env: str) -> tuple[int, str]:
    """Exit code and output of the entrypoint."""
    process = start(argv, nproc=nproc, **env)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, output


def record(output: Path, *, rank: int = 0, attempt: int = 1) -> RankRecord:
    return read_record(output / f"rank-{rank:05d}-attempt-{attempt}.jsonl")
