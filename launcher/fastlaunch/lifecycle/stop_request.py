"""Whether someone asked this process to stop, as a value to look at between two steps of its work."""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self


@dataclass(kw_only=True)
class StopRequest:
    """Whether someone asked this process to stop: by Ctrl-C, SIGTERM, or closing its terminal.

    As a context manager it listens. The first signal is noted in `by`; a second one raises KeyboardInterrupt,
    and so does each after it: in the main thread, and in others that sleep by `sleeping`.
    """

    by: str | None = None
    _num_interrupts: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # What is ignored stays ignored: nohup means it.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def sleeping(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        """Return `sleep` for another thread than the main one, which alone hears signals."""
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
