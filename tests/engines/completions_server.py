"""HTTP server in a thread of this process. The test's function `reply` answers its JSON requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Reply = Callable[["Handler", dict[str, Any], int], None]
"""Function (handler, the request's JSON, number of equal requests before) that sends the whole answer."""


@dataclass
class Server:
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    reply: Reply
    record: Server

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self._answer(dict(parse_qsl(urlsplit(self.path).query)))

    def _answer(self, body: dict[str, Any]) -> None:
        with self.record.lock:
            before = sum(earlier == body for earlier in self.record.bodies)
            self.record.bodies.append(body)
            self.record.headers.append({"path": self.path, **dict(self.headers)})
        with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up, as some tests intend
            self.reply(self, body, before)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def complete(self, text: object, finish: object = "stop", **message: object) -> None:
        """Send a completion, or a chat completion if the request's path asks for one.

        message: additional fields of the chat message.
        """
        answer = (
            {"message": {"content": text, **message}} if self.path.endswith("/chat/completions") else {"text": text}
        )
        usage = {"prompt_tokens": 11, "completion_tokens": 3}
        choice = {"index": 0, **answer, "finish_reason": finish}
        self.send(200, json.dumps({"choices": [choice], "usage": usage}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def completions_server(reply: Reply, tls: SSLContext | None = None) -> Iterator[Server]:
    record = Server()
    scripted = type("Scripted", (Handler,), {"reply": staticmethod(reply), "record": record})
    with ThreadingHTTPServer(("127.0.0.1", 0), scripted) as server:
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        record.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield record
        finally:
            server.shutdown()
            thread.join()
