"""Workers that solve in parallel, each with its own advice, and an editor that reads all of them."""

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.types import Message

ADVICE = ("Estimate first.", "Go step by step.", "Check your result in another way.")


class Workers(Orchestration):
    """Team of parallel workers and an editor, whose answer counts. Failed workers are left out."""

    agents = (AgentSpec("worker"), AgentSpec("editor"))

    def workers(self, episode):
        # Each worker has its own group, so it is compared with workers of other episodes that had the same advice.
        return [episode.ask("worker", index=i, group=f"worker{i}") for i in range(len(ADVICE))]

    def follow(self, episode):
        asks = self.workers(episode)
        said = [sample for ask in asks if (sample := episode.said(ask))]
        if said and all(episode.is_over(ask) for ask in asks):
            asks.append(episode.ask("editor", *said))
        return asks

    def messages(self, episode, ask):
        (*before, last) = self.prompt(ask.agent, Role.SOLVER, episode)
        if ask.agent == "worker":
            more = ADVICE[self.workers(episode).index(ask)]
        else:
            more = "\n\n".join(["Others wrote:", *(sample.shown for sample in episode.inputs(ask))])
        return [*before, Message(last.role, f"{last.content}\n\n{more}")]
