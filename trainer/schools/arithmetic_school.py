"""Solver, Verifier and Corrector are taught to calculate chains.

phase 1   the Solver alone with few slips, short problems and single operations first, until its loss is low: the
          arithmetic table must be there before anything else can be learned
phase 2   all roles from tutors that slip, until the Verifier's loss is low as well: it first copies the claim's
          lines, and stays at chance until it works them out
"""

from __future__ import annotations

import random

from marsrl.rollout.agents.roles import Role
from marsrl.rollout.tasks.arithmetic import draw_chain
from marsrl.rollout.tasks.arithmetic_tutor import TutorRates, equality_drill, solver_trace, table_drill, team_traces
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.tasks.trace import Trace
from marsrl.trainer.config import RunConfig, WarmStartConfig
from marsrl.trainer.schools.school import School


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
