"""The client takes nothing on trust that a retrieval server says; ours answers it, Search-R1 and Dr. MAS."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from completions_server import Handler, completions_server
from pydantic import ValidationError

from marsrl.rollout import http_line
from marsrl.rollout.tools.config import HttpSearch, IndexSearch, ToolsConfig
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.tools.search import build_index
from marsrl.rollout.tools.servers import Retrieval

FOUND = {"result": [[{"document": {"id": "7", "contents": '"Lima"\nThe capital.'}, "score": 1.5}]]}


def options(url: str = "http://127.0.0.1:1/retrieve", **changes: object) -> HttpSearch:
    given: dict[str, object] = {"kind": "http", "url": url, "backoff_s": 0.0, "retries": 2, "request_timeout_s": 60.0}
    return HttpSearch.model_validate({**given, **changes})


def ask(reply: Any, query: str = "capital of Peru", **changes: object) -> tuple[str, Any]:
    """What the tool says where the server replies so, and the server's record."""
    with completions_server(reply) as server:
        url = server.base_url.replace("/v1", "/retrieve")
        with closing(Retrieval(options(url, **changes))) as tool:
            try:
                said = tool.run({"query": query})
                return said if isinstance(said, str) else "\n".join(said), server
            except ToolError as error:
                return f"ToolError: {error}", server


def sends(value: object) -> Any:
    return lambda handler, body, before: handler.send(200, json.dumps(value).encode())


def test_it_asks_as_search_r1_and_dr_mas_do_and_shows_what_it_gets() -> None:
    text, server = ask(sends(FOUND), query='who said "no" \ud800?')
    assert text == "Doc 1(Title: Lima) The capital."
    [body], [headers] = server.bodies, server.headers
    query = 'who said "no" ??'
    assert body == {"queries": [query], "query": query, "topk": 3, "return_scores": True}
    assert headers["path"] == "/retrieve" and headers["Content-Type"] == "application/json"


def test_documents_without_scores_and_beyond_top_k_are_taken_and_left() -> None:
    value = {"result": [[{"contents": "A\na"}, {"contents": "B\nb", "id": 3}, {"contents": "C\nc"}]]}
    assert ask(sends(value), top_k=2)[0] == "Doc 1(Title: A) a\nDoc 2(Title: B) b"
    assert ask(sends({"result": [[]]}))[0] == "No documents match."
    assert ask(sends({"result": [[{"contents": '"T"\n\ud800x'}]]}))[0] == "Doc 1(Title: T) ?x"


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"result": None},
        {"result": []},
        {"result": [[], []]},
        {"result": [{"document": {}}]},
        {"result": [[7]]},
        {"result": [[{"document": None}]]},
        {"result": [[{"document": {"contents": 7}}]]},
        {"result": [[{"score": 1.0}]]},
        {"detail": "x" * 100_000},
    ],
)
def test_an_answer_of_another_form_is_an_error_of_one_attempt(value: object) -> None:
    text, server = ask(sends(value))
    assert text.startswith("ToolError: http://127.0.0.1") and "expected" in text and len(text) < 1000
    assert len(server.bodies) == 1


@pytest.mark.parametrize("body", [b"", b"<html>", b"[" * 100_000, b'{"result": \xff}', b"NaN"])
def test_an_answer_that_is_no_json_object_is_an_error(body: bytes) -> None:
    text, _ = ask(lambda handler, asked, before: handler.send(200, body))
    assert text.startswith("ToolError: ") and len(text) < 1000


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        if before < 2:
            handler.send(status, b"busy")
        else:
            handler.send(200, json.dumps(FOUND).encode())

    text, server = ask(reply)
    assert text == "Doc 1(Title: Lima) The capital." and len(server.bodies) == 3
    text, server = ask(reply, retries=1)
    assert f"given up after 2 attempts: HTTP {status}: 'busy'" in text and len(server.bodies) == 2


@pytest.mark.parametrize("status", [301, 307, 400, 404, 422])
def test_a_refusal_and_a_redirect_are_errors_of_one_attempt(status: int) -> None:
    text, server = ask(lambda handler, body, before: handler.send(status, b"no", Location="/v1/elsewhere"))
    assert f"HTTP {status}: 'no'" in text and len(server.bodies) == 1


def test_a_large_answer_is_not_read_to_its_end() -> None:
    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * (1 << 16))

    text, server = ask(reply, max_response_kib=64)
    assert "larger than tools.search.max_response_kib = 64 KiB" in text and len(server.bodies) == 1


def test_a_server_that_drips_or_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def drip(handler: Handler, body: dict[str, Any], before: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not gate.wait(0.02):
            handler.wfile.write(b" ")

    clock = itertools.count(0.0, 10.0)  # seconds between two looks at it: what was sent takes none of them
    with monkeypatch.context() as patch:
        patch.setattr(http_line, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        text, _ = ask(drip, request_timeout_s=15.0, retries=1)
    assert "no whole answer within tools.search.request_timeout_s = 15 s" in text
    text, _ = ask(lambda handler, body, before: gate.wait(60.0), request_timeout_s=0.1, retries=0)
    assert "given up after 1 attempts: ReadTimeout" in text
    gate.set()


def test_nobody_listens() -> None:
    with closing(Retrieval(options())) as tool, pytest.raises(ToolError, match="after 3 attempts: ConnectError"):
        tool.run({"query": "x"})


def test_closing_ends_a_search_that_waits() -> None:
    asked, gate, said = threading.Event(), threading.Event(), []

    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        asked.set()
        gate.wait(120.0)

    def search() -> None:
        try:
            tool.run({"query": "x"})
        except ToolError as error:
            said.append(str(error))

    with completions_server(reply) as server:
        tool = Retrieval(options(server.base_url, request_timeout_s=120.0))
        thread = threading.Thread(target=search)
        thread.start()
        assert asked.wait(60.0)
        tool.close()
        thread.join(60.0)
        assert not thread.is_alive() and len(said) == 1
        gate.set()


def test_several_queries_are_a_request_each_and_one_that_fails_is_the_answer() -> None:
    def reply(handler: Handler, body: dict[str, Any], before: int) -> None:
        found = [{"contents": f'"{body["query"]}"\ntext'}, {"contents": '"Both"\ntext'}]
        handler.send(404 if body["query"] == "gone" else 200, json.dumps({"result": [found]}).encode())

    with completions_server(reply) as server, closing(Retrieval(options(server.base_url))) as tool:
        parts = ["Doc 1(Title: a) text", "Doc 2(Title: Both) text", "Doc 3(Title: b) text"]
        assert tool.run({"queries": ["a", "b"]}) == parts
        assert [body["queries"] for body in server.bodies] == [["a"], ["b"]]
        with pytest.raises(ToolError, match="HTTP 404"):
            tool.run({"queries": ["a", "gone"]})


@pytest.mark.parametrize("arguments", [{}, {"query": 7}, {"query": " "}, {"queries": "x"}])
def test_arguments_are_checked_before_anything_is_sent(arguments: dict[str, object]) -> None:
    with closing(Retrieval(options())) as tool, pytest.raises(ToolError) as error:
        tool.run(arguments)
    assert "attempts" not in str(error.value)


# Settings.


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000/retrieve", "expected http://host"),
        ("file:///etc/passwd", "expected http://host"),
        ("http:///retrieve", "expected http://host"),
        ("http://host:99999/retrieve", "Port out of range"),
        ("http://user:secret@host/retrieve", "holds a user, password or query"),
        ("http://host/retrieve?key=secret", "holds a user, password or query"),
    ],
)
def test_a_url_that_is_none_or_holds_a_secret_is_refused(url: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        options(url)


def test_tools_are_told_apart_by_their_kind() -> None:
    read = ToolsConfig.model_validate({"search": {"kind": "index", "corpus": "a.jsonl"}})
    assert isinstance(read.search, IndexSearch) and read.search.top_k == 3
    read = ToolsConfig.model_validate({"search": {"kind": "http", "url": "http://h/retrieve"}})
    assert isinstance(read.search, HttpSearch)
    with pytest.raises(ValidationError, match="'index', 'http'"):
        ToolsConfig.model_validate({"search": {"kind": "bing"}})
    with pytest.raises(ValidationError, match="corpus"):
        ToolsConfig.model_validate({"search": {"kind": "http", "url": "http://h/retrieve", "corpus": "a.jsonl"}})


# Our server.

CORPUS = [Document("lima", "Lima", "The capital of Peru."), Document("peru", "Peru", "A country.\nIn the Andes.")]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from marsrl.rollout.tools.retrieval_server import make_app

    with closing(build_index(CORPUS)) as index, TestClient(make_app(index, top_k=1)) as client:
        yield client


def test_it_answers_search_r1_s_form(client: Any) -> None:
    asked = {"queries": ["peru andes", "capital", "nothing"], "topk": 2, "return_scores": True}
    result = client.post("/retrieve", json=asked).json()["result"]
    assert [[hit["document"]["id"] for hit in each] for each in result] == [["peru", "lima"], ["lima"], []]
    assert result[1][0]["document"] == {"id": "lima", "contents": '"Lima"\nThe capital of Peru.'}
    assert result[0][0]["score"] > result[0][1]["score"] > 0


def test_it_answers_dr_mas_s_form_and_without_scores(client: Any) -> None:
    asked = {"query": "andes", "topk": None, "unknown": 1}
    assert [d["id"] for d in client.post("/retrieve", json=asked).json()["result"][0]] == ["peru"]  # its own top_k, 1
    assert len(client.post("/retrieve", json={"query": "peru", "topk": 0}).json()["result"][0]) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[1]", 422),
        (b"{}", 422),
        (b'{"queries": "peru"}', 422),
        (b'{"queries": [1]}', 422),
        (b'{"queries": ["a"], "query": "b"}', 422),
        (b'{"queries": ["a"], "topk": -1}', 422),
        (b'{"queries": ["a"], "topk": 101}', 422),
        (json.dumps({"queries": ["a"] * 1025}).encode(), 422),
        (b'{"queries": ["' + b"a" * (5 << 20) + b'"]}', 413),
        (b'{"queries": ["\\ud800 \\u0000 \\" OR lima"]}', 200),
        (b'{"queries": []}', 200),
    ],
    ids=range(12),
)
def test_a_request_of_another_form_is_refused_and_the_server_lives(client: Any, body: bytes, status: int) -> None:
    answer = client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text[:300]
    assert client.post("/retrieve", json={"query": "peru"}).status_code == 200


def test_a_body_without_a_length_is_bounded_too(client: Any) -> None:
    chunks = (b"x" * (1 << 20) for _ in range(8))
    assert client.post("/retrieve", content=chunks).status_code == 413


def test_other_paths_and_methods_are_not_there(client: Any) -> None:
    assert client.get("/retrieve").status_code == 405
    assert client.get("/docs").status_code == client.get("/").status_code == 404


def test_the_command_serves_the_client_until_it_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": d.id, "title": d.title, "text": d.text}) + "\n" for d in CORPUS))
    command = [sys.executable, "-m", "marsrl.trainer.cli", "serve-retrieval", "--corpus", str(corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line.startswith(f"2 documents of {corpus} at http://127.0.0.1:"), line + process.stderr.read()
            url = line.split()[-1]
            with closing(Retrieval(options(url))) as tool:
                assert tool.run({"query": "Andes"}) == ["Doc 1(Title: Peru) A country.\nIn the Andes."]
            assert httpx.post(url, json={"queries": ["Andes"], "topk": 1}).json()["result"][0][0]["id"] == "peru"
            process.send_signal(signal.SIGINT)
            assert process.wait(120.0) == 0 and process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--corpus", "none.jsonl"], "none.jsonl"),
        (["--corpus", "bad.jsonl"], "bad.jsonl:1: not JSON"),
        (["--corpus", "good.jsonl", "--port", "70000"], "Invalid value for '--port'"),
        (["--corpus", "good.jsonl", "--top-k", "0"], "Invalid value for '--top-k'"),
        (["--corpus", "good.jsonl", "--host", "256.1.1.1", "--port", "0"], "serve-retrieval: "),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    pytest.importorskip("fastapi")
    from marsrl.trainer.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "good.jsonl").write_text('{"text": "x"}')
    start = time.monotonic()
    assert main(["serve-retrieval", *words]) == 2
    assert said in capsys.readouterr().err and time.monotonic() - start < 60


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from marsrl.trainer.cli import main

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve-retrieval", "--corpus", "x"]) == 2
    assert "pip install fastapi uvicorn (marsrl[retrieval])" in capsys.readouterr().err
