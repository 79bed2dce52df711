"""The schools of teams on the built-in questions, which are taught to read what was found of linked facts.

phase 1   documents and questions about the last of them, until the loss of who answers is low: copying must be there first
phase 2   all roles from tutors that slip, until the loss of who asks is low as well
"""

from __future__ import annotations

import random
from typing import ClassVar

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.calls_tutor import call_traces, distilling_drill
from marsrl.rollout.tasks.config import QaOptions
from marsrl.rollout.tasks.facts_tutor import another_world, reading_drill, search_traces
from marsrl.rollout.tasks.trace import Trace
from marsrl.trainer.config import RunConfig, WarmStartConfig
from marsrl.trainer.schools.school import School


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
