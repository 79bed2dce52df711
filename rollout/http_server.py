"""ASGI servers that run on an open socket until Ctrl-C."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0: any free one. OSError names an unavailable address."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(f"{host}:{port}: {why}; set another --port, or 0 for any free one") from error


def url_of(host: str, port: int) -> str:
    """Return http://host:port, with an IPv6 address in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: ASGIApp, listening: socket.socket, is_up: Callable[[], None]) -> None:
    """Serve on a listening socket until Ctrl-C. is_up: called once the server responds."""
    import uvicorn  # imported here: every run imports this module, but few install uvicorn

    class Server(uvicorn.Server):
        """Server that reports readiness only once it handles Ctrl-C: an earlier Ctrl-C could leave it half started."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            is_up()

    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after shutdown
        Server(config).run(sockets=[listening])
