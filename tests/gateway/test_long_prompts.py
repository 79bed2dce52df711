"""A prompt that takes long to be tokenised keeps nobody waiting but its own session."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from programs import playing, program, rollout_config

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import IntArray

LONG = 5_000_000
PATIENCE_S = 120.0

PROGRAM = """
import http.client, json, pathlib, threading, time, urllib.parse

FOLDER = pathlib.Path({folder!r})

def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)

def run(problem, client):
    if client.session.endswith(".1"):
        wait_for("sent")
        client.chat("solver", ["hello"])
        (FOLDER / "answered").touch()
        return 1.0
    refused = []

    def ask():
        try:
            client.chat("solver", ["a 1 " * {words}])
        except RuntimeError as error:
            refused.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for("long")
    line = http.client.HTTPConnection(urllib.parse.urlsplit(client.base_url).netloc)
    body = json.dumps({{"model": "solver", "messages": [{{"role": "user", "content": "own"}}]}})
    line.request("POST", "/v1/chat/completions", body, {{"authorization": "Bearer " + client.api_key}})
    (FOLDER / "sent").touch()
    assert line.getresponse().read()
    thread.join()
    assert "max_input_tokens is 1500" in refused[0]
    return 1.0
"""


class Noting(ChatRenderer):
    """Notes what it begins and ends; a long prompt waits for the other session's answer."""

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__(model)
        self.folder, self.notes = folder, list[str]()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **options: bool | str
    ) -> tuple[IntArray, str]:
        content = messages[0]["content"]
        name = "long" if len(content) >= LONG else content
        self.notes.append(f"begin {name}")
        if name == "long":
            (self.folder / "long").touch()
            end = time.monotonic() + PATIENCE_S
            while not (self.folder / "answered").exists() and time.monotonic() < end:
                time.sleep(0.01)
        rendered = super().render_chat(messages, tools, **options)
        self.notes.append(f"end {name}")
        return rendered


def test_a_short_call_is_answered_while_a_long_prompt_is_tokenised(model: Path, tmp_path: Path) -> None:
    text = PROGRAM.format(folder=str(tmp_path), words=LONG // 4)
    renderer = Noting(model, tmp_path)
    config = rollout_config(prompts_per_step=1, max_response_tokens=60)
    with playing(model, config, {"function": program(tmp_path, text)}, renderer=renderer) as played:
        batch = played.batch()
    assert batch.metrics["rollout/failed_episodes"] == 0
    assert renderer.notes == ["begin long", "begin hello", "end hello", "end long", "begin own", "end own"]
