"""System 2 and System 1 are taught to call tools about linked facts and calculations, and to read what was found.

phase 1   System 1 alone: documents and what is looked for in them, until its loss is low: copying must be there first
phase 2   both from tutors that slip, until System 2's loss is low as well
"""

from __future__ import annotations

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.calls_tutor import call_traces, distilling_drill
from marsrl.rollout.tasks.facts_tutor import another_world
from marsrl.rollout.tasks.trace import Trace
from marsrl.trainer.schools.facts_school import FactsSchool


class DualSchool(FactsSchool):
    """Teaches System 2 and System 1 on the built-in questions in their terse wording."""

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
