"""Keeps the hosts of a job in step: each learns within seconds how a run ended on the others.

A training process whose peer has died may wait for it for many minutes, in a collective or in the rendezvous
of the next run. SageMaker lets the hosts of a job reach each other, so each has one connection to the first,
which passes all messages on. A host is gone if it is silent for `SILENCE_S`, or if its connection breaks.
Messages are JSON, one a line; an empty object says only that its host is there.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

#: The port on the first host, beside torchrun's 29500.
PORT = 29490
SILENCE_S = 10.0
_ALIVE_EVERY_S = 2.0
#: Seconds to wait for all hosts, which pull an image of many gigabytes before they start.
JOIN_LIMIT_S = 900.0
_LOOK_S = 0.2
_MAX_LINE_BYTES = 2**16


class Hosts:
    """The hosts of a job, which tell each other how their runs ended.

    names: of all hosts, in order of rank. token: the job's, so that no stranger is taken for a host.

    A host whose name cannot be resolved, or which does not connect, is waited for until `join_limit_s`.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int,
        *,
        token: str,
        port: int = PORT,
        silence_s: float = SILENCE_S,
        join_limit_s: float = JOIN_LIMIT_S,
    ) -> None:
        self._names = names
        self._rank = rank
        self._token = token
        self._port = port
        self._silence_s = silence_s
        self._join_limit_s = join_limit_s
        self._lock = threading.Lock()
        self._connections: dict[int, socket.socket] = {}
        self._are_all_there = threading.Event()
        #: The hosts' messages, by number of the run and rank of the host.
        self._words: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._left: set[int] = set()
        self._is_closed = False
        #: Which host is gone, in words; None while all are there.
        self.lost: str | None = None

    def join(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait for all hosts; return whether they are there. `lost` says why not, unless asked to stop."""
        if len(self._names) == 1:
            return True
        if self._rank == 0:
            _in_background(self._accept, socket.create_server(("", self._port), backlog=len(self._names)))
        else:
            _in_background(self._reach_first)
        _in_background(self._keep_alive)
        end = time.monotonic() + self._join_limit_s
        while not self._are_all_there.wait(_LOOK_S):
            if self.lost or is_stopped():
                return False
            if time.monotonic() > end:
                present = {*self._connections, self._rank}
                missing = [name for rank, name in enumerate(self._names) if rank not in present]
                self.lost = f"{', '.join(missing)} did not come in {self._join_limit_s:g} s"
                return False
        return True

    def say(self, run: int, word: Mapping[str, Any]) -> None:
        """Tell all hosts how run number `run` of the job ended here."""
        with self._lock:
            self._words[run, self._rank] = word
        self._send({"run": run, "host": self._rank, "word": word})

    def words(self, run: int) -> dict[int, Mapping[str, Any]]:
        """Return what the hosts, this one included, have said about a run, by rank."""
        with self._lock:
            return {host: word for (number, host), word in self._words.items() if number == run}

    def has_any_said(self, key: str) -> bool:
        """Return whether `key` is true in any host's word on any run."""
        with self._lock:
            return any(word[key] for word in self._words.values())

    def close(self, *, is_done: bool) -> None:
        """Close all connections. is_done: this host has said everything; else the others count it as gone."""
        self._is_closed = True
        if is_done:
            self._send({"leaves": True})
        for connection in self._connections.values():
            # What has been sent still arrives.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()

    # Meeting

    def _accept(self, server: socket.socket) -> None:
        """Accept hosts until all have connected."""
        server.settimeout(_LOOK_S)
        with server:
            while not (self._are_all_there.is_set() or self._is_closed):
                with suppress(socket.timeout):
                    connection, _ = server.accept()
                    _in_background(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(self._silence_s)
        with connection, connection.makefile("rb") as lines:
            try:
                greeting = json.loads(lines.readline(_MAX_LINE_BYTES))
                rank = greeting["host"]
                if greeting["token"] != self._token or not 0 < rank < len(self._names):
                    return
            except (OSError, ValueError, KeyError, TypeError):
                return
            self._connections[rank] = connection
            if len(self._connections) == len(self._names) - 1:
                # No host begins before all are there.
                self._send({"all": True})
                self._are_all_there.set()
            self._listen(rank, lines)

    def _reach_first(self) -> None:
        while not self._is_closed:
            try:
                connection = socket.create_connection((self._names[0], self._port), timeout=5)
                connection.sendall(_as_line({"token": self._token, "host": self._rank}))
            except OSError:
                time.sleep(_LOOK_S)
                continue
            connection.settimeout(self._silence_s)
            with connection, connection.makefile("rb") as lines:
                self._connections[0] = connection
                self._listen(0, lines)
            return

    # Talking

    def _listen(self, rank: int, lines: BinaryIO) -> None:
        """Listen to a host until it is gone."""
        with suppress(OSError, ValueError):
            for line in lines:
                self._hear(rank, json.loads(line))
        if self._is_closed or self.lost or rank in self._left:
            return
        self.lost = f"{self._names[rank]} is gone"
        if self._rank == 0:
            self._send({"lost": self.lost}, but=rank)

    def _hear(self, rank: int, message: Mapping[str, Any]) -> None:
        if "all" in message:
            self._are_all_there.set()
        if "lost" in message:
            self.lost = self.lost or message["lost"]
        if "leaves" in message:
            self._left.add(rank)
        if "run" in message:
            with self._lock:
                self._words[message["run"], message["host"]] = message["word"]
            if self._rank == 0:
                self._send(message, but=rank)

    def _keep_alive(self) -> None:
        while not self._is_closed:
            time.sleep(_ALIVE_EVERY_S)
            self._send({})

    def _send(self, message: Mapping[str, Any], but: int | None = None) -> None:
        for rank, connection in list(self._connections.items()):
            if rank != but:
                # The thread that listens to a host notices when it is gone.
                with suppress(OSError), self._lock:
                    connection.sendall(_as_line(message))


def _as_line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _in_background(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()
