"""Agents of a team, and roles of the built-in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Role of an agent, which decides its prompt and parser. Metrics of agents with the same role are separate."""

    SOLVER = "solver"  # problem -> solution
    VERIFIER = "verifier"  # problem, solution -> report with a verdict
    CORRECTOR = "corrector"  # problem, solution, report -> refined solution
    ROUTER = "router"  # question, search results -> are they enough to answer? (Dr. MAS's Verifier for search)
    SEARCHER = "searcher"  # question, search results -> query
    ANSWERER = "answerer"  # question, search results -> answer
    REASONER = "reasoner"  # question -> a tool call or the answer, turn by turn (MARS's System 2)
    DISTILLER = "distiller"  # question, purpose, a tool's output -> its relevant content (MARS's System 1)
    ADVISER = "adviser"  # plans, criticises or summarises for others; gives no answer itself
    DEBATER = "debater"  # problem, own solution, others' solutions -> solution


PLACEHOLDERS: Mapping[Role, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Role.SOLVER: (("problem",), ()),
    Role.VERIFIER: (("problem", "solution"), ()),
    Role.CORRECTOR: (("problem", "solution", "report"), ()),
    Role.DEBATER: (("problem", "solution", "others"), ()),
    Role.ROUTER: (("problem", "found"), ()),
    Role.SEARCHER: (("problem", "found"), ("report",)),
    Role.ANSWERER: (("problem", "found"), ()),
    Role.REASONER: (("problem",), ("tools",)),
    Role.DISTILLER: (("problem", "output"), ("purpose",)),
    Role.ADVISER: (("problem",), ("solution", "report")),
}
"""Placeholders {name} of each role: (required in its turns, allowed in addition)."""

READS: Mapping[Role, str] = {
    **dict.fromkeys((Role.SOLVER, Role.CORRECTOR, Role.DEBATER, Role.ANSWERER, Role.REASONER), "answer"),
    Role.VERIFIER: "verdict",
    Role.ROUTER: "route",
    Role.SEARCHER: "query",
}
"""Kind of parser (a key of PARSERS) of each role's completions; other roles have none."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of an orchestration: AgentSpec("verifier1", Role.VERIFIER). also: further roles that the agent plays."""

    name: str
    role: Role = Role.SOLVER
    also: tuple[Role, ...] = ()

    @property
    def gives_verdicts(self) -> bool:
        """True if the agent judges its first input."""
        return self.role is Role.VERIFIER

    @property
    def advises(self) -> bool:
        """True if the agent gives neither answer nor verdict, so that the episode's outcome is its reward."""
        return self.role is Role.ADVISER

    @property
    def helps(self) -> bool:
        """True if the agent's text serves another agent, so that only the outcome measures its value."""
        return self.role in (Role.ROUTER, Role.SEARCHER, Role.DISTILLER)

    @property
    def solves(self) -> bool:
        """True if the agent answers a problem without other input."""
        return self.role in (Role.SOLVER, Role.DEBATER, Role.REASONER)
