"""The script that containers start with, on GPUs: ranks, driver, a stop with a checkpoint, and two nodes.

For two nodes NCCL's log tells its network, and the bandwidth is recorded.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch_train.distributed.fabric import logged_fabric

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


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def train_on_two_nodes(code: Path, output: Path, fabric: str) -> list[int]:
    """Exit codes of two nodes that train together, each with a GPU of its own.

    NCCL_HOSTID makes NCCL take the two processes for different hosts, so that it goes over its network (here
    TCP on the loopback interface) and not over NVLink or shared memory.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for node in range(2):
        command = [
            *("bash", str(code / "run_train.sh"), "--workload", "vit-tiny", "--recipe", "bf16"),
            *("--batch-size", "16", "--steps", "40", "--output", str(output / f"node-{node}")),
        ]
        environment = {
            "PATH": path,
            "CUDA_VISIBLE_DEVICES": str(node),
            "FASTLAUNCH_NUM_NODES": "2",
            "FASTLAUNCH_NODE_RANK": str(node),
            "FASTLAUNCH_MASTER_ADDR": "127.0.0.1",
            "FASTLAUNCH_MASTER_PORT": str(port),
            "FASTLAUNCH_FABRIC": fabric,
            "NCCL_HOSTID": f"node-{node}",
        }
        nodes.append(subprocess.Popen(command, env={**os.environ, **environment}))
    try:
        return [node.wait(300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()


def record_of(output: Path, node: int) -> RankRecord:
    return read_record(output / f"node-{node}" / f"rank-0000{node}-attempt-1.jsonl")


@needs_two_gpus
def test_nccl_tells_its_network_and_the_bandwidth_is_recorded(code: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert train_on_two_nodes(code, output, "any") == [0, 0]
    for node in range(2):
        found = logged_fabric(output / f"node-{node}", node)
        assert found.network is not None, (output / f"node-{node}" / f"nccl-node-{node}.txt").read_text()
        told = record_of(output, node)
        assert told.end is not None and told.end.status == "completed"
        assert (told.header["num_nodes"], told.header["world_size"]) == (2, 2)
        (phase,) = [phase for phase in told.phases if phase.name == "all-reduce"]
        words = dict(word.split("=") for word in (phase.detail or "").split())
        assert words["fabric"] == found.name
        assert (words["bytes"], words["nodes"]) == (str(256 * 2**20), "2")
        # More than a hundred-megabit network has, less than NVLink.
        assert 0.01 < float(words["bus_gb_per_s"]) < 1000
        assert not list((output / f"node-{node}").glob("traceback-*"))


@needs_two_gpus
@pytest.mark.skipif(Path("/dev/infiniband/uverbs0").exists(), reason="there may be an EFA here")
def test_without_efa_a_run_that_has_to_use_it_ends_with_78(code: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert train_on_two_nodes(code, output, "efa") == [78, 78]
    for node in range(2):
        told = record_of(output, node)
        assert told.end is not None and told.end.status == "failed" and not told.steps
        assert f"this run has to use EFA, but NCCL on node {node} selected NET/" in (told.end.message or "")
        (left,) = (output / f"node-{node}").glob("traceback-*")
        assert "FabricError" in left.read_text()
