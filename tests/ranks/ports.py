"""Ports for servers that are told theirs before they bind it."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to connections and to servers that ask for any."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
