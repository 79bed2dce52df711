"""Tools that query a server, and our retrieval server: replies are not trusted, and only the request contains the key.

tests/engines/test_openai_engine.py tests retries, refusals, redirects and silence for http_line.HttpLine.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from completions_server import Handler, completions_server
from pydantic import ValidationError

from marsrl.commands.cli import main
from marsrl.rollout.state import encode
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import HttpSearch, ToolsConfig
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.tools.search import build_index
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
    raise AssertionError("a page was read although tools.search.read_pages is false")


def ask(reply: Any, tool: str = "http", arguments: Mapping[str, object] | None = None, **changes: object) -> Any:
    """Return (output of the tool for the server's reply, the server with its record). tool: http, search or scholar."""
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


ASKED = 'who said "no" ??'
OF_GOOGLE = {"q": ASKED, "num": "10", "api_key": KEY}


@pytest.mark.parametrize(
    ("tool", "path", "body"),
    [
        ("http", "/retrieve", {"queries": [ASKED], "query": ASKED, "topk": 3, "return_scores": True}),
        ("search", "/search.json?engine=google&", {"engine": "google", **OF_GOOGLE}),
        ("scholar", "/search.json?engine=google_scholar&", {"engine": "google_scholar", **OF_GOOGLE}),
    ],
)
def test_requests_follow_search_r1_dr_mas_or_google(tool: str, path: str, body: object) -> None:
    _, server = ask(sends(FOUND if tool == "http" else of_google()), tool, {"query": 'who said "no" \ud800?'})
    [asked], [headers] = server.bodies, server.headers
    assert asked == body and headers["path"].startswith(path)
    assert tool != "http" or headers["Content-Type"] == "application/json"


def of_google(*found: object) -> object:
    return {"organic_results": found, "search_metadata": {}}


NOTHING, DONE = "Google hasn't returned any results for this query.", {"status": "Success"}
MARKUP = "<b>Capital</b>&nbsp;of <em class='x'>Peru</em>:<br/>Lima &amp; port. vector<int> a; x < y, z > 1: &lt;b&gt;"
PLAIN = "Capital\xa0of Peru:Lima & port. vector<int> a; x < y, z > 1: <b>"
UNTOLD = [{"title": title} for title in "BCD"]
PUBLISHED = "Published: A Author - Journal, 1997. Citations: 12. Abstract: We draw maps."


@pytest.mark.parametrize(
    ("tool", "answer", "shown"),
    [
        ("http", FOUND, ["Doc 1(Title: Lima) The capital."]),
        ("http", {"result": [[{"contents": f"{title}\nx", "id": 3} for title in "ABCD"]]},
         ["Doc 1(Title: A) x", "Doc 2(Title: B) x", "Doc 3(Title: C) x"]),
        ("http", {"result": [[{"contents": '"T"\n\ud800x'}]]}, ["Doc 1(Title: T) ?x"]),
        ("search", of_google(PAGE, {"title": "Ohne", "snippet": None}, PAGE),
         ["Doc 1(Title: Lima) https://lima.pe/\nThe capital of Peru.", "Doc 2(Title: Ohne) "]),
        ("scholar", of_google(PAPER, {"title": "Bare"}), [f"Paper 1(Title: Maps) {PUBLISHED}", "Paper 2(Title: Bare) "]),
        ("search", of_google({"link": "https://h/"}, {"title": "<B>Peru</B> &#39;s", "snippet": MARKUP}, *UNTOLD),
         [f"Doc 1(Title: Peru 's) {PLAIN}", "Doc 2(Title: B) ", "Doc 3(Title: C) "]),  # a document without title is skipped
        *((tool, found, "No documents match.") for tool, found in (
            ("http", {"result": [[]]}), ("search", {"error": NOTHING}), ("search", {"organic_results": []}),
            ("search", {"search_metadata": DONE, "error": NOTHING}),
            ("search", {"search_metadata": DONE, "answer_box": {"answer": "42"}}),  # no organic_results
        )),
    ],
)  # fmt: skip
def test_what_is_found_is_shown_each_once_up_to_top_k(tool: str, answer: object, shown: object) -> None:
    assert ask(sends(answer), tool, top_k=3)[0] == shown


def test_each_query_is_a_request_and_a_failure_is_the_answer() -> None:
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


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, f'{{"error": "{"x" * 182}{KEY}"}}'),  # the message is cut in the middle of the key
        (500, f"GET /search.json?q=x&api_key={KEY.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}"),
        (200, json.dumps({"organic_results": [PAGE | {"title": KEY, "link": f"https://h/?k={KEY}", "snippet": KEY}]})),
        (200, f'{{"organic_results": [{{"title": "{escaped(KEY)}"}}]}}'),
        (200, f'{{"error": "{escaped(KEY)}"}}'),
    ],
)
def test_the_api_key_appears_in_no_text_log_or_checkpoint(
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
    assert any("HTTP Request: GET" in text for text in told)  # httpx's log of a request is included
    for text in told:
        assert "s3cr3t" not in text


def test_a_refused_connection_is_an_error_without_the_key() -> None:
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
    ("changes", "expected"),
    [
        ({"kind": "http", "url": "127.0.0.1:8000/retrieve"}, "expected http://host"),
        ({"kind": "http", "url": "http://host:99999/retrieve"}, "Port out of range"),
        ({"kind": "http", "url": "http://user:secret@host/retrieve"}, "contains a user, password, query or fragment"),
        ({"kind": "http", "url": "http://host/retrieve", "corpus": "a.jsonl"}, "corpus"),
        ({"base_url": "https://serpapi.com/?api_key=1"}, "contains a user, password, query or fragment"),
        ({"api_key_env": "0a1b-key"}, "is not the name of an environment variable"),
        ({"kind": "bing"}, "'index', 'http'"),
    ],
)
def test_settings_with_a_key_or_of_another_kind_are_rejected(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        ToolsConfig.model_validate({"search": {"kind": "serpapi", **changes}})
    with pytest.raises(ValidationError, match="less than or equal to 20"):
        serpapi(top_k=21)


CORPUS = [Document("lima", "Lima", "The capital of Peru."), Document("peru", "Peru", "A country.\nIn the Andes.")]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    from fastapi.testclient import TestClient

    from marsrl.rollout.tools.retrieval_server import make_app

    with closing(build_index(CORPUS)) as index, TestClient(make_app(index, top_k=1)) as client:
        yield client


def test_the_retrieval_server_answers_both_request_forms(client: Any) -> None:
    asked = {"queries": ["peru andes", "capital", "nothing"], "topk": 2, "return_scores": True}
    result = client.post("/retrieve", json=asked).json()["result"]
    assert [[hit["document"]["id"] for hit in each] for each in result] == [["peru", "lima"], ["lima"], []]
    assert result[1][0]["document"] == {"id": "lima", "contents": '"Lima"\nThe capital of Peru.'}
    assert result[0][0]["score"] > result[0][1]["score"] > 0
    # Requests of Dr. MAS ask for no scores.
    asked = {"query": "andes", "topk": None, "unknown": 1}
    # The server's own top_k is 1.
    assert [d["id"] for d in client.post("/retrieve", json=asked).json()["result"][0]] == ["peru"]
    assert len(client.post("/retrieve", json={"query": "peru", "topk": 0}).json()["result"][0]) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[" * 100_000, 422),
        (b'{"queries": ["a"], "query": "b"}', 422),
        (b'{"queries": ["a"], "topk": -1}', 422),
        (json.dumps({"queries": ["a"] * 1025}).encode(), 422),
        (b'{"queries": ["' + b"a" * (5 << 20) + b'"]}', 413),
        ((b"x" * (1 << 20) for _ in range(8)), 413),  # without a length
        (b'{"queries": ["\\ud800 \\u0000 \\" OR lima"]}', 200),
    ],
    ids=range(8),
)
def test_a_malformed_request_is_rejected_and_the_server_lives(client: Any, body: Any, status: int) -> None:
    answer = client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and len(answer.text) < 1000, answer.text[:300]
    assert client.post("/retrieve", json={"query": "peru"}).status_code == 200


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["none"], "none.jsonl"),
        (["bad"], "bad.jsonl:1: not JSON"),
        (["good", "--port", "70000"], "Invalid value for '--port'"),
        (["good", "--host", "256.1.1.1", "--port", "0"], "serve-retrieval: "),
    ],
)
def test_unusable_corpora_and_addresses_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "good.jsonl").write_text('{"text": "x"}')
    assert main(["serve-retrieval", "--corpus", f"{tmp_path}/{words[0]}.jsonl", *words[1:]]) == 2
    assert expected in capsys.readouterr().err
