"""The address at which other hosts reach this one. Imports nothing heavy."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from marsrl.rollout.engines.refusals import address_here

_NOWHERE = "192.0.2.1"  # of no network (RFC 5737): the system says which interface it would take; nothing is sent


def split_address(address: str, port: int) -> tuple[str, int]:
    """(host, port) of host[:port], [IPv6]:port or ray://host:port; the default port is `port`.

    Raises:
        ValueError: the host is missing, or the port is not between 1 and 65535.
    """
    text = address.removeprefix("ray://")
    try:
        parts = urlsplit(f"//[{text}]" if text.count(":") > 1 and "[" not in text else f"//{text}")
        if parts.hostname and parts.port != 0:
            return parts.hostname, parts.port or port
    except ValueError:
        pass
    raise ValueError(f"{address!r} is no address; expected HOST or HOST:PORT")


def own_address(given: str | None = None) -> str:
    """The IP address at which other hosts reach this one: `given` (sync.host), resolved, or detected.

    Detected: torchrun's MASTER_ADDR if it is this host, else the interface of the default route, else what the host's own name
    resolves to.

    Raises:
        RuntimeError: `given` does not resolve, or is another host.
    """
    if given is not None:
        if (found := address_here(given)) is None:
            raise RuntimeError(
                f"sync.host is {given}, which is no address of this host, where trainer rank 0 is: correct it, or leave it out"
            )
        return found
    master = address_here(os.environ.get("MASTER_ADDR", "localhost"))
    detected = (master, address_towards(_NOWHERE), address_here(socket.gethostname()))
    return next((each for each in detected if each and not each.startswith("127.") and each != "::1"), "127.0.0.1")


def address_towards(host: str) -> str | None:
    """The IP address of this host's interface towards another host; None without a route."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(where)
            return str(route.getsockname()[0])
    except OSError:
        return None
