"""Documents and papers that are searched: in files, and as an agent reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.jsonl import BadLine, read_rows, well_formed

_MOST_NUMBER = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Document:
    """One passage of a corpus."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text in one, as Search-R1's corpora and servers have them."""
        return f'"{self.title}"\n{self.text}'


ReadRow = Callable[[Mapping[str, object], int], Document]
"""A row of a corpus and its line -> the document."""


def from_contents(id: str, contents: str) -> Document:
    """A document of Search-R1's form: the title in quotes on a line of its own, then the text."""
    title, _, text = contents.strip().partition("\n")
    return Document(id, title.strip().strip('"'), text)


def read_corpus(
    path: str | Path, read_row: ReadRow | None = None, form: str = "{id, title, text}"
) -> Iterator[Document]:
    """The documents of a jsonl file, one at a time: {id, title, text}, or {id, contents} as Search-R1 has them.

    read_row, form: of lines of another form, and what to call it; it raises BadLine.

    Raises:
        ValueError: a line is no document (file:line: reason), or there is none.
        OSError: the file cannot be read.
    """
    file = Path(path)
    num_read = 0
    for line, row in read_rows(file):
        try:
            if isinstance(row, BadLine):
                raise row
            yield (read_row or _document)(row, line)
        except BadLine as reason:
            raise ValueError(f"{file}:{line}: {reason}") from reason
        num_read += 1
    if not num_read:
        raise ValueError(f"{file} holds no document; expected lines of {form}")


def rendered(documents: Iterable[Document], kind: str = "Doc") -> list[str]:
    """Documents as an agent reads them, in the form of Search-R1: a part each, the same document once.

    kind: what it is called before its number.
    """
    return [f"{kind} {i}(Title: {d.title}) {d.text}" for i, d in enumerate(dict.fromkeys(documents), start=1)]


def shown(documents: Iterable[Document], kind: str = "Doc") -> str | list[str]:
    """A tool's output for the documents found."""
    return rendered(documents, kind) or "No documents match."


def _document(row: Mapping[str, object], line: int) -> Document:
    name, form = _row_name(row, line), "a document is {id, title, text} or {id, contents}"
    if "contents" in row and "text" not in row:
        document = from_contents(name, _row_text(row, "contents", form))
    else:
        title = _row_text(row, "title", form) if "title" in row else ""
        document = Document(name, title, _row_text(row, "text", form))
    if not document.text.strip() and not document.title.strip():
        raise BadLine("it has neither a title nor a text")
    return document


def _row_name(row: Mapping[str, object], line: int) -> str:
    """The id of a row, or its line."""
    name = row.get("id", line)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise BadLine(f"the id is {type(name).__name__}, expected text or a whole number")
    return str(name)


def _row_text(row: Mapping[str, object], key: str, form: str) -> str:
    """The text of this key; BadLine says what form it should have."""
    value = row.get(key)
    if not isinstance(value, str):
        kind = "missing" if value is None else type(value).__name__
        raise BadLine(f"{key!r} is {kind}, expected text ({form})")
    return well_formed(value, key)


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
    """Text of a paper beside its title: the fields that are known, by name."""
    return ". ".join(f"{name}: {value}" for name, value in fields.items() if value is not None)


def read_papers(path: str | Path) -> Iterator[Document]:
    """The papers of a jsonl file, one at a time: {title, abstract}, with id, year and citations where they are known.

    Raises:
        ValueError, OSError: as read_corpus.
    """
    return read_corpus(path, _paper, "{title, abstract, year, citations}")


def _paper(row: Mapping[str, object], line: int) -> Document:
    title = _row_text(row, "title", "a paper is {title, abstract, year, citations}")
    if not title.strip():
        raise BadLine("the title is empty")
    abstract = "" if row.get("abstract") is None else _row_text(row, "abstract", "or nothing")
    return Paper(_row_name(row, line), title, abstract, _number(row, "year"), _number(row, "citations")).document


def _number(row: Mapping[str, object], key: str) -> int | None:
    value = row.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_NUMBER):
        raise BadLine(f"{key!r} is {str(value)[:40]}, expected a whole number of 0 to {_MOST_NUMBER:,}, or nothing")
    return value
