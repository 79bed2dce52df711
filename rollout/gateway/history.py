"""History of a session's chats: finds the sample that a call continues, and the tokens that the call reuses.

Clients send the whole chat with every call and may rewrite earlier turns. Chats are therefore compared by what all clients
preserve:

    role, content                        null counts as ""
    calls of an assistant's turn         by id; order and arguments are ignored, since some clients reformat them
    calls whose ids are unknown          by place, name and arguments, since some clients replace all ids
    thoughts of an assistant's turn      only if they are sent back
    an empty turn of the assistant       may be missing
    the agent, and the tools             templates write them into the prompt

So a call whose chat begins with an answered chat continues the sample of that chat. If the sample was already continued
differently, the call begins a new sample whose prompt starts with the same tokens. Either way, sampled text is not tokenised
again. The session renders the chat again only if the chat template omits thoughts that are among these tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from marsrl.rollout.types import IntArray

ChatMessage = Mapping[str, Any]
"""A turn as in OpenAI's API, with `content` as text, and `reasoning` if there is a thought."""


@dataclass(slots=True, eq=False)
class Strand:
    """Tokens of a sample, of which the first num_prompt are the prompt.

    is_busy: True while a call extends the sample. call: number of the last answered call.

    text: prompts and answers as the client knows them, if it sends prompts as text; otherwise None. stop: stop string that ended
    the last answer, which clients do not get.
    """

    token_ids: IntArray
    num_prompt: int
    uid: str = ""
    is_busy: bool = True
    call: int = 0
    text: str | None = None
    stop: str = ""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Parts of a turn that clients may omit or rename.

    thought: an assistant's thought, or None. calls: (id, digest of name and arguments) of each tool call. answers: for a tool's
    output, the id of the call that it answers; otherwise "".
    """

    thought: str | None
    calls: tuple[tuple[str, bytes], ...]
    answers: str


@dataclass(frozen=True, slots=True)
class _Place:
    """End of an answer in a strand. call: number of the answered call. kept: one _Kept for each non-empty turn so far."""

    strand: Strand
    num_tokens: int
    call: int
    kept: Sequence[_Kept]

    @property
    def is_tip(self) -> bool:
        """True if the sample can be extended here."""
        return not self.strand.is_busy and self.num_tokens == len(self.strand.token_ids)


@dataclass(frozen=True, slots=True)
class Found:
    """An answered chat with which the chat of a new call begins.

    token_ids [N]: tokens of the answered chat. answered: its messages, with thoughts that the client did not send back and with
    the original ids of tool calls. new: messages of the new call after the answered chat. behind: sample of the answered chat.
    call: number of the call whose answer ends the answered chat. is_tip: True if the sample can be extended; otherwise a new
    sample begins with the same tokens.
    """

    token_ids: IntArray
    answered: Sequence[ChatMessage]
    new: Sequence[ChatMessage]
    behind: Strand
    call: int
    is_tip: bool


@dataclass(slots=True)
class History:
    """Answered chats and prompts of a session; see the module."""

    _places: dict[bytes, list[_Place]] = field(default_factory=dict)  # ends of answers, by digest of the chat
    # Samples of clients that send prompts as tokens or text, by agent.
    _strands: dict[str, list[Strand]] = field(default_factory=dict)
    _issued: set[str] = field(default_factory=set)  # ids of the tool calls in all answers

    def find(
        self,
        agent: str,
        tools: Any,
        messages: Sequence[ChatMessage],
        prefers: Callable[[Strand], bool] = lambda strand: False,
    ) -> Found | None:
        """Return the longest answered chat that is a proper prefix of these messages.

        Among equal chats, prefer the last that can be extended: a program may repeat a request if it lost or discarded an answer.
        prefers: returns True for samples that have precedence over all others.
        """
        digests = _digests(agent, tools, messages)
        kept = [None if _is_empty(message) else _kept(message) for message in messages]
        for length in range(len(messages) - 1, 0, -1):
            places, new = self._places.get(digests[length], ()), messages[length:]
            if not places or new[0]["role"] == "assistant" or all(map(_is_empty, new)):
                continue
            given = [each for each in kept[:length] if each is not None]
            renamed = [(place, ids) for place in places if (ids := self._known_ids(given, place.kept)) is not None]
            if renamed:
                place, ids = max(renamed, key=lambda each: (prefers(each[0].strand), each[0].is_tip, each[0].call))
                answered = _as_known(messages[:length], place.kept)
                token_ids = place.strand.token_ids[: place.num_tokens]
                return Found(token_ids, answered, _with_ids(new, ids), place.strand, place.call, place.is_tip)
        return None

    def _known_ids(self, given: Sequence[_Kept], known: Sequence[_Kept]) -> Mapping[str, str] | None:
        """Return {new id: known id} of the calls that were renamed; None if the turns differ in anything else."""
        ids: dict[str, str] = {}
        for turn, known_turn in zip(given, known, strict=True):
            if turn.thought is not None and turn.thought != known_turn.thought:
                return None
            if turn.answers != known_turn.answers and ids.get(turn.answers) != known_turn.answers:
                return None
            names = {name for name, _ in turn.calls}
            if "" not in names and names == {name for name, _ in known_turn.calls}:
                continue
            for (name, content), (known_name, known_content) in zip(turn.calls, known_turn.calls, strict=True):
                is_known = name != "" and name == known_name
                if not is_known and (name in self._issued or content != known_content):
                    return None
                ids[name] = known_name
        return ids

    def answered(self, agent: str, tools: Any, messages: Sequence[ChatMessage], strand: Strand) -> None:
        """Record a chat whose last message is the answer at the end of the strand's tokens."""
        kept = [_kept(message) for message in messages if not _is_empty(message)]
        self._issued.update(call["id"] for call in messages[-1].get("tool_calls") or ())
        place = _Place(strand, len(strand.token_ids), strand.call, kept)
        self._places.setdefault(_digests(agent, tools, messages)[-1], []).append(place)

    def find_prompt(self, agent: str, prompt: IntArray | str) -> Strand | None:
        """Return the sample that this prompt of tokens or text continues; None: it begins a new sample."""
        strands = [each for each in self._strands.get(agent, ()) if not each.is_busy and _goes_on(each, prompt)]
        return max(strands, key=lambda each: (len(each.token_ids), each.call), default=None)

    def add(self, agent: str, strand: Strand) -> None:
        """Record a sample of a client that sends prompts as tokens or text."""
        self._strands.setdefault(agent, []).append(strand)


def _goes_on(strand: Strand, prompt: IntArray | str) -> bool:
    """Return True if the prompt extends the strand."""
    if isinstance(prompt, str):
        return strand.text is not None and len(prompt) > len(strand.text) and prompt.startswith(strand.text)
    length = len(strand.token_ids)
    return strand.text is None and len(prompt) > length and np.array_equal(prompt[:length], strand.token_ids)


def _is_empty(message: ChatMessage) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _kept(message: ChatMessage) -> _Kept:
    calls = tuple(
        (str(each.get("id") or ""), _digest(b"", *content_of(each))) for each in message.get("tool_calls") or ()
    )
    thought = message.get("reasoning") if message["role"] == "assistant" else None
    return _Kept(thought, calls, str(message.get("tool_call_id") or ""))


def content_of(call: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the name and the parsed arguments of a tool call, since clients may reformat the arguments."""
    function = call["function"]
    name, arguments = function.get("name"), function.get("arguments") or {}
    with suppress(ValueError, RecursionError):
        return name, json.loads(arguments) if isinstance(arguments, str) else arguments
    return name, arguments


def _as_known(messages: Sequence[ChatMessage], known: Sequence[_Kept]) -> list[ChatMessage]:
    """Restore thoughts and the original ids of tool calls in an answered chat; clients may reuse one id in every turn."""
    turns, kept = list[ChatMessage](), iter(known)
    for message in messages:
        turn = dict(message)
        if not _is_empty(message):
            of_turn = next(kept)
            if of_turn.thought is not None:
                turn["reasoning"] = turn["reasoning_content"] = of_turn.thought
            ids = [name for name, _ in of_turn.calls]
            if {str(call.get("id") or "") for call in message.get("tool_calls") or ()} != set(ids):
                turn["tool_calls"] = [
                    {**call, "id": name} for call, name in zip(message["tool_calls"], ids, strict=True)
                ]
            if of_turn.answers:
                turn["tool_call_id"] = of_turn.answers
        turns.append(turn)
    return turns


def _with_ids(messages: Sequence[ChatMessage], ids: Mapping[str, str]) -> Sequence[ChatMessage]:
    """Replace ids of tool calls in new messages. ids: {the client's id: the original id}."""
    if not ids:
        return messages
    turns = []
    for message in messages:
        turn = dict(message)
        if message.get("tool_calls"):
            turn["tool_calls"] = [{**call, "id": _named(call.get("id"), ids)} for call in message["tool_calls"]]
        if message["role"] == "tool":
            turn["tool_call_id"] = _named(message.get("tool_call_id"), ids)
        turns.append(turn)
    return turns


def _named(name: Any, ids: Mapping[str, str]) -> Any:
    return ids.get(str(name or ""), name)


def _digests(agent: str, tools: Any, messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return digests of the first 0, 1, 2, ... messages."""
    digests = [_digest(b"", agent, tools or None)]
    for message in messages:
        digests.append(digests[-1] if _is_empty(message) else _digest(digests[-1], *_kept_by_all(message)))
    return digests


def _kept_by_all(message: ChatMessage) -> tuple[Any, ...]:
    return message["role"], message["content"], len(message.get("tool_calls") or ()), message.get("name")


def _digest(before: bytes, *parts: Any) -> bytes:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
