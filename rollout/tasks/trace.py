"""A tutor's trace: the prompt that an agent reads, and the completion that it is to imitate."""

from __future__ import annotations

from dataclasses import dataclass

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.types import Message

_VERDICTS = ("correct", "wrong", "yes", "no")


@dataclass(frozen=True, slots=True)
class Trace:
    """A prompt and the completion to imitate (the end token comes after it where `ends` is set).

    prompt: a str is tokenised as it stands. completion: words with a space between, a token each. role: who writes it; None
    for a drill whose loss nobody asks for.
    """

    role: Role | None
    prompt: tuple[Message, ...] | str
    completion: str
    ends: bool = True

    def weights(self, verdict_weight: float) -> list[float]:
        """The loss weight of each token of the completion, the end token included: one token a word.

        Verdict words weigh more: one word in thirty would otherwise stay at chance.
        """
        words = self.completion.split(" ")
        return [verdict_weight if word in _VERDICTS else 1.0 for word in words] + [1.0] * self.ends
