"""Run our ASGI servers on an open socket until Ctrl-C."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any that is free. OSError names an address that is not available."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(f"{host}:{port}: {why}; give another --port, or 0 for any that is free") from error


def url_of(host: str, port: int) -> str:
    """http://host:port; an IPv6 address is put in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(app: ASGIApp, listening: socket.socket, is_up: Callable[[], None]) -> None:
    """Serve on a listening socket until Ctrl-C. is_up: called once the server answers."""
    import uvicorn  # here: every run imports this module, and few have the extras that bring uvicorn

    class Server(uvicorn.Server):
        """Reports that it is up only once it handles Ctrl-C: an earlier Ctrl-C could leave it hanging half started."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            is_up()

    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again once it has shut down
        Server(config).run(sockets=[listening])
