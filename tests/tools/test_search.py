"""The index finds matching documents, whatever a query contains."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from marsrl.rollout.tools.documents import Document, read_corpus, read_papers, shown
from marsrl.rollout.tools.protocol import ToolError
from marsrl.rollout.tools.search import CorpusSearch, SearchIndex, build_index, open_index

DOCUMENTS = [
    Document("lima", "Lima", "Lima is the capital of Peru."),
    Document("peru", "Peru", "Peru borders Chile, and its singers are sung to."),
    Document("cafe", "Café", "A café in naïve नमस्ते 東京."),
    Document("the", "The Who", "The Who are a band of London"),
    Document("nul", "Quote \" ' title:", "before\x00after NEAR text"),
]


@pytest.fixture(scope="module")
def index() -> Iterator[SearchIndex]:
    index = build_index(DOCUMENTS)
    yield index
    index.close()


def found(index: SearchIndex, query: str, top_k: int = 3) -> list[str]:
    return [document.id for document, _ in index.search(query, top_k)]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("What is the capital of Peru?", ["lima", "peru"]),  # a match of two words ranks above a match of one
        ("lima borders chile", ["peru", "lima"]),  # the rank decides, not the order of the corpus
        ("singer border", ["peru"]),  # stems
        ("CAFE", ["cafe"]),
        ("cafe\u0301", ["cafe"]),
        ("नमस्ते", ["cafe"]),
        ("the who", ["the"]),  # "the" is left out because "who" remains
        ("with", []),  # if a query is only a stop word, that word is searched
        ("Peru" * 10_000, []),
    ],
)
def test_what_fits_best_comes_first(index: SearchIndex, query: str, ids: list[str]) -> None:
    assert found(index, query) == ids


@pytest.mark.parametrize(
    "query",
    [
        'lima" OR "peru',
        "{title text} : lima",
        "\x00lima",
        "lima \ud800 \udfff",
        "'; DROP TABLE documents; -- lima",
        "lima " * 200_000,
        "lima " + " ".join(f"word{i}" for i in range(100_000)),
    ],
    ids=range(7),
)
def test_nothing_in_a_query_is_an_operator(index: SearchIndex, query: str) -> None:
    assert "lima" in found(index, query)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "expected one argument, 'query', found none"),
        ({"query": "lima", "top_k": 1000}, "found 'query', 'top_k'"),
        ({"queries": ["lima", 7]}, r"'queries' is \['lima', 7\], expected a list of texts"),
        ({"queries": ["lima", " "]}, "one of the queries has no words"),
        ({"queries": ["lima"] * 9}, "'queries' has 9 texts, expected at most 8"),
        ({"queries": [["x" * 10_000_000]]}, r"'queries' is \[\['x{70,80}, expected a list of texts"),
        *(({"query": query}, "the query has no words") for query in ("", "\x00", '"***', "\ud800", "!" * 1_000_000)),
    ],
    ids=range(11),
)
def test_the_tool_says_what_is_wrong_with_its_arguments(
    index: SearchIndex, arguments: dict[str, object], expected: str
) -> None:
    with pytest.raises(ToolError, match=expected):
        CorpusSearch(index, 3).run(arguments)


def test_documents_are_shown_as_search_r1_shows_them(index: SearchIndex) -> None:
    assert CorpusSearch(index, 2).run({"query": "capital of Peru"}) == [
        "Doc 1(Title: Lima) Lima is the capital of Peru.",
        "Doc 2(Title: Peru) Peru borders Chile, and its singers are sung to.",
    ]
    assert CorpusSearch(index, 3).run({"query": "atlantis"}) == "No documents match." == shown([])


def test_several_queries_find_each_document_once_in_their_order(index: SearchIndex) -> None:
    tool = CorpusSearch(index, 2)
    asked = {"queries": ["band", "capital of Peru", "atlantis", "chile", "band"]}
    assert [part[:19] for part in tool.run(asked)] == [
        "Doc 1(Title: The Wh",
        "Doc 2(Title: Lima) ",
        "Doc 3(Title: Peru) ",
    ]
    assert tool.run({"queries": ["atlantis", "***"]}) == "No documents match."
    assert tool.run({"queries": ["capital of Peru"]}) == tool.run({"query": "capital of Peru"})


def test_threads_search_side_by_side(index: SearchIndex) -> None:
    with ThreadPoolExecutor(8) as threads:
        hits = list(threads.map(lambda _: index.search("capital of Peru", 2), range(400)))
    assert all([document for document, _ in each] == DOCUMENTS[:2] for each in hits)


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def test_a_corpus_is_read_in_both_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path / "corpus.jsonl",
        {"id": "a", "title": "Lima", "text": "A city.", "url": "left out"},
        {"id": 7, "contents": '"Peru"\nA country.\nOf many.'},
        b"",
        {"text": "Without a title."},
    )
    assert list(read_corpus(path)) == [
        Document("a", "Lima", "A city."),
        Document("7", "Peru", "A country.\nOf many."),
        Document("4", "", "Without a title."),
    ]
    assert list(read_corpus(path))[1].contents == '"Peru"\nA country.\nOf many.'


def test_papers_are_shown_with_what_is_known_of_them(tmp_path: Path) -> None:
    path = write(
        tmp_path / "papers.jsonl",
        {"id": "a", "title": "Sparse maps", "abstract": "We draw.", "year": 1997, "citations": 12, "venue": "left out"},
        {"title": "Lost maps", "year": None, "citations": 0},
    )
    with closing(open_index(path, tmp_path / "index.sqlite", read_papers)) as index:
        tool = CorpusSearch(index, 5, "Paper")
        assert tool.run({"queries": ["sparse", "maps"]}) == [
            "Paper 1(Title: Sparse maps) Year: 1997. Citations: 12. Abstract: We draw.",
            "Paper 2(Title: Lost maps) Citations: 0",
        ]
        assert tool.run({"query": "of 1997"}) == [tool.run({"query": "sparse"})[0]]
    with pytest.raises(ValueError, match="papers.jsonl:1: text: Field required"):
        open_index(path, tmp_path / "index.sqlite")  # the saved index is of papers, so it is rebuilt


@pytest.mark.parametrize(
    ("read", "line", "reason"),
    [
        (read_corpus, b"{", "not JSON"),
        (read_corpus, b"\xff", "not UTF-8 at byte 0"),
        (read_corpus, {"title": "x"}, r"text: Field required \(expected {id, title, text} or {id, contents}\)"),
        (read_corpus, {"id": True, "text": "x"}, "id.str: Input should be a valid string"),
        (read_corpus, {"title": " ", "text": "\n"}, "found neither a title nor a text"),
        (read_corpus, b'{"text": "\\ud800"}', r"text: .*text has a lone surrogate \(\\ud800\)"),
        (read_papers, {"abstract": "x"}, r"title: Field required \(expected {title, abstract, year, citations}\)"),
        (read_papers, {"title": "x", "year": True}, "year: Input should be a valid integer"),
    ],
)
def test_a_line_that_is_no_document_or_paper_is_named(tmp_path: Path, read: Any, line: object, reason: str) -> None:
    path = write(tmp_path / "corpus.jsonl", {"title": "fine", "text": "fine"}, line)
    with pytest.raises(ValueError, match=rf"corpus.jsonl:2: {reason}"):
        open_index(path, read=read)


def test_a_kept_index_is_rebuilt_only_if_the_corpus_changes(tmp_path: Path) -> None:
    corpus, file = write(tmp_path / "corpus.jsonl", {"text": "one"}), tmp_path / "deep" / "index.sqlite"
    open_index(corpus, file).close()
    made = file.stat().st_ino
    index = open_index(corpus, file)
    assert file.stat().st_ino == made and index.num_documents == 1
    write(corpus, {"text": "one"}, {"text": "two"})
    assert found(open_index(corpus, file), "two") == ["2"] and file.stat().st_ino != made
    index.close()
    assert os.listdir(file.parent) == ["index.sqlite"]  # the index stays, and nothing else


def test_a_file_that_is_no_index_is_not_written_over(tmp_path: Path) -> None:
    corpus, file = write(tmp_path / "corpus.jsonl", {"text": "one"}), tmp_path / "precious.txt"
    file.write_text("precious " * 1000)
    with pytest.raises(ValueError, match=r"precious.txt exists but is not a search index"):
        open_index(corpus, file)
    assert file.read_text() == "precious " * 1000
