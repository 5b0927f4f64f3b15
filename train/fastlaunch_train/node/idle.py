"""Whether a run idles: its GPUs do nothing, and it records nothing."""

from __future__ import annotations

from pathlib import Path

from fastlaunch_train.node.commands import Clock
from fastlaunch_train.node.gpus import Gpus
from fastlaunch_train.node.protocol import LEAST_USE


class IdleWatch:
    """Watches a run from its start on.

    limit_s: how long it may idle; None for ever. records: the folder of its records. GPUs of unknown use
    may be busy, so a machine without any never idles.
    """

    def __init__(self, limit_s: float | None, *, gpus: Gpus, records: Path, clock: Clock) -> None:
        self._limit_s = limit_s
        self._gpus = gpus
        self._records = records
        self._clock = clock
        self._active_s = clock.uptime_s()
        self._num_bytes = 0
        gpus.samples.clear()

    def is_over(self) -> bool:
        """Return whether it has idled for `limit_s`, or longer."""
        # It is asked several times a second, and a sample comes twice a minute.
        if self._limit_s is None or not self._gpus.samples:
            return False
        now_s = self._clock.uptime_s()
        num_bytes = sum(path.stat().st_size for path in self._records.glob("rank-*.jsonl"))
        is_active = num_bytes != self._num_bytes
        while self._gpus.samples:
            use = self._gpus.samples.popleft()
            is_active |= use is None or use * self._gpus.count >= LEAST_USE
        if is_active:
            self._active_s, self._num_bytes = now_s, num_bytes
        return now_s - self._active_s >= self._limit_s
