"""The types between the player, which knows engines, and the gateway, which knows programs.

player  -- submit(ToolCall "session") ------------------------> gateway     a session may begin
player <-- take(): Taken(calls, lost) -------------------------            agents are called, sessions lost
player  -- call.reply.set_result(Reply) ---------------------->            what an engine answered
player <-- Future[ToolOutput], whose text is a SessionEnd ------            the session is over
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

from marsrl.rollout.types import Finish, FloatArray, IntArray

SESSION = "session"
"""The tool that a session is to the player: it takes long, and asks agents meanwhile."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens of one turn. uid: of the sample that they belong to. logprobs in nats; error: why an engine gave up."""

    uid: str
    token_ids: IntArray
    logprobs: FloatArray
    finish: Finish
    error: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """A program's call of an agent.

    uid: of the sample that goes on; "": a new one begins, the agent's `number`-th in this session. behind: of the sample with
    whose tokens the new one begins; "": of none. attempt: how often the session was begun anew. token_ids [N]: the new sample's
    prompt, or what goes behind the sample's tokens. text: the prompt for people. max_tokens, stop: of this turn, beside the
    agent's own.
    """

    session: str
    agent: str
    number: int
    attempt: int
    token_ids: IntArray
    uid: str = ""
    behind: str = ""
    text: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reply: Future[Reply] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Taken:
    """News of sessions: lost ones, which begin anew, and calls in the order in which they came."""

    lost: Sequence[str] = ()
    calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a session, as its ToolOutput keeps it.

    reward: of every sample; rewards: by agent or uid, which come first. Where there is neither, the task judges: `answer`, or
    else the last answer of the session. read: uids of the samples whose last turn the program has read, in the order of these
    turns. num_calls: turns of all of them. asked: the uid of the sample of each call, as they came; "": it got no answer.
    """

    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    read: Sequence[str] = ()
    num_calls: int = 0
    asked: Sequence[str] = ()

    @property
    def is_judged(self) -> bool:
        """Has the program said what its samples are worth?"""
        return self.reward is not None or bool(self.rewards)

    def reward_of(self, uid: str, agent: str) -> float | None:
        """None: it said nothing of this sample."""
        return self.rewards.get(uid, self.rewards.get(agent, self.reward))

    def calls_of(self, uid: str) -> str:
        """The calls of the session that the sample answers, for people."""
        numbers = [str(number) for number, each in enumerate(self.asked, 1) if each == uid]
        return f"call{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {len(self.asked)}" if numbers else ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> SessionEnd:
        return cls(**json.loads(text))
