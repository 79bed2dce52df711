"""Requests to an untrusted server: bounded in size and time, with retries of transient failures."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, urlencode, urlsplit
from weakref import WeakSet

import httpx

_LONGEST_WAIT_S = 60.0
_MOST_SHOWN = 200  # characters of a server's text in a message

Answer = TypeVar("Answer")


class Refused(Exception):
    """Raised if the server's response is unusable, and retries cannot help or have failed."""


class _Again(Exception):
    """Raised for a transient failure of one attempt. wait_s: delay that the server requested, if any."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class HttpLine:
    """Client of one address whose pending requests can be aborted; closing an httpx client does not abort them."""

    def __init__(
        self,
        url: str,
        section: str,
        *,
        concurrency: int,
        timeout_s: float,
        retries: int,
        backoff_s: float,
        max_response_kib: int,
        headers: Mapping[str, str] | None = None,
        secret: Mapping[str, str] | None = None,
        timeout_key: str = "timeout_s",
    ) -> None:
        """Create the client without connecting.

        Args:
            section, timeout_key: names of the settings section, with a final dot, and of its timeout, for messages.
            timeout_s: limit of one attempt, from connection to last byte.
            retries: further attempts after 408, 409, 429, 5xx, or a failed connection.
            backoff_s: delay before the first retry; it doubles, up to 60 s.
            secret: query parameters that `get` adds to every address. Their values are never logged, and are removed from
                server texts that repeat them.
        """
        self._url, self._section, self._timeout_key = url, section, timeout_key
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._most_bytes = max_response_kib << 10
        self._secret = urlencode(secret or {})
        self._hidden = {
            form for value in (secret or {}).values() for form in (value, quote(value, ""), quote_plus(value))
        }
        self._jitter = random.Random()  # spreads the retries of requests that were rejected together
        self._is_cut = threading.Event()
        self._streams: WeakSet[Any] = WeakSet()
        # No redirects: the key must only reach the configured host. No compression (identity): the size limit applies to
        # uncompressed bytes.
        self._client = httpx.Client(
            headers={"Accept": "application/json", "Accept-Encoding": "identity", **(headers or {})},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=concurrency),
        )

    def post(self, body: bytes, read: Callable[[bytes], Answer]) -> Answer:
        """POST a body, and return what `read` parses from the response. Thread-safe.

        Raises Refused: the response is unusable (`read` raises it too), all attempts failed, or `cut` was called.
        """
        headers = {"Content-Type": "application/json"}
        return self._tried(read, method="POST", url=self._url, content=body, headers=headers)

    def get(self, query: Mapping[str, str], read: Callable[[bytes], Answer]) -> Answer:
        """GET with these query parameters; otherwise as `post`."""
        url = f"{self._url}?{urlencode(query)}"
        # The secret is sent in this target rather than in the URL, which httpx logs.
        target = f"{urlsplit(url).path}?{urlsplit(url).query}&{self._secret}"
        return self._tried(read, method="GET", url=url, extensions={"target": target.encode()})

    def hide(self, text: str) -> str:
        """Replace the secret in a text."""
        for form in self._hidden:
            text = text.replace(form, "[hidden]")
        return text

    def _tried(self, read: Callable[[bytes], Answer], **request: Any) -> Answer:
        for attempt in range(self._retries + 1):
            try:
                return read(self._ask(**request))
            except _Again as error:
                reason, wait_s = str(error), error.wait_s
            if attempt < self._retries:
                backoff = self._backoff_s * 2**attempt * (0.5 + 0.5 * self._jitter.random())
                if self._is_cut.wait(min(_LONGEST_WAIT_S, max(backoff, wait_s or 0.0))):
                    break
        raise Refused(f"gave up after {attempt + 1} attempts: {reason}")

    def cut(self) -> None:
        """Abort pending requests and fail all later ones; may be called twice."""
        self._is_cut.set()
        for stream in list(self._streams):
            _shut(stream)
        self._client.close()

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Record each new connection (httpx's trace hook)."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._streams.add(info["return_value"])
            if self._is_cut.is_set():
                _shut(info["return_value"])

    def _ask(self, *, extensions: Mapping[str, object] | None = None, **request: Any) -> bytes:
        """Return the response's body, at most max_response_kib."""
        end = time.monotonic() + self._timeout_s
        late = f"no whole answer within {self._section}{self._timeout_key} = {self._timeout_s:g} s"
        received = bytearray()
        try:
            with self._client.stream(**request, extensions={"trace": self._trace, **(extensions or {})}) as response:
                for chunk in response.iter_raw():
                    received += chunk
                    if len(received) > self._most_bytes:
                        kib = self._most_bytes >> 10
                        raise Refused(f"the answer is larger than {self._section}max_response_kib = {kib} KiB")
                    if time.monotonic() > end:
                        raise _Again(late)
                status, retry_after = response.status_code, response.headers.get("retry-after")
        except httpx.TimeoutException as error:  # no data for timeout_s
            raise _Again(f"{late} ({type(error).__name__})") from None
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:  # RuntimeError: the client was closed
            raise _Again(f"{type(error).__name__}: {error}"[:_MOST_SHOWN]) from None
        if self._hidden:
            received = bytearray(self.hide(received.decode("latin-1")), "latin-1")
        if status == 200:
            return bytes(received)
        what = f"HTTP {status}: {received[:_MOST_SHOWN].decode('utf-8', 'replace')!r}"
        if status in (408, 409, 429) or status >= 500:
            raise _Again(what, _seconds(retry_after))
        raise Refused(what)


def read_json(answer: bytes) -> object:
    """Parse a JSON response; Refused if it is not JSON."""
    try:
        value: object = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise Refused(
            f"the answer is not JSON ({error}): {answer[:_MOST_SHOWN].decode('utf-8', 'replace')!r}"
        ) from None
    return value


def excerpt(value: object) -> str:
    """Return the beginning of a value, for a message."""
    return repr(value)[:_MOST_SHOWN]


def _shut(stream: Any) -> None:
    connection = stream.get_extra_info("socket")
    if connection is not None:
        with suppress(OSError):  # already closed
            connection.shutdown(socket.SHUT_RDWR)


def _seconds(retry_after: str | None) -> float | None:
    """Parse a Retry-After header in seconds; None if it is a date or unreadable."""
    with suppress(ValueError):
        seconds = float(retry_after or "")
        return seconds if 0 < seconds < math.inf else None
    return None
