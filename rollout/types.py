"""The data contract between rollout and trainer, in the order the data flows.

    Problem -> Ask (an agent is asked) -> Sample (one completion) -> reward -> Group (samples that are compared)

Everything here is immutable, and holds numpy arrays and plain values only: it crosses process borders.
Token ids travel; text is decoded once for parsing and viewing and is never tokenised again as a completion.
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
"""The reward of a sample that could not be judged: left out of mean, std and count, advantage 0, never picked."""


class Finish(StrEnum):
    """Why a completion ended, or that it has not."""

    STOP = "stop"  # the model ended it (end token)
    LENGTH = "length"  # it reached the global maximum length
    UNFINISHED = "unfinished"  # its segment budget is used up; it goes on in a later stage
    WAITING = "waiting"  # the model paused for what a tool or another agent says; it goes on with that behind it
    ERROR = "error"  # the engine gave it up; its reward is missing


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and what judges an answer to it: Problem("train.jsonl:7", "a 3 b *7", "1", task="arithmetic")."""

    id: str
    question: str
    answer: str | None  # the reference; None where only a judge can tell
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


@dataclass(frozen=True, slots=True)
class Reward:
    """A judged completion.

        Reward(0.8, 1.0, {"answer": 1.0, "length": -0.2})       right, and longer than it should be
        Reward(MISSING, MISSING, note="no judgement within judge.timeout_s = 600 s")

    value: what the trainer uses (after penalties); NaN = missing (algorithms: left out everywhere).
    correct: the task's own judgement before penalties, in [0, 1]; NaN = unknown.
    parts: the addends of `value` by name. note: why, for people (a reason for a missing reward, an unparsable answer).
    """

    value: float
    correct: float
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def is_missing(self) -> bool:
        return math.isnan(self.value)


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of one agent: num_samples completions of one input.

        Ask("000017/solver", "solver", num_samples=8, group="000017/solver")
        Ask("000017/solver:3/verifier1", "verifier1", inputs=("000017/solver:3",), num_samples=8, group=...)

    id: unique in a run, a path that names its ancestors; a sample's uid adds its index, `000017/solver:3/verifier1:0`.
    inputs: uids of earlier samples of the episode that the messages show; the last one is the parent.
    group: what its samples are compared with: `id`, those of this input alone; or a name that several asks of the rollout
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
    """A call of a tool, for a sample that has ended or waits for it.

        ToolCall("000017.0/solver:0/0/search#0", "search", '{"query": "capital of France"}')

    id: unique in a run: the sample's uid, its turn, the tool, the place among the calls of that turn.
    arguments: a JSON object, as a model wrote it or a team made it; not trusted.
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

    parameters: a JSON schema of its arguments. server: the tool that has it among others, and whose calls name it
    ({"name": ..., "arguments": {...}}); "" where the function is the tool.
    """

    name: str
    description: str
    parameters: Mapping[str, object]
    server: str = ""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A tool's words: text that a model can read, of an error too.

        ToolOutput("12.5")                          a text
        ToolOutput.of(["first page", "second"])     pages or papers: parts, which can be read one by one

    text: all of it, parts on lines of their own. part_ends: where in it each part ends, () of what has none: a checkpoint keeps
    every character once. seconds: of the tool's run; 0 where an earlier one was remembered, or another call's.
    """

    text: str
    is_error: bool = False
    part_ends: tuple[int, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, parts: Sequence[str]) -> ToolOutput:
        """The output of these parts."""
        return cls("\n".join(parts), part_ends=tuple(end - 1 for end in accumulate(len(part) + 1 for part in parts)))

    @property
    def parts(self) -> tuple[str, ...]:
        """One text a page or paper; () of an error, of nothing found and of what a tool says in one piece."""
        starts = (0, *(end + 1 for end in self.part_ends))
        return tuple(self.text[start:end] for start, end in zip(starts, self.part_ends, strict=False))


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion by one agent: the unit that is trained.

    A Verifier's first of several on the Solver's fourth solution, decoded in two stages and right to say "wrong":

        Sample(
            "000017/solver:3/verifier1:0", "000017", "train.jsonl:7", "verifier1", "000017/solver:3/verifier1",
            parent_uid="000017/solver:3",
            prompt_ids=[5, 9, 4], token_ids=[7, 6, 2], is_sampled=[True, True, True], rollout_logprobs=[-0.1, -2.3, 0.0],
            segments=(Segment(0, 2, version=4), Segment(2, 3, version=5)), finish=Finish.STOP,
            full_text="Verdict: wrong", verdict=False, reward=Reward(1.0, 1.0, {"verdict": 1.0}),
        )

    token_ids [N] int32 and rollout_logprobs [N] float32 (nats, at the sampling temperature, of the weights that
    sampled, renormalised over what the sampler kept) cover the completion only, end token included. is_sampled [N] is
    False where the policy did not choose the token: a tool or another agent wrote it, while the sample waited. turn: how
    often it has gone on so; turn_start: the character of `text` from which all is its own since; in_thought: that begins
    within a thought (<think>).
    segments partition [0, N) by the policy version that decoded them. full_text: `text`, None where it is not kept. shown: what
    other agents see of it, "" where it never said anything. verdict: True = "correct"; answer: a final answer; None = not
    parsable, or not what the agent is asked for.
    outcome: correctness of what its episode ended with, where whole rollout instances are trained; NaN = not known.
    routed_experts: of prompt and completion, [tokens fed to the model, layers, top_k]; None: not recorded.
    kept_tokens: of the completion's N places, what the sampler kept of the vocabulary; None: not recorded.
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

    @property
    def episode_id(self) -> str:
        return self.uid.partition("/")[0]

    @property
    def text(self) -> str:
        """All that it wrote, its thought too; ValueError for a sample of an episode that has ended (without_tokens)."""
        if self.full_text is None:
            raise ValueError(
                f"sample {self.uid}: `text` is not kept; read `shown`, into which `parse` puts what others may see"
            )
        return self.full_text

    @property
    def turn_text(self) -> str:
        """Its own words in its present turn; nothing in it is a stranger's."""
        return self.text[self.turn_start :]

    @property
    def oldest_version(self) -> int:
        return min(segment.version for segment in self.segments)

    def without_tokens(self) -> Sample:
        """The part that later agents, rewards and picks need: no arrays, neither prompt nor thought."""
        return replace(
            self,
            prompt_ids=_NO_TOKENS,
            token_ids=_NO_TOKENS,
            is_sampled=_NO_TOKENS.astype(np.bool_),
            rollout_logprobs=_NO_TOKENS.astype(np.float32),
            full_text=None,
            prompt_text="",
            routed_experts=None,
            kept_tokens=None,
        )


_NO_TOKENS: IntArray = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one agent that are compared with each other, by uid: of one input, or of one rollout instance (Ask.group).

    Group("000017/solver", "000017", "solver", samples)     # "000017/solver:0" to "000017/solver:7"
    """

    group_id: str
    rollout_id: str
    agent: str
    samples: tuple[Sample, ...]
