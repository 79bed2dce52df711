"""Types exchanged by the player, which uses the engines, and the gateway (gateway.py), which serves programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field

import msgspec

from marsrl.rollout.types import Caller, Fate, Finish, FloatArray, IntArray, Prefix, Turn

SESSION = "session"
"""Name of the gateway's only tool. Each call of the tool is a session, during which a program calls agents."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens of one turn.

    uid: uid of the turn's sample. logprobs: nats. error: reason why the engine failed; "" if it succeeded.
    """

    uid: str
    token_ids: IntArray
    logprobs: FloatArray
    finish: Finish
    error: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """A program's call of an agent.

    uid: uid of the continued sample; "" if a new one begins. number: index of the new sample among the agent's in this session.
    attempt: number of restarts of the session. token_ids [N]: the new sample's prompt, or the tokens to append to the continued
    sample. place: index among the session's calls, from 0. text: the prompt for display. max_tokens, stop: limits of this turn,
    in addition to the agent's own.
    """

    session: str
    agent: str
    number: int
    attempt: int
    token_ids: IntArray
    place: int = 0
    uid: str = ""
    text: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    reply: Future[Reply] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Origin:
    """How a sample of a session began. parent: uid of the sample that it follows, for display; "": none. Other fields: see
    Sample."""

    parent: str = ""
    behind: Prefix | None = None
    caller: Caller | None = None
    rewritten: str = ""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """End of a session, as stored in its ToolOutput.

    reward: reward of every sample. rewards: rewards by agent or uid; {} if nothing is rewarded. If both are None, the task judges
    `answer`, or else the session's last answer. turn_rewards: additional reward of each call's answer; () if no answer has one.
    fates: fate of each call's answer, in order of the calls. read: uids of samples with an answer that the program read, in the
    order in which it read each sample's last answer. origins: origins of samples, by uid.
    """

    reward: float | None = None
    rewards: Mapping[str, float] | None = None
    answer: str | None = None
    read: Sequence[str] = ()
    fates: Sequence[str] = ()
    turn_rewards: Sequence[float] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """True if the program gave rewards."""
        return self.reward is not None or self.rewards is not None

    def reward_of(self, uid: str, agent: str) -> float | None:
        """Return the sample's reward; None if not given."""
        return self.reward if self.rewards is None else self.rewards.get(uid, self.rewards.get(agent))

    def calls_of(self, turns: Sequence[Turn]) -> str:
        """List the session's calls answered by a sample, for display: `calls 1, 3, 4 (unread) of 5`."""
        numbers = [f"{each.call}{'' if each.fate is Fate.READ else f' ({each.fate})'}" for each in turns]
        return f"call{'s' * (len(numbers) > 1)} {', '.join(numbers)} of {len(self.fates)}" if numbers else ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> SessionEnd:
        return msgspec.convert(json.loads(text), cls)
