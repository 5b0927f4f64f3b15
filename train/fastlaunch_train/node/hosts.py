"""Keeps the hosts of a job in step: each hears within seconds what became of a run on the others.

A training process whose peer has died may wait for it for many minutes, in a collective or in the rendezvous
of the next run. SageMaker lets the hosts of a job reach each other, so each has one connection to the first,
which passes on what any of them says. Whoever is silent for `SILENCE_S`, or whose connection breaks, is gone.
The words are JSON, one a line; an empty object says only that its host is there.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

#: Beside torchrun's 29500, on the first host.
PORT = 29490
SILENCE_S = 10.0
_ALIVE_EVERY_S = 2.0
#: Hosts pull an image of many gigabytes before they start.
JOIN_LIMIT_S = 900.0
_MAX_LINE_BYTES = 2**16


class Hosts:
    """names: of all hosts in order of rank. token: of the job, so that no stranger is taken for a host.

    A host whose name cannot be resolved, or which does not come, is waited for until `join_limit_s`.
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
        self._words: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._lost: str | None = None
        self._left: set[int] = set()
        self._closed = False
        self._server: socket.socket | None = None

    @property
    def lost(self) -> str | None:
        """Which host is gone, in words; None while all are there."""
        return self._lost

    def join(self, is_stopped: Callable[[], bool]) -> bool:
        """Wait until all hosts are there; whether they are. False if asked to stop, or if `lost` says why."""
        if len(self._names) == 1:
            return True
        end = time.monotonic() + self._join_limit_s
        try:
            while not (self._accept() if self._rank == 0 else self._reach_first()):
                if is_stopped():
                    return False
                if time.monotonic() > end:
                    self._lost = f"{self._missing()} did not come in {self._join_limit_s:g} s"
                    return False
        finally:
            if self._server is not None:
                self._server.close()
        for rank, connection in self._connections.items():
            connection.settimeout(self._silence_s)
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()
        threading.Thread(target=self._keep_alive, daemon=True).start()
        return True

    def say(self, run: int, word: Mapping[str, Any]) -> None:
        """Tell all hosts what became of this job's run number `run` here."""
        with self._lock:
            self._words[run, self._rank] = word
        self._send({"run": run, "host": self._rank, **word})

    def words(self, run: int) -> dict[int, Mapping[str, Any]]:
        """What the hosts, this one included, have said of a run, by rank."""
        with self._lock:
            return {host: word for (of, host), word in self._words.items() if of == run}

    def close(self, *, is_done: bool) -> None:
        """Go. is_done: all has been said; else this host is gone to the others, who may wait for its word."""
        self._closed = True
        if is_done:
            self._send({"leaves": True})
        for connection in self._connections.values():
            # What was sent still arrives.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.close()

    # Meeting

    def _accept(self) -> bool:
        """Hear a host that comes; whether all have come."""
        if self._server is None:
            self._server = socket.create_server(("", self._port), backlog=len(self._names))
            self._server.settimeout(0.5)
        with suppress(socket.timeout):
            connection, _ = self._server.accept()
            self._greet(connection)
        if len(self._connections) < len(self._names) - 1:
            return False
        # Nobody begins before all are there.
        self._send({"all": True})
        return True

    def _missing(self) -> str:
        there = (*self._connections, self._rank) if self._rank == 0 else (self._rank,)
        return ", ".join(name for at, name in enumerate(self._names) if at not in there)

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        with suppress(OSError, ValueError, KeyError, TypeError):
            greeting = json.loads(_line(connection))
            if greeting["token"] == self._token and 0 < greeting["host"] < len(self._names):
                self._connections[greeting["host"]] = connection
                return
        connection.close()

    def _reach_first(self) -> bool:
        """Reach the first host, or hear it; whether it has said that all are there."""
        try:
            if 0 not in self._connections:
                connection = socket.create_connection((self._names[0], self._port), timeout=5)
                connection.sendall(_as_line({"token": self._token, "host": self._rank}))
                connection.settimeout(0.5)
                self._connections[0] = connection
            return bool(_line(self._connections[0]))
        except socket.timeout:
            return False
        except OSError:
            self._connections.pop(0, None)
            time.sleep(0.5)
            return False

    # Talking

    def _listen(self, rank: int, connection: socket.socket) -> None:
        waiting = b""
        while not self._closed:
            try:
                data = connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._lose(rank)
                return
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                self._hear(rank, json.loads(line))

    def _hear(self, rank: int, said: dict[str, Any]) -> None:
        if "lost" in said:
            self._lost = self._lost or said["lost"]
        if "leaves" in said:
            self._left.add(rank)
        if "run" not in said:
            return
        word = dict(said)
        with self._lock:
            self._words[word.pop("run"), word.pop("host")] = word
        if self._rank == 0:
            self._send(said, but=rank)

    def _lose(self, rank: int) -> None:
        if self._closed or self._lost or rank in self._left:
            return
        self._lost = f"{self._names[rank]} is gone"
        if self._rank == 0:
            self._send({"lost": self._lost}, but=rank)

    def _keep_alive(self) -> None:
        while not self._closed:
            time.sleep(_ALIVE_EVERY_S)
            self._send({})

    def _send(self, said: Mapping[str, Any], but: int | None = None) -> None:
        for rank, connection in list(self._connections.items()):
            if rank != but:
                # One that is gone is noticed by who listens to it.
                with suppress(OSError), self._lock:
                    connection.sendall(_as_line(said))


def _as_line(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _line(connection: socket.socket) -> bytes:
    """The next line, byte by byte, so that nothing after it is taken. Raises OSError."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > _MAX_LINE_BYTES:
            raise ConnectionError("no line")
        line += byte
    return line
