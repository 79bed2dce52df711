"""Documents that are searched: in files, and as an agent reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.jsonl import BadLine, read_rows, well_formed


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
    """What an agent reads of documents, in the form of Search-R1: a part each, the same document once.

    kind: what it is called before its number.
    """
    return [f"{kind} {i}(Title: {d.title}) {d.text}" for i, d in enumerate(dict.fromkeys(documents), start=1)]


def shown(documents: Iterable[Document], kind: str = "Doc") -> str | list[str]:
    """What a tool says of those it found."""
    return rendered(documents, kind) or "No documents match."


def _document(row: Mapping[str, object], line: int) -> Document:
    name, form = row_name(row, line), "a document is {id, title, text} or {id, contents}"
    if "contents" in row and "text" not in row:
        document = from_contents(name, row_text(row, "contents", form))
    else:
        title = row_text(row, "title", form) if "title" in row else ""
        document = Document(name, title, row_text(row, "text", form))
    if not document.text.strip() and not document.title.strip():
        raise BadLine("it has neither a title nor a text")
    return document


def row_name(row: Mapping[str, object], line: int) -> str:
    """The id of a row, or its line."""
    name = row.get("id", line)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise BadLine(f"the id is {type(name).__name__}, expected text or a whole number")
    return str(name)


def row_text(row: Mapping[str, object], key: str, form: str) -> str:
    """The text of this key; BadLine says what form it should have."""
    value = row.get(key)
    if not isinstance(value, str):
        kind = "missing" if value is None else type(value).__name__
        raise BadLine(f"{key!r} is {kind}, expected text ({form})")
    return well_formed(value, key)
