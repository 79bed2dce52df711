"""Supervised lessons before RL for teams with random weights: one school per team.

Solver, Verifier and Corrector are taught to calculate chains:

    phase 1   the Solver alone with few slips, short problems and single operations first, until its loss is low: the
              arithmetic table comes before everything else
    phase 2   all roles from tutors that slip, until the Verifier's loss is low too: it first copies the claim's
              lines and stays at chance until it computes them

Teams on the built-in questions learn to read retrieved linked facts:

    phase 1   documents and questions about the last one, until the answering agent's loss is low: copying comes first
    phase 2   all roles from tutors that slip, until the asking agent's loss is low too
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.arithmetic import draw_chain
from marsrl.rollout.tasks.arithmetic_tutor import equality_drill, solver_trace, table_drill, team_traces
from marsrl.rollout.tasks.config import ArithmeticOptions, QaOptions
from marsrl.rollout.tasks.facts_tutor import another_world, call_traces, distilling_drill, reading_drill, search_traces
from marsrl.rollout.tasks.word_tokenizer import Trace
from marsrl.trainer.config import RunConfig, WarmStartConfig

_WANTED = "preset=cpu_{0} (task=qa with task_options.wording=terse, orchestration={0}, agents.<name>.prompt=facts)"


class School(ABC):
    """Generates one team's lessons: traces of tutors that slip, and drills. A seed gives the same lessons on every rank.

    tokenizer: key of rollout.tasks.registry.TOKENIZERS. alone: agent whose loss ends phase 1; judged: agent whose loss ends
    phase 2. section: its own part of config.warm_start, or None. options: of the task, whose problems the lessons have. wants:
    settings it can teach.
    """

    tokenizer: ClassVar[str]
    options: ClassVar[type[ArithmeticOptions] | type[QaOptions]]
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
        """True if the school can teach the configured team."""

    @classmethod
    @abstractmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        """Lowest and highest accuracy of a mediocre team, by row of the evaluation before RL ("system", or an agent's name)."""

    @abstractmethod
    def first_lesson(self, step: int) -> list[Trace]:
        """Traces of phase 1, the foundation; most are by `alone`."""

    @abstractmethod
    def team_lesson(self) -> list[Trace]:
        """Traces of phase 2: all roles, on the same problems."""


class ArithmeticSchool(School):
    """Teaches any team on the arithmetic task."""

    tokenizer = "arithmetic"
    options = ArithmeticOptions
    alone, judged = Role.SOLVER, Role.VERIFIER
    wants = "task=arithmetic"

    def __init__(self, config: RunConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._options = ArithmeticOptions.model_validate(config.task_options)

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        return config.task == "arithmetic"

    @classmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        return {"solver": settings.accuracy_solver, "verifier1": settings.accuracy_verifier}

    def first_lesson(self, step: int) -> list[Trace]:
        """The Solver's traces and single operations. Problems begin with 1-3, then 1-7 operations."""
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
        traces = [trace for chain in chains for trace in team_traces(self.rng, chain, self.settings, self._options)]
        return traces + [equality_drill(self.rng) for _ in range(self.settings.equality_drills)]


class FactsSchool(School):
    """Teaches a team on the built-in questions in their terse wording; section names its orchestration too."""

    section: ClassVar[str]
    options = QaOptions
    traces: ClassVar[Callable[..., list[Trace]]]  # of one problem, by its tutors

    def __init__(self, config: RunConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._options = QaOptions.model_validate(config.task_options)

    def first_lesson(self, step: int) -> list[Trace]:
        return self._drills(self.settings.solver_batch)

    def team_lesson(self) -> list[Trace]:
        world, lessons = another_world(self.rng, self._options), getattr(self.settings, self.section)
        traces = [trace for _ in range(self.settings.team_batch) for trace in self.traces(self.rng, world, lessons)]
        return traces + self._drills(lessons.drills)

    @abstractmethod
    def _drills(self, count: int) -> list[Trace]:
        """Documents and questions about them."""

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        """True for this team on these questions, in the terse wording for models with random weights."""
        return (
            config.task == "qa"
            and config.data.train is None
            and config.task_options.get("wording") == "terse"
            and config.orchestration == cls.section
            and all(agent.prompt == "facts" for agent in config.agents.values())
        )

    @classmethod
    def bounds(cls, settings: WarmStartConfig) -> dict[str, tuple[float, float]]:
        return {"system": getattr(settings, cls.section).accuracy}


class SearchSchool(FactsSchool):
    """Teaches the search team on the built-in questions in their terse wording."""

    tokenizer = "facts"
    alone, judged = Role.ANSWERER, Role.SEARCHER
    section = "search_team"
    wants = _WANTED.format("search_team")
    traces = staticmethod(search_traces)

    @classmethod
    def teaches(cls, config: RunConfig) -> bool:
        return super().teaches(config) and not QaOptions.model_validate(config.task_options).calculations

    def first_lesson(self, step: int) -> list[Trace]:
        """One document at a time at first, then one or two."""
        most = 1 if step < self.settings.short_steps else 2
        return self._drills(self.settings.solver_batch, most)

    def _drills(self, count: int, most_documents: int = 2) -> list[Trace]:
        world = another_world(self.rng, self._options)
        return [reading_drill(self.rng, world, self.rng.randint(1, most_documents)) for _ in range(count)]


class DualSchool(FactsSchool):
    """Teaches System 2 and System 1 to call tools, calculators among them, and to read results; System 1 alone first."""

    tokenizer = "calls"
    alone, judged = Role.DISTILLER, Role.REASONER
    section = "dual_system"
    wants = _WANTED.format("dual_system")
    traces = staticmethod(call_traces)

    def _drills(self, count: int) -> list[Trace]:
        world = another_world(self.rng, self._options)
        return [distilling_drill(self.rng, world) for _ in range(count)]


SCHOOLS: tuple[type[School], ...] = (ArithmeticSchool, SearchSchool, DualSchool)


def school_of(config: RunConfig) -> type[School] | None:
    """The school for the configured team; None: no school exists, and its policies need models."""
    return next((school for school in SCHOOLS if school.teaches(config)), None)


def accuracy_before_rl(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Lowest and highest accuracy of a taught team before RL, by row of the evaluation; {} without a school."""
    school = school_of(config)
    return school.bounds(config.warm_start) if school is not None else {}


def who_is_taught() -> str:
    """The settings with which a policy needs no model, for messages."""
    return ", or ".join(school.wants for school in SCHOOLS)
