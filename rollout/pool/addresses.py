"""The address at which other hosts reach this one. Imports nothing heavy."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import psutil

from marsrl.rollout.engines.refusals import address_here

_NOWHERE = "192.0.2.1"  # of no network (RFC 5737): the system says which interface it would take; nothing is sent


def split_address(address: str, port: int) -> tuple[str, int]:
    """(host, port) of host[:port], [IPv6]:port or ray://host:port; the default port is `port`.

    Raises ValueError: the host is missing, or the port is not between 1 and 65535.
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

    Detected: torchrun's MASTER_ADDR if it is this host, else the interface of the default route, or of the only network.

    Raises RuntimeError: `given` does not resolve, or is another host; or several addresses are possible.
    """
    others = [each.address for of in psutil.net_if_addrs().values() for each in of if each.family == socket.AF_INET]
    others = [address for address in others if not _is_loopback(address)]
    if given is not None:
        if (found := address_here(given)) is None:
            raise RuntimeError(
                f"sync.host is {given}, which is no address of this host ({', '.join(others) or 'none but loopback'}), where "
                "trainer rank 0 is: correct it, or leave it out"
            )
        return found
    for found in (address_here(os.environ.get("MASTER_ADDR", "localhost")), address_towards(_NOWHERE)):
        if found is not None and not _is_loopback(found):
            return found
    if len(others) > 1:
        raise RuntimeError(
            f"this host has several addresses ({', '.join(others)}) and no default route to choose by: set sync.host to the one "
            "at which the hosts of engines reach it"
        )
    return others[0] if others else "127.0.0.1"


def address_towards(host: str) -> str | None:
    """The IP address of this host's interface towards another host; None without a route."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(where)
            return str(route.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
