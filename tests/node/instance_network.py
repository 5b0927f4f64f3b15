"""What a simulated instance reaches: the metadata service (IMDSv2), and AWS by a wire that can be cut."""

import ctypes
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CLONE_NEWNET = 0x40000000


def listen_inside(process: int, addresses: Sequence[tuple[str, int]]) -> list[socket.socket]:
    """Sockets that listen at `addresses` in the network namespace of `process`, and are used from here.

    A socket belongs to the namespace of the thread that makes it, so one thread goes there and ends.
    """

    def make() -> list[socket.socket]:
        namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(namespace)
        return [socket.create_server(address) for address in addresses]

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


class Switch:
    """A bridge between instances, which each have one address on it."""

    #: The kernel takes down an ended instance's wire a moment later: no other wire gets its name.
    _wires = itertools.count()

    def __init__(self) -> None:
        self._name = f"fl{os.getpid() % 100_000}"
        self._number = 9
        _ip("link", "add", self._name, "type", "bridge")
        _ip("link", "set", self._name, "up")

    def attach(self, process: int) -> str:
        """Address of the network namespace of `process`, which is on the bridge from now on."""
        self._number += 1
        address, end = f"10.253.0.{self._number}", f"{self._name}n{next(self._wires)}"
        peer = ("type", "veth", "peer", "name", "ens5", "netns", str(process))
        _ip("link", "add", end, "master", self._name, *peer)
        _ip("link", "set", end, "up")
        for command in (("address", "add", f"{address}/24", "dev", "ens5"), ("link", "set", "ens5", "up")):
            subprocess.run(["nsenter", "-t", str(process), "-n", "ip", *command], check=True)
        return address

    def close(self) -> None:
        _ip("link", "delete", self._name)


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True)


class MetadataService:
    """IMDSv2: `values` by path below /latest/meta-data/; 404 for what is not there, 401 without a token."""

    def __init__(self, listening: socket.socket, values: Mapping[str, str]) -> None:
        self.values = dict(values)
        self._server = _server(listening, _metadata_handler(self.values.get))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _server(listening: socket.socket, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(listening.getsockname(), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    return server


def _metadata_handler(value_of: Callable[[str], str | None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            asked = (
                self.path == "/latest/api/token" and "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
            )
            self._answer(200 if asked else 400, "a-token" if asked else "")

        def do_GET(self) -> None:
            if self.headers.get("X-aws-ec2-metadata-token") != "a-token":
                self._answer(401, "")
                return
            value = value_of(self.path.removeprefix("/latest/meta-data/"))
            self._answer(404 if value is None else 200, value or "")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Wire:
    """Forwards what connects to `listening` to `target` (host, port), unless it is cut."""

    def __init__(self, listening: socket.socket, target: tuple[str, int]) -> None:
        self._listening = listening
        self._target = target
        self._open: set[socket.socket] = set()
        self._cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break what is open, and refuse what comes."""
        self._cut = True
        for end in list(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Forward again."""
        self._cut = False

    def close(self) -> None:
        self.cut()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listening.accept()
            except OSError:
                return
            if self._cut:
                inner.close()
                continue
            outer = socket.create_connection(self._target)
            self._open |= {inner, outer}
            for source, sink in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        self._open.discard(source)
        if sink not in self._open:
            source.close()
            sink.close()
