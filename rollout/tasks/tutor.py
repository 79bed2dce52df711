"""Tutors: writers of demonstrations for teams that start from random weights (docs/cpu_default.md)."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import Settings
from marsrl.rollout.tasks.config import TutorConfig
from marsrl.rollout.types import Message

_WEIGHTS = dict.fromkeys(("correct", "wrong", "yes", "no"), 6.0)
"""Loss weights of verdict words. A report of thirty words has one verdict, which would not be learned with weight 1."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A prompt and the completion to imitate (followed by the end token if `ends`).

    prompt: a str is tokenised without a chat template. completion: words separated by spaces, one token each. role: role that
    writes the completion; None for a drill whose loss is not reported.
    """

    role: Role | None
    prompt: tuple[Message, ...] | str
    completion: str
    ends: bool = True

    @property
    def weights(self) -> list[float]:
        """Loss weight of each token of the completion, including the end token."""
        return [_WEIGHTS.get(word, 1.0) for word in self.completion.split(" ")] + [1.0] * self.ends


Options = TypeVar("Options", bound=Settings)


class Tutor(ABC, Generic[Options]):
    """Writer of one team's demonstrations with deliberate mistakes (slips), which RL removes.

    Equal seeds give equal demonstrations.

    tokenizer: key of rollout.tasks.registry.TOKENIZERS. task_options: class of the task's options. judged: (role whose loss ends
    phase 1, role whose loss ends phase 2).
    """

    tokenizer: ClassVar[str]
    task_options: ClassVar[type[Settings]]
    judged: ClassVar[tuple[Role, Role]]

    def __init__(self, rng: random.Random, config: TutorConfig, options: Options) -> None:
        self.rng, self.config, self.options = rng, config, options

    @abstractmethod
    def foundation(self, step: int) -> Iterator[Trace]:
        """Write the demonstrations of a step of phase 1, most of them by its judged role."""

    @abstractmethod
    def team_lesson(self) -> Iterator[Trace]:
        """Write the demonstrations of a step of phase 2: all roles, on the same problems."""
