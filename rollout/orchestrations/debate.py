"""Debate (Du et al., arXiv:2305.14325): agents solve, read each other's solutions, and solve again; the majority answer
counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.agents.same_answer import answer_key
from marsrl.rollout.config import MOST, Count, Settings
from marsrl.rollout.episode import Episode
from marsrl.rollout.types import Ask, Message, Sample


class Debate(Orchestration):
    """Debate in which one agent, `debater`, plays all debaters. A debater without text in a round is left out of the next."""

    class Options(Settings):
        debaters: int = Field(3, gt=1, le=MOST, description="number of debaters that solve in parallel")
        rounds: Count = Field(2, description="number of rounds; the first shows no other solutions")

    name = "debate"
    agents = (AgentSpec("debater", also=(Role.DEBATER,)),)
    options: Debate.Options

    def follow(self, episode: Episode) -> Sequence[Ask]:
        asks = last = [episode.ask("debater", turn=number) for number in range(1, self.options.debaters + 1)]
        for _ in range(self.options.rounds - 1):
            if not all(episode.is_over(ask) for ask in last):
                break
            solutions = [sample for ask in last if (sample := episode.said(ask)) is not None and sample.shown]
            if len(solutions) < 2:
                break
            last = [
                episode.ask("debater", *(each for each in solutions if each is not solution), solution)
                for solution in solutions
            ]
            asks = asks + last
        return asks

    def most_samples(self) -> dict[str, int]:
        return {"debater": self.options.debaters * self.options.rounds * self.group_size}

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        if not ask.inputs:
            return super().messages(episode, ask)
        *others, own = episode.inputs(ask)
        told = "\n\n".join(other.shown for other in others)
        return self.prompt(ask.agent, Role.DEBATER, episode, own.shown, others=told)

    def outcome(self, episode: Episode) -> Sample | None:
        """Return the most frequent answer of the last round with any answer; the earliest in a tie."""
        rounds: dict[int, list[Sample]] = {}
        for ask in self.follow(episode):
            rounds.setdefault(ask.id.count("/"), []).extend(s for s in episode.samples(ask) if s.answer is not None)
        last = next((rounds[number] for number in sorted(rounds, reverse=True) if rounds[number]), [])
        if not last:
            return None
        keys = {sample.uid: answer_key(sample.answer or "") for sample in last}
        votes = Counter(keys.values())
        return max(last, key=lambda sample: votes[keys[sample.uid]])
