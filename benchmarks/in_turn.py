"""The team of gateway.py's `in_turn`, as an orchestration: the same prompts, the same number of samples."""

from __future__ import annotations

from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.solver_verifier import SolverVerifier
from marsrl.rollout.types import Ask, Message, Sample


class InTurn(SolverVerifier):
    """A solution, a report on it that never approves, and a solution that has both before it."""

    name = "in_turn"

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        shown = [sample.shown for sample in episode.inputs(ask)]
        return (Message("user", "\n".join([episode.problem.question, *shown])),)

    def accepts(self, report: Sample) -> bool:
        return False
