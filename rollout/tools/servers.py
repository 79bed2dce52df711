"""Tools that query a server: a retrieval server as in Search-R1 and Dr. MAS, or Google and Google Scholar through SerpApi.

    POST url  {"queries": [query], "query": query, "topk": 3, "return_scores": true}
    200       {"result": [[{"document": {"id": ..., "contents": "\"Title\"\ntext"}, "score": 12.3}, ...]]}

Search-R1's server reads `queries`, Dr. MAS's `query`; both ignore unknown keys.

    GET base_url/search.json?engine=google&q=...&num=10&api_key=...
    200 {"organic_results": [{"title": ..., "link": ..., "snippet": ...}, ...]}

With engine=google_scholar, results also have "publication_info": {"summary": ...} and "inline_links": {"cited_by": {"total":
12}}. A successful search may have no organic_results, because Google found nothing or shows only results of other kinds. A
result may have no title. The protocol requires the key in the address. The key is never logged or stored, and is removed from
the server's text if that repeats it.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from marsrl.rollout.config import read_key
from marsrl.rollout.http_line import HttpLine, Refused, excerpt, read_json
from marsrl.rollout.tools.config import HttpSearch, SerpApiScholar, SerpApiSearch, ServerLimits
from marsrl.rollout.tools.documents import Document, from_contents, said_of, shown
from marsrl.rollout.tools.protocol import WAITED, ReadPages, ToolError, query_arguments

_NOTHING = "hasn't returned any results"  # part of SerpApi's error if nothing was found
_PAGE = 10  # results of one Google page; if fewer are requested, SerpApi sometimes returns none
_MARKUP = re.compile(r"</?(?:a|b|br|em|font|i|mark|p|span|strong|sub|sup|u|wbr)(?:\s[^<>]*)?/?>", re.IGNORECASE)


class _ServerSearch:
    """Search by a server: {"query": text} or {"queries": [texts]} -> results. Queries are sent one after the other.

    Raises ToolError if the server fails to answer one of them.
    """

    # Outputs are cached: a corpus does not change during a run, and repeated queries would be billed again.
    is_deterministic = True

    def __init__(
        self, name: str, url: str, options: ServerLimits, kind: str, secret: Mapping[str, str] | None = None
    ) -> None:
        """Create the tool; sends nothing. kind: the word for a result, as shown to agents."""
        self._url, self._kind = url, kind
        self._line = HttpLine(
            url,
            f"tools.{name}.",
            concurrency=2 * options.concurrency,  # an abandoned call may still hold a connection
            timeout_s=options.request_timeout_s,
            retries=options.retries,
            backoff_s=options.backoff_s,
            max_response_kib=options.max_response_kib,
            secret=secret,
            timeout_key="request_timeout_s",
        )

    def run(self, arguments: Mapping[str, object]) -> str | list[str]:
        try:
            # Lone surrogates are invalid in an address, and servers treat them differently.
            queries = [each.encode("utf-8", "replace").decode("utf-8") for each in query_arguments(arguments)]
            documents = self._found(queries)
        except Refused as error:
            raise ToolError(self._line.hide(f"{self._url}: {error}")) from None
        output = shown(documents, self._kind)
        return output if isinstance(output, str) else [self._line.hide(part) for part in output]

    def close(self) -> None:
        """Make pending searches fail; may be called twice."""
        self._line.cut()

    def _found(self, queries: Sequence[str]) -> list[Document]:
        return [document for query in queries for document in self._search(query)]

    def _search(self, query: str) -> list[Document]:
        raise NotImplementedError


class Retrieval(_ServerSearch):
    """Tool that returns the top_k documents of each query from a retrieval server."""

    def __init__(self, options: HttpSearch) -> None:
        self._top_k = options.top_k
        super().__init__("search", options.url, options, "Doc")

    def _search(self, query: str) -> list[Document]:
        asked = {"queries": [query], "query": query, "topk": self._top_k, "return_scores": True}
        return self._line.post(json.dumps(asked).encode(), self._documents)

    def _documents(self, answer: bytes) -> list[Document]:
        value = read_json(answer)
        results = value.get("result") if isinstance(value, dict) else None
        if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], list):
            raise Refused(f"expected `result`, a list of one list of documents, found {excerpt(value)}")
        return [_document(each) for each in results[0][: self._top_k]]


def _document(item: object) -> Document:
    """Read a document of a response: {"document": ..., "score": ...}, or the bare document from a server without scores."""
    document = item.get("document", item) if isinstance(item, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise Refused(f"expected a document with `contents`, found {excerpt(item)}")
    return from_contents(str(document.get("id", "")), contents.encode("utf-8", "replace").decode("utf-8"))


class SerpApi(_ServerSearch):
    """Tool that returns the top_k results of each query, with the text of their pages if options.read_pages."""

    def __init__(self, name: str, options: SerpApiSearch, read_pages: ReadPages) -> None:
        """Create the tool. Raises ValueError if the variable that options.api_key_env names is not set."""
        self._top_k, self._is_scholar = options.top_k, isinstance(options, SerpApiScholar)
        self._read_pages = read_pages if options.read_pages else None
        self._timeout_s = options.timeout_s
        secret = {"api_key": read_key(options.api_key_env, f"tools.{name}.api_key_env")}
        kind = "Paper" if self._is_scholar else "Doc"
        super().__init__(name, f"{options.base_url}/search.json", options, kind, secret)

    def _found(self, queries: Sequence[str]) -> list[Document]:
        pages_end = time.monotonic() + WAITED * self._timeout_s
        found = super()._found(queries)
        return (
            found if self._read_pages is None else _with_bodies(found, self._read_pages, pages_end - time.monotonic())
        )

    def _search(self, query: str) -> list[Document]:
        engine = "google_scholar" if self._is_scholar else "google"
        asked = {"engine": engine, "q": query, "num": str(max(_PAGE, self._top_k))}
        return self._line.get(asked, self._results)

    def _results(self, answer: bytes) -> list[Document]:
        value = read_json(answer)
        if not isinstance(value, dict):
            raise Refused(f"expected an object with `organic_results`, found {excerpt(value)}")
        results, error = value.get("organic_results"), value.get("error")
        has_succeeded = error is None and _below(value.get("search_metadata"), "status") == "Success"
        if results is None and (has_succeeded or (isinstance(error, str) and _NOTHING in error)):
            return []
        if not isinstance(results, list):
            raise Refused(f"expected `organic_results`, a list, found {excerpt(error or value)}")
        return [self._document(each) for each in results if _text(each, "title")][: self._top_k]

    def _document(self, result: object) -> Document:
        title, link, snippet = (_text(result, key) for key in ("title", "link", "snippet"))
        if not self._is_scholar:
            return Document(link, title, f"{link}\n{snippet}".strip())
        fields = {
            "Published": _text(_below(result, "publication_info"), "summary") or None,
            "Citations": _below(_below(_below(result, "inline_links"), "cited_by"), "total"),
            "Abstract": snippet or None,
        }
        if not isinstance(fields["Citations"], int | None):
            raise Refused(f"expected `cited_by` with a number `total`, found {excerpt(result)}")
        return Document(link, title, said_of(fields))


def _with_bodies(documents: Sequence[Document], read_pages: ReadPages, wait_s: float) -> list[Document]:
    """Return each result once, with its page's text after the snippet, or with the reason why the page has none.

    wait_s: maximum seconds for all pages together.
    """
    links = {document.id: document for document in reversed(documents) if document.id}
    pages = dict(zip(links, read_pages(list(links), max(0.0, wait_s)), strict=True))
    bodies = {
        link: f"(Its page cannot be read: {page.text.removeprefix('error: ')})" if page.is_error else page.text
        for link, page in pages.items()
    }
    return [
        replace(document, text=f"{document.text}\n{bodies[document.id]}") if document.id else document
        for document in documents
        if links.get(document.id, document) is document
    ]


def _below(value: object, key: str) -> object:
    """Return value[key]; None if either is missing."""
    if value is not None and not isinstance(value, dict):
        raise Refused(f"expected an object with `{key}`, found {excerpt(value)}")
    return None if value is None else value.get(key)


def _text(value: object, key: str) -> str:
    """Return the text of this key without markup; "" if missing."""
    text = _below(value, key)
    if not isinstance(text, str | None):
        raise Refused(f"expected a text `{key}`, found {excerpt(value)}")
    # Remove tags before unescaping: escaped tags are the page's own text.
    plain = html.unescape(_MARKUP.sub("", text or ""))
    return plain.encode("utf-8", "replace").decode("utf-8")
