"""Lessons before RL for teams whose policies start from random weights: one school a team.

Solver, Verifier and Corrector are taught to calculate chains:

    phase 1   the Solver alone with few slips, short problems and single operations first, until its loss is low: the
              arithmetic table must be there before anything else can be learned
    phase 2   all roles from tutors that slip, until the Verifier's loss is low as well: it first copies the claim's
              lines, and stays at chance until it works them out

Teams on the built-in questions are taught to read what was found of linked facts:

    phase 1   documents and questions about the last of them, until the loss of who answers is low: copying must be there first
    phase 2   all roles from tutors that slip, until the loss of who asks is low as well
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import Settings
from marsrl.rollout.tasks.arithmetic import draw_chain
from marsrl.rollout.tasks.arithmetic_tutor import TutorRates, equality_drill, solver_trace, table_drill, team_traces
from marsrl.rollout.tasks.config import ArithmeticOptions, QaOptions
from marsrl.rollout.tasks.facts_tutor import another_world, call_traces, distilling_drill, reading_drill, search_traces
from marsrl.rollout.tasks.word_tokenizer import Trace
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
        """True if the school teaches the team of these settings."""

    @classmethod
    @abstractmethod
    def options(cls, config: RunConfig) -> Settings:
        """config.task_options, read: the problems that the lessons are about."""

    @classmethod
    @abstractmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        """Accuracy of a mediocre team, from and to, by row of the evaluation before RL ("system", or an agent's name)."""

    @abstractmethod
    def first_lesson(self, step: int) -> list[Trace]:
        """Traces of phase 1, what everything else stands on; `alone` writes most of them."""

    @abstractmethod
    def team_lesson(self) -> list[Trace]:
        """Traces of phase 2: all roles, on the same problems."""


class ArithmeticSchool(School):
    """Teaches every team on the arithmetic task."""

    tokenizer = "arithmetic"
    alone, judged = Role.SOLVER, Role.VERIFIER
    wants = "task=arithmetic"

    def __init__(self, config: RunConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        settings = config.warm_start
        self._options = self.options(config)
        self._rates = TutorRates(
            settings.slip_solver,
            settings.slip_verifier,
            settings.slip_corrector,
            settings.anchor,
            settings.restate,
            settings.hard_claims,
            settings.slip_hard,
        )

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        return config.task == "arithmetic"

    @classmethod
    def options(cls, config: RunConfig) -> ArithmeticOptions:
        return ArithmeticOptions.model_validate(dict(config.task_options))

    @classmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        return {"solver": settings.accuracy_solver, "verifier1": settings.accuracy_verifier}

    def first_lesson(self, step: int) -> list[Trace]:
        """The Solver's traces, and single operations. The first steps have problems of 1-3, then 1-7 operations."""
        options = self._options
        if step < self.settings.short_steps:
            longest = 3 if step < self.settings.short_steps // 2 else options.max_operations
            options = options.model_copy(update={"min_operations": 1, "max_operations": longest})
        chains = [draw_chain(self.rng, options, held_out=False) for _ in range(self.settings.solver_batch)]
        traces = [solver_trace(self.rng, chain, self.settings.slip_solver_phase1, options) for chain in chains]
        drills = [equality_drill(self.rng) for _ in range(self.settings.equality_drills)]
        drills += [table_drill(self.rng) for _ in range(self.settings.table_drills)]
        return traces + drills

    def team_lesson(self) -> list[Trace]:
        chains = [draw_chain(self.rng, self._options, held_out=False) for _ in range(self.settings.team_batch)]
        traces = [trace for chain in chains for trace in team_traces(self.rng, chain, self._rates, self._options)]
        return traces + [equality_drill(self.rng) for _ in range(self.settings.equality_drills)]


class FactsSchool(School):
    """Teaches one team on the built-in questions in their terse wording; section: its orchestration too."""

    section: ClassVar[str]

    def __init__(self, config: RunConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._options = self.options(config)

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        """The team on these questions, in the words of policies that are made from nothing."""
        return (
            config.task == "qa"
            and config.data.train is None
            and config.task_options.get("wording") == "terse"
            and config.orchestration == cls.section
            and all(agent.prompt == "facts" for agent in config.agents.values())
        )

    @classmethod
    def options(cls, config: RunConfig) -> QaOptions:
        return QaOptions.model_validate(dict(config.task_options))

    @classmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        return {"system": getattr(settings, cls.section).accuracy}


class SearchSchool(FactsSchool):
    """Teaches the search team on the built-in questions in their terse wording."""

    tokenizer = "facts"
    alone, judged = Role.ANSWERER, Role.SEARCHER
    section = "search_team"
    wants = (
        "preset=cpu_search_team (task=qa with task_options.wording=terse, orchestration=search_team, "
        "agents.<name>.prompt=facts)"
    )

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        return super().teaches(config) and not cls.options(config).calculations

    def first_lesson(self, step: int) -> list[Trace]:
        """One document at a time in the first steps, then one or two."""
        most = 1 if step < self.settings.short_steps else 2
        return self._drills(self.settings.solver_batch, most)

    def team_lesson(self) -> list[Trace]:
        world = another_world(self.rng, self._options)
        slips = self.settings.search_team
        traces = [trace for _ in range(self.settings.team_batch) for trace in search_traces(self.rng, world, slips)]
        return traces + self._drills(slips.drills, 2)

    def _drills(self, count: int, most_documents: int) -> list[Trace]:
        world = another_world(self.rng, self._options)
        return [reading_drill(self.rng, world, self.rng.randint(1, most_documents)) for _ in range(count)]


class DualSchool(FactsSchool):
    """Teaches System 2 and System 1 to call tools, also about calculations, and to read what was found; System 1 alone first."""

    tokenizer = "calls"
    alone, judged = Role.DISTILLER, Role.REASONER
    section = "dual_system"
    wants = (
        "preset=cpu_dual_system (task=qa with task_options.wording=terse, orchestration=dual_system, "
        "agents.<name>.prompt=facts)"
    )

    def first_lesson(self, step: int) -> list[Trace]:
        return self._drills(self.settings.solver_batch)

    def team_lesson(self) -> list[Trace]:
        world = another_world(self.rng, self._options)
        lessons = self.settings.dual_system
        traces = [trace for _ in range(self.settings.team_batch) for trace in call_traces(self.rng, world, lessons)]
        return traces + self._drills(lessons.drills)

    def _drills(self, count: int) -> list[Trace]:
        world = another_world(self.rng, self._options)
        return [distilling_drill(self.rng, world) for _ in range(count)]


SCHOOLS: tuple[type[School], ...] = (ArithmeticSchool, SearchSchool, DualSchool)


def school_of(config: RunConfig) -> type[School] | None:
    """The school of the team of these settings; None: there is none, and its policies need models."""
    return next((school for school in SCHOOLS if school.teaches(config)), None)


def accuracy_before_rl(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Accuracy of a taught team before RL, from and to, by row of the evaluation; {} where no school teaches it."""
    school = school_of(config)
    return school.bounds(config.warm_start) if school is not None else {}


def who_is_taught() -> str:
    """Settings with which a policy needs no model, in words."""
    return ", or ".join(school.wants for school in SCHOOLS)
