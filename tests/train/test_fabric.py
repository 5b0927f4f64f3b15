"""Which network NCCL says it takes: logs made after public examples of NCCL and its plugin, old and new."""

import threading
from pathlib import Path

import pytest

from fastlaunch_train.distributed.fabric import (
    Fabric,
    connect,
    fabric_error,
    log_nccl,
    log_path,
    logged_fabric,
    node_rank,
    read_fabric,
)

#: aws-ofi-nccl 1.16 on p4d, NCCL 2.27.
EFA_2025 = """\
ip-10-0-0-5:188:188 [0] NCCL INFO NET/Plugin: Plugin name set by env to libnccl-net.so
ip-10-0-0-5:188:585 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.16.2
ip-10-0-0-5:188:585 [0] NCCL INFO NET/OFI Setting provider_filter to efa
ip-10-0-0-5:188:585 [0] NCCL INFO NET/OFI Using transport protocol SENDRECV (platform set)
ip-10-0-0-5:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 4 nics)
ip-10-0-0-5:188:585 [0] NCCL INFO Assigned NET plugin Libfabric to comm
ip-10-0-0-5:188:585 [0] NCCL INFO Using network Libfabric
ip-10-0-0-5:188:709 [0] NCCL INFO Channel 00/0 : 3[0] -> 0[0] [receive] via NET/Libfabric/0/GDRDMA
"""
#: aws-ofi-nccl 1.21 on p6-b200.
EFA_2026 = EFA_2025.replace("fabric is efa (found 4", "fabric is efa-direct (found 8")
#: aws-ofi-nccl 1.7 on p4d.
EFA_2023 = """\
ip-10-1-14-81:6158:9214 [2] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.7.3-aws
ip-10-1-14-81:6158:9214 [2] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
ip-10-1-14-81:6158:9214 [2] NCCL INFO Using network AWS Libfabric
"""
#: The plugin is there, an EFA is not, and FI_PROVIDER lets libfabric go over TCP.
LIBFABRIC_TCP = """\
ip-172-31-32-9:70:71 [0] NCCL INFO NET/OFI No eligible providers were found
ip-172-31-32-9:70:71 [0] NCCL INFO NET/OFI Selected provider is tcp, fabric is 172.31.32.0/20 (found 1 nics)
ip-172-31-32-9:70:71 [0] NCCL INFO NET/OFI Need to force simple protocol: GDR not supported
ip-172-31-32-9:70:71 [0] NCCL INFO Using network AWS Libfabric
"""
#: No plugin in the image.
SOCKET = """\
ip-10-0-0-5:79:79 [0] NCCL INFO Bootstrap : Using ens5:10.0.0.5<0>
ip-10-0-0-5:79:79 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
ip-10-0-0-5:79:85 [0] NCCL INFO NET/IB : No device found.
ip-10-0-0-5:79:85 [0] NCCL INFO NET/Socket : Using [0]ens5:10.0.0.5<0>
ip-10-0-0-5:79:85 [0] NCCL INFO Using network Socket
"""
#: The plugin finds EFA, and whoever started it told NCCL to take TCP.
FORCED_SOCKET = EFA_2025.replace("Using network Libfabric", "Using network Socket")


@pytest.mark.parametrize(
    ("log", "name", "selection"),
    [
        (EFA_2026, "efa", "NET/OFI with provider efa"),
        (EFA_2023, "efa", "NET/OFI with provider efa"),
        # What has been found is no choice yet: a plugin may say more in the next line.
        ("\n".join(EFA_2025.splitlines()[:5]), "efa", "NET/OFI with provider efa"),
        ("\n".join(SOCKET.splitlines()[:4]), "unknown", "no network"),
        (LIBFABRIC_TCP, "libfabric-tcp", "NET/OFI with provider tcp (NET/OFI No eligible"),
        (SOCKET, "socket", "NET/Socket (NET/Plugin : No plugin found"),
        (FORCED_SOCKET, "socket", "NET/Socket"),
        (EFA_2025 + FORCED_SOCKET, "socket", "NET/Socket"),  # of two communicators the later counts
        ("node:1:2 [0] NCCL INFO Using network IB\n", "ib", "NET/IB"),
        ("NCCL WARN Cuda failure 802\n", "unknown", "no network"),
    ],
)
def test_a_log_tells_the_network(log: str, name: str, selection: str) -> None:
    fabric = read_fabric(log.splitlines())
    assert (fabric.name, fabric.is_efa) == (name, name == "efa")
    assert fabric.selection.startswith(selection)
    assert fabric.selection in str(fabric_error(fabric, 3))


def ranks(**changes: str) -> dict[str, str]:
    """torchrun's variables on local rank 0 of the second of two machines with eight ranks each."""
    return {
        "RANK": "8",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "NCCL_DEBUG": "WARN",
        **changes,
    }


def test_local_rank_0_of_several_nodes_has_nccl_tell(tmp_path: Path) -> None:
    environment = ranks()
    assert node_rank(environment) == 1
    output = tmp_path / "100%"
    log_nccl(output, environment)
    assert (environment["NCCL_DEBUG"], environment["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
    assert environment["NCCL_DEBUG_FILE"] == f"{tmp_path}/100%%/nccl-node-1.txt"
    assert output.is_dir()


@pytest.mark.parametrize(
    "environment", [ranks(RANK="9", LOCAL_RANK="1"), ranks(RANK="0", WORLD_SIZE="8"), {}]
)
def test_every_other_rank_says_as_much_as_before(tmp_path: Path, environment: dict[str, str]) -> None:
    before = dict(environment)
    log_nccl(tmp_path, environment)
    assert environment == before


def test_the_file_is_read(tmp_path: Path) -> None:
    assert logged_fabric(tmp_path, 1) == Fabric()
    log_path(tmp_path, 1).write_bytes(b"\xff\n" + EFA_2025.encode())
    assert logged_fabric(tmp_path, 1).is_efa
    assert not logged_fabric(tmp_path, 0).is_efa


def test_a_collective_that_ends_is_waited_for_and_what_it_raises_is_told() -> None:
    done = []
    assert connect(lambda: done.append(1), lambda: True, limit_s=60) is None
    assert done == [1]

    def refuse() -> None:
        raise RuntimeError("NCCL error")

    assert str(connect(refuse, lambda: False, limit_s=60)) == "NCCL error"


@pytest.mark.parametrize(("is_refused", "limit_s"), [(True, 3600), (False, 0)])
def test_a_collective_without_end_is_left(is_refused: bool, limit_s: float) -> None:
    peer = threading.Event()

    def hang() -> None:
        peer.wait(60)

    error = connect(hang, lambda: is_refused, limit_s=limit_s, check_s=0.01)
    assert isinstance(error, TimeoutError)
    peer.set()
