"""Process that extracts the main text of pages, so that the trainer does not parse untrusted bytes (rollout/worker_process.py).

A request is {"body", "media_type", "charset", "most_chars"}, a reply {"text"} or {"error"}.
"""

from __future__ import annotations

import io
import logging
from contextlib import suppress
from typing import Any

from marsrl.rollout.worker_process import Answer


def main_text(body: bytes, media_type: str, charset: str, most_chars: int) -> str:
    """Return the main text of a page, "" if it has none; ValueError: the body is not text.

    PDFs are recognised by their first bytes, whatever the media type. Their pages are read until most_chars is reached.
    """
    if body.startswith(b"%PDF-"):
        return _of_pdf(body, most_chars)
    if media_type == "application/pdf":
        raise ValueError("the page is declared as a PDF, but is not one")
    text = _decoded(body, charset)
    if "\0" in text:
        raise ValueError("the page is declared as text, but is binary")
    if media_type not in ("text/html", "application/xhtml+xml"):
        return text
    import trafilatura

    return trafilatura.extract(text, include_comments=False) or trafilatura.html2txt(text)


def _decoded(body: bytes, charset: str) -> str:
    """Decode a text by the server's charset, else as UTF-8, else by a charset that the page declares or trafilatura guesses."""
    for name in (charset, "utf-8"):
        with suppress(UnicodeError, LookupError):  # LookupError: no text encoding has this name
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


def load_parsers() -> Answer:
    """Return the worker's answering function."""
    logging.disable()  # the parsers report a page's faults on stderr
    import pypdf  # noqa: F401
    import trafilatura  # noqa: F401

    def answer(asked: dict[str, Any]) -> dict[str, object]:
        return {"text": main_text(**asked).strip()[: asked["most_chars"] + 1]}

    return answer
