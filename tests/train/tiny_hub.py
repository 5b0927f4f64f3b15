"""A Hugging Face hub on loopback that serves a folder as the files of its only model."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: The model's name, and the commit of its files.
MODEL, COMMIT = "org/gated", "c0" * 20


class TinyHub:
    """Serves `folder` as MODEL to whoever has the token, until `close`. served: names of what was sent."""

    def __init__(self, folder: Path, *, token: str) -> None:
        self.served: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, folder, token))
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        ).start()

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self._server.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(hub: TinyHub, folder: Path, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            file = re.fullmatch(rf"/{MODEL}/resolve/(?:main|{COMMIT})/([\w.-]+)", path)
            if MODEL not in path:
                self._send(401, error="RepoNotFound")
            elif self.headers.get("Authorization") != f"Bearer {token}":
                self._send(401, error="GatedRepo")
            elif re.fullmatch(rf"/api/models/{MODEL}(/revision/\w+)?", path):
                siblings = [{"rfilename": one.name, "size": one.stat().st_size} for one in folder.iterdir()]
                self._send(200, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
            elif file and (folder / file[1]).is_file():
                if self.command == "GET":
                    hub.served.append(file[1])
                self._send(200, (folder / file[1]).read_bytes())
            else:
                self._send(404, error="EntryNotFound")

        def _send(self, status: int, body: bytes = b"", error: str | None = None) -> None:
            self.send_response(status)
            headers = {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT}
            headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            if error:
                headers |= {"X-Error-Code": error, "X-Error-Message": error}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
