"""Your own team: a checker decides whether a second solver is called."""

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role


class SecondOpinion(Orchestration):
    """Team of two solvers and a checker.

    The first solves, and the checker judges. If it does not approve, the second solves from scratch, and its answer counts.
    """

    agents = (AgentSpec("first"), AgentSpec("checker", Role.VERIFIER), AgentSpec("second"))

    def follow(self, episode):
        first = episode.ask("first")
        solution = episode.said(first)
        if solution is None:
            return [first]
        check = episode.ask("checker", solution)
        report = episode.said(check)
        if report is None or report.verdict:
            return [first, check]
        return [first, check, episode.ask("second")]

    def outcome(self, episode):
        said = {ask.agent: episode.said(ask) for ask in self.follow(episode)}
        return said.get("second") or said.get("first")
