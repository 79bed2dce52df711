"""Our retrieval server answers its own client, Search-R1 and Dr. MAS, and whatever else is sent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from marsrl.rollout.tools.config import HttpSearch
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.tools.search import build_index
from marsrl.rollout.tools.servers import Retrieval
from marsrl.trainer.commands.cli import main

pytest.importorskip("fastapi")
CORPUS = [Document("lima", "Lima", "The capital of Peru."), Document("peru", "Peru", "A country.\nIn the Andes.")]


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
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
        (b"[" * 100_000, 422),
        (b'{"queries": ["a"], "query": "b"}', 422),
        (b'{"queries": ["a"], "topk": -1}', 422),
        (json.dumps({"queries": ["a"] * 1025}).encode(), 422),
        (b'{"queries": ["' + b"a" * (5 << 20) + b'"]}', 413),
        (b'{"queries": ["\\ud800 \\u0000 \\" OR lima"]}', 200),
    ],
    ids=range(7),
)
def test_a_request_of_another_form_is_refused_and_the_server_lives(client: Any, body: bytes, status: int) -> None:
    answer = client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status and len(answer.text) < 1000, answer.text[:300]
    assert client.post("/retrieve", json={"query": "peru"}).status_code == 200


def test_a_body_without_a_length_is_bounded(client: Any) -> None:
    assert client.post("/retrieve", content=(b"x" * (1 << 20) for _ in range(8))).status_code == 413


def test_the_command_serves_the_client_until_it_is_stopped(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"id": d.id, "title": d.title, "text": d.text}) + "\n" for d in CORPUS))
    words = ["serve-retrieval", "--corpus", str(corpus), "--port", "0"]
    command = [sys.executable, "-m", "marsrl.trainer.commands.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line.startswith(f"2 documents of {corpus} at http://127.0.0.1:"), line + process.stderr.read()
            url = line.split()[-1]
            with closing(Retrieval(HttpSearch(kind="http", url=url, request_timeout_s=60.0))) as tool:
                assert tool.run({"query": "Andes"}) == ["Doc 1(Title: Peru) A country.\nIn the Andes."]
            answer = httpx.post(url, json={"queries": ["Andes"], "topk": 1}, timeout=60.0)
            assert answer.json()["result"][0][0]["id"] == "peru"
            process.send_signal(signal.SIGINT)
            assert process.wait(120.0) == 0 and process.stderr.read() == ""
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "none.jsonl"),
        (["bad"], "bad.jsonl:1: not JSON"),
        (["good", "--port", "70000"], "Invalid value for '--port'"),
        (["good", "--host", "256.1.1.1", "--port", "0"], "serve-retrieval: "),
    ],
)
def test_what_cannot_be_served_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "good.jsonl").write_text('{"text": "x"}')
    assert (
        main(["serve-retrieval", "--corpus", f"{tmp_path}/{words[0]}.jsonl", *words[1:]]) == 2
        and said in capsys.readouterr().err
    )
