"""The process that takes the main text out of pages, so that what parses a stranger's bytes is not the trainer
(rollout/worker_process.py).

    python -P -m marsrl.rollout.tools.main_text CONNECTION MEMORY_MIB

A request is {"body", "media_type", "charset", "most_chars"}, a reply {"text"} or {"error"}.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import suppress
from typing import Any

from marsrl.rollout.worker_process import Answer, serve


def main_text(body: bytes, media_type: str, charset: str, most_chars: int) -> str:
    """The main text of a page, "" where there is none. A PDF is known by its first bytes, whatever its server calls it.

    most_chars: about; after so many no further page of a PDF is read.

    Raises:
        ValueError: it is no text.
    """
    if body.startswith(b"%PDF-"):
        return _of_pdf(body, most_chars)
    if media_type == "application/pdf":
        raise ValueError("it is called a PDF and is none")
    text = _decoded(body, charset)
    if "\0" in text:
        raise ValueError("it is called a text and is none")
    if media_type not in ("text/html", "application/xhtml+xml"):
        return text
    import trafilatura

    return trafilatura.extract(text, include_comments=False) or trafilatura.html2txt(text)


def _decoded(body: bytes, charset: str) -> str:
    """By its server's word, if that fits; else by its own, or what it looks like."""
    for name in (charset, "utf-8"):
        with suppress(UnicodeError, LookupError):  # LookupError: no encoding of texts has this name
            return body.decode(name)
    from trafilatura.utils import decode_file

    return str(decode_file(body))


def _of_pdf(body: bytes, most_chars: int) -> str:
    from pypdf import PdfReader

    texts: list[str] = []
    for page in PdfReader(io.BytesIO(body)).pages:
        texts.append(page.extract_text())
        if sum(map(len, texts)) > most_chars:
            break
    return "\n\n".join(texts)


def main(line: str, memory_mib: int) -> None:
    def load() -> Answer:
        logging.disable()  # they say on stderr what a page does wrong
        import pypdf  # noqa: F401
        import trafilatura  # noqa: F401

        return answer

    def answer(asked: dict[str, Any]) -> dict[str, object]:
        return {"text": main_text(**asked).strip()[: asked["most_chars"] + 1]}

    serve(line, memory_mib << 20, load)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
