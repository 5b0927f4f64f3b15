"""The bandwidth of an all-reduce: nccl-tests' definition, and two processes that measure it."""

import pytest
from test_parallel import outputs, start_pair

from fastlaunch_train.distributed.all_reduce import Bandwidth


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    # 1 GiB in 10 ms are 107.37 GB/s of algorithm bandwidth; times 2 (n - 1) / n.
    [(2, 107.3741824), (8, 187.9048192), (16, 201.326592)],
)
def test_bus_bandwidth_is_nccl_tests(num_ranks: int, expected: float) -> None:
    found = Bandwidth(seconds=0.01, message_bytes=2**30, num_ranks=num_ranks, num_repeats=5)
    assert found.bus_gb_per_s == pytest.approx(expected)


def test_the_detail_says_everything() -> None:
    found = Bandwidth(seconds=0.01, message_bytes=2**30, num_ranks=16, num_repeats=5)
    assert found.detail(fabric="efa", num_nodes=2) == (
        "bus_gb_per_s=201.327 seconds=0.01 bytes=1073741824 repeats=5 ranks=16 nodes=2 fabric=efa"
    )


@pytest.mark.slow
def test_ranks_agree_on_what_they_measured_and_on_the_fabric() -> None:
    body = """
        from pathlib import Path
        from fastlaunch_train.distributed.all_reduce import measure
        from fastlaunch_train.distributed.fabric import check_fabric
        from fastlaunch_train.process.failures import FabricError
        found = measure(process, 40_002)
        assert found.message_bytes == 40_000 and found.num_ranks == 2 and found.seconds > 0
        assert check_fabric(process, Path("."), "any").name == "gloo"
        try:
            check_fabric(process, Path("."), "efa")
        except FabricError as error:
            print(found.seconds, error)
        stop_process()
        """
    first, second = outputs(start_pair(body, LOCAL_WORLD_SIZE="1"))
    assert "NCCL on node 0 selected NET/gloo (there is no GPU)" in first
    assert "NCCL on node 1 selected NET/gloo" in second
    assert first.split()[0] == second.split()[0]
