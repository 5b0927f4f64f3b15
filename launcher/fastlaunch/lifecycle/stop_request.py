"""A request to stop this process, as a value to check between two steps of its work."""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self


@dataclass(kw_only=True)
class StopRequest:
    """Whether the user asked this process to stop: by Ctrl-C, SIGTERM, or closing its terminal.

    It listens as a context manager. The first signal is noted in `by`; every later one raises
    KeyboardInterrupt in the main thread, and in other threads that sleep through `sleeping`.
    """

    by: str | None = None
    _num_interrupts: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Keep ignored signals ignored, for nohup.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def sleeping(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        """Return `sleep` for a thread other than the main one, which alone receives signals."""
        num_raised = self._num_interrupts

        def sleep_unless_interrupted(seconds: float) -> None:
            nonlocal num_raised
            sleep(seconds)
            if num_raised < self._num_interrupts:
                num_raised = self._num_interrupts
                raise KeyboardInterrupt

        return sleep_unless_interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None:
            self._num_interrupts += 1
            raise KeyboardInterrupt
        self.by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
