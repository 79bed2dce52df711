"""Solver and Verifier in turn (Dr. MAS, arXiv:2602.08847, its team for math)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.config import Count, Settings
from marsrl.rollout.episode import Episode
from marsrl.rollout.types import Ask, Message, Sample


class SolverVerifier(Orchestration):
    """The Verifier approves a solution, or the Solver tries again with the report. The last solution is not verified.

    A solution cut off at its length limit is verified too, so that the Solver can try again. The last
    solution counts, with or without an answer, as in the published code. An unreadable verdict rejects, unless
    agents.verifier.missing_verdict is "correct". In the published code an unreadable verdict approves, and so it does here
    with the prompt set drmas_math and agents.verifier.parser=compat.
    """

    class Options(Settings):
        max_loops: Count = Field(2, description="maximum solutions; the last one is not verified")

    name = "solver_verifier"
    agents = (AgentSpec("solver", also=(Role.CORRECTOR,)), AgentSpec("verifier", Role.VERIFIER))
    options: SolverVerifier.Options

    def follow(self, episode: Episode) -> Sequence[Ask]:
        asks = [episode.ask("solver")]
        for _ in range(self.options.max_loops - 1):
            solution = episode.said(asks[-1])
            if solution is None:
                break
            asks.append(episode.ask("verifier", solution))
            report = episode.said(asks[-1])
            if report is None or self.accepts(report):
                break
            asks.append(episode.ask("solver", solution, report))
        return asks

    def most_samples(self) -> dict[str, int]:
        loops = self.options.max_loops
        return {"solver": loops * self.group_size, "verifier": (loops - 1) * self.group_size}

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        if ask.agent == "solver" and ask.inputs:
            solution, report = episode.inputs(ask)
            return self.prompt(ask.agent, Role.CORRECTOR, episode, solution.shown, report.shown)
        return super().messages(episode, ask)

    def outcome(self, episode: Episode) -> Sample | None:
        """Return the last solution, whose reward is missing if it ended as an error."""
        solutions = (s for ask in reversed(self.follow(episode)) if ask.agent == "solver" for s in episode.samples(ask))
        return next(solutions, None)
