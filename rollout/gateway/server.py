"""HTTP server of the gateway: OpenAI's and Anthropic's protocols for programs, GET /next and POST /end for workers.

    GET  /next?worker=ID&most=N    workers' key      {"sessions": [{session, api_key, problem, agents}], "over": [key]}
    POST /end                      a session's key   {reward | rewards | answer | error}
    POST /v1/chat/completions      a session's key   other paths: see APIS
    POST /s/KEY/v1/...             the same, for programs that take a URL and no key; keys in headers are ignored

An answer takes as long as the engines need, including the time of weight updates. To keep the client from timing out, the
server sends blanks, or comments in a stream, before a late answer. A call without an answer fails or is cut off, and clients
retry it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from marsrl.rollout.gateway import chat_api, completions_api, messages_api, responses_api
from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.lineage import names_of
from marsrl.rollout.gateway.session import CallLost, Session
from marsrl.rollout.gateway.workers import Workers, join_line
from marsrl.rollout.http_server import listen, url_of

_log = logging.getLogger(__name__)

_QUIET_S = 2.0  # longest gap between keep-alive bytes of a pending answer: far below any client's timeout
_POLL_S, _POLLS = 0.05, 100  # a GET /next of a worker waits 5 s for a session
_TICK_S = 0.5
_SHUTDOWN_S = 0.1  # time for pending requests at the end of the run
_KEEP_S = 600  # keep-alive of idle connections: clients reuse them, and a closed one costs a retry
_BACKLOG = 2048  # connections waiting to be accepted: sessions begin together, and a rejected client waits a second
_ANTHROPIC = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_OF_SESSION = "/s/{key}"
_KEY_IN_PATH = re.compile(r"^/s/[^/]*")
_SURROGATES = (b"\\ud", b"\\uD", b"\xed")  # the first bytes of a surrogate in JSON and in UTF-8


@dataclass(frozen=True, slots=True)
class Api:
    """A protocol. read: parses the request. reply: renders the answer as JSON. events: renders the answer as a stream."""

    read: Callable[[Mapping[str, Any], Mapping[str, Agent]], Ask]
    reply: Callable[[Answer, Mapping[str, Any]], Mapping[str, Any]]
    events: Callable[[Answer, Mapping[str, Any]], Iterator[bytes]]


APIS = {
    "/v1/chat/completions": Api(chat_api.read_chat, chat_api.chat_reply, chat_api.chat_events),
    "/v1/responses": Api(responses_api.read_responses, responses_api.responses_reply, responses_api.responses_events),
    "/v1/messages": Api(messages_api.read_messages, messages_api.messages_reply, messages_api.messages_events),
    "/v1/completions": Api(
        completions_api.read_completion, completions_api.completion_reply, completions_api.completion_events
    ),
    "/inference/v1/generate": Api(
        completions_api.read_generate,
        completions_api.generate_reply,
        completions_api.completion_events,  # unused: this API never streams
    ),
}


_GATEWAY, _KEY = web.AppKey("gateway", Gateway), web.AppKey("key", str)


def make_app(gateway: Gateway, key: str) -> web.Application:
    """Build the application. key: the workers' API key."""
    app = web.Application(middlewares=[_refusing], client_max_size=gateway.config.max_body_mib << 20)
    app[_GATEWAY], app[_KEY] = gateway, key
    app.add_routes([web.get("/next", _hand_out), web.post("/end", _end)])
    for start in ("", _OF_SESSION):
        app.add_routes([web.get(f"{start}/v1/models", _models), *(web.post(f"{start}{path}", _call) for path in APIS)])
    return app


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        return _error(request, error.status, str(error), error.code)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        served = ", ".join(f"POST {path}" for path in APIS)
        return _error(
            request, error.status, f"{request.method} {_path_of(request)} is unsupported; supported: {served}"
        )
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        if not isinstance(error, CallLost):
            _log.warning("%s fails: %r", _path_of(request), error, exc_info=error)
        return _error(request, 500, "internal error of the gateway; see the run's log")


def _error(request: web.Request, status: int, message: str, code: str | None = None) -> web.Response:
    """Render an error in the form of the request's protocol; the session continues."""
    headers = {"x-should-retry": "false"} if status == 429 else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    error: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    if _path_of(request).startswith("/v1/messages"):
        kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        error = {"type": "error", "error": {"type": kind, "message": message}}
    return web.json_response(error, status=status, headers=headers)


async def _hand_out(request: web.Request) -> web.Response:
    if not secrets.compare_digest(_key_of(request).encode(), request.app[_KEY].encode()):
        raise Refused(401, "wrong key; expected the workers' key")
    gateway, worker, most = request.app[_GATEWAY], request.query["worker"], int(request.query["most"])
    sessions, over = gateway.hand_out(worker, most)
    for _ in range(_POLLS):
        if sessions or over:
            break
        await asyncio.sleep(_POLL_S)
        if _is_disconnected(request):  # a disconnected worker must not get sessions
            break
        sessions, over = gateway.hand_out(worker, most)
    given = [
        {"session": each.id, "api_key": each.key, "problem": each.problem, "agents": list(gateway.agents)}
        for each in sessions
    ]
    return web.json_response({"sessions": given, "over": over})


async def _end(request: web.Request) -> web.Response:
    session, body, _ = await _session_of(request)
    request.app[_GATEWAY].end(session, body)
    return web.json_response({})


async def _models(request: web.Request) -> web.Response:
    _known(request)
    agents = request.app[_GATEWAY].agents
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "marsrl"} for name in agents]
    return web.json_response({"object": "list", "data": data})


async def _call(request: web.Request) -> web.StreamResponse:
    session, body, data = await _session_of(request)
    try:
        return await _answered(request, session, body, data)
    except Refused as error:
        session.refusals[str(error)] = None
        raise


async def _answered(request: web.Request, session: Session, body: dict[str, Any], data: bytes) -> web.StreamResponse:
    """Send the answer, after keep-alive blanks if it is late, and record it as read.

    If the call fails after such blanks, abort the connection, because the HTTP status is already sent.
    """
    api = APIS[path := _path_of(request)]
    lineage, caller = names_of(request.headers)
    digest = hashlib.blake2b(lineage.encode() + path.encode() + data, digest_size=16).digest()
    try:
        if any(mark in data for mark in _SURROGATES):  # lone surrogates cannot be tokenised
            json.dumps(body, ensure_ascii=False).encode()
        ask, streams = api.read(body, request.app[_GATEWAY].agents), bool(body.get("stream"))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise Refused(400, f"the request is malformed: {error}") from error
    ask = replace(ask, lineage=lineage, caller=caller)
    is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
    task = await session.ask(ask, digest, is_retry=is_retry, listens=lambda: not _is_disconnected(request))
    media_type = {"Content-Type": "text/event-stream" if streams else "application/json"}
    late = web.StreamResponse(headers=media_type)
    while not (await asyncio.wait([task], timeout=_QUIET_S))[0]:
        if not late.prepared:
            await late.prepare(request)
        await late.write(b": waiting\n\n" if streams else b" ")
    if late.prepared and task.exception() is not None and request.transport is not None:
        request.transport.abort()
    answer = task.result()
    said = b"".join(api.events(answer, body)) if streams else json.dumps(api.reply(answer, body)).encode()
    if late.prepared:
        await late.write(said)
    else:
        late = web.Response(body=said, headers=media_type)
        await late.prepare(request)
    await late.write_eof()
    if not _is_disconnected(request):
        session.note_read(task)
    return late


def _known(request: web.Request) -> Session:
    session = request.app[_GATEWAY].of_key(_key_of(request))
    if session is None:
        raise Refused(401, "the key belongs to no running session")
    return session


async def _session_of(request: web.Request) -> tuple[Session, dict[str, Any], bytes]:
    """Return (the session, its request's body as JSON, the raw body)."""
    _known(request)
    try:
        body = json.loads(data := await request.read())
    except web.HTTPRequestEntityTooLarge:
        most = request.app[_GATEWAY].config.max_body_mib
        raise Refused(413, f"the request is larger than external.max_body_mib = {most}") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the request is {data[:100].decode('utf-8', 'replace')}; expected a JSON object")
    return _known(request), body, data  # the session may have ended meanwhile


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _path_of(request: web.Request) -> str:
    """Return the path, as routes match it, without a session's key, which must not be logged."""
    return _KEY_IN_PATH.sub("", request.rel_url.path_safe)


def _key_of(request: web.Request) -> str:
    if "key" in request.match_info:
        return request.match_info["key"]
    bearer = request.headers.get("authorization", "")
    return bearer.removeprefix("Bearer ") if bearer else request.headers.get("x-api-key", "")


@contextmanager
def open_gateway(
    config: ExternalConfig,
    agents: Mapping[str, Agent],
    key: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    sums_turns: bool = False,
) -> Iterator[Gateway]:
    """Run a gateway in its own thread, with locally started workers; OSError: the address cannot be bound.

    key: the workers' API key; None: a random key. clock, sums_turns: see Gateway.
    """
    key = key or secrets.token_urlsafe(24)
    gateway = Gateway(config, agents, clock, sums_turns)
    with listen(config.host, config.port) as listening:
        workers = Workers(config, url_of(config.host, listening.getsockname()[1]), key)
        if not config.workers:
            print(join_line(config), file=sys.stderr, flush=True)
        loop, stopping = asyncio.new_event_loop(), asyncio.Event()

        async def answer() -> None:
            runner = web.AppRunner(
                make_app(gateway, key), access_log=None, keepalive_timeout=_KEEP_S, shutdown_timeout=_SHUTDOWN_S
            )
            await runner.setup()
            await web.SockSite(runner, listening, backlog=_BACKLOG).start()
            try:
                while not stopping.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), _TICK_S)
                    workers.end_hanging(gateway.tick())
                    workers.watch(gateway)
            finally:
                gateway.close()
                workers.close()
                await runner.cleanup()

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=lambda: loop) as runner:
                    runner.run(answer())
            except BaseException as error:
                gateway.fail(f"the gateway has failed: {type(error).__name__}: {error}")
                raise

        thread = threading.Thread(target=run, name="marsrl-gateway", daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            with suppress(RuntimeError):  # raised if the loop is closed, because the gateway has failed
                loop.call_soon_threadsafe(stopping.set)
            thread.join()
