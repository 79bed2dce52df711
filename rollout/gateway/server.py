"""The gateway's HTTP server: OpenAI's and Anthropic's protocols for programs, GET /next and POST /end for workers.

    GET  /next?worker=ID&most=N    workers' key      {"sessions": [{session, api_key, problem, agents}], "over": [key]}
    POST /end                      a session's key   {reward | rewards | answer | error}
    POST /v1/chat/completions      a session's key   and so on: see APIS

An answer takes as long as the engines, also while weights change: status and headers are sent at once, then blanks, or comments
of a stream, that keep the client from timing out. A call without an answer is cut off, and clients retry it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from marsrl.rollout.gateway import chat_api, completions_api, messages_api, responses_api
from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.session import CallLost, Session
from marsrl.rollout.gateway.workers import Workers, join_line
from marsrl.rollout.http_server import listen

_log = logging.getLogger(__name__)

_QUIET_S = 10.0  # longest gap between keep-alive bytes of a pending answer
_POLL_S, _POLLS = 0.05, 100  # a GET /next of a worker waits 5 s for a session
_TICK_S = 0.5
_LONG = 1 << 16  # bytes of a request above which its tokenisation would delay other calls
_KEEP_S = 600  # keep-alive of idle connections: clients reuse theirs, and a closed one costs a retry


@dataclass(frozen=True, slots=True)
class Api:
    """A protocol. read: parses the request; reply: the answer as JSON; events: as a stream."""

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
        completions_api.read_generate, completions_api.generate_reply, completions_api.no_events
    ),
}


def make_app(gateway: Gateway, key: str) -> FastAPI:
    """The application. key: the workers'."""
    app = FastAPI(title="marsrl gateway", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    def refused(_: Request, error: Refused) -> Response:
        said = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
        headers = {"x-should-retry": "false"} if error.status == 429 else None
        return JSONResponse({"error": said}, error.status, headers)

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> Response:
        if not isinstance(error, CallLost):
            _log.warning("%s fails: %r", request.url.path, error, exc_info=error)
        return JSONResponse({"error": {"message": "the gateway has failed", "type": "server_error"}}, 500)

    def known(request: Request) -> Session:
        session = gateway.of_key(_key_of(request))
        if session is None:
            raise Refused(401, "no session that goes on has this key")
        return session

    async def session_of(request: Request) -> tuple[Session, dict[str, Any], bytes, bool]:
        """(the session, its request's body as JSON, its digest, whether it is long)."""
        known(request)
        most, data = gateway.config.max_body_mib << 20, bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > most:
                raise Refused(413, f"the request is larger than external.max_body_mib = {gateway.config.max_body_mib}")
        try:
            body = json.loads(data)
        except ValueError as error:
            raise Refused(400, f"the request is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused(400, "the request is no JSON object")
        digest = hashlib.blake2b(request.scope["path"].encode() + data, digest_size=16).digest()
        return known(request), body, digest, len(data) > _LONG  # it may have ended meanwhile

    @app.get("/next")
    async def hand_out(request: Request, worker: str, most: int) -> Response:
        if not secrets.compare_digest(_key_of(request).encode(), key.encode()):
            raise Refused(401, "this is not the workers' key")
        sessions, over = gateway.hand_out(worker, most)
        for _ in range(_POLLS):
            if sessions or over:
                break
            await asyncio.sleep(_POLL_S)
            if await request.is_disconnected():  # a disconnected worker would get sessions that nobody plays
                break
            sessions, over = gateway.hand_out(worker, most)
        given = [
            {"session": each.id, "api_key": each.key, "problem": each.problem, "agents": list(gateway.agents)}
            for each in sessions
        ]
        return JSONResponse({"sessions": given, "over": over})

    @app.post("/end")
    async def end(request: Request) -> Response:
        session, body, *_ = await session_of(request)
        gateway.end(session, body)
        return JSONResponse({})

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        known(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "marsrl"} for name in gateway.agents]
        return JSONResponse({"object": "list", "data": data})

    def add(path: str, api: Api) -> None:
        async def call(request: Request) -> Response:
            session, body, digest, is_long = await session_of(request)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            ask = api.read(body, gateway.agents)
            task = await session.ask(ask, digest, is_retry=is_retry, is_long=is_long)
            streams, quiet_s = bool(body.get("stream")), _quiet_s(request)

            async def parts() -> AsyncIterator[bytes]:
                """The answer after keep-alive blanks; once sent, it is noted as read. Cut off if there is none."""
                while not (await asyncio.wait([task], timeout=quiet_s))[0]:
                    yield b": waiting\n\n" if streams else b" "
                answer = task.result()
                for part in api.events(answer, body) if streams else [json.dumps(api.reply(answer, body)).encode()]:
                    yield part
                session.note_read(task)

            return StreamingResponse(parts(), media_type="text/event-stream" if streams else "application/json")

        app.add_route(path, call, methods=["POST"])  # bypasses FastAPI's request handling, which is unused here

    for path, api in APIS.items():
        add(path, api)
    return app


def _quiet_s(request: Request) -> float:
    """A third of the client's own timeout, if it sends one."""
    with suppress(ValueError):
        return min(_QUIET_S, float(request.headers.get("x-stainless-read-timeout", "inf")) / 3)
    return _QUIET_S


def _key_of(request: Request) -> str:
    bearer = request.headers.get("authorization", "")
    return bearer.removeprefix("Bearer ") if bearer else request.headers.get("x-api-key", "")


@contextmanager
def open_gateway(
    config: ExternalConfig,
    agents: Mapping[str, Agent],
    key: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Gateway]:
    """Run a gateway in a thread of its own, with locally started workers.

    key: of workers; None: a random one. clock: see Gateway.

    Raises:
        OSError: the address cannot be bound.
    """
    key = key or secrets.token_urlsafe(24)
    gateway = Gateway(config, agents, clock)
    with listen(config.host, config.port) as listening:
        url = f"http://{config.host}:{listening.getsockname()[1]}"
        workers = Workers(config, url, key)
        if not config.workers:
            _log.warning("%s", join_line(config))
        settings = uvicorn.Config(
            make_app(gateway, key),
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_S,
        )
        server = uvicorn.Server(settings)

        async def answer() -> None:
            serving = asyncio.ensure_future(server.serve([listening]))
            try:
                while not (await asyncio.wait([serving], timeout=_TICK_S))[0]:
                    workers.end_hanging(gateway.tick())
                    workers.watch(gateway)
            finally:
                gateway.close()
                workers.close()

        def run() -> None:
            try:
                asyncio.run(answer())
            except BaseException as error:
                gateway.fail(f"the gateway has failed: {type(error).__name__}: {error}")
                raise

        thread = threading.Thread(target=run, name="marsrl-gateway", daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
