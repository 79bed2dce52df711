"""Lines of data.demonstrations as what a learner imitates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from marsrl.rollout.agents.prompts import prompt_set
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.types import Message
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer
from marsrl.trainer.supervised.demonstrations import Demonstrations, read_demonstrations

CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "No."},
]


@pytest.fixture
def renderer(tmp_path: Path) -> ChatRenderer:
    (tmp_path / "model").mkdir()
    write_byte_tokenizer(tmp_path / "model")
    return ChatRenderer(tmp_path / "model")


def config_of(*words: str) -> RunConfig:
    return read_config(None, ["task=math", "data.train=problems.jsonl", *words])[0]


def read(
    folder: Path, renderer: ChatRenderer, *lines: object, longest: int = 10_000, config: RunConfig | None = None
) -> Demonstrations:
    file = folder / "demos.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    config = config or config_of()
    names = list(config.trained_policies)
    return read_demonstrations(file, config, dict.fromkeys(names, renderer), dict.fromkeys(names, longest))


def test_the_prompt_is_what_the_agent_would_be_asked_and_the_rest_is_imitated(
    tmp_path: Path, renderer: ChatRenderer
) -> None:
    fields = {"problem": "2 + 2", "solution": "It is 5."}
    found = read(
        tmp_path,
        renderer,
        {"agent": "verifier1", "prompt": fields, "completion": "wrong"},
        {"messages": [*CHAT, {"role": "assistant", "content": "4"}]},
        {"prompt": "<|im_start|>2 + 2 =", "completion": " 4"},
    )
    asked = prompt_set("math").fill(Role.VERIFIER, **fields)
    chat = [Message(each["role"], each["content"]) for each in CHAT]  # type: ignore[arg-type]
    expected = [
        ("verifier1", renderer.render(asked)[0], "wrong"),
        ("any", renderer.render(chat)[0], "4"),
        ("any", renderer.encode_trusted("<|im_start|>2 + 2 ="), " 4"),
    ]
    for line, (writer, prompt, completion) in zip(found.lines, expected, strict=True):
        sequence = line.sequence
        assert (line.policy, found.writers[sequence.agent]) == ("main", writer)
        assert np.array_equal(sequence.prompt_ids, prompt) and sequence.is_sampled.all()
        assert renderer.decode(sequence.token_ids) == completion and sequence.token_ids[-1] == renderer.eos_id
        assert sequence.advantage == 1 and sequence.token_advantages is None


def test_the_options_of_the_agents_template_hold(tmp_path: Path, renderer: ChatRenderer) -> None:
    """A chat of an agent is rendered as the agent's are; its policy is the agent's."""
    words = "policies={a: {model: /a}, b: {model: /b}}", "agents={solver: {policy: a}, verifier1: {policy: b}}"
    others = "agents={corrector1: {policy: a}, verifier2: {policy: b}, corrector2: {policy: a}}"
    config = config_of(*words, others)
    said = [*CHAT, {"role": "assistant", "content": "4"}]
    found = read(
        tmp_path, renderer, *({"agent": name, "messages": said} for name in ("verifier1", "solver")), config=config
    )
    assert [line.policy for line in found.lines] == ["b", "a"]
    with pytest.raises(ValueError, match=r"demos.jsonl:1: it names no agent, and there are several policies .* a, b"):
        read(tmp_path, renderer, {"messages": said}, config=config)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"', "not JSON"),
        ({"prompt": "a"}, "completion: expected a text, found nothing"),
        ({"completion": "a"}, "expected messages, or prompt and completion"),
        ({"prompt": "", "completion": "a"}, "its prompt has no token"),
        ({"agent": "solver7", "prompt": "a", "completion": "b"}, "agent is 'solver7'; the team has solver, verifier1"),
        ({"prompt": {"problem": "a"}, "completion": "b"}, "prompt has fields, and no agent is named"),
        (
            {"agent": "verifier1", "prompt": {"problem": "a"}, "completion": "b"},
            "prompt has the fields problem; verifier1 needs problem, solution",
        ),
        ({"messages": CHAT}, "messages: expected the completion, an assistant's turn, at the end"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}, "expected a list of {role, content}"),
        ({"prompt": "a", "completion": "\ud800"}, "completion has a lone surrogate"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(
    tmp_path: Path, renderer: ChatRenderer, line: object, problem: str
) -> None:
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(ValueError) as raised:
        read(tmp_path, renderer, good, line)
    assert str(raised.value).startswith(f"{tmp_path / 'demos.jsonl'}:2: ") and problem in str(raised.value)
    found = read(tmp_path, renderer, good, line, config=config_of("data.on_bad_line=skip"))
    assert len(found.lines) == 1 and "1 lines are no demonstrations" in found.notes[0]


def test_a_demonstration_without_room_is_left_out_and_counted(tmp_path: Path, renderer: ChatRenderer) -> None:
    lines = [{"prompt": "a", "completion": "b" * 7}, {"prompt": "a", "completion": "b" * 8}]
    found = read(tmp_path, renderer, *lines, longest=9)  # the prompt, seven letters and the end
    assert [line.sequence.num_tokens for line in found.lines] == [9]
    assert found.notes[0].startswith("1 demonstrations are longer") and "demos.jsonl:2 with 10 tokens" in found.notes[0]
    with pytest.raises(ValueError, match="has none to train on: 2 demonstrations are longer"):
        read(tmp_path, renderer, *lines, longest=8)
