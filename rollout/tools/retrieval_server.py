"""HTTP server of a search index, with the protocol of Search-R1 and Dr. MAS (see servers.py): `marsrl serve-retrieval`.

Accepts several `queries`, or one `query`; without return_scores, results are lists of bare documents. There is no
authentication: anyone who reaches the address can search.
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
_MOST_SHOWN = 500  # characters of an error about a request


class Query(BaseModel):
    """A request. Other keys are ignored, as by the servers of Search-R1 and Dr. MAS."""

    queries: Annotated[list[str], Field(max_length=_MOST_QUERIES)] | None = None
    query: str | None = None
    topk: int | None = Field(None, ge=0, le=_MOST_TOP_K)  # 0, null: the server's default
    return_scores: bool = False


def make_app(index: SearchIndex, top_k: int) -> FastAPI:
    """Build the application, which answers in threads. top_k: documents per query if a request has no topk."""
    # Disables FastAPI's documentation pages, which load scripts from other sites.
    app = FastAPI(title="marsrl retrieval", docs_url=None, redoc_url=None)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BODY_BYTES:
                raise HTTPException(413, "the request is larger than 4 MiB", {"connection": "close"})
        try:
            search_request = Query.model_validate(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise HTTPException(422, str(error)[:_MOST_SHOWN]) from None
        if (search_request.query is None) == (search_request.queries is None) and search_request.queries != [
            search_request.query
        ]:
            raise HTTPException(422, "expected `queries`, a list of texts, or `query`, a text")
        return await run_in_threadpool(answer, search_request)

    def answer(request: Query) -> dict[str, Any]:
        queries = request.queries if request.queries is not None else [request.query or ""]
        hits = [index.search(query, request.topk or top_k) for query in queries]
        results = [[({"id": d.id, "contents": d.contents}, score) for d, score in scored] for scored in hits]
        if not request.return_scores:
            return {"result": [[document for document, _ in scored] for scored in results]}
        return {
            "result": [[{"document": document, "score": score} for document, score in scored] for scored in results]
        }

    return app


def serve(index: SearchIndex, host: str, port: int, top_k: int, on_address: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. on_address: called with the URL once it is reachable. OSError: the address is unavailable."""
    with http_server.listen(host, port) as listening:
        address = http_server.url_of(host, listening.getsockname()[1])
        http_server.serve(make_app(index, top_k), listening, lambda: on_address(f"{address}/retrieve"))
