"""Tools of a Model Context Protocol server, through the package `mcp`.

    calls (threads of the pool) -> an event loop in its own thread -> Client -> stdin and stdout of a command, or HTTP

If the server ends during a call, that call fails. It is not repeated, because it may have crashed the server or already taken
effect. The next call makes one attempt to restart the server.
"""

from __future__ import annotations

import codecs
import json
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, ExitStack
from encodings import utf_8
from functools import cache, partial

import anyio
import httpx2
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from pydantic_core import to_json

from marsrl.rollout.config import read_key
from marsrl.rollout.tools.config import McpServer
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.types import ToolFunction

_MOST_PAGES = 32  # maximum pages of a server's list of tools
_MOST_KIB = 4096  # limit of a line from a command, or of an HTTP response; `mcp` limits an event of a stream to 1 MiB
_MOST_SHOWN = 300  # characters of a server's text in a message
# Error codes of a lost session; an HTTP server that has forgotten the session returns the second.
_LOST = (CONNECTION_CLOSED, INVALID_REQUEST)


class McpTools:
    """Tool that calls the server's tools: {"name": ..., "arguments": {...}} -> text.

    Raises:
        ValueError: the server does not start, or lacks tools that the settings name.
    """

    def __init__(self, name: str, settings: McpServer) -> None:
        self.name, self.is_deterministic, self._settings = name, settings.deterministic, settings
        self._num_restarts = 0
        self._starting = threading.Lock()
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._stack.callback(self._portal.call, self._portal.stop, True)
        self._client: Client | None = None
        self._connection: Future[None] | None = None
        try:
            self.functions = tuple(self._portal.call(self._listed, self._connected()))
        except Exception as error:
            self.close()
            raise ValueError(f"tools.{name}: {_words(error)}") from error
        self._num_restarts = 0

    def run(self, arguments: Mapping[str, object]) -> str:
        name, call_arguments = arguments.get("name"), arguments.get("arguments", {})
        if name not in [function.name for function in self.functions]:
            known = ", ".join(function.name for function in self.functions)
            raise ToolError(f"there is no tool {str(name)[:_MOST_SHOWN]!r}; expected one of {known}")
        if not isinstance(call_arguments, dict):
            raise ToolError("'arguments' must be an object")
        client = self._connected()
        try:
            call = partial(client.call_tool, name, call_arguments, read_timeout_seconds=self._settings.timeout_s)
            result = self._portal.call(call)
        except MCPError as error:
            if error.code in _LOST:
                self._lose(client)
            raise ToolError(_words(error)) from None
        except CancelledError:
            raise ToolError("the connection was closed") from None
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def take_counts(self) -> dict[str, float]:
        """Return {"restarts": number of reconnections to a server that had ended}."""
        counts, self._num_restarts = {"restarts": float(self._num_restarts)}, 0
        return counts

    def close(self) -> None:
        """End the connection, and the server if it was started here; pending calls fail. May be called twice."""
        self._stack.close()

    def _connected(self) -> Client:
        """Return the client of the running server, which is restarted if it has ended. ToolError: the server does not start."""
        with self._starting:
            if self._client is None or self._connection is None or self._connection.done():
                self._num_restarts += 1
                try:
                    self._connection, self._client = self._portal.start_task(self._hold)
                except Exception as error:
                    self._client = None
                    raise ToolError(f"the server does not start: {_words(error)}") from error
            return self._client

    def _lose(self, client: Client) -> None:
        with self._starting:
            if self._client is client and self._connection is not None:
                self._connection.cancel()
                self._client = None

    # The methods below run in the event loop.

    async def _hold(self, *, task_status: TaskStatus[Client]) -> None:
        """Hold a connection open until cancelled; `mcp` requires that one task opens and closes it."""
        settings, key = self._settings, f"tools.{self.name}"
        async with AsyncExitStack() as stack:
            if settings.command is not None:
                command, *arguments = settings.command
                environment = {name: read_key(name, f"{key}.environment") for name in settings.environment}
                parameters = StdioServerParameters(
                    command=command,
                    args=arguments,
                    env=environment,
                    encoding=_bounded_lines(),
                    encoding_error_handler="replace",
                )
                transport = stdio_client(parameters, sys.__stderr__ or sys.stderr)
            else:
                token = settings.api_key_env and read_key(settings.api_key_env, f"{key}.api_key_env")
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                headers["Accept-Encoding"] = "identity"  # keeps size limits exact: no compression
                # Each call has its own limit; a limit of the transport would end the connection and all concurrent calls.
                timeout = httpx2.Timeout(settings.timeout_s, read=None)
                client = httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [_bound]})
                http = await stack.enter_async_context(client)
                transport = streamable_http_client(settings.url or "", http_client=http)
            server = Client(transport, read_timeout_seconds=settings.timeout_s)
            task_status.started(await stack.enter_async_context(server))
            await anyio.sleep_forever()

    async def _listed(self, client: Client) -> list[ToolFunction]:
        """Return the server's tools that settings.tools names; None: all of them."""
        offered: dict[str, ToolFunction] = {}
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                offered[tool.name] = ToolFunction(tool.name, tool.description or "", tool.input_schema, self.name)
            if (cursor := page.next_cursor) is None:
                break
        names = list(offered) if self._settings.tools is None else self._settings.tools
        if missing := [name for name in names if name not in offered]:
            raise ValueError(f"the server has no tool {missing[0]!r}; expected one of {', '.join(offered) or 'none'}")
        if not names:
            raise ValueError("the server offers no tools; expected at least one")
        return [offered[name] for name in names]


@cache
def _bounded_lines() -> str:
    """Return the name of a codec that limits the length of lines; `mcp` has no limit, but accepts any codec."""
    name = "marsrl_bounded_lines"
    codec = codecs.CodecInfo(utf_8.encode, utf_8.decode, incrementaldecoder=_BoundedDecoder, name=name)
    codecs.register({name: codec}.get)
    return name


class _BoundedDecoder(utf_8.IncrementalDecoder):
    """UTF-8 decoder that drops the end of lines longer than _MOST_KIB: they become invalid messages, and their calls time
    out."""

    _num_bytes = 0  # bytes of the current line

    def decode(self, data: bytes, final: bool = False) -> str:  # type: ignore[override]
        if self._num_bytes > _MOST_KIB << 10:
            data = b"".join(data.partition(b"\n")[1:])
        end = data.rfind(b"\n") + 1
        self._num_bytes = len(data) - end + (0 if end else self._num_bytes)
        return super().decode(data, final)


class _BoundedStream(httpx2.AsyncByteStream):
    """Body of a response, limited to _MOST_KIB unless it is an endless stream of events."""

    def __init__(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._stream, self._is_coded = response.stream, "content-encoding" in response.headers
        self._is_bounded = not response.headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_coded:
            raise httpx2.StreamError("the answer is compressed, which was not requested")
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if self._is_bounded and num_bytes > _MOST_KIB << 10:
                raise httpx2.StreamError(f"the answer is larger than {_MOST_KIB} KiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound(response: httpx2.Response) -> None:
    response.stream = _BoundedStream(response)


def _text(result: CallToolResult) -> str:
    """Convert a result to text for a model.

    Texts are unchanged; other contents become placeholders such as [image, not shown]. Structured content follows as JSON, unless
    the texts repeat it.
    """
    shown = list(map(_shown, result.content))
    texts = [each.text for each in result.content if isinstance(each, TextContent)]
    if result.structured_content is not None and not _say(texts, result.structured_content):
        shown.append(to_json(result.structured_content).decode())
    return "\n".join(shown)


def _shown(content: ContentBlock) -> str:
    if isinstance(content, TextContent):
        return content.text
    if isinstance(content, ResourceLink):
        return f"[resource_link, not read: {content.name}, {content.uri}]"
    if isinstance(content, EmbeddedResource):
        held = content.resource
        return held.text if isinstance(held, TextResourceContents) else f"[resource, not shown: {held.uri}]"
    return f"[{content.type}, not shown]"


def _say(texts: Sequence[str], structured: object) -> bool:
    """Return True if the texts repeat the structured content.

    They do if one text is the content's JSON, as the protocol recommends. The Python SDK wraps a value that is not an object as
    {"result": value}; texts that are this value, or its items, also repeat the content.
    """
    values = list(map(_value, texts))
    if any(value == structured for value in values):
        return True
    if not isinstance(structured, dict) or list(structured) != ["result"]:
        return False
    wrapped = structured["result"]
    return wrapped in (*texts, *values) or (bool(texts) and wrapped in (list(texts), values))


def _value(text: str) -> object:
    """Parse a JSON text; return any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _words(error: BaseException) -> str:
    """Format the error in one line; for an exception group, its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:_MOST_SHOWN] or type(error).__name__
