"""SIGTERM and SIGINT: a flag that the loop reads between steps, and a way out when it cannot.

Python runs signal handlers in the main thread only, and not while that thread waits inside a collective, a
device synchronisation or a compiler. So a second thread hears of the signal through the wakeup descriptor
and ends the process itself if the loop has not ended in time.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fastlaunch_train.process.launch import DEFAULT_STOP_GRACE_S

#: Seconds between the second thread's checks whether a checkpoint is being written.
_CHECK_S = 0.25
_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)


class Interrupts:
    """Whether the process was asked to stop, and by which signal.

    If `done` is not called within `grace_s` seconds after a signal, not counting time in `saving`, another
    thread calls `on_stuck` and ends the process.
    """

    def __init__(self, *, grace_s: float = DEFAULT_STOP_GRACE_S) -> None:
        self._grace_s = grace_s
        self._signal: int | None = None
        self._done = threading.Event()
        self._sender: socket.socket | None = None
        self._saving = False
        self.on_stuck: Callable[[str], object] | None = None
        self._replaced: dict[int, Any] = {}

    def install(self, *, keep_handlers: bool = False) -> None:
        """Catch SIGTERM and SIGINT from now on; call it in the main thread.

        keep_handlers: leave a signal to whoever handles it already, such as a user's script.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            if not keep_handlers or signal.getsignal(number) in _DEFAULT_HANDLERS:
                self._replaced.setdefault(number, signal.signal(number, self._handle))
        if self._sender is not None or not self._replaced:
            return
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._sender = sender  # kept open: the wakeup descriptor is only a number
        # A child that gets a signal, such as a pool's, would write into the same socket.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, args=(receiver,), name="interrupts", daemon=True).start()

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def message(self) -> str:
        """The reason for the run's end, for its record."""
        return f"stopped by {signal.Signals(self._signal).name}" if self._signal else "stopped by a peer"

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enter a context in which a checkpoint, ours or a peer's, is written: slow but not stuck."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def done(self) -> None:
        """Note that the loop has ended, so that the process need not be forced to end."""
        self._done.set()

    def _forget(self) -> None:
        """Leave signals as they were before `install`."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def _watch(self, receiver: socket.socket) -> None:
        watched = {int(signal.SIGTERM), int(signal.SIGINT)}
        caught: list[int] = []
        while not caught:
            numbers = receiver.recv(64)
            if not numbers:
                return
            caught = [number for number in numbers if number in watched]
        self._signal = self._signal or caught[0]
        left_s = self._grace_s
        while left_s > 0:
            before = time.monotonic()
            if self._done.wait(min(left_s, _CHECK_S)):
                return
            if not self._saving:
                left_s -= time.monotonic() - before
        if self.on_stuck is not None:
            self.on_stuck(f"{self.message}; no step ended within {self._grace_s:g} s")
        os._exit(130)
