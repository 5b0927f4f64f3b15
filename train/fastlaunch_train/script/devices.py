"""Sample this machine's GPUs with nvidia-smi, for scripts that record nothing themselves. No torch."""

import subprocess
import threading
from collections.abc import Callable

from fastlaunch_train.process.device import number_or_none, visible_gpus
from fastlaunch_train.records.records import Device

#: Seconds between two samples.
SAMPLE_EVERY_S = 5
#: The most samples of a run to keep; beyond that every second one is dropped.
MAX_SAMPLES = 20_000


class DeviceSampler:
    """Samples every GPU until `stop`; without an NVIDIA driver there are no samples."""

    def __init__(self, seconds: Callable[[], float], argv: tuple[str, ...] = ("nvidia-smi",)) -> None:
        """seconds: since the script began."""
        self._seconds = seconds
        self._samples: list[Device] = []
        self._process: subprocess.Popen[str] | None = None
        query = "--query-gpu=index,utilization.gpu,memory.used,power.draw"
        try:
            self._process = subprocess.Popen(
                [*argv, query, "--format=csv,noheader,nounits", f"--loop={SAMPLE_EVERY_S}", *visible_gpus()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # a Ctrl-C must not reach it
            )
        except OSError:
            return
        self._reader = threading.Thread(target=self._read, name="devices", daemon=True)
        self._reader.start()

    def stop(self) -> list[Device]:
        """Return the samples, in their order."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
        return self._samples

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            sample = parse_sample(line, self._seconds())
            if sample is not None:
                self._samples.append(sample)
            if len(self._samples) >= MAX_SAMPLES:
                gpus = len({sample.gpu for sample in self._samples})
                self._samples = [sample for at, sample in enumerate(self._samples) if at // gpus % 2 == 0]


def parse_sample(line: str, at_s: float) -> Device | None:
    """Return the sample in a line of nvidia-smi, or None; values that the GPU does not report are None."""
    cells = [number_or_none(cell) for cell in line.split(",")]
    if len(cells) != 4 or cells[0] is None:
        return None
    percent, memory_mib, power_w = cells[1:]
    return Device(
        at_s=round(at_s, 1),
        gpu=int(cells[0]),
        utilization=None if percent is None else percent / 100,
        memory_gib=None if memory_mib is None else round(memory_mib / 1024, 3),
        power_w=power_w,
    )
