"""Whether a machine's GPUs are sound, according to the driver and the kernel.

Names are those of nvidia-smi's XML. Drivers from 450 to 580 differ in the counters of `volatile`; all of
uncorrectable errors count. Xids: docs.nvidia.com/deploy/xid-errors.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

from fastlaunch_train.node.commands import Commands, Done
from fastlaunch_train.node.protocol import GPU_USE_QUERY, mean_gpu_use

#: Xids after which no result of the GPU can be trusted, or the GPU is gone.
_FAULTY_XIDS = {
    48: "uncorrectable ECC error",
    64: "row remapper failure",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "high rate of correctable ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "no answer from its GSP",
    120: "error of its GSP",
}
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_REPORT = re.compile(r"<nvidia_smi_log>.*</nvidia_smi_log>", re.DOTALL)
#: What nvidia-smi shows for every value of a GPU that no longer answers.
_LOST = ("GPU is lost", "GPU requires reset")
#: nvidia-smi's exit codes if the driver or its library is missing; 127 if nvidia-smi itself is.
_NO_DRIVER = (9, 12, 127)
#: Time limit, in seconds, of a query: eight GPUs answer in seconds, one that hangs never does.
_LIMIT_S = 30.0
#: Time limit, in seconds, of a query that may be left unanswered.
_SHORT_LIMIT_S = 5.0


class Gpus:
    """The GPUs of this machine. count: their number in the catalogue; 0 for none, or if it is unknown."""

    def __init__(
        self, count: int, *, has_nvswitch: bool = False, run: Callable[..., Done] | None = None
    ) -> None:
        self.count = count
        self._has_nvswitch = has_nvswitch
        self._run = run or Commands().run
        self._had_driver = False
        self._is_silent = False
        #: What is worth reporting, whether it is a fault or not, in order.
        self.notes: list[str] = []
        #: The answers of `use` that nobody has taken yet, oldest first.
        self.samples: deque[float | None] = deque(maxlen=1000)

    def use(self) -> float | None:
        """Return how busy the GPUs are, from 0 to 1; None if nvidia-smi has hung, or does not say."""
        use = None
        if self.count and not self._is_silent:
            answer = self._run(*GPU_USE_QUERY, limit_s=_SHORT_LIMIT_S, is_quiet=True)
            self._is_silent = answer.code in (124, 127)
            use = mean_gpu_use(answer.stdout) if answer.is_ok else None
        self.samples.append(use)
        return use

    def has_driver(self) -> bool:
        """Return whether a driver answers, whatever it says."""
        return self._ask("nvidia-smi", "-L").code not in _NO_DRIVER

    def fault(self) -> str | None:
        """Return what is wrong with the GPUs, in a line; None if nothing is.

        Without a driver their state is unknown, as an image may lack nvidia-smi.
        """
        if not self.count:
            return None
        report = self._ask("nvidia-smi", "-q", "-x")
        self._had_driver = self._had_driver or report.code not in _NO_DRIVER
        faults = list(faults_of(report.stdout, self.count)) if self._had_driver else []
        if self._has_nvswitch:
            faults += inactive_links(self._ask("nvidia-smi", "nvlink", "-s").stdout)
        faults += filter(None, [self.kernel_fault()])
        return "; ".join(faults) or None

    def kernel_fault(self) -> str | None:
        """Return the Xids since boot that make a GPU faulty; add the others to `notes`.

        Return None if the kernel's log cannot be read, as in most containers.
        """
        faults: dict[str, None] = {}
        for place, text in _XID.findall(self._ask("dmesg").stdout):
            number, xid = int(text), f"Xid {text} at {place}"
            if number in _FAULTY_XIDS:
                faults[f"{xid} ({_FAULTY_XIDS[number]})"] = None
            elif xid not in self.notes:
                self.notes.append(xid)
        return "; ".join(faults) or None

    def _ask(self, *command: str) -> Done:
        return self._run(*command, limit_s=_LIMIT_S, is_quiet=True)


def faults_of(report: str, count: int) -> Iterator[str]:
    """Yield the faults in the report of `nvidia-smi -q -x`, on a machine that has `count` GPUs."""
    # Warnings, such as one about an infoROM, may follow the XML, and change the exit code.
    document = _REPORT.search(report)
    try:
        gpus = ElementTree.fromstring(document[0] if document else "").findall("gpu")
    except ElementTree.ParseError:
        # If a GPU is off the bus, nvidia-smi may print that as plain text, and nothing about the others.
        yield f"nvidia-smi cannot say how its GPUs are: {' '.join(report.split())[:160] or 'no answer'}"
        return
    if len(gpus) < count:
        yield f"{len(gpus)} of {count} GPUs are there"
    for number, gpu in enumerate(gpus):
        if any(one.text in _LOST for one in gpu.iter()):
            yield f"GPU {number} is lost"
        counters = gpu.iterfind("ecc_errors/volatile/*")
        # A Volta or Turing GPU with an older driver counts the same as `double_bit`.
        uncorrectable = [one.text for one in counters if "uncorrectable" in one.tag]
        uncorrectable.append(gpu.findtext("ecc_errors/volatile/double_bit/total"))
        if num_errors := sum(int(text) for text in uncorrectable if text and text.isdigit()):
            yield f"GPU {number}: {num_errors} uncorrectable ECC errors since boot"
        if gpu.findtext("remapped_rows/remapped_row_pending") == "Yes":
            yield f"GPU {number}: a row remap is pending"
        if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
            yield f"GPU {number}: a row could not be remapped"


def inactive_links(status: str) -> list[str]:
    """Return a phrase for each GPU with inactive links, by the report of `nvidia-smi nvlink -s`."""
    # Below each GPU's header stands `Link 3: <inactive>`, or one line for all of its links.
    _, *parts = re.split(r"^GPU (\d+):", status, flags=re.MULTILINE)
    inactive = [(gpu, text.lower().count("inactive")) for gpu, text in zip(parts[::2], parts[1::2])]
    return [f"GPU {gpu}: inactive NVLinks ({count})" for gpu, count in inactive if count]
