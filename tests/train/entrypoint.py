"""Runs the entrypoint in a process of its own and reads what it recorded.

Importing torch takes longer than most of these runs: `run` and `start` fork a process that has imported it,
and call the entrypoint's `main` there. `run_command` starts the real command line, and torchrun's.
"""

import gc
import multiprocessing
import multiprocessing.process
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch_train.records.records import End

ROOT = Path(__file__).resolve().parents[2]
TINY = str(Path(__file__).parent / "workloads" / "tiny.py")

#: These tests are of the CPU, also on a machine that has more; tests/gpu has those of the GPU.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch._dynamo", "fastlaunch_train.run.run"])


def arguments(output: Path, *more: str, workload: str = f"{TINY}:build", recipe: str = "fp32") -> list[str]:
    given = [str(a) for a in more]
    defaults = {"--batch-size": "4", "--steps": "20"}
    for flag, value in defaults.items():
        if flag not in given:
            given += [flag, value]
    return ["--workload", workload, "--recipe", recipe, "--output", str(output), *given]


class Run:
    """An entrypoint that was started with `argv`."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._log = Path(file.name)
        self._process: multiprocessing.process.BaseProcess = _FORKS.Process(
            target=_main, args=(argv, env, str(self._log))
        )
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout_s: float) -> str:
        """What it printed, after it has ended; AssertionError if it does not end in time."""
        self._process.join(timeout_s)
        ended = self._process.exitcode is not None
        if not ended:
            self._process.kill()
            self._process.join()
        output = self._log.read_text()
        self._log.unlink()
        assert ended, f"still running after {timeout_s:g} s:\n{output}"
        return output


def start(argv: list[str], **env: str) -> Run:
    return Run(argv, env)


def run(argv: list[str], **env: str) -> tuple[int, str]:
    """Exit code and output of the entrypoint."""
    started = start(argv, **env)
    output = started.wait(timeout_s=300)
    code = started.poll()
    assert code is not None
    return code, output


def ended(code: int, argv: list[str], **env: str) -> str:
    """The output of the entrypoint, which has to end with this exit code."""
    returned, output = run(argv, **env)
    assert returned == code, output
    return output


def trained(
    output: Path,
    *more: str,
    workload: str = f"{TINY}:build",
    recipe: str = "fp32",
    attempt: int = 1,
    **env: str,
) -> RankRecord:
    """The record of a run that has to complete."""
    ended(0, arguments(output, *more, workload=workload, recipe=recipe), **env)
    return record(output, attempt=attempt)


def end_of(output: Path, *, rank: int = 0, attempt: int = 1) -> End:
    """The last line of a record, which has to be there."""
    end = record(output, rank=rank, attempt=attempt).end
    assert end is not None
    return end


def losses(output: Path, *, rank: int = 0, attempt: int = 1) -> list[float | None]:
    return [step.loss for step in record(output, rank=rank, attempt=attempt).steps]


def start_command(
    argv: list[str], *, nproc: int = 1, rendezvous: tuple[str, ...] = ("--standalone",)
) -> subprocess.Popen[str]:
    """`python -m fastlaunch_train`, under torchrun if there are several ranks or nodes."""
    prefix = [sys.executable, "-m"]
    if nproc > 1 or rendezvous != ("--standalone",):
        prefix += ["torch.distributed.run", *rendezvous, f"--nproc-per-node={nproc}", "-m"]
    path = os.pathsep.join([str(ROOT / "train"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*prefix, "fastlaunch_train", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **NO_GPU, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def run_command(argv: list[str], *, nproc: int = 1) -> tuple[int, str]:
    process = start_command(argv, nproc=nproc)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, output


def record(output: Path, *, rank: int = 0, attempt: int = 1) -> RankRecord:
    return read_record(output / f"rank-{rank:05d}-attempt-{attempt}.jsonl")


def _main(argv: list[str], env: dict[str, str], log: str) -> None:
    # A run collects garbage before its first step, which among all that torch imports takes longer than it.
    gc.freeze()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(NO_GPU | env)
    if "FILE_SIZE_LIMIT" in env:
        # As a full disk: a write beyond it fails (Python ignores the signal that comes with it).
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(env["FILE_SIZE_LIMIT"]),) * 2)
    import torch

    from fastlaunch_train.__main__ import main

    torch.set_num_threads(1)
    sys.exit(main(argv))
