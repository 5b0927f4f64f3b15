"""Which network NCCL took between the nodes: EFA, or one that is many times slower and does not say so.

Where EFA cannot be used NCCL falls back to TCP without an error. What it took it tells at NCCL_DEBUG=INFO:

    host:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
    host:188:585 [0] NCCL INFO Using network Libfabric

The first line is of the plugin aws-ofi-nccl, and the only one that tells EFA. Its older releases write
`Selected Provider is efa (found 4 nics)` (nccl_net_ofi_query_provider_capabilities in its
src/nccl_ofi_net.cpp). The second is NCCL's and names the plugin, `AWS Libfabric` or `Libfabric`, which it
does as well when libfabric goes over TCP; else it is `Socket` or `IB`. Examples: issues 1597 (EFA) and 1126
(TCP) of github.com/NVIDIA/nccl, seen 2026-11-21.

NCCL tells this before it connects the nodes. Where they take different networks, or a security group is in
the way of EFA, some releases wait for each other without end, and nothing but this process can end that.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fastlaunch_train.distributed.parallel import Process, agree
from fastlaunch_train.process.failures import FabricError

_PROVIDER = re.compile(r"NET/OFI Selected provider is ([\w-]+)(?:, fabric is ([\w./:-]+))?", re.IGNORECASE)
_NETWORK = re.compile(r"NCCL INFO Using network (\S.*?)\s*$")
#: Releases of NCCL up to 2.5 do not say which network they use, but only what each has found.
_INTERNAL = re.compile(r"NCCL INFO NET/(IB|Socket) : Using ")
#: What says why EFA was not taken: the plugin's own warnings, and that there is no plugin.
_REASONS = re.compile(
    r"NET/OFI (?:No eligible providers.*|Couldn't find any optimal provider.*|GDR disabled.*)"
    r"|NET/Plugin ?: ?.*(?:No plugin found|Could not find:? ?libnccl-net|cannot open shared object).*"
    r"|fi_getinfo: provider efa output empty list"
)
_CHECK = (
    "see nccl-node-*.txt; check that the instances have EFA interfaces, that their security group lets "
    "everything in from and out to itself, that the container has /dev/infiniband, and that the image has "
    "aws-ofi-nccl (libnccl-net.so). --allow-tcp trains without EFA"
)
#: For the first collective: NCCL connects hundreds of GPUs in a minute.
CONNECT_LIMIT_S = 300.0
_LOOK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What NCCL said it takes between nodes; all None if it said nothing, as between GPUs of one machine.

    network: as NCCL calls it, `AWS Libfabric`, `Libfabric`, `Socket` or `IB`. provider: libfabric's, such as
    `efa` or `tcp`. fabric: of the provider, such as `efa-direct`. reason: why EFA was not taken.
    is_selected: whether NCCL said that it uses the network, and not only that it found it.
    """

    network: str | None = None
    provider: str | None = None
    fabric: str | None = None
    reason: str | None = None
    is_selected: bool = False

    @property
    def is_efa(self) -> bool:
        """Whether gradients go over EFA: libfabric has it, and NCCL takes libfabric."""
        return self.provider == "efa" and (self.network is None or "libfabric" in self.network.lower())

    @property
    def name(self) -> str:
        """In one word: `efa`, `libfabric-tcp`, `socket`, `ib`, `unknown`."""
        if self.is_efa:
            return "efa"
        if self.network is not None and "libfabric" not in self.network.lower():
            return self.network.lower().replace(" ", "-")
        return f"libfabric-{self.provider}" if self.provider else "unknown"

    @property
    def told(self) -> str:
        """What NCCL selected, as it calls it, and why not EFA if it says so."""
        selected = "nothing that its log tells"
        if self.network is not None:
            selected = f"NET/{self.network}"
        if self.provider is not None and (self.network is None or "libfabric" in self.network.lower()):
            selected = f"NET/OFI with provider {self.provider}"
        return f"{selected} ({self.reason})" if self.reason and not self.is_efa else selected


#: The processes of machines without GPUs talk through gloo.
_WITHOUT_GPU = Fabric(network="gloo", reason="there is no GPU")


def log_path(output: Path, node: int) -> Path:
    """Where local rank 0 of a node has NCCL write what it does."""
    return output / f"nccl-node-{node}.txt"


def watch(output: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL tell what it takes, on local rank 0 of each of several nodes. Call it before NCCL starts.

    By torchrun's environment variables. The other ranks say as much as before, which is warnings.
    """
    if not _has_peers(environment) or environment.get("LOCAL_RANK") != "0":
        return
    output.mkdir(parents=True, exist_ok=True)
    path = log_path(output, node_rank(environment))
    environment["NCCL_DEBUG"] = "INFO"
    environment["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    # NCCL takes % for a host name or a process id that is to be put in.
    environment["NCCL_DEBUG_FILE"] = str(path.absolute()).replace("%", "%%")


def node_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Which of the nodes this is, from 0, by torchrun's environment variables."""
    return int(environment.get("RANK") or "0") // int(environment.get("LOCAL_WORLD_SIZE") or "1")


def checked_fabric(process: Process, output: Path, wanted: str) -> Fabric:
    """What the ranks of several nodes talk over, after their first collective; all call it together.

    wanted: `efa` or `any`. Raises FabricError where it has to be EFA and one node has another, on all ranks
    that NCCL connects, and on the ranks of that node if it does not; and where NCCL connects none in time.
    """
    node, is_gpu = node_rank(), process.device.type == "cuda"

    def collective() -> None:
        if is_gpu:
            # A thread has a device of its own.
            torch.cuda.set_device(process.device)
        dist.all_reduce(torch.zeros(1, device=process.device))
        if is_gpu:
            torch.cuda.synchronize(process.device)

    def is_refused() -> bool:
        return wanted == "efa" and is_gpu and _says_other(output, node)

    error = connect(collective, is_refused)
    if error is None:
        # No rank reads before every one has connected.
        agree(process, [0.0])
    found = found_fabric(output, node) if is_gpu else _WITHOUT_GPU
    is_wrong = wanted == "efa" and not found.is_efa
    if error is not None:
        # The others hear of it when this rank is gone.
        if is_wrong:
            raise fabric_error(found, node) from error
        if isinstance(error, TimeoutError):
            told = f"NCCL did not connect the nodes in {CONNECT_LIMIT_S:g} s, and on node {node} it selected"
            raise FabricError(f"{told} {found.told}", _CHECK) from error
        raise error
    wrong_node = round(agree(process, [float(node + 1 if is_wrong else 0)])[0]) - 1
    if is_wrong:
        raise fabric_error(found, node)
    if wrong_node >= 0:
        raise FabricError(f"this run has to use EFA, and node {wrong_node} does not", _CHECK)
    return found


def connect(
    collective: Callable[[], None],
    is_refused: Callable[[], bool],
    *,
    limit_s: float = CONNECT_LIMIT_S,
    look_s: float = _LOOK_S,
) -> Exception | None:
    """What the collective raised, None once it is done; TimeoutError if that takes more than limit_s.

    Or as soon as `is_refused`. The collective goes on then, since nothing interrupts NCCL: end the process.
    """
    raised: list[Exception] = []

    def attempt() -> None:
        try:
            collective()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=attempt, name="first collective", daemon=True)
    thread.start()
    end = time.monotonic() + limit_s
    while True:
        thread.join(look_s)
        if not thread.is_alive():
            return raised[0] if raised else None
        if is_refused() or time.monotonic() >= end:
            return TimeoutError("the first collective has not ended")


def read_fabric(lines: Iterable[str]) -> Fabric:
    """What NCCL says in its log. Of several communicators the last one counts."""
    network = provider = fabric = reason = internal = None
    for line in lines:
        if found := _PROVIDER.search(line):
            provider, fabric = found[1].lower(), found[2]
        elif found := _NETWORK.search(line):
            network = found[1]
        elif found := _INTERNAL.search(line):
            internal = found[1]
        elif reason is None and (found := _REASONS.search(line)):
            reason = " ".join(found[0].split())[:160]
    is_selected = network is not None
    if network is None and provider is None:
        network = internal
    return Fabric(network=network, provider=provider, fabric=fabric, reason=reason, is_selected=is_selected)


def found_fabric(output: Path, node: int) -> Fabric:
    """What NCCL wrote into its log on this node; all None without one."""
    try:
        with log_path(output, node).open(errors="replace") as log:
            return read_fabric(log)
    except FileNotFoundError:
        return Fabric()


def _says_other(output: Path, node: int) -> bool:
    """Whether NCCL has said on this node which network it uses, and it is not EFA."""
    found = found_fabric(output, node)
    # Before that line it tells what else it has found.
    return found.is_selected and not found.is_efa


def fabric_error(fabric: Fabric, node: int) -> FabricError:
    """The error of a run that must use EFA, and does not on this node."""
    return FabricError(f"this run has to use EFA, and NCCL on node {node} selected {fabric.told}", _CHECK)


def _has_peers(environment: Mapping[str, str]) -> bool:
    local = int(environment.get("LOCAL_WORLD_SIZE") or "1")
    return int(environment.get("WORLD_SIZE") or "1") > local
