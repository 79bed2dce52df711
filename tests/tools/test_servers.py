"""Tools that ask a server: nothing that it says is trusted, and a key is nowhere but in the request.

Retries, refusals, redirects and silence are those of http_line.HttpLine (tests/engines/test_openai_engine.py).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
from completions_server import Handler, completions_server
from pydantic import ValidationError

from marsrl.rollout.state import encode
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import HttpSearch, ToolsConfig
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.tools.servers import Retrieval, SerpApi
from marsrl.rollout.types import ToolCall, ToolOutput

KEY = "s3cr3t+key/of=ours"
FOUND = {"result": [[{"document": {"id": "7", "contents": '"Lima"\nThe capital.'}, "score": 1.5}]]}
PAGE = {"position": 1, "title": "Lima", "link": "https://lima.pe/", "snippet": "The capital of Peru."}
PAPER = {
    "title": "Maps",
    "snippet": "We draw maps.",
    "publication_info": {"summary": "A Author - Journal, 1997", "authors": [{"name": "A Author"}]},
    "inline_links": {"cited_by": {"total": 12, "link": "left out"}},
}
LIMITS = {"backoff_s": 0.0, "retries": 2, "request_timeout_s": 60.0}


@pytest.fixture(autouse=True)
def _key(environment: None) -> None:
    os.environ["SERPAPI_API_KEY"] = KEY


def http(url: str = "http://127.0.0.1:1/retrieve", **changes: object) -> HttpSearch:
    return HttpSearch.model_validate({"kind": "http", "url": url, **LIMITS, **changes})


def serpapi(url: str = "http://127.0.0.1:1", **changes: object) -> ToolsConfig:
    given = {"kind": "serpapi", "base_url": url, **LIMITS, **changes}
    return ToolsConfig.model_validate({"search": given, "scholar": given})


def unread(urls: Sequence[str], wait_s: float) -> Sequence[ToolOutput]:
    raise AssertionError("pages are read where tools.search.read_pages says so")


def ask(reply: Any, tool: str = "http", arguments: Mapping[str, object] | None = None, **changes: object) -> Any:
    """(what http, search or scholar says where the server replies so, the server's record)."""
    with completions_server(reply) as server:
        base = server.base_url.removesuffix("/v1")
        if tool == "http":
            asked: Retrieval | SerpApi = Retrieval(http(f"{base}/retrieve", **changes))
        else:
            asked = SerpApi(tool, getattr(serpapi(base, **changes), tool), unread)
        with closing(asked):
            try:
                return asked.run(arguments or {"query": "capital of peru?"}), server
            except ToolError as error:
                return f"ToolError: {error}", server


def sends(value: object) -> Any:
    return lambda handler, asked, before: handler.send(200, json.dumps(value).encode())


# A retrieval server.


def test_it_asks_as_search_r1_and_dr_mas_do_and_shows_what_it_gets() -> None:
    parts, server = ask(sends(FOUND), arguments={"query": 'who said "no" \ud800?'})
    assert parts == ["Doc 1(Title: Lima) The capital."]
    [body], [headers] = server.bodies, server.headers
    query = 'who said "no" ??'
    assert body == {"queries": [query], "query": query, "topk": 3, "return_scores": True}
    assert headers["path"] == "/retrieve" and headers["Content-Type"] == "application/json"


def test_documents_without_scores_and_beyond_top_k_are_taken_and_left() -> None:
    value = {"result": [[{"contents": "A\na"}, {"contents": "B\nb", "id": 3}, {"contents": "C\nc"}]]}
    assert ask(sends(value), top_k=2)[0] == ["Doc 1(Title: A) a", "Doc 2(Title: B) b"]
    assert ask(sends({"result": [[]]}))[0] == "No documents match."
    assert ask(sends({"result": [[{"contents": '"T"\n\ud800x'}]]}))[0] == ["Doc 1(Title: T) ?x"]


def test_several_queries_are_a_request_each_and_one_that_fails_is_the_answer() -> None:
    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        found = [{"contents": f'"{body["query"]}"\ntext'}, {"contents": '"Both"\ntext'}]
        handler.send(404 if body["query"] == "gone" else 200, json.dumps({"result": [found]}).encode())

    parts, server = ask(reply, arguments={"queries": ["a", "b"]})
    assert parts == ["Doc 1(Title: a) text", "Doc 2(Title: Both) text", "Doc 3(Title: b) text"]
    assert [body["queries"] for body in server.bodies] == [["a"], ["b"]]
    assert "HTTP 404" in ask(reply, arguments={"queries": ["a", "gone"]})[0]


def drips(handler: Handler, body: dict[str, Any], before: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.02)


def test_a_server_that_drips_or_floods_is_given_up() -> None:
    text, _ = ask(drips, request_timeout_s=2.0, retries=0)
    assert "no whole answer within tools.search.request_timeout_s = 2 s" in text
    text, _ = ask(lambda handler, body, before: handler.send(200, b" " * (1 << 17)), max_response_kib=64)
    assert "larger than tools.search.max_response_kib = 64 KiB" in text


# Google, by SerpApi.


def test_a_page_is_its_title_link_and_snippet() -> None:
    bare = {"title": "Ohne", "snippet": None}
    parts, server = ask(sends({"organic_results": [PAGE, bare, PAGE], "search_metadata": {}}), "search", top_k=4)
    assert parts == ["Doc 1(Title: Lima) https://lima.pe/\nThe capital of Peru.", "Doc 2(Title: Ohne) "]
    [asked], [headers] = server.bodies, server.headers
    assert asked == {"engine": "google", "q": "capital of peru?", "num": "10", "api_key": KEY}
    assert headers["path"].startswith("/search.json?engine=google&q=capital+of+peru%3F&num=10&api_key=s3cr3t%2Bkey")


def test_a_paper_is_its_title_publication_citations_and_snippet() -> None:
    parts, server = ask(sends({"organic_results": [PAPER, {"title": "Bare"}]}), "scholar")
    said = "Published: A Author - Journal, 1997. Citations: 12. Abstract: We draw maps."
    assert parts == [f"Paper 1(Title: Maps) {said}", "Paper 2(Title: Bare) "]
    assert (server.bodies[0]["engine"], server.bodies[0]["num"]) == ("google_scholar", "10")


@pytest.mark.parametrize(
    "answer",
    [
        {"error": "Google hasn't returned any results for this query."},
        {"organic_results": []},
        {"search_metadata": {"status": "Success"}, "error": "Google hasn't returned any results for this query."},
        {"search_metadata": {"status": "Success"}, "answer_box": {"answer": "42"}},  # Google showed nothing else
    ],
)
def test_nothing_found_is_no_error(answer: object) -> None:
    assert ask(sends(answer), "search")[0] == "No documents match."


def test_results_without_a_title_are_passed_over_and_markup_is_taken_out() -> None:
    snippet = "The <b>capital</b>&nbsp;of <em class='x'>Peru</em>:<br/>Lima &amp; port. vector<int> a; x < y, z > 1: &lt;b&gt;"
    found = [
        {"link": "https://h/"},
        {"title": "<B>Peru</B> &#39;s", "snippet": snippet},
        {"title": "B"},
        {"title": "C"},
    ]
    parts, _ = ask(sends({"organic_results": found}), "search", top_k=2)
    assert parts == [
        "Doc 1(Title: Peru 's) The capital\xa0of Peru:Lima & port. vector<int> a; x < y, z > 1: <b>",
        "Doc 2(Title: B) ",
    ]


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, f'{{"error": "{"x" * 182}{KEY}"}}'),  # a message is cut in the midst of it
        (500, f"GET /search.json?q=x&api_key={KEY.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}"),
        (200, json.dumps({"organic_results": [PAGE | {"title": KEY, "link": f"https://h/?k={KEY}", "snippet": KEY}]})),
        (200, f'{{"organic_results": [{{"title": "{escaped(KEY)}"}}]}}'),
        (200, f'{{"error": "{escaped(KEY)}"}}'),
    ],
)
def test_the_key_is_in_no_text_error_log_repr_setting_or_checkpoint(
    status: int, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with completions_server(lambda handler, asked, before: handler.send(status, body.encode())) as server:
        config = serpapi(server.base_url.removesuffix("/v1"), retries=0)
        with closing(build_tools(config, ["search"], ())) as pool:
            output = pool.submit(ToolCall("1", "search", '{"query": "x"}')).result(30.0)
            told = [output.text, encode(output).decode("latin-1"), repr(config), config.model_dump_json(), repr(pool)]
    assert server.bodies[0]["api_key"] == KEY and output.is_error == (status != 200 or "error" in body)
    told += [f"{record.getMessage()} {record.exc_text}" for record in caplog.records]
    assert any("HTTP Request: GET" in text for text in told)  # what httpx logs of a request is among it
    for text in told:
        assert "s3cr3t" not in text


def test_nobody_listens_and_the_error_has_no_key() -> None:
    with closing(SerpApi("search", serpapi().search, unread)) as tool, pytest.raises(ToolError) as error:  # type: ignore[arg-type]
        tool.run({"query": "x"})
    assert "after 3 attempts: ConnectError" in str(error.value) and "s3cr3t" not in repr(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize("key", [None, " ", "käse", "a\nb"])
def test_a_key_that_is_not_there_is_named_before_anything_starts(key: str | None) -> None:
    del os.environ["SERPAPI_API_KEY"]
    os.environ |= {} if key is None else {"SERPAPI_API_KEY": key}
    for check in (check_tools, build_tools):
        with pytest.raises(ValueError, match=r"tools.scholar.api_key_env names SERPAPI_API_KEY, which is not"):
            check(serpapi(), ["scholar"], ())


# Both.


@pytest.mark.parametrize(
    ("tool", "value"),
    [
        *(("http", value) for value in ([], {}, {"result": None}, {"result": [[], []]}, {"result": [[7]]})),
        ("http", {"result": [[{"document": {"contents": 7}}]]}),
        *(("search", value) for value in ([], {}, {"organic_results": {"0": PAGE}}, {"organic_results": [7]})),
        ("search", {"error": "Your account has run out of searches."}),
        ("search", {"search_metadata": {"status": "Processing"}}),
        ("search", {"organic_results": [PAGE | {"snippet": {"x": "y" * 100_000}}]}),
        ("scholar", {"organic_results": [PAPER | {"inline_links": {"cited_by": {"total": "12"}}}]}),
    ],
)
def test_an_answer_of_another_form_is_an_error_of_one_attempt(tool: str, value: object) -> None:
    text, server = ask(sends(value), tool)
    assert text.startswith("ToolError: http://127.0.0.1") and "expected" in text and len(text) < 1000
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "http", "url": "127.0.0.1:8000/retrieve"}, "expected http://host"),
        ({"kind": "http", "url": "http://host:99999/retrieve"}, "Port out of range"),
        ({"kind": "http", "url": "http://user:secret@host/retrieve"}, "holds a user, password or query"),
        ({"kind": "http", "url": "http://host/retrieve", "corpus": "a.jsonl"}, "corpus"),
        ({"base_url": "https://serpapi.com/?api_key=1"}, "holds a user, password or query"),
        ({"api_key_env": "0a1b-key"}, "is not the name of an environment variable"),
        ({"kind": "bing"}, "'index', 'http'"),
    ],
)
def test_settings_that_hold_a_key_or_are_of_another_kind_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ToolsConfig.model_validate({"search": {"kind": "serpapi", **changes}})
    with pytest.raises(ValidationError, match="less than or equal to 20"):
        serpapi(top_k=21)
