"""A program that records the sessions that it plays. A file that tests/chaos.py writes names how it misbehaves."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

PLAYED = "MARSRL_PLAYED"  # environment variable with the record's path; the file that names the mischief lies beside it
MOST_CALLS = 3


def run(problem: SimpleNamespace, client: Any) -> dict[str, float]:
    book = Path(os.environ[PLAYED])
    _note(book, f"{client.session} begins")
    turns = [{"role": "user", "content": problem.question}]
    first = client.chat("solver", turns, max_tokens=16)
    time.sleep(zlib.crc32(client.session.encode()) % 300 / 1000)  # sessions end one by one, not all at once
    report = client.chat("verifier", [f"{problem.question} {first.text}"], max_tokens=16)
    turns += [first.message, {"role": "user", "content": report.text}]
    told = book.with_suffix(".mischief")
    mischief = told.read_text() if told.exists() and client.session.endswith(".0") else ""
    if mischief == "disconnect":  # in the middle of the last call, whose answer is never read
        line = http.client.HTTPConnection(urlsplit(client.base_url).netloc)
        body = json.dumps({"model": "solver", "messages": turns, "max_tokens": 16, "stream": True})
        line.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {client.api_key}"})
        line.getresponse()  # reads only the headers
        line.close()
    else:
        client.chat("solver", turns, max_tokens=16)
    if mischief == "call-a-thousand-times":
        for _ in range(1000):
            try:
                client.chat("solver", turns)
            except RuntimeError as error:
                assert f"external.max_calls = {MOST_CALLS}" in str(error)
            else:
                raise AssertionError("a call beyond external.max_calls was answered")
    if mischief == "send-100-mib":
        url, headers = f"{client.base_url}/chat/completions", {"authorization": f"Bearer {client.api_key}"}
        try:
            urllib.request.urlopen(urllib.request.Request(url, bytes(100 << 20), headers))
        except urllib.error.HTTPError as error:
            assert error.code == 413
        except OSError:
            pass  # the connection was cut before everything was sent
        else:
            raise AssertionError("a request beyond external.max_body_mib was answered")
    _note(book, f"{client.session} ends {mischief}")
    return {"solver": zlib.crc32(first.text.encode()) % 2, "verifier": zlib.crc32(report.text.encode()) % 2}


def _note(book: Path, line: str) -> None:
    # Unbuffered appends: lines stay complete, whatever else writes or is killed.
    with open(book, "ab", buffering=0) as file:
        file.write(f"{line}\n".encode())
