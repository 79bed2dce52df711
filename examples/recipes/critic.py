"""A critic that gives no answer itself. Its reward is the outcome of its episode."""

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.types import Message

CRITICISE = "\n\nSay in two sentences what is wrong or missing here. Do not solve it yourself."


class Critic(Orchestration):
    """Team of a Solver, a critic, and a reviser that solves again after reading both."""

    agents = (AgentSpec("solver"), AgentSpec("critic", Role.ADVISER), AgentSpec("reviser", Role.CORRECTOR))

    def follow(self, episode):
        asks = [episode.ask("solver")]
        for agent in ("critic", "reviser"):
            said = [episode.said(ask) for ask in asks]
            if None in said:
                break
            asks.append(episode.ask(agent, *said))
        return asks

    def messages(self, episode, ask):
        if ask.agent != "critic":
            return super().messages(episode, ask)
        (solution,) = episode.inputs(ask)
        return [Message("user", f"{episode.problem.question}\n\n{solution.shown}{CRITICISE}")]
