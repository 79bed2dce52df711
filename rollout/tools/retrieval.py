"""The tool that asks a retrieval server, as Search-R1's and Dr. MAS's code does.

    POST url  {"queries": [query], "query": query, "topk": 3, "return_scores": true}
    200       {"result": [[{"document": {"id": ..., "contents": "\"Title\"\ntext"}, "score": 12.3}, ...]]}

Search-R1's server reads `queries`, Dr. MAS's `query`; both leave out what they do not know.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

from marsrl.rollout.http_line import HttpLine, Refused, excerpt, read_json
from marsrl.rollout.tools.config import HttpSearch
from marsrl.rollout.tools.documents import Document, from_contents, shown
from marsrl.rollout.tools.protocol import ToolError, query_arguments


class Retrieval:
    """The tool: {"query": text} or {"queries": [texts]} -> the top_k documents of each, a request a query, in turn.

    A ToolError where the server has none to give to one of them.
    """

    name = "search"
    argument = "query"
    is_deterministic = True  # a corpus does not change while a run lasts

    def __init__(self, options: HttpSearch) -> None:
        """Nothing is sent yet."""
        self._url, self._top_k = options.url, options.top_k
        self._line = HttpLine(
            options.url,
            "tools.search.",
            concurrency=2 * options.concurrency,  # a call that was given up may still hold its own
            timeout_s=options.request_timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            max_response_kib=options.max_response_kib,
            timeout_key="request_timeout_s",
        )

    def run(self, arguments: Mapping[str, object]) -> str | list[str]:
        try:
            return shown(document for query in query_arguments(arguments) for document in self._search(query))
        except Refused as error:
            raise ToolError(f"{self._url}: {error}") from error

    def close(self) -> None:
        """Searches under way fail; may be called twice."""
        self._line.cut()

    def _search(self, query: str) -> list[Document]:
        query = query.encode("utf-8", "replace").decode("utf-8")  # servers differ about half of a surrogate pair
        asked = {"queries": [query], "query": query, "topk": self._top_k, "return_scores": True}
        return self._line.post(json.dumps(asked).encode(), self._documents, random.Random(query))

    def _documents(self, answer: bytes) -> list[Document]:
        value = read_json(answer)
        results = value.get("result") if isinstance(value, dict) else None
        if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], list):
            raise Refused(f"expected `result`, a list of one list of documents, found {excerpt(value)}")
        return [_document(each) for each in results[0][: self._top_k]]


def _document(found: object) -> Document:
    """With return_scores it is {"document": ..., "score": ...}; a server may leave the score out, as where it is not asked."""
    document = found.get("document", found) if isinstance(found, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise Refused(f"expected a document with `contents`, found {excerpt(found)}")
    return from_contents(str(document.get("id", "")), contents.encode("utf-8", "replace").decode("utf-8"))
