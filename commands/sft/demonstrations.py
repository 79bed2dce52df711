"""Reader of data.demonstrations, a user's file of sequences to imitate (docs/teachers.md).

`agent` selects the policy and the chat template's options. The fields of a `prompt` object fill the agent's prompt
(docs/prompts.md). The last of `messages` is the completion; the chat template renders the earlier ones, with their thoughts and
any `tools`, as the prompt. A text prompt is tokenised without a template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marsrl.rollout.agents.parsers import THINK_CLOSE, THINK_OPEN
from marsrl.rollout.agents.prompts import PromptSet, prompt_set, require_words
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import PLACEHOLDERS
from marsrl.rollout.gateway.chat_api import chat_message
from marsrl.rollout.gateway.chats import Refused
from marsrl.rollout.jsonl import BadLine, read_rows, well_formed
from marsrl.rollout.orchestrations.registry import find_orchestration
from marsrl.rollout.tasks.registry import prompts_of
from marsrl.rollout.types import IntArray
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.supervised.imitation import DemonstrationTokens

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names under which data sets store reasoning


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Sequence of one line, and the policy to train on it."""

    policy: str
    sequence: TrainSequence


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Contents of a file of demonstrations.

    writers: agents in order, and "any" for lines without an agent; TrainSequence.agent is an index into this list.
    notes: messages about skipped lines.
    sum: digest of the file's contents.
    """

    lines: tuple[Demonstration, ...]
    writers: tuple[str, ...]
    notes: tuple[str, ...]
    sum: str


def read_demonstrations(
    path: Path, config: RunConfig, renderers: Mapping[str, ChatRenderer], longest: Mapping[str, int]
) -> Demonstrations:
    """Read the demonstrations of a jsonl file.

    renderers, longest: chat renderer and longest sequence (tokens), by trained policy.

    Raises ValueError if a line is invalid (unless data.on_bad_line=skip), all are too long, or the file has none.
    """
    reader, lines = _Reader(config, renderers), list[Demonstration]()
    bad, too_long = list[str](), list[str]()
    digest = hashlib.blake2b(digest_size=8)
    for number, row in read_rows(path):
        where = f"{path}:{number}"
        try:
            if isinstance(row, BadLine):
                raise row
            line = reader.read(row, f"{path.name}:{number}")
        except BadLine as reason:
            bad.append(f"{where}: {reason}")
            if config.data.on_bad_line == "error":
                raise ValueError(f"{bad[0]} (set data.on_bad_line=skip to skip such lines)") from reason
            continue
        if (num_tokens := line.sequence.num_tokens) > longest[line.policy]:
            too_long.append(f"{where} with {num_tokens:,} tokens, at most {longest[line.policy]:,}")
            continue
        digest.update(line.sequence.prompt_ids.tobytes() + b"/" + line.sequence.token_ids.tobytes())
        lines.append(line)
    notes = [f"{len(bad)} lines are not demonstrations and are skipped, the first is {bad[0]}"] if bad else []
    if too_long:
        notes.append(
            f"{len(too_long)} demonstrations are longer than the model's positions or trainer.max_tokens_per_micro_batch and "
            f"are skipped, the first is {too_long[0]}"
        )
    if not lines:
        raise ValueError(
            f"data.demonstrations={path} has no demonstration to train on: {'; '.join(notes) or 'the file is empty'}"
        )
    return Demonstrations(tuple(lines), reader.writers, tuple(notes), digest.hexdigest())


class _Reader:
    """Reader of rows; raises BadLine for a row that is not a demonstration."""

    def __init__(self, config: RunConfig, renderers: Mapping[str, ChatRenderer]) -> None:
        self._config, self._renderers = config, renderers
        self._tokens = {name: DemonstrationTokens(renderer) for name, renderer in renderers.items()}
        self._roles = {spec.name: spec.role for spec in find_orchestration(config.orchestration).agents}
        self._prompts: dict[str, PromptSet] = {}
        self.writers = (*config.agents, "any")

    def read(self, row: Mapping[str, object], uid: str) -> Demonstration:
        agent = row.get("agent")
        if agent is not None and agent not in self._config.agents:
            raise BadLine(f"agent is {agent!r}; expected one of the team's: {', '.join(self._config.agents)}")
        writer = "any" if agent is None else str(agent)
        policy = self._policy(writer)
        prompt: IntArray | str
        if "messages" in row:
            prompt, completion = self._chat(row, writer, self._renderers[policy])
        else:
            prompt = self._prompt(row.get("prompt"), writer, self._renderers[policy])
            completion = _text(row, "completion")
        if not completion.strip():
            raise BadLine("the completion is empty; expected text")
        sequence = self._tokens[policy].sequence(prompt, completion, self.writers.index(writer), uid=uid)
        if not len(sequence.prompt_ids):
            raise BadLine("the prompt is empty; expected at least one token, which predicts the completion's first one")
        return Demonstration(policy, sequence)

    def _policy(self, writer: str) -> str:
        if writer != "any":
            policy = self._config.agents[writer].policy
            if policy not in self._renderers:
                raise BadLine(
                    f"agent {writer} has policy {policy}, which is frozen; remove the line or train the policy"
                )
            return policy
        if len(self._renderers) > 1:
            raise BadLine(
                f"agent is missing, but several policies are trained ({', '.join(self._renderers)}); add the field agent"
            )
        return next(iter(self._renderers))

    def _options(self, writer: str) -> dict[str, bool | str]:
        return {} if writer == "any" else self._config.agents[writer].template_options

    def _chat(self, row: Mapping[str, object], writer: str, renderer: ChatRenderer) -> tuple[IntArray, str]:
        """Return (prompt, completion). The completion is the last message, an assistant's, in the form that the model writes."""
        messages, tools = row["messages"], row.get("tools") or ()
        if not isinstance(messages, list) or not all(_is_turn(each) for each in messages):
            raise BadLine("messages: expected a list of {role, content}, where content is text")
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise BadLine("messages: expected at least two, the last of them from the assistant: it is the completion")
        if not isinstance(tools, list | tuple):
            raise BadLine(f"tools: expected a list of functions, found {type(tools).__name__}")
        *prompt_messages, last = messages
        well_formed(json.dumps([messages, tools], ensure_ascii=False), "messages")
        if field := next((name for name in _THOUGHTS if last.get(name)), None):
            raise BadLine(f"messages: {field} is not supported; put the reasoning into content, as the model writes it")
        if last.get("weight") == 0:
            raise BadLine(
                "messages: weight of the last message is 0, but it is the completion; remove the line or the weight"
            )
        options = self._options(writer)
        try:
            # chat_message parses arguments of tool calls that are JSON in a string. Fields that it omits, such as gpt-oss's
            # `thinking`, stay for the chat template.
            turns = [{**message, **chat_message(message)} for message in prompt_messages]
            prompt, text = renderer.render(turns, tools, **options)
            calls = renderer.turn_text(chat_message(last), tools, **options) if last.get("tool_calls") else ""
        except Refused as error:
            raise BadLine(str(error)) from error
        except (ValueError, TypeError) as error:
            raise BadLine(f"messages: the chat template rejects them: {error}") from error
        content = last.get("content") or ""
        if text.rstrip().endswith(THINK_OPEN):  # DeepSeek-R1's template opens the <think> block
            content = content.removeprefix(text[text.rindex(THINK_OPEN) :]).removeprefix(THINK_OPEN)
            if THINK_CLOSE not in content:
                raise BadLine("messages: the chat template opens a <think> block, but the completion does not close it")
        return prompt, content + calls

    def _prompt(self, prompt: object, writer: str, renderer: ChatRenderer) -> IntArray | str:
        if isinstance(prompt, str):
            return well_formed(prompt, "prompt")
        if isinstance(prompt, list):
            raise BadLine("prompt is a chat; write it as messages, with the completion as the last message")
        if not isinstance(prompt, dict):
            raise BadLine("expected messages, or prompt and completion")
        if writer == "any":
            raise BadLine("prompt is an object, but agent is missing; add the agent whose prompt these fields fill")
        role = self._roles[writer]
        needed, allowed = PLACEHOLDERS[role]
        if not set(needed) <= prompt.keys() <= {*needed, *allowed}:
            raise BadLine(
                f"prompt has the fields {', '.join(prompt) or 'none'}; the prompt of {writer} requires {', '.join(needed)}"
                + (f" and accepts {', '.join(allowed)}" if allowed else "")
            )
        values = {name: _text(prompt, name) for name in prompt}
        return renderer.render(self._prompts_of(writer).fill(role, **values), **self._options(writer))[0]

    def _prompts_of(self, agent: str) -> PromptSet:
        if agent not in self._prompts:
            config, role = self._config.agents[agent], self._roles[agent]
            prompts = prompt_set(config.prompt or prompts_of(self._config.task, self._config.task_options))
            require_words(prompts, role)
            self._prompts[agent] = prompts.with_words((role,), config.system, config.suffix)
        return self._prompts[agent]


def _is_turn(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), str) or (message.get("content") is None and "tool_calls" in message)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise BadLine(f"{key}: expected text, found {'nothing' if value is None else type(value).__name__}")
    return well_formed(value, key)


def held_out(lines: Sequence[Demonstration], order: Sequence[int], share: float) -> tuple[list[Demonstration], ...]:
    """Split demonstrations into (training, held out). The first ones of `order` are held out, at least one if share > 0."""
    num = min(len(lines) - 1, max(1, round(share * len(lines)))) if share else 0
    return [lines[i] for i in sorted(order[num:])], [lines[i] for i in sorted(order[:num])]
