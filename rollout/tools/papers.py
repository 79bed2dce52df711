"""Papers that are searched: in files, and as an agent reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.jsonl import BadLine
from marsrl.rollout.tools.documents import Document, read_corpus, row_name, row_text

_MOST_NUMBER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Paper:
    """One paper. year, citations: None where they are not known."""

    id: str
    title: str
    abstract: str
    year: int | None = None
    citations: int | None = None

    @property
    def document(self) -> Document:
        """The paper as the index holds it and an agent reads it, so that a query may name its year."""
        fields = {"Year": self.year, "Citations": self.citations, "Abstract": self.abstract or None}
        return Document(self.id, self.title, said_of(fields))


def said_of(fields: Mapping[str, object]) -> str:
    """What an agent reads of a paper beside its title: what is known of these, by name."""
    return ". ".join(f"{name}: {value}" for name, value in fields.items() if value is not None)


def read_papers(path: str | Path) -> Iterator[Document]:
    """The papers of a jsonl file, one at a time: {title, abstract}, with id, year and citations where they are known.

    Raises:
        ValueError, OSError: as documents.read_corpus.
    """
    return read_corpus(path, _paper, "{title, abstract, year, citations}")


def _paper(row: Mapping[str, object], line: int) -> Document:
    title = row_text(row, "title", "a paper is {title, abstract, year, citations}")
    if not title.strip():
        raise BadLine("the title is empty")
    abstract = "" if row.get("abstract") is None else row_text(row, "abstract", "or nothing")
    return Paper(row_name(row, line), title, abstract, _number(row, "year"), _number(row, "citations")).document


def _number(row: Mapping[str, object], key: str) -> int | None:
    value = row.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_NUMBER):
        raise BadLine(f"{key!r} is {str(value)[:40]}, expected a whole number of 0 to {_MOST_NUMBER:,}, or nothing")
    return value
