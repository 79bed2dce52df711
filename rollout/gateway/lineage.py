"""Lineages of a session: samples that continue the same context of an agent, and the lineage that called them.

A call that does not continue a sample (history.py) begins a new sample, of one of four kinds:

    branch       its chat begins with an answered chat: it joins the lineage of that chat, and begins with the same tokens
    rewritten    it shares its longest prefix of tokens with a sample S, and the prefix includes answers of S, or the new chat
                 shows more answers than the first chat of S's lineage did: it joins that lineage
    successor    its chat quotes text that an earlier answer introduced, such as a summary, and the lineage of that answer makes
                 no more calls: it joins that lineage
    root         anything else: it begins a new lineage. Its caller is the lineage that waits meanwhile: the caller's last call
                 was answered before the root's first call, and its next call follows the root's last one. If several lineages
                 fit, the root has no caller

Headers can name a call's lineage and its caller; such names take precedence over these rules. Headers never decide which tokens
a call continues.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from marsrl.rollout.agents.parsers import THINK_CLOSE
from marsrl.rollout.gateway.calls import Origin
from marsrl.rollout.gateway.changes import OTHER, first_change
from marsrl.rollout.gateway.chats import Ask, Refused
from marsrl.rollout.gateway.history import ChatMessage, Strand
from marsrl.rollout.types import Caller, IntArray, Prefix

_OWN = ("X-Marsrl-Lineage", "X-Marsrl-Lineage-Parent")
_WINDOW = "x-codex-window-id"  # header with a thread's id and the number of its compactions
# Headers of marsrl, Claude Code, Codex and OpenCode.
_NAMES = (_OWN[0], "X-Claude-Code-Agent-Id", "thread-id", _WINDOW, "X-Session-Id")
_PARENTS = (_OWN[1], "X-Claude-Code-Parent-Agent-Id", "x-codex-parent-thread-id", "x-parent-session-id")
_MOST_NAME = 128  # characters
_PIECE = 64  # characters of each excerpt of an answer that is looked for in a new chat
_LATEST = 16  # number of latest answers that are looked for in a new chat
_MOST_TEXT = 1 << 18  # characters at the end of a chat that are searched


def names_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of a request's lineage and of its caller; "" if no header gives one.

    A name that is too long or unprintable raises Refused if it is in one of marsrl's headers, and is ignored in headers of other
    harnesses.
    """
    names = []
    for keys in (_NAMES, _PARENTS):
        key = next((key for key in keys if headers.get(key)), "")
        name = headers[key] if key else ""
        if key == _WINDOW:
            name = name.rpartition(":")[0] or name
        if len(name) > _MOST_NAME or not name.isprintable():
            if key in _OWN:
                raise Refused(400, f"{key} has {len(name)} characters; expected at most {_MOST_NAME}, all printable")
            name = ""
        names.append(name)
    return names[0], names[1]


class Prefixes:
    """Tokens of an agent's samples in a session, sorted.

    A sample that shares the longest prefix with given tokens is then next to the position where these would be inserted.
    """

    def __init__(self) -> None:
        self._sorted: list[Strand] = []
        self._unsorted: dict[Strand, None] = {}  # strands begun or extended since the last search

    def add(self, strand: Strand) -> None:
        self._unsorted[strand] = None

    def extend(self, strand: Strand, token_ids: IntArray) -> None:
        """Append tokens to a strand."""
        if strand not in self._unsorted:
            self._sorted.remove(strand)
            self._unsorted[strand] = None
        strand.token_ids = np.concatenate([strand.token_ids, token_ids])

    def longest(self, token_ids: IntArray) -> tuple[Strand, int] | None:
        """Return (strand with the longest common prefix, number of tokens in this prefix); None if no strand shares a token."""
        for strand in self._unsorted:
            insort(self._sorted, strand, key=_key)
        self._unsorted.clear()
        place = bisect_left(self._sorted, token_ids.tobytes(), key=_key)
        neighbours = self._sorted[max(0, place - 1) : place + 1]
        shared = [(strand, num_shared(strand.token_ids, token_ids)) for strand in neighbours]
        return max((each for each in shared if each[1]), key=lambda each: each[1], default=None)


def _key(strand: Strand) -> bytes:
    return strand.token_ids.tobytes()  # any key works that sorts strands with a common prefix next to each other


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def num_shared(one: IntArray, other: IntArray) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(slots=True, eq=False)
class Lineage:
    """Context of an agent, with the samples that continue it.

    name, parent: names of the lineage and of its caller, from headers; "" if not given. num_shown: number of answers in the first
    chat. calls: numbers of the lineage's calls, in order. held: number of the earlier call whose answer the first chat quotes, or
    None. chat: the latest answered chat.
    """

    name: str
    parent: str
    num_shown: int
    held: int | None
    calls: list[int] = field(default_factory=list)
    chat: Sequence[ChatMessage] = ()


@dataclass(frozen=True, slots=True)
class _Begun:
    """A new sample. after: earlier sample that it branches off or rewrites, or None. why: reason why it does not continue that
    sample. shares: (earlier sample of the agent with the longest common prefix, length of the prefix), or None."""

    agent: str
    lineage: Lineage
    after: Strand | None
    why: str
    shares: tuple[Strand, int] | None


@dataclass(frozen=True, slots=True)
class Settled:
    """Lineages at the end of a session, when successors have joined the lineages that they follow.

    origins, agents, lineages: origin, agent and lineage of each sample, by uid, in order of first calls. named: lineages by name.
    """

    origins: Mapping[str, Origin]
    agents: Mapping[str, str]
    lineages: Mapping[str, Lineage]
    named: Mapping[str, Lineage]

    def rewards(
        self,
        by_agent: Mapping[str, float],
        by_lineage: Mapping[Lineage, Sequence[float]],
        answers: Iterable[tuple[str, float]],
        by_turn: Iterable[str] = (),
    ) -> dict[str, float]:
        """Return rewards by agent, and by uid for samples whose reward differs from that of their agent.

        A sample gets the first of these rewards that is given:

            1. the mean reward of its answers
            2. the reward of its lineage
            3. the reward of its agent, or else the mean reward of its lineage's answers; with a caller, this mean comes first
            4. the reward of the sample that called it

        A caller that is another agent counts only if headers name it. Otherwise a Verifier would get the Solver's reward exactly
        when the Verifier sends the Solver back.

        by_lineage: rewards given to each name of a lineage, which are averaged. answers: (uid of the sample, reward) of each
        rewarded answer. by_turn: agents whose single turns are rewarded; their samples get 0 if no other reward applies. Means
        omit NaN.
        """
        of_sample: dict[str, list[float]] = {}
        of_lineage: dict[Lineage, list[float]] = {}
        for uid, value in answers:
            of_sample.setdefault(uid, []).append(value)
            of_lineage.setdefault(self.lineages[uid], []).append(value)
        means = {lineage: _mean(values) for lineage, values in of_lineage.items()}
        named = {lineage: _mean(values) for lineage, values in by_lineage.items()}
        known = {lineage: mean for lineage, mean in means.items() if not math.isnan(mean)} | named
        by_uid = {uid: _mean(values) for uid, values in of_sample.items()}
        given = {*by_agent, *by_turn}
        for uid, origin in self.origins.items():
            lineage, caller = self.lineages[uid], origin.caller
            if caller is not None and not lineage.parent and self.agents[caller.uid] != self.agents[uid]:
                caller = None
            is_sub_agent = caller is not None or lineage in by_lineage
            if uid not in by_uid and lineage in known and (is_sub_agent or self.agents[uid] not in by_agent):
                by_uid[uid] = known[lineage]
            elif uid not in by_uid and caller is not None and self.agents[uid] not in given:
                if caller.uid in by_uid:  # The caller began earlier, so its reward is known by now.
                    by_uid[uid] = by_uid[caller.uid]
                elif self.agents[caller.uid] in by_agent:
                    by_uid[uid] = by_agent[self.agents[caller.uid]]
        return dict.fromkeys(by_turn, 0.0) | dict(by_agent) | by_uid


@dataclass(slots=True)
class Lineages:
    """Lineages of a session; see the module. most_names: maximum number of names (external.max_lineages)."""

    most_names: int
    _all: list[Lineage] = field(default_factory=list)  # all lineages, in order of first calls
    _named: dict[str, Lineage] = field(default_factory=dict)
    _begun: dict[Strand, _Begun] = field(default_factory=dict)
    _strands: dict[int, Strand] = field(default_factory=dict)  # strand of each call, by the call's number
    # For each call, number of calls begun before it was answered.
    _answered: dict[int, int] = field(default_factory=dict)
    _prefixes: dict[str, Prefixes] = field(default_factory=dict)  # tokens of each agent's samples
    # Latest calls with long answers: (number, request, excerpts of the answer).
    _latest: deque[tuple[int, Ask, Sequence[str]]] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def check(self, ask: Ask) -> None:
        """Raise Refused if the call names a new lineage and the session already has the maximum number of names."""
        if ask.lineage and ask.lineage not in self._named and len(self._named) >= self.most_names:
            raise Refused(
                429,
                f"the session names more lineages in headers than external.max_lineages = {self.most_names}; raise it, or use "
                "earlier names",
            )

    def prefers(self, ask: Ask) -> Callable[[Strand], bool]:
        """Return a predicate: True for samples of the named lineage, or of unnamed lineages if the call names none."""
        return lambda strand: self._begun[strand].lineage.name == ask.lineage

    def begin(self, ask: Ask, strand: Strand, number: int, behind: Strand | None = None, why: str = "") -> int | None:
        """Record a new sample; return the number of the call whose answer its chat quotes, if it may be a successor.

        number: the call's number. behind: the sample that the new sample branches off. why: reason why it does not continue that
        sample, if known.
        """
        prefixes = self._prefixes.setdefault(ask.agent, Prefixes())
        shares = prefixes.longest(strand.token_ids)
        prefixes.add(strand)
        num_shown = sum(message["role"] == "assistant" for message in ask.messages)
        if behind is None and shares is not None:
            earlier, num_tokens = shares
            if num_shown > self._begun[earlier].lineage.num_shown or num_tokens > earlier.num_prompt:
                behind = earlier
                why = "" if ask.messages else f"the prompt changes after token {num_tokens}"
        if behind is not None and not why:
            why = first_change(self._begun[behind].lineage.chat, ask.messages) or OTHER
        lineage = self._named.get(ask.lineage)
        if not ask.lineage and behind is not None:
            lineage = self._begun[behind].lineage
        held = None
        if lineage is None:
            held = None if ask.lineage else self._held(ask)
            lineage = Lineage(ask.lineage, ask.caller, num_shown, held)
            self._all.append(lineage)
        self._begun[strand] = _Begun(ask.agent, lineage, behind, why, shares)
        self._note(ask, strand, number)
        return held

    def go_on(self, ask: Ask, strand: Strand, number: int, new: IntArray) -> None:
        """Append a call's new tokens to the sample that it continues."""
        self._prefixes[ask.agent].extend(strand, new)
        self._note(ask, strand, number)

    def answer(
        self, ask: Ask, strand: Strand, number: int, token_ids: IntArray, message: ChatMessage, num_calls: int
    ) -> None:
        """Append an answer's tokens to its sample. number: its call's number; num_calls: calls of the session so far."""
        self._prefixes[ask.agent].extend(strand, token_ids)
        self._answered[number] = num_calls
        if ask.messages:
            self._begun[strand].lineage.chat = [*ask.messages, message]
        text = message["content"].rpartition(THINK_CLOSE)[2].strip()
        if len(text) >= _PIECE:  # Excerpts, because programs take summaries out of tags, or cut them.
            starts = (0, (len(text) - _PIECE) // 2, len(text) - _PIECE)
            self._latest.append((number, ask, [text[start : start + _PIECE] for start in starts]))

    def settle(self) -> Settled:
        """Join successors to the lineages that they follow, and find callers."""
        whole: dict[Lineage, Lineage] = {}
        calls: dict[Lineage, list[int]] = {}  # numbers of calls by lineage; lineages in order of their first calls
        for lineage in self._all:
            before = None if lineage.held is None else whole[self._begun[self._strands[lineage.held]].lineage]
            if before is not None and calls[before][-1] < lineage.calls[0]:
                calls[before] += lineage.calls
                whole[lineage] = before
            else:
                calls[lineage] = list(lineage.calls)
                whole[lineage] = lineage
        named = {name: whole[lineage] for name, lineage in self._named.items()}
        callers = {lineage: self._caller(call) for lineage, call in self._callers(calls, named).items()}
        begun = {strand.uid: each for strand, each in self._begun.items() if strand.uid}
        lineages = {uid: whole[each.lineage] for uid, each in begun.items()}
        origins = {uid: self._origin(each, callers[lineages[uid]]) for uid, each in begun.items()}
        return Settled(origins, {uid: each.agent for uid, each in begun.items()}, lineages, named)

    def _callers(
        self, calls: Mapping[Lineage, Sequence[int]], named: Mapping[str, Lineage]
    ) -> dict[Lineage, int | None]:
        """Return, for each lineage, the number of the caller's call whose answer started it; None: unknown."""
        callers: dict[Lineage, int | None] = {}
        around: list[Lineage] = []  # earlier lineages that make a call after the first call of this one
        for lineage, own_calls in calls.items():
            around = [each for each in around if calls[each][-1] > own_calls[0]]
            parent = named.get(lineage.parent)
            if parent is not None and parent is not lineage:
                earlier = calls[parent][: bisect_left(calls[parent], own_calls[0])]
                callers[lineage] = earlier[-1] if earlier else None
            else:
                fits = (call for each in around if (call := self._waits(calls[each], own_calls)) is not None)
                two = list(islice(fits, 2))
                callers[lineage] = two[0] if len(two) == 1 else None
            around.append(lineage)
        return callers

    def _waits(self, calls: Sequence[int], started: Sequence[int]) -> int | None:
        """Return the call in `calls` that may have started the calls in `started`, else None.

        calls: calls of the lineage that may be the caller. started: calls of the lineage that it may have started.

        Returns the last call in `calls` before started[0], if it was answered by then and the next one comes after started[-1].
        """
        place = bisect_left(calls, started[0])
        is_answered = self._answered.get(calls[place - 1], started[0] + 1) <= started[0]
        return calls[place - 1] if is_answered and calls[place] > started[-1] else None

    def _caller(self, call: int | None) -> Caller | None:
        uid = "" if call is None else self._strands[call].uid
        return None if call is None or not uid else Caller(uid, call + 1)

    def _origin(self, begun: _Begun, caller: Caller | None) -> Origin:
        after, held = begun.after, begun.lineage.held
        if after is None and held is not None:
            after = self._strands[held]
        shares = (
            None if begun.shares is None or not begun.shares[0].uid else Prefix(begun.shares[0].uid, begun.shares[1])
        )
        parent = after.uid if after is not None else "" if caller is None else caller.uid
        return Origin(parent, shares, caller, begun.why)

    def _note(self, ask: Ask, strand: Strand, number: int) -> None:
        lineage = self._begun[strand].lineage
        lineage.calls.append(number)
        self._strands[number] = strand
        if ask.lineage:
            self._named.setdefault(ask.lineage, lineage)

    def _held(self, ask: Ask) -> int | None:
        """Return the number of the agent's latest call whose answer the chat quotes; None without one.

        Text that the answer itself repeats from its chat, such as the problem, does not count.
        """
        text = _text(ask)
        for number, earlier, pieces in reversed(self._latest):
            if earlier.agent != ask.agent:
                continue
            held = [piece for piece in pieces if piece in text]
            if held and any(piece not in _text(earlier) for piece in held):
                return number
        return None


def _text(ask: Ask) -> str:
    return "\n".join(message["content"] for message in ask.messages)[-_MOST_TEXT:]
