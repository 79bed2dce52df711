"""The index behind HTTP, as Search-R1's and Dr. MAS's code asks for it: `marsrl serve-retrieval`.

    POST /retrieve  {"queries": [text, ...], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"id": ..., "contents": "\"Title\"\ntext"}, "score": 12.3}, ...], ...]}

`query` in place of `queries` is a list of one, as Dr. MAS asks; without return_scores the documents stand in the lists alone.
It knows no users: whoever reaches the address can search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marsrl.rollout import http_server
from marsrl.rollout.tools.search import SearchIndex

_MOST_BODY_BYTES = 4 << 20
_MOST_QUERIES = 1024
_MOST_TOP_K = 100


class Query(BaseModel):
    """A request. Other keys are ignored, as by those servers."""

    queries: Annotated[list[str], Field(max_length=_MOST_QUERIES)] | None = None
    query: str | None = None
    topk: int | None = Field(None, ge=0, le=_MOST_TOP_K)  # 0, null: the server's own, as there
    return_scores: bool = False


class _SmallBodies:
    """Answers 413 to a body above _MOST_BODY_BYTES before the application has read it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received, body, more = 0, bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # it went away
                return
            received += len(message.get("body", b""))
            more = message.get("more_body", False)
            if received > _MOST_BODY_BYTES:
                await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
                await send({"type": "http.response.body", "body": b"the request is larger than 4 MiB"})
                return
            body += message.get("body", b"")

        async def whole() -> Message:
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, whole, send)


def make_app(index: SearchIndex, top_k: int) -> FastAPI:
    """The application; requests are answered in threads. top_k: for requests that do not say."""
    app = FastAPI(title="marsrl retrieval", docs_url=None, redoc_url=None)  # their pages load scripts from elsewhere
    app.add_middleware(_SmallBodies)

    @app.post("/retrieve")
    def retrieve(asked: Query) -> dict[str, Any]:
        if (asked.query is None) == (asked.queries is None) and asked.queries != [asked.query]:
            raise HTTPException(422, "expected `queries`, a list of texts, or `query`, a text")
        queries = asked.queries if asked.queries is not None else [asked.query or ""]
        hits = [index.search(query, asked.topk or top_k) for query in queries]
        if not asked.return_scores:
            return {"result": [[{"id": d.id, "contents": d.contents} for d, _ in each] for each in hits]}
        return {
            "result": [
                [{"document": {"id": d.id, "contents": d.contents}, "score": score} for d, score in each]
                for each in hits
            ]
        }

    return app


def serve(index: SearchIndex, host: str, port: int, top_k: int, on_address: Callable[[str], None]) -> None:
    """Answer until Ctrl-C. on_address: told the URL, once it can be reached.

    Raises:
        OSError: the address cannot be had.
    """
    with http_server.listen(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}/retrieve"
        http_server.serve(make_app(index, top_k), listening, lambda: on_address(address))
