"""Completions, from ask to judged sample, and the asks and rollout instances that checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from marsrl.rollout.config import MOST_TOKENS
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.calls import Call
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import (
    Ask,
    BoolArray,
    Caller,
    Fate,
    Finish,
    FloatArray,
    IntArray,
    Prefix,
    Sample,
    Segment,
    Turn,
)


class State(StrEnum):
    """State of a completion.

    due -> decoding -> judging -> over
     ^        |  '---> waiting ---^
     '--------+-----------'
    """

    DUE = "due"  # the next segment must be decoded, now or in the next stage
    DECODING = "decoding"
    WAITING = "waiting"  # waits for a tool, another agent, or the next turn
    JUDGING = "judging"
    OVER = "over"


class _OfCompletion:
    """Fields that are not checkpointed: links to other parts, and values unknown after a restart."""

    of: OpenAsk
    index: int  # index of the completion within its ask
    text: str | None = None
    call: Call | None = None
    call_start: int = 0
    usage: tuple[int, int] | None = None


@dataclass(slots=True, eq=False)
class Completion(_OfCompletion):
    """One completion of an ask. The next segment continues its token ids, never its text; each token keeps its policy version.

    turn: number of waits after which the completion continued; tokens inserted there have is_sampled False. turns: answered
    calls of a program. parent: uid of the sample of its session that it follows, or "". behind, caller, rewritten: as in Sample.
    routed_experts: experts of prompt and completion without the last token, each chosen by the version that decoded the token.
    kept_tokens: kept tokens at the completion's N positions; None until a segment records them.
    num_decoded: tokens of the current segment decoded before an abort. seconds: engine time.
    finish, error: finish reason, and the cause of a failure. sample: the sample, which has no reward until it is judged; None
    while the completion is not finished. text: text of all tokens, from the engine that drew the last ones; None: unknown.
    call, call_start: the program's call that the current turn answers, and the index of the turn's first token in the
    completion.
    usage: (prompt tokens, new tokens) of all turns as a server counts them; None: as counted here.
    """

    state: State = State.DUE
    token_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # [N]
    logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))  # [N] nats
    is_sampled: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))  # [N]
    segments: tuple[Segment, ...] = ()
    turn: int = 0
    turns: tuple[Turn, ...] = ()
    parent: str = ""
    behind: Prefix | None = None
    caller: Caller | None = None
    rewritten: str = ""
    routed_experts: ExpertArray | None = None
    kept_tokens: KeptTokens | None = None
    num_decoded: int = 0
    seconds: float = 0.0
    finish: Finish = Finish.UNFINISHED
    error: str = ""
    sample: Sample | None = None

    @property
    def uid(self) -> str:
        return f"{self.of.ask.id}:{self.index}"

    @property
    def agent(self) -> str:
        return self.of.ask.agent

    @property
    def episode(self) -> Episode:
        return self.of.episode

    def request(self, max_new_tokens: int, sampling: Sampling, seed: int, **more: Any) -> DecodeRequest:
        """Build the request for the next segment. more: further fields of DecodeRequest."""
        if self.call is not None:
            sampling = replace(sampling, stop=(*sampling.stop, *self.call.stop))
            max_new_tokens = min(max_new_tokens, self.tokens_left_of_call)
        tokens = prompt = self.of.prompt_ids
        if len(self.token_ids):
            tokens = np.concatenate([prompt, self.token_ids]).astype(np.int32, copy=False)
        inserted = np.flatnonzero(~self.is_sampled)
        begin = len(prompt) + (int(inserted[-1]) + 1 if len(inserted) else 0)
        return DecodeRequest(
            self.uid,
            tokens,
            max_new_tokens,
            sampling,
            seed,
            self.of.ask.id,
            text_from=len(prompt),
            stop_from=begin,
            **more,
        )

    @property
    def tokens_left_of_call(self) -> int:
        """Number of tokens left for the answer to the program's call."""
        if self.call is None or self.call.max_tokens is None:
            return MOST_TOKENS
        return self.call_start + self.call.max_tokens - len(self.token_ids)

    @property
    def is_trained(self) -> BoolArray:
        """Mask [N] of trained tokens: is_sampled, except in answers that a program discarded or never read."""
        if not self.turns:
            return self.is_sampled
        is_read = np.zeros(len(self.token_ids), np.bool_)
        for turn in self.turns:
            is_read[turn.start : turn.end] = turn.fate is Fate.READ
        return self.is_sampled & is_read

    def until_read(self) -> Completion:
        """Cut the tokens after the last answer that a program read, and take over that answer's finish reason.

        Keeps all tokens if no answer was read, or if no program plays.
        """
        last = next((turn for turn in reversed(self.turns) if turn.fate is Fate.READ), None)
        if last is None or (last is self.turns[-1] and last.end == len(self.token_ids)):
            return self
        tokens, own = self.token_ids[: last.end], self.is_sampled[: last.end]
        return replace(self, token_ids=tokens, is_sampled=own, finish=last.finish)

    def extend(self, result: DecodeResult) -> None:
        """Append one segment and its records. A segment without tokens, from an engine that failed at once, leaves no trace."""
        self.seconds += result.seconds
        if result.usage is not None:
            read, drawn = self.usage or (0, 0)
            self.usage = read + result.usage[0], drawn + result.usage[1]
        if len(result.token_ids):
            self._keep(result.kept_tokens, len(result.token_ids))
            start = len(self.token_ids)
            self.segments = (*self.segments, Segment(start, start + len(result.token_ids), result.version))
            self._append(result.token_ids, result.logprobs, np.ones(len(result.token_ids), np.bool_))
            if result.routed_experts is not None:
                known = [] if self.routed_experts is None else [self.routed_experts]
                self.routed_experts = np.concatenate([*known, result.routed_experts])

    def go_on_with(self, token_ids: IntArray) -> None:
        """Append tokens that the policy did not sample: they have no log-probs, and belong to the preceding segment."""
        num_tokens = len(token_ids)
        self._keep(None, num_tokens)
        if self.segments:
            self.segments = (*self.segments[:-1], replace(self.segments[-1], end=self.segments[-1].end + num_tokens))
        self._append(token_ids, np.zeros(num_tokens, np.float32), np.zeros(num_tokens, np.bool_))
        self.turn += 1

    def _append(self, token_ids: IntArray, logprobs: FloatArray, is_sampled: BoolArray) -> None:
        if len(self.token_ids):  # otherwise the first segment's arrays are kept without a copy
            token_ids = np.concatenate([self.token_ids, token_ids])
            logprobs = np.concatenate([self.logprobs, logprobs])
            is_sampled = np.concatenate([self.is_sampled, is_sampled])
        self.token_ids = token_ids.astype(np.int32, copy=False)
        self.logprobs = logprobs.astype(np.float32, copy=False)
        self.is_sampled = is_sampled

    def _keep(self, kept_tokens: KeptTokens | None, num_tokens: int) -> None:
        """Append kept tokens of the next positions, not yet in token_ids; None: nothing was truncated there."""
        if self.kept_tokens is None and kept_tokens is None:
            return
        before = self.kept_tokens or KeptTokens.nothing_left_out(len(self.token_ids))
        self.kept_tokens = before.followed_by(kept_tokens or KeptTokens.nothing_left_out(num_tokens))

    def copy(self) -> Completion:
        """Return an independent copy. A finished copy keeps its sample; a completion being judged is judged again."""
        if self.state is State.OVER:
            return Completion(State.OVER, sample=self.sample)
        return replace(self, sample=None)


class _OfAsk:
    """Fields that are not checkpointed. episode: episode of the ask, set by the player."""

    episode: Episode


@dataclass(slots=True, eq=False)
class OpenAsk(_OfAsk):
    """An open ask: its agent's prompt, and its completions by index.

    opened_version: the policy version at the ask's first submission, from which its age is counted.
    """

    ask: Ask
    prompt_ids: IntArray
    prompt_text: str
    opened_version: int
    completions: list[Completion]

    def __post_init__(self) -> None:
        for index, each in enumerate(self.completions):
            each.of, each.index = self, index

    @property
    def unfinished(self) -> list[Completion]:
        return [each for each in self.completions if each.state is not State.OVER]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Judged samples, by index."""
        return tuple(each.sample for each in self.completions if each.state is State.OVER and each.sample is not None)

    def copy(self) -> OpenAsk:
        return replace(self, completions=[each.copy() for each in self.completions])


@dataclass(slots=True)
class Instance:
    """One draw of a problem, while any part of it is running.

    episodes: running episodes, by id. held: samples that wait for the instance's end, to be trained together. is_added: True if
    the problem was drawn for rollout.refill. is_counted: True if rollout.refill counted one of its groups. has_spread: True if a
    counted group has spread.
    """

    episodes: dict[str, Episode] = field(default_factory=dict)
    held: list[Sample] = field(default_factory=list)
    is_added: bool = False
    is_counted: bool = False
    has_spread: bool = False
