"""Fetcher of pages from untrusted addresses, which models or other pages chose.

    address -> scheme, no credentials -> host resolved once -> every IP address public -> connection to that very IP address
       ^-------------------------------- redirect, five at most <------------------------------------------------|-> bytes

The check is in the code that connects (httpcore's network backend), so that nothing can resolve the host again in between (DNS
rebinding), and no redirect bypasses it. Cookies are not kept. The environment's proxies are not used: behind a proxy, the
address that is reached would be unknown.
"""

from __future__ import annotations

import socket
import ssl
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpcore
import httpx

from marsrl.rollout.tools.config import PagesConfig
from marsrl.rollout.tools.protocol import ToolError

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_TEXTS = ("application/xhtml+xml", "application/pdf")  # accepted media types besides text/*
# Unspecific media types: the first bytes of the body decide.
_UNKNOWN = ("", "application/octet-stream", "binary/octet-stream")
_GZIP = 16 + zlib.MAX_WBITS
_MOST_SHOWN = 60  # characters of a server's text in a message

# Addresses that are not public, or do not belong to a single host, although `ipaddress` reports them as global.
# IPv4: IETF assignments (and Oracle Cloud's metadata), 6to4 relays, Azure's metadata. IPv6: Teredo and others, 6to4,
# documentation.
_NOT_PUBLIC_4 = [IPv4Network(block) for block in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")]
_GLOBAL_6 = IPv6Network("2000::/3")  # the assigned range; ::ffff:a.b.c.d and NAT64 (64:ff9b::/96) are outside
_NOT_PUBLIC_6 = [IPv6Network(block) for block in ("2001::/23", "2002::/16", "3fff::/20")]


class Refused(ToolError):
    """Raised for a page that our limits reject."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A page's body, decompressed. media_type: lower case, "" if the server sent none; charset likewise."""

    body: bytes
    media_type: str
    charset: str


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return True for a unicast address of the public Internet; False for IPv6 forms of IPv4 addresses (mapped, 6to4, NAT64)."""
    if isinstance(address, IPv4Address):
        return (
            address.is_global and not address.is_multicast and not any(address in network for network in _NOT_PUBLIC_4)
        )
    return address in _GLOBAL_6 and address.is_global and not any(address in network for network in _NOT_PUBLIC_6)


class Fetcher:
    """Fetcher of one page per call. Thread-safe."""

    def __init__(self, limits: PagesConfig) -> None:
        self._limits = limits
        self._ssl_context = httpcore.default_ssl_context()
        self._headers = (
            (b"User-Agent", limits.user_agent.encode("ascii")),
            (b"Accept", b"text/html,application/xhtml+xml,application/pdf,text/*;q=0.8"),
            (b"Accept-Encoding", b"gzip"),
            (b"Connection", b"close"),
        )

    def fetch(self, url: str, deadline: float) -> Fetched:
        """Fetch the page at this address. deadline: monotonic seconds, for all redirects together.

        Raises Refused if the address, type or size is not allowed; ToolError if the page cannot be fetched.
        """
        backend = _PublicNetwork(self._limits.allow_hosts, deadline)
        address = _checked(url)
        with httpcore.ConnectionPool(self._ssl_context, network_backend=backend) as pool:
            for _ in range(_MOST_REDIRECTS + 1):
                try:
                    page = self._ask(pool, address)
                except httpcore.TimeoutException:
                    raise ToolError(
                        f"the page did not arrive within tools.pages.timeout_s = {self._limits.timeout_s:g} s"
                    ) from None
                except (httpcore.NetworkError, httpcore.ProtocolError) as error:
                    raise ToolError(f"{type(error).__name__}: {error}"[:200]) from None
                if isinstance(page, Fetched):
                    return page
                address = page
        raise Refused(f"the page redirects more than the allowed {_MOST_REDIRECTS} times")

    def _ask(self, pool: httpcore.ConnectionPool, address: httpx.URL) -> Fetched | httpx.URL:
        """Return the page, or the address that it redirects to."""
        target = httpcore.URL(
            scheme=address.raw_scheme, host=address.raw_host, port=address.port, target=address.raw_path
        )
        headers = [(b"Host", address.netloc), *self._headers]
        with pool.stream("GET", target, headers=headers) as response:
            fields = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and "location" in fields:
                return _checked(fields["location"], address)
            if response.status != 200:
                raise ToolError(f"HTTP {response.status}")
            media_type, charset = _content_type(fields.get("content-type", ""))
            if not media_type.startswith("text/") and media_type not in (*_TEXTS, *_UNKNOWN):
                raise Refused(f"the page is not text: content type {media_type[:_MOST_SHOWN]!r}")
            body = b"".join(self._decompressed(response.iter_stream(), fields.get("content-encoding", "")))
        if media_type in _UNKNOWN and not body.startswith(b"%PDF-"):
            raise Refused(f"the page is not text: content type {media_type!r}")
        return Fetched(body, media_type, charset)

    def _decompressed(self, chunks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
        """Yield the decompressed body; the size limit holds before and after decompression."""
        if encoding.strip().lower() not in ("", "identity", "gzip", "x-gzip"):
            raise Refused(f"the page is compressed with {encoding[:_MOST_SHOWN]!r}, although only gzip was requested")
        gzip = zlib.decompressobj(_GZIP) if "gzip" in encoding.lower() else None
        most = self._limits.max_kib << 10
        sent = expanded = 0
        for chunk in chunks:
            sent += len(chunk)
            if gzip is not None:
                try:
                    chunk = gzip.decompress(chunk, most + 1 - expanded)
                except zlib.error as error:
                    raise ToolError(f"the gzip data of the page is invalid ({error})"[:200]) from None
            expanded += len(chunk)
            if max(sent, expanded) > most:
                raise Refused(f"the page is larger than tools.pages.max_kib = {self._limits.max_kib} KiB")
            yield chunk


def _checked(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """Parse and check an address. base: the page that redirects to it."""
    try:
        address = httpx.URL(url.strip()) if base is None else base.join(url)
        host = address.raw_host
    except (httpx.InvalidURL, ValueError) as error:  # an invalid IDNA name or port raises ValueError
        raise Refused(f"the address is invalid: {error}"[:200]) from None
    if address.scheme not in ("http", "https") or not host:
        raise Refused("the address must begin with http:// or https://")
    if address.port is not None and not 0 < address.port < 1 << 16:
        raise Refused(f"the address is invalid: port {address.port}, expected 1 to 65535")
    if address.userinfo:
        raise Refused("the address must not contain a user or a password")
    return address


def _content_type(header: str) -> tuple[str, str]:
    message = Message()
    message["content-type"] = header
    return (message.get_content_type() if header.strip() else ""), (message.get_content_charset("") or "")


class _PublicNetwork(httpcore.NetworkBackend):
    """Network that connects to public addresses, and to any address of hosts allowed by name; connections end at a deadline."""

    def __init__(self, allowed: Iterable[str], deadline: float) -> None:
        self._allowed, self._deadline = frozenset(allowed), deadline
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any) -> _Stream:
        error: Exception | None = None
        for address in self._addresses(host, port):
            try:
                return _Stream(self._sockets.connect_tcp(address, port, _left(self._deadline)), self._deadline)
            except httpcore.ConnectError as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host} has no address")

    def _addresses(self, host: str, port: int) -> list[str]:
        """Resolve a host to its IP addresses, if all of them are allowed."""
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host[:_MOST_SHOWN]} cannot be looked up ({error})") from None
        addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in infos))
        if host.lower() not in self._allowed and not all(is_public(ip_address(address)) for address in addresses):
            # The message omits the address: otherwise a page could probe the names of a private network.
            raise Refused("the page's host has an address that is not public (tools.pages.allow_hosts)")
        return addresses


class _Stream(httpcore.NetworkStream):
    """A connection that ends at a deadline, even while data keeps arriving."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Stream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    """Return the seconds until the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the deadline has passed")
    return left
