"""Programs play: what they ask becomes samples, token by token what a team of ours would have."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import playing, program, rollout_config, turns_of

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import IntArray

TWO = """
def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    first = client.chat("solver", turns, max_tokens=30)
    shown = f"{problem.question} \\n {first.text}"
    report = client.chat("verifier", [{"role": "system", "content": "grade"}, shown], max_tokens=20)
    again = client.chat("solver", [*turns, first.message, f"{report.text} fix"], max_tokens=30)
    return {"solver": len(again.text) / 100, "verifier": len(report.text) / 100}
"""


def test_a_program_with_two_agents_is_played_to_groups_by_agent(model: Path, tmp_path: Path) -> None:
    with playing(model, rollout_config(), {"function": program(tmp_path, TWO)}) as played:
        batch = played.batch()
        again = played.batch()
    groups = {(group.rollout_id, group.agent): group.samples for group in batch.groups}
    assert sorted(groups) == [(f"00000{i}", agent) for i in (1, 2) for agent in ("solver", "verifier")]
    assert len(again.groups) == 4 and {group.rollout_id for group in again.groups} == {"000003", "000004"}
    for (rollout_id, agent), samples in groups.items():
        assert [sample.uid for sample in samples] == [f"{rollout_id}.{i}/{agent}:0" for i in (0, 1)]
        for sample in samples:
            runs = turns_of(sample)
            assert len(runs) == (3 if agent == "solver" else 1)
            assert max(runs[::2]) <= (30 if agent == "solver" else 20)
            assert sample.turn == (agent == "solver")
            assert (sample.rollout_logprobs[sample.is_sampled] < 0).all()
            assert not sample.rollout_logprobs[~sample.is_sampled].any()
            assert sample.reward.value > 0
            assert sample.reward.note == ("calls 1, 3 of 3" if agent == "solver" else "call 2 of 3")
    assert batch.metrics["rollout/episodes"] == 4 and batch.metrics["team/samples"] == 8
    assert batch.metrics["team/calls"] == 12 and batch.metrics["rollout/foreign_tokens"] > 0


ONE = """
def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    for _ in range(2):
        said = client.chat("solver", turns, max_tokens=40)
        turns += [said.message, {"role": "user", "content": "fix"}]
    return RETURNED
"""


@pytest.mark.parametrize(
    ("returned", "solver_rewards"),
    [
        ("None", {0.0}),
        ("'no'", {0.0}),
        ("problem.answer", {1.0}),
        ("{'solver': float('nan')}", {None}),
    ],
)
def test_a_reward_is_the_program_s_or_the_task_s_of_its_answer(
    model: Path, tmp_path: Path, returned: str, solver_rewards: set[float | None]
) -> None:
    """Random weights never say `Answer:`, so that their own answers are wrong."""
    external = {"function": program(tmp_path, ONE.replace("RETURNED", returned))}
    with playing(model, rollout_config(prompts_per_step=4), external) as played:
        samples = played.samples()
    values = [sample.reward.value for sample in samples.values()]
    assert len(samples) == 8 and {None if value != value else value for value in values} == solver_rewards


@pytest.mark.parametrize(
    "options", [{"overlap": 1}, {"overlap": 2, "finish_share": 0.5}, {"finish_share": 0.5}], ids=str
)
def test_sessions_span_stages_and_versions(model: Path, tmp_path: Path, options: dict[str, float]) -> None:
    text = """
    import time

    def run(problem, client):
        turns = [{"role": "user", "content": problem.question}]
        for _ in range(3):
            said = client.chat("solver", turns, max_tokens=20)
            turns += [said.message, {"role": "user", "content": "fix"}]
            time.sleep(0.3 * client.session.endswith(".1"))
        return 1.0
    """
    config = rollout_config(**options)
    trained = Counter[str]()
    with playing(model, config, {"function": program(tmp_path, text)}) as played:
        while len(trained) < 8:
            batch = played.batch()
            trained.update(sample.uid for group in batch.groups for sample in group.samples)
            assert all(len(group.samples) == 2 for group in batch.groups)
            assert config.overlap or played.stages.player.is_resting  # engines get new weights now
            played.stages.rest()
    assert set(trained.values()) == {1}


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
