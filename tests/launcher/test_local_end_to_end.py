"""The whole way on this machine, with nothing played: launcher, torchrun, training, records, summary."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from fake_train.processes import is_training, real_launcher, runs, wait_until

from fastlaunch.core.plan import RunState
from fastlaunch.measure.record_files import read_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (importlib.util.find_spec("torch") and importlib.util.find_spec("timm")),
        reason="needs the extra `train`",
    ),
]


def completed(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with real_launcher(*argv) as process:
        out, err = process.communicate(timeout=110)
        return process.returncode, out, err


def ranks(directory: Path | None) -> list[int]:
    """Process ids of the ranks that train in `directory`."""
    variable_of_run = f"FASTLAUNCH_RUN_DIRECTORY={directory}".encode()
    pids = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue
        if variable_of_run in variables and any(
            variable.startswith(b"LOCAL_RANK=") for variable in variables
        ):
            pids.append(int(environ.parent.name))
    return pids


def test_submit_trains_on_two_ranks_and_summarises() -> None:
    code, out, err = completed("submit", "--local", "--steps", "70", "--seed", "4", "--nproc", "2")
    assert code == 0, err
    (run,) = runs()
    assert run.state is RunState.COMPLETED
    assert run.summary is not None and run.directory is not None
    assert (run.summary.num_steps, run.summary.seed, run.summary.setup.recipe) == (70, 4, "bf16")
    assert (run.summary.setup.num_gpus, run.summary.timing.samples_per_step) == (2, 16)
    assert len(list(run.directory.glob("rank-*-attempt-1.jsonl"))) == 2
    record = read_record(run.directory / "rank-00000-attempt-1.jsonl")
    assert record.header["run_id"] == run.id
    assert record.header["machine"]["device_type"] == "cpu"
    assert "bf16: step 70/70" in err and "next: " in err.splitlines()[-1]
    assert out.splitlines()[-1].endswith(".")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra `train`")
def test_text_is_read_for_an_epoch_and_evaluated(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one two three four five six seven.\n" * 60)
    language = ("--workload", "gpt2-tiny", "--data", f"file:{corpus}", "--sequence-length", "32")
    length = ("--epochs", "1", "--eval-every", "5", "--num-workers", "0")
    code, _, err = completed("submit", "--local", "--recipe", "fp32", *language, *length)
    assert code == 0, err
    (run,) = runs()
    assert run.state is RunState.COMPLETED, run.reason
    assert run.spec is not None and (run.spec["steps"], run.spec["epochs"]) == (None, 1)
    assert run.directory is not None
    record = read_record(run.directory / "rank-00000-attempt-1.jsonl")
    assert record.header["steps"] == record.steps[-1].step > 5
    assert record.header["workload"]["sequence_length"] == 32
    assert [line.step for line in record.evals][-1] == record.header["steps"]
    assert "fp32: started\n" in err


def test_ctrl_c_interrupts_every_rank_and_leaves_none() -> None:
    with real_launcher("submit", "--local", "--steps", "100000", "--nproc", "2") as process:
        wait_until(is_training)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    (run,) = runs()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "stopped by Ctrl-C")
    assert run.summary is not None and run.summary.num_steps > 0
    assert ranks(run.directory) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_ranks_that_outlive_launcher_and_torchrun_are_seen_and_stopped() -> None:
    with real_launcher("submit", "--local", "--steps", "100000", "--nproc", "2") as process:
        wait_until(is_training)
        process.kill()
    (run,) = runs()
    assert run.directory is not None
    os.kill(int((run.directory / "lock").read_text()), signal.SIGKILL)
    assert len(ranks(run.directory)) == 2
    _, out, _ = completed("status")
    assert out.splitlines()[-1] == "1 run under way or of the last submission: 1 running."
    completed("cancel", run.id)
    assert ranks(run.directory) == []
    assert runs()[0].state is RunState.INTERRUPTED
