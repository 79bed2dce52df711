"""One session: a program's calls while it plays a problem, the samples they form, and limits on both.

Everything runs in the server's thread, except for replies, which come from the player's thread.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np

from marsrl.rollout.gateway.calls import Call, Reply, SessionEnd
from marsrl.rollout.gateway.changes import BRANCH, THOUGHTS
from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused, Said
from marsrl.rollout.gateway.history import History, Strand
from marsrl.rollout.gateway.lineage import Lineage, Lineages, Settled
from marsrl.rollout.text import without_surrogates
from marsrl.rollout.types import Fate, Finish, IntArray, ToolOutput

Given = ParamSpec("Given")
Rendered = TypeVar("Rendered")

_FINISH = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class CallLost(Exception):
    """A call without an answer, because an engine failed on it."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A call of the program. listens: returns True while the client waits for the answer.

    is_read: the program received the answer. is_used: a later call continues the answer, or the program rewards it by id.
    is_asked_again: the program sent the same body again after receiving the answer.
    """

    task: asyncio.Task[Answer]
    listens: Callable[[], bool]
    uid: str = ""
    is_read: bool = False
    is_used: bool = False
    is_asked_again: bool = False

    @property
    def is_lost(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_awaited(self) -> bool:
        return not (self.is_read or self.is_lost) and self.listens()


@dataclass(slots=True, eq=False)
class Session:
    """One session of a program; see the module.

    id: id of the episode. key: authenticates requests. problem: the problem as sent to the worker. worker: worker that plays the
    session; "" before it starts. output: future resolved at the end. send: passes a call to the player. clock: returns seconds.
    masks_superseded: discarded answers are not trained (external.superseded). sums_turns: rewards given by answer id are rewards
    of turns (credit.turns=returns); otherwise a sample's reward is the mean over its answers.
    """

    id: str
    problem: Mapping[str, Any]
    output: Future[ToolOutput]
    agents: Mapping[str, Agent]
    send: Callable[[Call], None]
    max_calls: int
    attempt: int
    clock: Callable[[], float]
    lineages: Lineages
    masks_superseded: bool = True
    sums_turns: bool = False
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    worker: str = ""
    began_s: float = 0.0  # time of `start`
    own_s: float = 0.0  # seconds without open calls, up to _idle_since
    _idle_since: float = 0.0
    _history: History = field(default_factory=History)
    _numbers: Counter[str] = field(default_factory=Counter)  # number of samples begun, by agent
    _calls: list[_Asked] = field(default_factory=list)
    _read: dict[int, None] = field(default_factory=dict)  # numbers of calls whose answers were read, in that order
    _answered: dict[str, int] = field(default_factory=dict)  # numbers of calls, by the ids of their answers
    refusals: dict[str, None] = field(default_factory=dict)  # error messages of rejected requests, in order
    _is_over: bool = False
    _order: asyncio.Lock = field(default_factory=asyncio.Lock)  # keeps calls in order of arrival
    _num_open: int = 0  # calls being parsed or answered
    _open: set[asyncio.Task[Answer]] = field(default_factory=set)
    _by_body: dict[bytes, list[_Asked]] = field(default_factory=dict)

    def start(self, worker: str) -> None:
        self.worker, self.began_s = worker, self.clock()
        self._idle_since = self.began_s

    @property
    def trains(self) -> bool:
        """True in training, False in an evaluation."""
        return bool(self.problem["purpose"] == "train")

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def seconds_alone(self) -> float:
        """Seconds without an open call."""
        return self.own_s + (0.0 if self._num_open else self.clock() - self._idle_since)

    async def ask(
        self, ask: Ask, body: bytes, *, is_retry: bool, listens: Callable[[], bool] = lambda: True
    ) -> asyncio.Task[Answer]:
        """Begin a call, and return the task of its answer.

        body: digest of the request, by which equal requests are recognised. is_retry: True if the client marked the request as a
        retry; it then gets the answer of the call that it repeats, unless that call failed. listens: returns True while the
        client waits.

        An equal request without this mark begins a new call: a branch if a client still waits for an earlier one, and otherwise a
        repetition (external.superseded).

        Raises Refused: the prompt is too long, or the session has used up its calls or has ended.
        """
        self._note_begin()
        try:
            async with self._order:
                known = self._by_body.setdefault(body, [])
                same = [each for each in known if not each.is_lost]
                if is_retry and same:
                    found = next((each for each in same if not each.is_read), same[-1])
                    found.listens = listens
                    return found.task
                if self.num_calls >= self.max_calls:
                    raise Refused(429, f"the session has used up external.max_calls = {self.max_calls} calls")
                task = asyncio.ensure_future(await self._begin(self.agents[ask.agent], ask))
                if not any(each.is_awaited for each in known):
                    for each in known:
                        each.is_asked_again = each.is_read
                known.append(_Asked(task, listens))
                self._calls.append(known[-1])
                self._note_begin()
                self._open.add(task)
                task.add_done_callback(self._is_answered)
                return task
        finally:
            self._note_end()

    def note_read(self, task: asyncio.Task[Answer]) -> None:
        """Record that the program has read the answer."""
        self._note_read(self._answered[task.result().id])

    def end(self, report: Mapping[str, Any]) -> ToolOutput:
        """End the session with its worker's report, {reward | rewards | answer | error}. An invalid report counts as an error."""
        seconds = self.clock() - self.began_s
        try:
            if report.get("error") is not None:
                error = str(report["error"])
                raise ValueError(next((refusal for refusal in self.refusals if refusal in error), error))
            reward = None if report.get("reward") is None else _number(report["reward"])
            given = report.get("rewards")
            settled = self.lineages.settle()
            by_agent, by_lineage, by_call = self._rewards({} if given is None else given, settled)
            _, _, of_turns = self._rewards(report.get("turn_rewards", {}), settled)
            if self.sums_turns:
                of_turns += by_call
            turn_rewards = [0.0] * (self.num_calls if of_turns else 0)
            for number, value in of_turns:
                turn_rewards[number] += value
            rewards: dict[str, float] | None = None
            if given is not None:
                by_turn = [self._calls[number].task.result().agent for number, _ in of_turns]
                answers = [] if self.sums_turns else [(self._calls[number].uid, value) for number, value in by_call]
                rewards = settled.rewards(by_agent, by_lineage, answers, by_turn)
            answer = None if report.get("answer") is None else str(report["answer"])
            end = SessionEnd(
                reward,
                rewards,
                answer,
                self._uids_read(),
                [self._fate(each) for each in self._calls],
                turn_rewards,
                settled.origins,
            )
        except (ValueError, TypeError, AttributeError) as error:
            return ToolOutput(without_surrogates(f"the program failed: {error}"), is_error=True, seconds=seconds)
        return ToolOutput(end.encode(), seconds=seconds)

    def cancel(self) -> None:
        """Drop open calls and reject new ones."""
        self._is_over = True
        for task in list(self._open):
            task.cancel()

    def _rewards(
        self, given: Mapping[str, Any], settled: Settled
    ) -> tuple[dict[str, float], dict[Lineage, list[float]], list[tuple[int, float]]]:
        """Split the rewards of a report: by agent, by lineage, and as pairs (number of the answered call, reward)."""
        by_agent: dict[str, float] = {}
        by_lineage: dict[Lineage, list[float]] = {}
        by_call: list[tuple[int, float]] = []
        for name, value in given.items():
            if name in self.agents:
                by_agent[name] = _number(value)
            elif name in settled.named:
                if self.sums_turns:
                    raise ValueError(
                        f"a reward is for the lineage {name!r}; with credit.turns=returns give it to the id of an answer"
                    )
                by_lineage.setdefault(settled.named[name], []).append(_number(value))
            elif (number := self._answered.get(re.split("[-_]", name)[-1])) is not None:  # chatcmpl-ID, msg_ID, ...
                self._note_used(number)
                by_call.append((number, _number(value)))
            else:
                raise ValueError(
                    f"a reward is for {name!r}; expected an agent, the name of a lineage or the id of an answer"
                )
        return by_agent, by_lineage, by_call

    def _note_read(self, number: int) -> None:
        self._calls[number].is_read = True
        self._read.pop(number, None)
        self._read[number] = None

    def _note_used(self, number: int) -> None:
        """Record that this call's answer is continued or rewarded: the program received it, even if the connection was lost."""
        self._calls[number].is_used = True
        if not self._calls[number].is_read:
            self._note_read(number)

    def _fate(self, asked: _Asked) -> Fate:
        if not asked.is_read:
            return Fate.UNREAD
        is_thrown_away = asked.is_asked_again and not asked.is_used
        return Fate.SUPERSEDED if is_thrown_away and self.masks_superseded else Fate.READ

    def _uids_read(self) -> list[str]:
        """Return uids of samples with a read answer, ordered by when their last answer was read."""
        read = [self._calls[number] for number in self._read]
        uids = [each.uid for each in read if self._fate(each) is Fate.READ]
        return list(dict.fromkeys(reversed(uids)))[::-1]

    async def _begin(self, agent: Agent, ask: Ask) -> Coroutine[Any, Any, Answer]:
        """Send the call; return the coroutine that waits for its answer."""
        self.lineages.check(ask)
        if ask.prompt is None:
            ask, strand, call = await self._by_chat(agent, ask)
        else:
            strand, call = await self._by_prompt(agent, ask, ask.prompt)
        if self._is_over:
            raise Refused(401, "the session is over")
        self.send(call)
        return self._answer(agent, ask, strand, call.reply, self.num_calls)

    async def _by_chat(self, agent: Agent, ask: Ask) -> tuple[Ask, Strand, Call]:
        """Begin a call with a chat. The returned Ask's messages include all known thoughts."""
        prefix = self._history.find(agent.name, ask.shown, ask.messages, self.lineages.prefers(ask))
        renderer, options = agent.renderer, {**agent.settings.template_options, **ask.options}
        begun = renderer.encode_trusted(_opening(agent, ask))
        if prefix is not None:
            self._note_used(prefix.call)
            ask = replace(ask, messages=[*prefix.answered, *prefix.new])
        if prefix is None or not await _rendered(
            agent, renderer.keeps_thoughts, prefix.answered, prefix.new, ask.tools, **options
        ):
            token_ids, text = await _rendered(agent, renderer.render, ask.messages, ask.tools, **options)
            token_ids, text = np.concatenate([token_ids, begun]), text + _opening(agent, ask)
            behind, why = (None, "") if prefix is None else (prefix.behind, THOUGHTS)
            return ask, *self._new(agent, ask, token_ids, text, behind, why)
        has_ended = int(prefix.token_ids[-1]) in renderer.stop_ids
        new = np.concatenate([await _rendered(agent, renderer.next_turn, prefix.new, has_ended, **options), begun])
        if prefix.is_tip:
            return ask, *self._go_on(agent, ask, prefix.behind, new)
        token_ids = np.concatenate([prefix.token_ids, new])
        why = "" if any(turn["role"] == "assistant" for turn in prefix.new) else BRANCH
        return ask, *self._new(agent, ask, token_ids, renderer.decode(token_ids), prefix.behind, why)

    async def _by_prompt(self, agent: Agent, ask: Ask, prompt: IntArray | str) -> tuple[Strand, Call]:
        strand = self._history.find_prompt(agent.name, prompt)
        if strand is not None:
            self._note_used(strand.call)
        start = 0 if strand is None else len(strand.token_ids if strand.text is None else strand.text)
        new = prompt[start:]
        if isinstance(new, str):
            new = new if strand is None else new.removeprefix(strand.stop)  # the sample already has its stop string
            new = await _rendered(agent, agent.renderer.encode_trusted, new)
        text = prompt if isinstance(prompt, str) else None
        if strand is None:
            strand, call = self._new(agent, ask, new, agent.renderer.decode(new) if text is None else text)
            self._history.add(agent.name, strand)
        else:
            strand, call = self._go_on(agent, ask, strand, new)
        strand.text = text
        return strand, call

    def _new(
        self, agent: Agent, ask: Ask, token_ids: IntArray, text: str, behind: Strand | None = None, why: str = ""
    ) -> tuple[Strand, Call]:
        """Begin a sample. behind: the sample that its chat branches off. why: as in Lineages.begin."""
        if not 0 < len(token_ids) <= agent.settings.max_input_tokens:
            raise Refused(
                400,
                f"the prompt has {len(token_ids)} tokens; expected at least 1 and at most agents.{agent.name}.max_input_tokens = "
                f"{agent.settings.max_input_tokens}",
                "context_length_exceeded",
            )
        number = self._numbers[agent.name]
        self._numbers[agent.name] += 1
        strand = Strand(token_ids, len(token_ids))
        held = self.lineages.begin(ask, strand, self.num_calls, behind, why)
        if held is not None:
            self._note_used(held)
        return strand, self._call(agent, ask, number, token_ids, text=text)

    def _go_on(self, agent: Agent, ask: Ask, strand: Strand, new: IntArray) -> tuple[Strand, Call]:
        num_tokens = len(strand.token_ids) - strand.num_prompt + len(new)
        if num_tokens >= agent.max_response_tokens:
            raise Refused(
                400,
                f"the sample would have {num_tokens} tokens after its first prompt; expected fewer than "
                f"{agent.max_response_tokens} (agents.{agent.name}.max_response_tokens, rollout.max_response_tokens)",
                "context_length_exceeded",
            )
        strand.is_busy = True
        self.lineages.go_on(ask, strand, self.num_calls, new)
        return strand, self._call(agent, ask, 0, new, uid=strand.uid)

    def _call(self, agent: Agent, ask: Ask, number: int, token_ids: IntArray, uid: str = "", text: str = "") -> Call:
        place, stop = self.num_calls, ask.stop
        if ask.one_call and agent.reader is not None:
            stop = (*stop, agent.reader.closing)
        return Call(self.id, agent.name, number, self.attempt, token_ids, place, uid, text, ask.max_tokens, stop)

    async def _answer(self, agent: Agent, ask: Ask, strand: Strand, reply: Future[Reply], number: int) -> Answer:
        got = await asyncio.wrap_future(reply)
        strand.uid = self._calls[number].uid = got.uid
        if got.finish is Finish.ERROR:
            raise CallLost(got.error)  # the strand stays busy: it cannot be extended
        prompt_ids = strand.token_ids
        text, stop = _split_at_stop(agent.renderer.decode(got.token_ids), (*agent.settings.stop, *ask.stop))
        if begun := _opening(agent, ask):
            text, turn_ids = begun + text, np.concatenate([agent.renderer.encode_trusted(begun), got.token_ids])
        else:
            turn_ids = got.token_ids
        # A client that sends prompts as tokens or text gets the whole text, and sends it back.
        reader = agent.reader if ask.prompt is None else None
        parsed = Said(text) if reader is None else reader(text, turn_ids, ask)
        message = {"role": "assistant", "content": parsed.content, "tool_calls": parsed.calls}
        if parsed.reasoning is not None:
            message["reasoning"] = parsed.reasoning
        self.lineages.answer(ask, strand, number, got.token_ids, message, self.num_calls)
        strand.is_busy, strand.call = False, number
        if strand.text is not None:
            strand.text, strand.stop = strand.text + parsed.content, stop
        if ask.prompt is None:
            self._history.answered(agent.name, ask.shown, [*ask.messages, message], strand)
        answer = Answer(
            secrets.token_hex(12),
            got.uid,
            agent.name,
            parsed,
            "tool_calls" if parsed.calls else _FINISH[got.finish],
            stop,
            prompt_ids,
            got.token_ids,
            got.logprobs,
            lambda: agent.renderer.pieces(got.token_ids),
        )
        self._answered[answer.id] = number
        return answer

    def _note_begin(self) -> None:
        if not self._num_open:
            self.own_s += self.clock() - self._idle_since
        self._num_open += 1

    def _note_end(self) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle_since = self.clock()

    def _is_answered(self, task: asyncio.Task[Answer]) -> None:
        self._note_end()
        self._open.discard(task)
        if not task.cancelled():
            task.exception()  # reading the exception keeps asyncio from reporting it as unhandled


async def _rendered(
    agent: Agent, render: Callable[Given, Rendered], *given: Given.args, **named: Given.kwargs
) -> Rendered:
    """Render a program's messages in a thread, so that only later calls of this session wait.

    Raises Refused: the chat template rejects the roles or their order.
    """
    try:
        return await asyncio.to_thread(render, *given, **named)
    except (ValueError, TypeError, KeyError) as error:
        why = error.__cause__ or error  # the template's own message
        raise Refused(400, f"the chat template of agent {agent.name} rejects these messages: {why}") from error


def _opening(agent: Agent, ask: Ask) -> str:
    """Return the untrained text with which the turn begins if the program requires a tool call; otherwise ""."""
    return "" if ask.must_call is None or agent.reader is None else agent.reader.opening(ask.must_call)


def _split_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Return (the text as clients get it, the stop string after it or "")."""
    end, stop = min(((text.find(stop), stop) for stop in stops if stop in text), default=(len(text), ""))
    return text[:end], stop


def _number(value: Any) -> float:
    number = float(value)
    if math.isinf(number):
        raise ValueError(f"a reward is {number}; expected a finite number, or NaN for no reward")
    return number
