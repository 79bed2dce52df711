"""Index of documents in SQLite's FTS5, ranked by its bm25(), and the tool that searches it.

FTS5 is used instead of bm25s because it is in Python's standard library, its index is one file that a second run opens
immediately, its documents stay on disk, and threads search it in parallel. Its k1 and b are fixed at 1.2 and 0.75.

A model's query is not FTS5 syntax: its words are extracted and quoted, so that none is an operator.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sqlite3
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from marsrl.rollout.tools.documents import Document, read_corpus, shown
from marsrl.rollout.tools.protocol import ToolError, query_arguments

_FORM = "1"  # version of the index format; a file of another version is rebuilt
_WORD = re.compile(r"[^\W_]+")
_MOST_QUERY_CHARS = 10_000  # characters of a query that are searched; the rest is ignored
_MOST_WORDS = 64  # maximum words of a query, the rest is ignored; FTS5 allows 256
_TITLE_WEIGHT = 1.0  # 1 ranks as if title and text were one field, as in Search-R1's corpora
# Lucene's English stop words, which its BM25 omits too: they occur in every document and carry no information.
_STOPS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was "
    "will with"
)
_STOP_WORDS = frozenset(_STOPS.split())


class SearchIndex:
    """Searchable index of documents. Thread-safe. The caller must close it: it may own a temporary file."""

    def __init__(self, file: Path, owned: tempfile.TemporaryDirectory[str] | None = None) -> None:
        """Open an existing index; build_index and open_index create one. owned: a folder that `close` removes."""
        self._address = f"{file.resolve().as_uri()}?mode=ro&immutable=1"
        self._owned = owned
        with closing(self._connect()) as connection:
            [[self.num_documents]] = connection.execute("SELECT count(*) FROM documents")

    def search(self, query: str, top_k: int) -> list[tuple[Document, float]]:
        """Return the best documents with their scores, at most top_k; ties in the order of the corpus.

        A score is BM25's sum over the query's words, above 0. Returns [] for a query without words, or with only unknown ones.
        """
        words = _words(query)
        if not words:
            return []
        with closing(self._connect()) as connection:
            rows = connection.execute(
                "SELECT id, title, text, -bm25(documents, 0.0, ?, 1.0) AS score FROM documents WHERE documents MATCH ? "
                "ORDER BY score DESC, rowid LIMIT ?",
                (_TITLE_WEIGHT, " OR ".join(f'"{word}"' for word in words), top_k),
            ).fetchall()
        return [(Document(id, title, text), score) for id, title, text, score in rows]

    def close(self) -> None:
        """Remove the file if it is temporary; may be called twice."""
        if self._owned is not None:
            self._owned.cleanup()

    def _connect(self) -> sqlite3.Connection:
        # A new connection costs 0.1 ms, so each search opens and closes its own: threads share no connection.
        return sqlite3.connect(self._address, uri=True)


def build_index(documents: Iterable[Document]) -> SearchIndex:
    """Build an index in a temporary file, for corpora that are generated or read once."""
    folder = tempfile.TemporaryDirectory(prefix="marsrl-index-")
    file = Path(folder.name) / "index.sqlite"
    _write(file, documents, "")
    return SearchIndex(file, folder)


def open_index(
    corpus: str | Path,
    file: str | Path | None = None,
    read: Callable[[str | Path], Iterator[Document]] = read_corpus,
) -> SearchIndex:
    """Open the index of a corpus file; ValueError: `read` rejects a line, or `file` is not an index.

    file: file of the index, built if it is missing or belongs to another corpus (path, size, modification time); None: a
    temporary file.
    """
    if file is None:
        return build_index(read(corpus))
    file, stamp = Path(file), _stamp(Path(corpus), read.__name__)
    if not file.exists() or _stamp_of(file) != stamp:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")  # process ids repeat in containers
        try:
            _write(unfinished, read(corpus), stamp)
            os.replace(unfinished, file)  # atomic, even if several processes build it
        finally:
            unfinished.unlink(missing_ok=True)
    return SearchIndex(file)


class CorpusSearch:
    """Tool for search: {"query": text} or {"queries": [texts]} -> the top_k documents of each, in the order of the queries.

    kind: word before a document's number in outputs.
    """

    is_deterministic = True

    def __init__(self, index: SearchIndex, top_k: int, kind: str = "Doc") -> None:
        self._index, self._top_k, self._kind = index, top_k, kind

    def run(self, arguments: Mapping[str, object]) -> str | list[str]:
        queries = query_arguments(arguments)
        if not any(map(_words, queries)):
            raise ToolError("the query has no words")
        found = (document for query in queries for document, _ in self._index.search(query, self._top_k))
        return shown(found, self._kind)

    def close(self) -> None:
        self._index.close()


def _words(query: str) -> list[str]:
    """Return the distinct words of a query in order; stop words are left out, unless there are no other words."""
    words = _WORD.findall(unicodedata.normalize("NFC", query[:_MOST_QUERY_CHARS]).lower())
    telling = [word for word in words if word not in _STOP_WORDS]
    return list(dict.fromkeys(telling or words))[:_MOST_WORDS]


def _write(file: Path, documents: Iterable[Document], stamp: str) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("CREATE TABLE about (form TEXT, stamp TEXT)")
        connection.execute("INSERT INTO about VALUES (?, ?)", (_FORM, stamp))
        connection.execute(
            "CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, title, text, "
            "tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        with connection:
            connection.executemany(
                "INSERT INTO documents VALUES (?, ?, ?)", ((each.id, each.title, each.text) for each in documents)
            )
            connection.execute("INSERT INTO documents (documents) VALUES ('optimize')")


def _stamp(corpus: Path, form: str) -> str:
    state = corpus.stat()
    words = f"{form}/{corpus.resolve()}/{state.st_size}/{state.st_mtime_ns}"
    return hashlib.blake2b(words.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _stamp_of(file: Path) -> str | None:
    """Return the stamp in an index; None for an index of another version. ValueError: the file is not an index, and is not
    overwritten."""
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            [(form, stamp)] = connection.execute("SELECT form, stamp FROM about").fetchall()
    except (sqlite3.Error, ValueError) as error:
        raise ValueError(f"{file} exists but is not a search index ({error}); set another file, or remove it") from None
    return str(stamp) if form == _FORM else None
