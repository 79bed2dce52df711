"""What a team is taught before RL where its policy starts from random weights. One class a team; registry.py has them all."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import Settings
from marsrl.rollout.tasks.trace import Trace
from marsrl.trainer.config import RunConfig, WarmStartConfig


class School(ABC):
    """Makes the lessons of one team: traces of tutors that slip, and drills. A seed's lessons are the same on every rank.

    tokenizer: which of rollout.tasks.registry.TOKENIZERS has their words. alone: whose loss ends phase 1; judged: whose loss ends
    phase 2. section: the part of config.warm_start that this school alone reads; None: there is none. wants: for people, the
    settings with which it teaches.
    """

    tokenizer: ClassVar[str]
    alone: ClassVar[Role]
    judged: ClassVar[Role]
    section: ClassVar[str | None] = None
    wants: ClassVar[str]

    def __init__(self, config: RunConfig, rng: random.Random) -> None:
        self.settings = config.warm_start
        self.rng = rng

    @classmethod
    @abstractmethod
    def teaches(cls, config: RunConfig) -> bool:
        """Is the team of these settings its own?"""

    @classmethod
    @abstractmethod
    def options(cls, config: RunConfig) -> Settings:
        """config.task_options, read: the problems that the lessons are about."""

    @classmethod
    @abstractmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        """By row of the evaluation before RL ("system", or an agent's name): the bounds of a mediocre team."""

    @abstractmethod
    def first_lesson(self, step: int) -> list[Trace]:
        """Traces of phase 1, what everything else stands on; `alone` writes most of them."""

    @abstractmethod
    def team_lesson(self) -> list[Trace]:
        """Traces of phase 2: all roles, on the same problems."""
