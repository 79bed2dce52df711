"""Verifier, Search and Answer agent are taught to read what was found of linked facts.

phase 1   documents and questions about the last of them, until the answers' loss is low: copying must be there first
phase 2   all roles from tutors that slip, until the Search agent's loss is low as well
"""

from __future__ import annotations

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.facts_tutor import another_world, reading_drill, search_traces
from marsrl.rollout.tasks.trace import Trace
from marsrl.trainer.config import RunConfig
from marsrl.trainer.schools.facts_school import FactsSchool


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
