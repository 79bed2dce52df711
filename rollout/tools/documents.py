"""Documents and papers to search: reading them from files, and formatting them for agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from marsrl.rollout.config import problems_of
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
        """Title and text in one string, as in Search-R1's corpora and servers."""
        return f'"{self.title}"\n{self.text}'


class _Row(BaseModel):
    """A line of a file; other keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)
    id: str | int

    @field_validator("*")
    @classmethod
    def _has_utf8(cls, value: object, info: ValidationInfo) -> object:
        return well_formed(value, str(info.field_name)) if isinstance(value, str) else value


class Paper(_Row):
    """One paper. year, citations: None if unknown."""

    title: str = Field(pattern=r"\S")
    abstract: str | None = None
    year: int | None = Field(None, ge=0, le=_MOST_NUMBER)
    citations: int | None = Field(None, ge=0, le=_MOST_NUMBER)

    @property
    def document(self) -> Document:
        """Convert the paper to a document for the index and for agents, with the year, so that queries can match it."""
        fields = {"Year": self.year, "Citations": self.citations, "Abstract": self.abstract or None}
        return Document(str(self.id), self.title, said_of(fields))


class _Text(_Row):
    text: str
    title: str = ""


class _Contents(_Row):
    contents: str


def from_contents(id: str, contents: str) -> Document:
    """Read a document in Search-R1's form: the title in quotes on the first line, then the text."""
    title, _, text = contents.strip().partition("\n")
    return Document(id, title.strip().strip('"'), text)


def read_corpus(path: str | Path) -> Iterator[Document]:
    """Yield the documents of a jsonl file one at a time: {id, title, text}, or {id, contents} as in Search-R1.

    Raises ValueError: a line is not a document (file:line: reason), or the file has none.
    """
    return _read(path, _document, "{id, title, text} or {id, contents}")


def read_papers(path: str | Path) -> Iterator[Document]:
    """Yield the papers of a jsonl file one at a time: {title, abstract}, and optionally id, year and citations. Errors as in
    read_corpus."""
    return _read(path, lambda row: Paper.model_validate(row).document, "{title, abstract, year, citations}")


def _read(path: str | Path, read_row: Callable[[Mapping[str, object]], Document], form: str) -> Iterator[Document]:
    file = Path(path)
    num_read = 0
    for line, row in read_rows(file):
        try:
            if isinstance(row, BadLine):
                raise row
            yield read_row({"id": line, **row})
        except ValidationError as error:
            raise ValueError(f"{file}:{line}: {problems_of(error)} (expected {form})") from error
        except BadLine as reason:
            raise ValueError(f"{file}:{line}: {reason}") from reason
        num_read += 1
    if not num_read:
        raise ValueError(f"{file} has no documents; expected lines of {form}")


def _document(row: Mapping[str, object]) -> Document:
    if "contents" in row and "text" not in row:
        both = _Contents.model_validate(row)
        document = from_contents(str(both.id), both.contents)
    else:
        found = _Text.model_validate(row)
        document = Document(str(found.id), found.title, found.text)
    if not document.text.strip() and not document.title.strip():
        raise BadLine("found neither a title nor a text; expected at least one")
    return document


def rendered(documents: Iterable[Document], kind: str = "Doc") -> list[str]:
    """Format documents for agents as Search-R1 does: one part each, duplicates once.

    kind: word before a document's number.
    """
    return [f"{kind} {i}(Title: {d.title}) {d.text}" for i, d in enumerate(dict.fromkeys(documents), start=1)]


def shown(documents: Iterable[Document], kind: str = "Doc") -> str | list[str]:
    """Return the output that an agent gets for these documents."""
    return rendered(documents, kind) or "No documents match."


def said_of(fields: Mapping[str, object]) -> str:
    """Return a paper's text without its title: the known fields, by name."""
    return ". ".join(f"{name}: {value}" for name, value in fields.items() if value is not None)
