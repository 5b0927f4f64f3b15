"""Find out which network NCCL uses between the nodes: EFA, or silently a much slower one.

If EFA does not work, NCCL falls back to TCP without an error. At NCCL_DEBUG=INFO it logs its choice:

    host:188:585 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)
    host:188:585 [0] NCCL INFO Using network Libfabric

The first line is from the plugin aws-ofi-nccl, and the only one that mentions EFA. Older releases write
`Selected Provider is efa (found 4 nics)` (nccl_net_ofi_query_provider_capabilities in its
src/nccl_ofi_net.cpp). The second is from NCCL and names the plugin, `AWS Libfabric` or `Libfabric`, even if
libfabric uses TCP; without the plugin it names `Socket` or `IB`. Examples: issues 1597 (EFA) and 1126 (TCP)
of github.com/NVIDIA/nccl, seen 2026-11-21.

NCCL logs this before it connects the nodes. If they use different networks, or a security group blocks EFA,
some releases wait for each other forever, and only this process can end that.
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
#: Reasons why EFA is not used: the plugin's own warnings, or a missing plugin.
_REASONS = re.compile(
    r"NET/OFI (?:No eligible providers.*|Couldn't find any optimal provider.*|GDR disabled.*)"
    r"|NET/Plugin ?: ?.*(?:No plugin found|Could not find:? ?libnccl-net|cannot open shared object).*"
    r"|fi_getinfo: provider efa output empty list"
)
_CHECK = (
    "see nccl-node-*.txt; check that the instances have EFA interfaces, that their security group allows all "
    "traffic from and to itself, that the container has /dev/infiniband, and that the image has aws-ofi-nccl "
    "(libnccl-net.so). --allow-tcp trains without EFA"
)
#: Seconds to connect; NCCL connects hundreds of GPUs in a minute.
CONNECT_LIMIT_S = 300.0
_CHECK_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """NCCL's choice of network between nodes by its log; all None if it names none, as within one machine."""

    #: NCCL's name: `AWS Libfabric`, `Libfabric`, `Socket` or `IB`; None until it has selected one
    network: str | None = None
    provider: str | None = None  #: libfabric's provider, such as `efa` or `tcp`
    fabric: str | None = None  #: the provider's fabric, such as `efa-direct`
    reason: str | None = None  #: why EFA is not used

    @property
    def is_efa(self) -> bool:
        """Whether gradients go over EFA: libfabric uses EFA, and NCCL uses libfabric."""
        return self.provider == "efa" and self._may_be_libfabric

    @property
    def _may_be_libfabric(self) -> bool:
        return self.network is None or "libfabric" in self.network.lower()

    @property
    def name(self) -> str:
        """The network in one word: `efa`, `libfabric-tcp`, `socket`, `ib`, `unknown`."""
        if self.is_efa:
            return "efa"
        if self.network is not None and not self._may_be_libfabric:
            return self.network.lower().replace(" ", "-")
        return f"libfabric-{self.provider}" if self.provider else "unknown"

    @property
    def selection(self) -> str:
        """NCCL's choice in its own words, and the reason against EFA if it logs one."""
        selected = "no network that its log names"
        if self.network is not None:
            selected = f"NET/{self.network}"
        if self.provider is not None and self._may_be_libfabric:
            selected = f"NET/OFI with provider {self.provider}"
        return f"{selected} ({self.reason})" if self.reason and not self.is_efa else selected


#: Processes on machines without GPUs talk through gloo.
_WITHOUT_GPU = Fabric(network="gloo", reason="there is no GPU")


def log_path(output: Path, node: int) -> Path:
    """Return the path of NCCL's log on local rank 0 of a node."""
    return output / f"nccl-node-{node}.txt"


def log_nccl(output: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL log its network on local rank 0 of each node, if there are several, before it starts.

    `environment` has torchrun's variables. The other ranks keep their log level.
    """
    world_size, local_world_size = (
        int(environment.get(name) or "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    if world_size <= local_world_size or environment.get("LOCAL_RANK") != "0":
        return
    output.mkdir(parents=True, exist_ok=True)
    path = log_path(output, node_rank(environment))
    environment["NCCL_DEBUG"] = "INFO"
    environment["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    # NCCL replaces %h and %p by the host name and the process id.
    environment["NCCL_DEBUG_FILE"] = str(path.absolute()).replace("%", "%%")


def node_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this node, from 0, by torchrun's environment variables."""
    return int(environment.get("RANK") or "0") // int(environment.get("LOCAL_WORLD_SIZE") or "1")


def check_fabric(process: Process, output: Path, required: str) -> Fabric:
    """Return the network between the nodes, after the first collective; all ranks call it together.

    required: `efa` or `any`. Raises FabricError if EFA is required and a node uses another network: on all
    ranks if NCCL connects them, else on that node's ranks. Raises it, too, if NCCL does not connect in time.
    """
    node, is_gpu = node_rank(), process.device.type == "cuda"

    def collective() -> None:
        if is_gpu:
            # The current device is a setting of each thread.
            torch.cuda.set_device(process.device)
        dist.all_reduce(torch.zeros(1, device=process.device))
        if is_gpu:
            torch.cuda.synchronize(process.device)

    def is_refused() -> bool:
        fabric = logged_fabric(output, node)
        # Before NCCL selects a network, it lists the others that it has found.
        return required == "efa" and is_gpu and fabric.network is not None and not fabric.is_efa

    error = connect(collective, is_refused)
    if error is None:
        # No rank reads its log before all have connected.
        agree(process, [0.0])
    fabric = logged_fabric(output, node) if is_gpu else _WITHOUT_GPU
    is_wrong = required == "efa" and not fabric.is_efa
    if error is not None:
        # The other ranks notice when this rank is gone.
        if is_wrong:
            raise fabric_error(fabric, node) from error
        if isinstance(error, TimeoutError):
            raise FabricError(
                f"NCCL did not connect the nodes in {CONNECT_LIMIT_S:g} s, and on node {node} it selected "
                f"{fabric.selection}",
                _CHECK,
            ) from error
        raise error
    wrong_node = round(agree(process, [float(node + 1 if is_wrong else 0)])[0]) - 1
    if is_wrong:
        raise fabric_error(fabric, node)
    if wrong_node >= 0:
        raise FabricError(f"this run has to use EFA, but node {wrong_node} does not", _CHECK)
    return fabric


def connect(
    collective: Callable[[], None],
    is_refused: Callable[[], bool],
    *,
    limit_s: float = CONNECT_LIMIT_S,
    check_s: float = _CHECK_S,
) -> Exception | None:
    """Run the collective and return its exception; TimeoutError after limit_s, or once `is_refused`.

    Nothing can interrupt NCCL, so a timed-out collective goes on: end the process.
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
        thread.join(check_s)
        if not thread.is_alive():
            return raised[0] if raised else None
        if is_refused() or time.monotonic() >= end:
            return TimeoutError("the first collective has not ended")


def read_fabric(lines: Iterable[str]) -> Fabric:
    """Read NCCL's choice from its log. The last of several communicators counts."""
    network = provider = fabric = reason = None
    for line in lines:
        if match := _PROVIDER.search(line):
            provider, fabric = match[1].lower(), match[2]
        elif match := _NETWORK.search(line):
            network = match[1]
        elif reason is None and (match := _REASONS.search(line)):
            reason = " ".join(match[0].split())[:160]
    return Fabric(network=network, provider=provider, fabric=fabric, reason=reason)


def logged_fabric(output: Path, node: int) -> Fabric:
    """Read NCCL's choice from this node's log; all None without a log."""
    try:
        with log_path(output, node).open(errors="replace") as log:
            return read_fabric(log)
    except FileNotFoundError:
        return Fabric()


def fabric_error(fabric: Fabric, node: int) -> FabricError:
    """Return the error of a run that has to use EFA but does not on this node."""
    return FabricError(
        f"this run has to use EFA, but NCCL on node {node} selected {fabric.selection}", _CHECK
    )
