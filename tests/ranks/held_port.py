"""A free port: for a server that a test starts, or as an address where no server listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that no other process gets inside the block.

    No server listens at the port. A server that sets SO_REUSEADDR can bind it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
