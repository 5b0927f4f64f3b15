"""A network and a service that are not to be relied on: an HTTP proxy before the AWS of the tests.

Between a client and the server it fails, throttles, loses answers to requests that were carried out, and does
not show new instances for a while. What it does is either said beforehand (`script`) or
drawn from a seed (`at_random`), and is written down in `log`. With one client that asks one thing at a time,
the same seed does the same.
"""

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from socket import SHUT_RDWR
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import moto_gaps
from sent_request import SentRequest, request_of


class Fault(StrEnum):
    """What can go wrong with one request. The request is carried out in `LOSE_ANSWER` and `NONE` alone."""

    NONE = "none"
    INTERNAL_ERROR = "internal-error"
    UNAVAILABLE = "unavailable"
    THROTTLE = "throttle"
    LOSE_REQUEST = "lose-request"
    LOSE_ANSWER = "lose-answer"


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One request, what was done to it, and the status that the client got: None if it got no answer."""

    action: str
    fault: Fault
    request: SentRequest
    status: int | None


#: What a throttled client is told, by service; moto_gaps has the format of each.
_THROTTLED = {"ec2": ("RequestLimitExceeded", 503), "s3": ("SlowDown", 503)}


class FaultyProxy:
    """A started proxy; `url` is what clients are given. Faultless until it is told otherwise.

    hide_describes: in how many answers of DescribeInstances a new instance is missing. Terminating it
    meanwhile is refused: there is none of that id.
    """

    def __init__(self, server_url: str, *, seed: int = 0, host: str = "127.0.0.1") -> None:
        self.hide_describes = 0
        self.log: list[Happening] = []
        self._target = urlsplit(server_url).netloc
        self._random = Random(seed)
        self._lock = Lock()
        self._scripts: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self._rates: list[tuple[frozenset[str] | None, Mapping[Fault, float]]] = []
        self._hidden: dict[str, int] = {}
        self._server = ThreadingHTTPServer((host, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.url = f"http://{host}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def script(self, action: str, *faults: Fault) -> None:
        """Do these to the next requests of `action`, one each, before anything at random."""
        with self._lock:
            self._scripts[action].extend(faults)

    def at_random(self, rates: Mapping[Fault, float], *, actions: Sequence[str] | None = None) -> None:
        """Draw a fault for every request (of these actions): rates are probabilities, 1 in all or less."""
        assert 0 <= sum(rates.values()) <= 1
        with self._lock:
            self._rates.insert(0, (None if actions is None else frozenset(actions), dict(rates)))

    def calm(self) -> None:
        """Do nothing more to anybody; instances that are hidden are seen again."""
        with self._lock:
            self._scripts.clear()
            self._rates.clear()
            self._hidden.clear()
            self.hide_describes = 0

    # One request

    def answer(self, request: SentRequest, body: bytes, target: str) -> "tuple[int, Any, bytes] | None":
        """Status, headers and body for the client, None to hang up."""
        with self._lock:
            fault = self._draw(request.action)
        told = self._forward(request, body, target, fault)
        with self._lock:
            status = told[0] if told else None
            self.log.append(Happening(action=request.action, fault=fault, request=request, status=status))
        return told

    def _draw(self, action: str) -> Fault:
        if self._scripts[action]:
            return self._scripts[action].popleft()
        for actions, rates in self._rates:
            if actions is None or action in actions:
                drawn = self._random.random()
                for fault, rate in rates.items():
                    drawn -= rate
                    if drawn < 0:
                        return fault
                break
        return Fault.NONE

    def _forward(
        self, request: SentRequest, body: bytes, target: str, fault: Fault
    ) -> "tuple[int, Any, bytes] | None":
        if fault is Fault.LOSE_REQUEST:
            return None
        if fault is Fault.INTERNAL_ERROR:
            return moto_gaps.error(request, "InternalError", "An internal error has occurred", 500)
        if fault is Fault.UNAVAILABLE:
            return moto_gaps.error(request, "ServiceUnavailable", "The service is unavailable", 503)
        if fault is Fault.THROTTLE:
            code, status = _THROTTLED.get(request.service, ("ThrottlingException", 400))
            return moto_gaps.error(request, code, "Request limit exceeded.", status)
        unknown = self._unknown(request)
        if unknown:
            message = f"The instance ID '{unknown}' does not exist"
            return moto_gaps.error(request, "InvalidInstanceID.NotFound", message, 400)
        connection = HTTPConnection(self._target, timeout=60)
        try:
            headers = {k: v for k, v in request.headers.items() if k not in ("expect", "transfer-encoding")}
            connection.request(request.method, target, body, {**headers, "content-length": str(len(body))})
            response = connection.getresponse()
            status, told, data = response.status, response.getheaders(), response.read()
        finally:
            connection.close()
        if status == 200 and request.action in ("RunInstances", "DescribeInstances"):
            with self._lock:
                data = self._seen_through(request.action, data)
        return None if fault is Fault.LOSE_ANSWER else (status, told, data)

    def _unknown(self, request: SentRequest) -> str | None:
        """An instance that is to be terminated, and that nobody knows of yet."""
        if request.action != "TerminateInstances":
            return None
        asked = [value for name, value in request.parameters.items() if name.startswith("InstanceId.")]
        with self._lock:
            return next((one for one in asked if self._hidden.get(one, 0) > 0), None)

    def _seen_through(self, action: str, data: bytes) -> bytes:
        if action == "RunInstances":
            for one in re.findall(r"<instanceId>(i-[0-9a-f]+)</instanceId>", data.decode()):
                self._hidden.setdefault(one, self.hide_describes)
            return data
        tree = ElementTree.fromstring(data)
        space = tree.tag.partition("}")[0] + "}" if tree.tag.startswith("{") else ""
        for instances in tree.iter(f"{space}instancesSet"):
            for item in list(instances):
                one = item.findtext(f"{space}instanceId") or ""
                if self._hidden.get(one, 0) > 0:
                    self._hidden[one] -= 1
                    instances.remove(item)
        ElementTree.register_namespace("", space.strip("{}"))
        return ElementTree.tostring(tree, encoding="utf-8", xml_declaration=True)


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body go out apart, and the second would wait 40 ms for the first to be acknowledged.
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _pass_on(self) -> None:
            body = self._body()
            path, _, query = self.path.partition("?")
            headers = {name.lower(): value for name, value in self.headers.items()}
            told = proxy.answer(request_of(self.command, path, query, headers, body), body, self.path)
            if told is None:
                self.close_connection = True
                self.connection.shutdown(SHUT_RDWR)
                return
            status, answered, data = told
            self.send_response(status)
            length = str(len(data))
            for name, value in answered:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif name.lower() not in (
                    "content-length",
                    "connection",
                    "transfer-encoding",
                    "server",
                    "date",
                ):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        # The names that http.server looks for.
        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

    return Handler
