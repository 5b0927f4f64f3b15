"""The script that containers start with, on GPUs: ranks, driver, and a stop with a checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastlaunch_train.records.records import RankRecord, read_record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder as a node unpacks it: the script, and the training package beside it."""
    place = tmp_path / "code"
    (place / "user").mkdir(parents=True)
    (place / "run_train.sh").write_bytes((ROOT / "containers" / "run_train.sh").read_bytes())
    (place / "train").symlink_to(ROOT / "train")
    return place


def start(code: Path, output: Path, *more: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [
            *("bash", str(code / "run_train.sh"), "--workload", "vit-tiny", "--recipe", "bf16"),
            *("--batch-size", "16", "--output", str(output), *more),
        ],
        env={**os.environ, "PATH": path, "FASTLAUNCH_STOP_GRACE_S": "90"},
    )


def records(output: Path) -> list[RankRecord]:
    return [read_record(path) for path in sorted(output.glob("rank-*.jsonl"))]


def test_a_rank_per_gpu_with_the_driver_in_the_header(code: Path, tmp_path: Path) -> None:
    assert start(code, tmp_path / "out", "--steps", "40").wait(300) == 0
    found = records(tmp_path / "out")
    assert len(found) == torch.cuda.device_count()
    for record in found:
        assert record.end is not None and record.end.status == "completed"
        assert record.header["machine"]["driver"]
        assert record.header["machine"]["cuda_compat"]


def test_a_stop_leaves_a_checkpoint_that_is_gone_on_from(code: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    many = ("--steps", "1000000", "--checkpoint-every", "100000")
    process = start(code, output, *many)
    deadline = time.monotonic() + 300
    while not any(b'"kind":"block"' in path.read_bytes() for path in output.glob("rank-00000-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) != 0
    stopped = records(output)
    assert {record.end.status for record in stopped if record.end} == {"interrupted"}
    last = {record.steps[-1].step for record in stopped}
    assert len(last) == 1, "all ranks agree on one step"
    (checkpoint,) = (output / "checkpoints").glob("step-*.pt")
    assert int(checkpoint.stem.removeprefix("step-")) in last
    steps = str(*last)
    assert (
        start(code, output, "--steps", str(int(steps) + 20), "--checkpoint-every", "100000", "--resume").wait(
            300
        )
        == 0
    )
    resumed = [record for record in records(output) if record.header["attempt"] == 2]
    assert {record.header["first_step"] for record in resumed} == {int(steps) + 1}
