"""The index behind HTTP, as Search-R1's and Dr. MAS's code asks for it: `marsrl serve-retrieval`.

    POST /retrieve  {"queries": [text, ...], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"id": ..., "contents": "\"Title\"\ntext"}, "score": 12.3}, ...], ...]}

`query` in place of `queries` is a list of one, as Dr. MAS asks; without return_scores the documents stand in the lists alone.
It knows no users: whoever reaches the address can search.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from marsrl.rollout import http_server
from marsrl.rollout.tools.search import SearchIndex

_MOST_BODY_BYTES = 4 << 20
_MOST_QUERIES = 1024
_MOST_TOP_K = 100
_MOST_SHOWN = 500  # characters of what is wrong with a request


class Query(BaseModel):
    """A request. Other keys are ignored, as by those servers."""

    queries: Annotated[list[str], Field(max_length=_MOST_QUERIES)] | None = None
    query: str | None = None
    topk: int | None = Field(None, ge=0, le=_MOST_TOP_K)  # 0, null: the server's own, as there
    return_scores: bool = False


def make_app(index: SearchIndex, top_k: int) -> FastAPI:
    """The application; requests are answered in threads. top_k: for requests that do not say."""
    app = FastAPI(title="marsrl retrieval", docs_url=None, redoc_url=None)  # their pages load scripts from elsewhere

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BODY_BYTES:
                raise HTTPException(413, "the request is larger than 4 MiB", {"connection": "close"})
        try:
            asked = Query.model_validate(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, str(error)[:_MOST_SHOWN]) from None
        if (asked.query is None) == (asked.queries is None) and asked.queries != [asked.query]:
            raise HTTPException(422, "expected `queries`, a list of texts, or `query`, a text")
        return await run_in_threadpool(answer, asked)

    def answer(asked: Query) -> dict[str, Any]:
        queries = asked.queries if asked.queries is not None else [asked.query or ""]
        hits = [index.search(query, asked.topk or top_k) for query in queries]
        found = [[({"id": d.id, "contents": d.contents}, score) for d, score in each] for each in hits]
        if not asked.return_scores:
            return {"result": [[document for document, _ in each] for each in found]}
        return {"result": [[{"document": document, "score": score} for document, score in each] for each in found]}

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
