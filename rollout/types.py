"""The data contract between rollout and trainer, in the order the data flows.

    Problem -> Ask (a call of an agent) -> Sample (one completion) -> reward -> Group (samples that are compared)

All classes are immutable and hold only numpy arrays and plain values, so that they can be sent between processes. Token ids are
sent; text is decoded once for parsing and viewing, and is never tokenised again as a completion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

MISSING = math.nan
"""Reward of a sample that could not be judged: excluded from mean, std and count; advantage 0; never picked."""


class Finish(StrEnum):
    """Finish reason of a completion, or UNFINISHED."""

    STOP = "stop"  # the model emitted an end token
    LENGTH = "length"  # the maximum length is reached
    UNFINISHED = "unfinished"  # the segment's token budget is spent; a later stage continues
    WAITING = "waiting"  # the model paused for a tool's output or another agent's answer, and will continue
    ERROR = "error"  # the engine gave up; the reward is missing


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its reference answer: Problem("train.jsonl:7", "a 3 b *7", "1", task="arithmetic")."""

    id: str
    question: str
    answer: str | None  # reference; None if only a judge can decide
    task: str


MessageRole = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn, before the chat template."""

    role: MessageRole
    content: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, end) of a completion, decoded in one stage by one policy version."""

    start: int
    end: int
    version: int


class Fate(StrEnum):
    """Fate of an answer to a call of a program."""

    READ = "read"  # trained: the program received the answer, or a later call continues it
    UNREAD = "unread"  # not received: the connection was cut, or the session ended earlier
    SUPERSEDED = "superseded"  # discarded: no call continues it, and the program repeated the request


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [start, end) of a completion: the answer to one call of a program.

    call: number in the session, from 1. finish: this answer's finish reason. Only answers that were READ are trained.
    """

    call: int
    start: int
    end: int
    finish: Finish
    fate: Fate = Fate.READ


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first num_tokens tokens, of prompt and completion, that a sample has in common with the sample `uid`."""

    uid: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Caller:
    """The answer that made a program start a sub-agent: the answer in sample `uid` to call number `call` (from 1)."""

    uid: str
    call: int


PENALTIES = ("format", "overlong")
"""Names of the penalties on a completion's form in Reward.parts."""


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward of a completion.

        Reward(0.8, 1.0, {"answer": 1.0, "length": -0.2})       right, and longer than it should be
        Reward(MISSING, MISSING, note="no judgement within judge.timeout_s = 600 s")

    value: reward for training, after penalties; NaN = missing (excluded by all algorithms).
    correct: the task's judgement before penalties, in [0, 1]; NaN = unknown.
    parts: the addends of `value`, by name. note: explanation of a missing reward or unparsable answer, for display.
    turns: part of `value` that belongs to each of the sample's trained_turns; the rest of `value` belongs to the last turn. ()
    means that all of `value` belongs to the last turn.
    """

    value: float
    correct: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    turns: tuple[float, ...] = ()

    @property
    def is_missing(self) -> bool:
        return math.isnan(self.value)


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of one agent: num_samples completions of one input.

        Ask("000017/solver", "solver", num_samples=8, group="000017/solver")
        Ask("000017/solver:3/verifier1", "verifier1", inputs=("000017/solver:3",), num_samples=8, group=...)

    id: unique in a run, a path of its ancestors; a sample's uid appends its index, `000017/solver:3/verifier1:0`.
    inputs: uids of earlier samples of the episode that the messages show; the last one is the parent.
    group: name of the group in which the samples are compared: the ask's `id`, or a name that several asks of the rollout
    instance share.
    """

    id: str
    agent: str
    inputs: tuple[str, ...] = ()
    num_samples: int = 1
    group: str = ""

    @property
    def episode_id(self) -> str:
        return self.id.partition("/")[0]

    @property
    def parent_uid(self) -> str | None:
        return self.inputs[-1] if self.inputs else None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call for a sample that has ended or is waiting for it.

        ToolCall("000017.0/solver:0/0/search#0", "search", '{"query": "capital of France"}')

    id: unique in a run: the sample's uid, the turn, the tool, and the index among the turn's calls.
    arguments: a JSON object written by a model or a team; untrusted.
    """

    id: str
    tool: str
    arguments: str

    @property
    def episode_id(self) -> str:
        return self.id.partition("/")[0]


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that a model can call, as chat templates show it.

        ToolFunction("convert", "Converts a length.", {"type": "object", "properties": {"value": {"type": "number"}}})

    parameters: JSON schema of the arguments. server: tool that groups this function with others; calls then name the tool
    and the function ({"name": ..., "arguments": {...}}); "" if the function is the tool itself.
    """

    name: str
    description: str
    parameters: Mapping[str, object]
    server: str = ""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A tool's output, or its error, as text for a model.

        ToolOutput("12.5")                          one text
        ToolOutput.of(["first page", "second"])     several parts, such as pages or papers, that can be read one by one

    text: the whole output; parts are joined by newlines. part_ends: end of each part in `text`, so that a checkpoint
    stores every character once; () without parts. seconds: the tool's run time; 0 if the output was cached.
    """

    text: str
    is_error: bool = False
    part_ends: tuple[int, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, parts: Sequence[str]) -> ToolOutput:
        """Build an output from parts."""
        return cls("\n".join(parts), part_ends=tuple(end - 1 for end in accumulate(len(part) + 1 for part in parts)))

    @property
    def parts(self) -> tuple[str, ...]:
        """One text per part; () for an error, an empty result, or an output without parts."""
        starts = (0, *(end + 1 for end in self.part_ends))
        return tuple(self.text[start:end] for start, end in zip(starts, self.part_ends, strict=False))


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion by one agent: the unit of training.

    Example: a Verifier's first sample on the Solver's fourth solution, decoded in two stages; its verdict "wrong" is right:

        Sample(
            "000017/solver:3/verifier1:0", "000017", "train.jsonl:7", "verifier1", "000017/solver:3/verifier1",
            parent_uid="000017/solver:3",
            prompt_ids=[5, 9, 4], token_ids=[7, 6, 2], is_sampled=[True, True, True], rollout_logprobs=[-0.1, -2.3, 0.0],
            segments=(Segment(0, 2, version=4), Segment(2, 3, version=5)), finish=Finish.STOP,
            full_text="Verdict: wrong", verdict=False, reward=Reward(1.0, 1.0, {"verdict": 1.0}),
        )

    token_ids [N] int32 and rollout_logprobs [N] float32 cover the completion only, end token included. Log-probs are in
    nats, at the sampling temperature, under the weights that sampled, renormalised over the tokens that the sampler kept.
    is_sampled [N] is False for tokens that are not trained: tokens that a tool or another agent wrote while the sample waited,
    and answers that a program discarded or never read. turn: number of times that the sample has continued after waiting;
    turn_start: index in `text` at which the current turn begins; in_thought: True if it begins within a thought (<think>).
    turns: the answers to a program's calls, in order; () if no program played. turn_end: index in `text` of the end of the
    last answer that was read, if unread answers follow; None: the end of `text`.
    behind: longest common prefix with an earlier sample of the agent in a program's session; None if there is none. caller:
    answer that made a program start this sample's sub-agent; None for other samples. rewritten: what a
    program changed in its chat, so that the sample does not continue an earlier one (for display); "" if it changed nothing.
    segments partition [0, N) by the policy version that decoded them. full_text: the value of `text`; None if not kept.
    shown: the part of `text` that other agents see. answer: the final answer. verdict: True for "correct". Both are None if
    unparsable, or if the agent gives none. outcome: correctness of the episode's result, if whole rollout instances are
    trained; NaN = unknown.
    routed_experts: experts of prompt and completion, [tokens fed to the model, layers, top_k]; None: not recorded.
    kept_tokens: tokens that the sampler kept at each of the completion's N positions; None: not recorded.
    """

    uid: str
    rollout_id: str
    problem_id: str
    agent: str
    group_id: str
    parent_uid: str | None
    prompt_ids: IntArray
    token_ids: IntArray
    is_sampled: BoolArray
    rollout_logprobs: FloatArray
    segments: tuple[Segment, ...]
    finish: Finish
    full_text: str | None = ""
    prompt_text: str = ""
    shown: str = ""
    answer: str | None = None
    verdict: bool | None = None
    reward: Reward = Reward(MISSING, MISSING, note="not judged")
    outcome: float = MISSING
    routed_experts: ExpertArray | None = None
    kept_tokens: KeptTokens | None = None
    turn: int = 0
    turn_start: int = 0
    in_thought: bool = False
    turns: tuple[Turn, ...] = ()
    turn_end: int | None = None
    behind: Prefix | None = None
    caller: Caller | None = None
    rewritten: str = ""

    @property
    def episode_id(self) -> str:
        return self.uid.partition("/")[0]

    @property
    def session_id(self) -> str:
        """Id of the session that the sample belongs to, or the sample's uid.

        An agent's samples in one session of a program count as one in statistics.
        """
        return self.episode_id if self.turns else self.uid

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the policy chose, including answers that no program read."""
        if self.turns:
            return sum(turn.end - turn.start for turn in self.turns)
        return int(np.count_nonzero(self.is_sampled))

    @property
    def length(self) -> int:
        """Number of tokens up to the end of the last answer that a program read; all tokens for a sample of a team."""
        read = [turn.end for turn in self.turns if turn.fate is Fate.READ]
        return len(self.token_ids) if not self.turns else max(read, default=0)

    @property
    def trained_turns(self) -> list[Turn]:
        """Trained turns, in order: the answers that a program read, or a team's runs of consecutive sampled tokens."""
        if self.turns:
            return [turn for turn in self.turns if turn.fate is Fate.READ]
        ends = np.flatnonzero(np.diff(self.is_sampled, prepend=False, append=False)).tolist()
        runs = enumerate(zip(ends[::2], ends[1::2], strict=True), start=1)
        return [Turn(number, start, end, self.finish) for number, (start, end) in runs]

    @property
    def text(self) -> str:
        """The whole completion, thoughts included. Raises ValueError after `without_tokens`, as for an episode's samples."""
        if self.full_text is None:
            raise ValueError(
                f"sample {self.uid}: `text` is not kept in an episode; read `shown`, which the orchestration's `parse` sets"
            )
        return self.full_text

    @property
    def turn_text(self) -> str:
        """The policy's own text of the current turn, without text by tools or other agents.

        If a program plays: the text of the last answer that was read.
        """
        return self.text[self.turn_start : self.turn_end]

    @property
    def oldest_version(self) -> int:
        return min(segment.version for segment in self.segments)

    def without_tokens(self) -> Sample:
        """Return a copy without arrays, prompt and thoughts, which later agents, rewards and picks do not need."""
        return replace(
            self,
            prompt_ids=_NO_TOKENS,
            token_ids=_NO_TOKENS,
            is_sampled=_NO_BOOLS,
            rollout_logprobs=_NO_FLOATS,
            full_text=None,
            prompt_text="",
            routed_experts=None,
            kept_tokens=None,
        )


_NO_TOKENS: IntArray = np.zeros(0, np.int32)
_NO_BOOLS: BoolArray = np.zeros(0, np.bool_)
_NO_FLOATS: FloatArray = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one agent that are compared with each other, ordered by uid.

    They have the same input, or belong to the same rollout instance (Ask.group).

    Group("000017/solver", "000017", "solver", samples)     # "000017/solver:0" to "000017/solver:7"
    """

    group_id: str
    rollout_id: str
    agent: str
    samples: tuple[Sample, ...]
