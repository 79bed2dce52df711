"""Addresses at which other hosts reach this one. Imports only light modules."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import psutil

from marsrl.rollout.engines.refusals import address_here

_NOWHERE = "192.0.2.1"  # TEST-NET address (RFC 5737): reveals the outgoing interface; nothing is sent


def split_address(address: str, port: int) -> tuple[str, int]:
    """Split host[:port], [IPv6]:port or ray://host:port into (host, port), with `port` as the default.

    Raises ValueError: the host is missing, or the port is not between 1 and 65535.
    """
    text = address.removeprefix("ray://")
    try:
        parts = urlsplit(f"//[{text}]" if text.count(":") > 1 and "[" not in text else f"//{text}")
        if parts.hostname and parts.port != 0:
            return parts.hostname, parts.port or port
    except ValueError:
        pass
    raise ValueError(f"{address!r} is not an address; expected HOST or HOST:PORT, with a port from 1 to 65535")


def own_address(host: str | None = None) -> str:
    """Return the IP address at which other hosts reach this one: that of `host` (sync.host) or, without it, a detected one.

    The detected address is torchrun's MASTER_ADDR if that is this host, else that of the default route or of the only network.

    Raises RuntimeError: `host` does not resolve, or is another host; or several addresses are possible.
    """
    others = [each.address for of in psutil.net_if_addrs().values() for each in of if each.family == socket.AF_INET]
    others = [address for address in others if not _is_loopback(address)]
    if host is not None:
        if (address := address_here(host)) is None:
            raise RuntimeError(
                f"sync.host is {host}, which is not an address of this host ({', '.join(others) or 'loopback only'}); "
                "expected an address of trainer rank 0's host; correct it, or omit it"
            )
        return address
    for address in (address_here(os.environ.get("MASTER_ADDR", "localhost")), address_towards(_NOWHERE)):
        if address is not None and not _is_loopback(address):
            return address
    if len(others) > 1:
        raise RuntimeError(
            f"this host has several addresses ({', '.join(others)}) and no default route; set sync.host to the one "
            "that the engines' hosts can reach"
        )
    return others[0] if others else "127.0.0.1"


def address_towards(host: str) -> str | None:
    """Return the IP address of this host's interface towards another host; None without a route."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(where)
            return str(route.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
