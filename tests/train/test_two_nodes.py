"""Two machines that train one model, as two containers' entrypoints on this machine's loopback."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from entrypoint import ROOT

from fastlaunch.measure.record_files import RankRecord, read_record

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

RUN = "20261121-090312-k3f9"


class Pair:
    """Two nodes, each with its own output folder as on machines of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []
        code = folder / "code"
        (code / "user").mkdir(parents=True)
        (code / "train").symlink_to(ROOT / "train")
        shutil.copy(ROOT / "containers" / "run_train.sh", code)
        shutil.copy(ROOT / "tests/train/workloads/tiny.py", code / "user" / "mine.py")

    def start(self, **more: str) -> None:
        for node in range(2):
            with (self.folder / f"log-{node}").open("wb") as log:
                self._nodes.append(self._start(node, log.fileno(), more))

    def _start(self, node: int, log: int, more: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *("/bin/bash", self.folder / "code" / "run_train.sh", "--workload", "./mine.py:build"),
                *("--recipe", "fp32", "--batch-size", "4", "--steps", "30"),
                *("--output", self.folder / f"out-{node}"),
            ],
            stdout=log,
            stderr=log,
            # A container's end takes all of it.
            start_new_session=True,
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "CUDA_VISIBLE_DEVICES": "",
                "FASTLAUNCH_RUN_ID": f"{RUN}-{os.getpid()}",
                "FASTLAUNCH_NUM_NODES": "2",
                "FASTLAUNCH_NODE_RANK": str(node),
                "FASTLAUNCH_MASTER_ADDR": "127.0.0.1",
                "FASTLAUNCH_STOP_GRACE_S": "20",
                "FASTLAUNCH_PRINT_METRICS": "1",
                **more,
            },
        )

    def wait(self, node: int) -> int:
        return self._nodes[node].wait(100)

    def record(self, node: int) -> RankRecord:
        """Of node k's only rank."""
        return read_record(self.folder / f"out-{node}" / f"rank-0000{node}-attempt-1.jsonl")

    def traceback(self, node: int) -> str:
        return (self.folder / f"out-{node}" / f"traceback-rank-0000{node}-attempt-1.txt").read_text()

    def log(self, node: int) -> str:
        return (self.folder / f"log-{node}").read_text()

    def end(self) -> None:
        for process in self._nodes:
            process.kill()
            process.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.end()


def test_two_nodes_train_as_one_and_measure_what_is_between_them(pair: Pair) -> None:
    pair.start(FASTLAUNCH_FABRIC="any")
    assert [pair.wait(0), pair.wait(1)] == [0, 0], pair.log(0) + pair.log(1)
    losses = []
    for node in range(2):
        record = pair.record(node)
        assert record.end is not None and record.end.status == "completed"
        assert (record.header["num_nodes"], record.header["world_size"]) == (2, 2)
        (phase,) = [phase for phase in record.phases if phase.name == "all-reduce"]
        assert phase.detail is not None and phase.step == 0
        detail = dict(word.split("=") for word in phase.detail.split())
        expected = {"nodes": "2", "ranks": "2", "fabric": "gloo", "bytes": "1048576"}
        assert detail.items() >= expected.items()
        assert float(detail["bus_gb_per_s"]) > 0
        assert not list((pair.folder / f"out-{node}").glob("traceback-*"))
        losses.append(record.steps[-1].loss)
    # They trained on different samples, and as one: the last loss is each one's own.
    assert losses[0] != losses[1]
    printed = [line for line in pair.log(0).splitlines() if line.startswith("fastlaunch: ")]
    assert printed[-1].startswith("fastlaunch: step=30 loss=")
    words = dict(word.split("=") for word in printed[-1].split()[1:])
    assert list(words) == ["step", "loss", "step_time_s", "samples_per_s"]
    assert float(words["samples_per_s"]) == pytest.approx(8 / float(words["step_time_s"]), rel=0.01)
    assert "fastlaunch: " not in pair.log(1)


def test_where_it_has_to_be_efa_and_is_not_both_end_as_a_configuration_error(pair: Pair) -> None:
    pair.start(FASTLAUNCH_FABRIC="efa")
    assert [pair.wait(0), pair.wait(1)] == [78, 78], pair.log(0) + pair.log(1)
    for node in range(2):
        record = pair.record(node)
        assert record.end is not None and record.end.status == "failed" and not record.steps
        message = f"this run has to use EFA, but NCCL on node {node} selected NET/gloo (there is no GPU)"
        assert record.end.message == message
        assert message in pair.traceback(node)
        assert f"error: {message}\n  see nccl-node-*.txt; check that" in pair.log(node)
