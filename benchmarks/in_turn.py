"""The team of `in_turn` in gateway.py as an orchestration, with the same prompts and number of samples."""

from __future__ import annotations

from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.solver_verifier import SolverVerifier
from marsrl.rollout.types import Ask, Message, Sample


class InTurn(SolverVerifier):
    """Orchestration of three samples: a solution, a report that never approves it, and a second solution that reads both."""

    name = "in_turn"

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        texts = [sample.shown for sample in episode.inputs(ask)]
        return (Message("user", "\n".join([episode.problem.question, *texts])),)

    def accepts(self, report: Sample) -> bool:
        return False
