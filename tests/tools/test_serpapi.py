"""Google's results by SerpApi's protocol: nothing that the server says is trusted, and the key is nowhere but in the request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest
from completions_server import Handler, completions_server
from pydantic import ValidationError

from marsrl.rollout.state import encode
from marsrl.rollout.tools.build import build_tools, check_tools
from marsrl.rollout.tools.config import ToolsConfig
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.tools.servers import SerpApi
from marsrl.rollout.types import ToolCall, ToolOutput

KEY = "s3cr3t+key/of=ours"
PAGE = {"position": 1, "title": "Lima", "link": "https://lima.pe/", "snippet": "The capital of Peru."}
PAPER = {
    "title": "Maps",
    "snippet": "We draw maps.",
    "publication_info": {"summary": "A Author - Journal, 1997", "authors": [{"name": "A Author"}]},
    "inline_links": {"cited_by": {"total": 12, "link": "left out"}},
}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPAPI_API_KEY", KEY)


def settings(url: str = "http://127.0.0.1:1", **changes: object) -> ToolsConfig:
    given = {"kind": "serpapi", "base_url": url, "backoff_s": 0.0, "retries": 2, "request_timeout_s": 60.0, **changes}
    return ToolsConfig.model_validate({"search": given, "scholar": given})


def ask(reply: Any, name: str = "search", arguments: Mapping[str, object] | None = None, **changes: object) -> Any:
    """(what the tool says where the server replies so, the server's record)."""
    with completions_server(reply) as server:
        options = getattr(settings(server.base_url.removesuffix("/v1"), **changes), name)
        with closing(SerpApi(name, options, unread)) as tool:
            try:
                return tool.run(arguments or {"query": "capital of peru?"}), server
            except ToolError as error:
                return f"ToolError: {error}", server


def unread(urls: Sequence[str], wait_s: float) -> Sequence[ToolOutput]:
    raise AssertionError("pages are read where tools.search.read_pages says so")


def sends(value: object) -> Any:
    return lambda handler, asked, before: handler.send(200, json.dumps(value).encode())


def test_a_page_is_its_title_link_and_snippet() -> None:
    bare = {"title": "Ohne", "snippet": None}
    parts, server = ask(sends({"organic_results": [PAGE, bare, PAGE], "search_metadata": {}}), top_k=4)
    assert parts == ["Doc 1(Title: Lima) https://lima.pe/\nThe capital of Peru.", "Doc 2(Title: Ohne) "]
    [asked], [headers] = server.bodies, server.headers
    assert asked == {"engine": "google", "q": "capital of peru?", "num": "10", "api_key": KEY}
    assert headers["path"].startswith("/search.json?engine=google&q=capital+of+peru%3F&num=10&api_key=s3cr3t%2Bkey")


def test_a_paper_is_its_title_publication_citations_and_snippet() -> None:
    parts, server = ask(sends({"organic_results": [PAPER, {"title": "Bare"}]}), "scholar")
    said = "Published: A Author - Journal, 1997. Citations: 12. Abstract: We draw maps."
    assert parts == [f"Paper 1(Title: Maps) {said}", "Paper 2(Title: Bare) "]
    assert (server.bodies[0]["engine"], server.bodies[0]["num"]) == ("google_scholar", "10")


def test_nothing_found_is_no_error() -> None:
    nothing = "Google hasn't returned any results for this query."
    answers = [
        {"error": nothing},
        {"organic_results": []},
        {
            "search_metadata": {"status": "Success"},
            "search_information": {"organic_results_state": "Fully empty"},
            "error": nothing,
        },
        {"search_metadata": {"status": "Success"}, "answer_box": {"answer": "42"}},  # Google showed nothing else
    ]
    assert [ask(sends(answer))[0] for answer in answers] == ["No documents match."] * 4


def test_a_result_without_a_title_is_passed_over_and_as_many_are_asked_for_and_shown_as_were_wanted() -> None:
    parts, _ = ask(sends({"organic_results": [{"link": "https://h/"}, PAGE, {"title": "B"}, {"title": "C"}]}), top_k=2)
    assert [part[:20] for part in parts] == ["Doc 1(Title: Lima) h", "Doc 2(Title: B) "]
    assert ask(sends({"organic_results": [PAGE]}), top_k=15)[1].bodies[0]["num"] == "15"


def test_markup_of_a_page_is_taken_out_and_what_only_looks_like_it_is_kept() -> None:
    snippet = "The <b>capital</b>&nbsp;of <em class='x'>Peru</em>:<br/>Lima &amp; port. vector<int> a; x < y, z > 1: &lt;b&gt;"
    parts, _ = ask(sends({"organic_results": [{"title": "<B>Peru</B> &#39;s", "snippet": snippet}]}))
    assert parts == ["Doc 1(Title: Peru 's) The capital\xa0of Peru:Lima & port. vector<int> a; x < y, z > 1: <b>"]


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"error": "Your account has run out of searches."},
        {"organic_results": {"0": PAGE}},
        {"organic_results": [7]},
        {"search_metadata": {"status": "Processing"}},
        {"search_metadata": {"status": "Error"}, "error": "We couldn't get valid results for this search."},
        {"search_metadata": "Success"},
        {"organic_results": [PAGE | {"title": ["x"]}]},
        {"organic_results": [PAGE | {"link": 7}]},
        {"organic_results": [PAGE | {"snippet": {"x": "y" * 100_000}}]},
    ],
)
def test_an_answer_of_another_form_is_an_error_of_one_attempt(value: object) -> None:
    text, server = ask(sends(value))
    assert text.startswith("ToolError: http://127.0.0.1") and "expected" in text and len(text) < 1000
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"publication_info": "1997"},
        {"publication_info": {"summary": 1997}},
        {"inline_links": [1]},
        {"inline_links": {"cited_by": 12}},
        {"inline_links": {"cited_by": {"total": "12"}}},
    ],
)
def test_a_paper_of_another_form_is_an_error(changes: dict[str, object]) -> None:
    text, _ = ask(sends({"organic_results": [PAPER | changes]}), "scholar")
    assert text.startswith("ToolError: ") and "expected" in text


def test_a_server_that_asks_for_time_gets_it_and_its_last_word_is_shown() -> None:
    def too_many(handler: Handler, asked: dict[str, Any], before: int) -> None:
        if before < 1:
            handler.send(429, b"{}", Retry_After="0.5")
        else:
            sends({"organic_results": [PAGE]})(handler, asked, before)

    begin = time.monotonic()
    assert len(ask(too_many)[0]) == 1 and time.monotonic() - begin >= 0.5  # as long as the server asked for
    said, server = ask(lambda handler, asked, before: handler.send(429, b'{"error": "run out of searches"}'))
    assert said.startswith("ToolError: http://127.0.0.1") and "given up after 3 attempts: HTTP 429" in said
    assert "run out of searches" in said and len(server.bodies) == 3


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, f'{{"error": "{"x" * 182}{KEY}"}}'),  # a message is cut in the midst of it
        (500, f"GET /search.json?q=x&api_key={KEY.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}"),
        (200, f'{{"error": "{KEY}"}}'),
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
        config = settings(server.base_url.removesuffix("/v1"), retries=0)
        with closing(build_tools(config, ["search"], ())) as pool:
            output = pool.submit(ToolCall("1", "search", '{"query": "x"}')).result(30.0)
            told = [output.text, encode(output).decode("latin-1"), repr(config), config.model_dump_json(), repr(pool)]
    assert server.bodies[0]["api_key"] == KEY and output.is_error == (status != 200 or "error" in body)
    told += [f"{record.getMessage()} {record.exc_text}" for record in caplog.records]
    assert any("HTTP Request: GET" in text for text in told)  # what httpx logs of a request is among it
    for text in told:
        assert "s3cr3t" not in text


def test_nobody_listens_and_the_error_has_no_key() -> None:
    with closing(SerpApi("search", settings().search, unread)) as tool, pytest.raises(ToolError) as error:  # type: ignore[arg-type]
        tool.run({"query": "x"})
    assert "after 3 attempts: ConnectError" in str(error.value) and "s3cr3t" not in repr(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize("key", [None, " ", "käse", "a\nb"])
def test_a_key_that_is_not_there_is_named_before_anything_starts(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERPAPI_API_KEY") if key is None else monkeypatch.setenv("SERPAPI_API_KEY", key)
    with pytest.raises(ValueError, match=r"tools.scholar.api_key_env names SERPAPI_API_KEY, which is not"):
        check_tools(settings(), ["scholar"], ())
    with pytest.raises(ValueError, match=r"tools.search.api_key_env names SERPAPI_API_KEY"):
        build_tools(settings(), ["search"], ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base_url": "https://serpapi.com/?api_key=1"}, "holds a user, password or query; give a key by api_key_env"),
        ({"base_url": "serpapi.com"}, "expected http://host"),
        ({"api_key_env": "0a1b-key"}, "is not the name of an environment variable"),
        ({"top_k": 21}, "less than or equal to 20"),
    ],
)
def test_settings_that_hold_a_key_or_ask_for_too_much_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        settings(**changes)
