"""The process that takes the main text out of pages, for pages.TextWorkers: what parses a stranger's bytes is not the trainer.

    python -P -m marsrl.rollout.tools.main_text MEMORY_MIB

The first line of its output says that it is ready. A request is a JSON line {"media_type", "charset", "num_bytes", "most_chars",
"seconds"} and then the bytes of the page; its reply a JSON line {"text"} or {"error"}. Past its seconds the kernel ends the
process, in the midst of C code too.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import resource
import signal
import sys

_START_S = 60.0  # importing lxml and the others on a busy machine
# Of what servers say of their texts: names of encodings, and of no other codec of Python's (`zip`, `idna`).
_CHARSETS = re.compile(
    r"utf-?(8|16|16le|16be)|us-ascii|iso-8859-\d+|latin-?1|windows-\d+|cp\d+|koi8-[ru]|gb(k|2312|18030)|big5|euc-(jp|kr)|"
    r"shift_jis"
)


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
        if _CHARSETS.fullmatch(name):
            try:
                return body.decode(name)
            except (UnicodeError, LookupError):
                pass
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


def main(memory_mib: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; this ends when it closes our input
    signal.setitimer(signal.ITIMER_REAL, _START_S)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    asked, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    logging.disable()  # they say on stderr what a page does wrong
    import pypdf  # noqa: F401
    import trafilatura  # noqa: F401

    print(json.dumps({"ready": True}), file=replies, flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for line in asked:
        request = json.loads(line)
        body = asked.read(request["num_bytes"])
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        try:
            text = main_text(body, request["media_type"], request["charset"], request["most_chars"])
            reply = {"text": text.strip()[: request["most_chars"] + 1]}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
