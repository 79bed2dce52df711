"""History of a session's chats: finds the sample that a call continues, and the tokens that they share.

Clients send the whole chat with every call and may rewrite earlier turns. Chats are therefore compared by what all clients
preserve:

    role, content                        null is ""
    calls of an assistant's turn         by id; neither order nor arguments, which some clients reformat
    thoughts of an assistant's turn      only if they are sent back
    an empty turn of the assistant       may be missing
    the agent, and the tools             templates write them into the prompt

So a call whose chat begins with an answered one continues that sample or, if the sample was already continued differently,
begins a new sample whose prompt starts with the same tokens: sampled text is not tokenised again. The session renders the chat
again only if the chat template omits thoughts that are among these tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from marsrl.rollout.types import IntArray

ChatMessage = Mapping[str, Any]
"""A turn as in OpenAI's API, with `content` as text, and `reasoning` if there is a thought."""


@dataclass(slots=True, eq=False)
class Strand:
    """Tokens of a sample, of which the first num_prompt are the prompt.

    is_busy: True while a call extends the sample. call: number of the last call that the sample answers.

    text: for a sample called by text, the text known to the client. stop: the stop string after it, which clients do not get.
    """

    token_ids: IntArray
    num_prompt: int
    uid: str = ""
    is_busy: bool = True
    call: int = 0
    text: str | None = None
    stop: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """End of an answer in a strand. call: number of the answered call. thoughts: thoughts of all assistant turns so far."""

    strand: Strand
    num_tokens: int
    call: int
    thoughts: tuple[str | None, ...]

    @property
    def is_tip(self) -> bool:
        """True if the sample can be extended here."""
        return not self.strand.is_busy and self.num_tokens == len(self.strand.token_ids)


@dataclass(frozen=True, slots=True)
class Found:
    """The answered chat that begins a call's chat.

    token_ids [N]: tokens of the answered chat. answered: its messages, including thoughts that the client did not send back.
    new: the call's messages after it. uid: uid of its sample. call: number of the call that it answers. strand: its sample, if
    it can be extended; None: a new sample begins with the same tokens.
    """

    token_ids: IntArray
    answered: Sequence[ChatMessage]
    new: Sequence[ChatMessage]
    uid: str
    call: int
    strand: Strand | None


@dataclass(slots=True)
class History:
    """Answered chats and prompts of a session; see the module."""

    _places: dict[bytes, list[_Place]] = field(default_factory=dict)  # by digest of the chat
    _strands: dict[str, list[Strand]] = field(default_factory=dict)  # by agent, for samples called by prompts

    def find(self, agent: str, tools: Any, messages: Sequence[ChatMessage]) -> Found | None:
        """Return the longest answered chat that is a proper prefix of these messages.

        Among equal chats, prefer the last that can be extended: a program may repeat a request if it lost or discarded an answer.
        """
        digests = _digests(agent, tools, messages)
        for length in range(len(messages) - 1, 0, -1):
            thoughts = _thoughts(messages[:length])
            new = messages[length:]
            if all(map(_is_empty, new)) or new[0]["role"] == "assistant":
                continue
            places = [each for each in self._places.get(digests[length], ()) if _agree(thoughts, each.thoughts)]
            if places:
                place = max(places, key=lambda each: (each.is_tip, each.call))
                strand = place.strand if place.is_tip else None
                answered = _with_thoughts(messages[:length], place.thoughts)
                token_ids, uid = place.strand.token_ids[: place.num_tokens], place.strand.uid
                return Found(token_ids, answered, new, uid, place.call, strand)
        return None

    def answered(self, agent: str, tools: Any, messages: Sequence[ChatMessage], strand: Strand) -> None:
        """Record a chat whose last message is the answer at the end of the strand's tokens."""
        place = _Place(strand, len(strand.token_ids), strand.call, _thoughts(messages))
        self._places.setdefault(_digests(agent, tools, messages)[-1], []).append(place)

    def find_prompt(self, agent: str, prompt: IntArray | str) -> Strand | None:
        """Return the sample that this prompt continues; for clients that send tokens or text."""
        strands = [each for each in self._strands.get(agent, ()) if not each.is_busy and _goes_on(each, prompt)]
        return max(strands, key=lambda each: (len(each.token_ids), each.call), default=None)

    def add(self, agent: str, strand: Strand) -> None:
        """Record a sample called by tokens or text."""
        self._strands.setdefault(agent, []).append(strand)


def _goes_on(strand: Strand, prompt: IntArray | str) -> bool:
    """Return True if the prompt extends the strand."""
    if isinstance(prompt, str):
        return strand.text is not None and len(prompt) > len(strand.text) and prompt.startswith(strand.text)
    length = len(strand.token_ids)
    return strand.text is None and len(prompt) > length and np.array_equal(prompt[:length], strand.token_ids)


def _is_empty(message: ChatMessage) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def _thoughts(messages: Sequence[ChatMessage]) -> tuple[str | None, ...]:
    return tuple(each.get("reasoning") for each in messages if each["role"] == "assistant" and not _is_empty(each))


def _with_thoughts(messages: Sequence[ChatMessage], thoughts: Sequence[str | None]) -> list[ChatMessage]:
    known = iter(thoughts)
    turns = list[ChatMessage]()
    for message in messages:
        thought = None if message["role"] != "assistant" or _is_empty(message) else next(known)
        turns.append(message if thought is None else {**message, "reasoning": thought, "reasoning_content": thought})
    return turns


def _agree(given: Sequence[str | None], known: Sequence[str | None]) -> bool:
    return all(one is None or one == other for one, other in zip(given, known, strict=True))


def _digests(agent: str, tools: Any, messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return digests of the first 0, 1, 2, ... messages."""
    digests = [_digest(b"", agent, tools or None)]
    for message in messages:
        digests.append(digests[-1] if _is_empty(message) else _digest(digests[-1], *_kept_by_all(message)))
    return digests


def _kept_by_all(message: ChatMessage) -> tuple[Any, ...]:
    calls = sorted(str(each.get("id") or each["function"]) for each in message.get("tool_calls") or ())
    return message["role"], message["content"], calls, message.get("tool_call_id"), message.get("name")


def _digest(before: bytes, *parts: Any) -> bytes:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
