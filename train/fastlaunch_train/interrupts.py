"""SIGTERM and SIGINT: a flag that the loop reads between steps, and a way out when it cannot read it.

Python runs signal handlers in the main thread only, and not while that thread waits inside a collective, a
device synchronisation or a compiler. So a second thread hears of the signal through the wakeup descriptor
and, if the loop has not ended in time, ends the process itself, before torchrun does: it kills its workers
30 s after a signal.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

#: Seconds that the loop has to end by itself; under torchrun's 30.
GRACE_S = 25.0


class Interrupts:
    """Whether the process was asked to stop, and by which signal.

    on_stuck is called from another thread if `done` has not been called `grace_s` seconds after a signal;
    it must end the process.
    """

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._signal: int | None = None
        self._done = threading.Event()
        self.on_stuck: Callable[[str], object] | None = None

    def install(self) -> None:
        """Catch SIGTERM and SIGINT from now on. Call it in the main thread."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._sender = sender  # kept open: the wakeup descriptor is only a number
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        threading.Thread(target=self._watch, args=(receiver,), name="interrupts", daemon=True).start()

    @property
    def requested(self) -> bool:
        return self._signal is not None

    @property
    def message(self) -> str:
        """Why the run ends, for the record."""
        return f"stopped by {signal.Signals(self._signal).name}" if self._signal else "stopped by a peer"

    def done(self) -> None:
        """The loop has ended: nothing needs to be forced any more."""
        self._done.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def _watch(self, receiver: socket.socket) -> None:
        watched = {int(signal.SIGTERM), int(signal.SIGINT)}
        while True:
            numbers = receiver.recv(64)
            if not numbers:
                return
            caught = [number for number in numbers if number in watched]
            if caught:
                break
        self._signal = self._signal or caught[0]
        if not self._done.wait(self._grace_s):
            if self.on_stuck is not None:
                self.on_stuck(f"{self.message}; no step ended within {self._grace_s:g} s")
            os._exit(130)
