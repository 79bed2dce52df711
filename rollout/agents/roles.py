"""The agents of a team, and the roles of the shipped prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """An agent's task, which decides its prompt and its parser. Two agents may play one role and still be counted apart."""

    SOLVER = "solver"  # problem -> solution
    VERIFIER = "verifier"  # problem, solution -> report with a verdict
    CORRECTOR = "corrector"  # problem, solution, report -> refined solution
    ROUTER = "router"  # question, what was found -> is it enough to answer? (Dr. MAS's Verifier for search)
    SEARCHER = "searcher"  # question, what was found -> query
    ANSWERER = "answerer"  # question, what was found -> answer
    REASONER = "reasoner"  # question -> a call of a tool, or the answer; turn by turn (MARS's System 2)
    DISTILLER = "distiller"  # question, purpose, what a tool found -> what matters of it (MARS's System 1)
    ADVISER = "adviser"  # plans, criticises or summarises for others: gives no answer of its own
    DEBATER = "debater"  # problem, own solution, solutions of others -> solution


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
"""Placeholders, as {name}, that a role's turns must have, and those that they may have."""

READS: Mapping[Role, str] = {
    **dict.fromkeys((Role.SOLVER, Role.CORRECTOR, Role.DEBATER, Role.ANSWERER, Role.REASONER), "answer"),
    Role.VERIFIER: "verdict",
    Role.ROUTER: "route",
    Role.SEARCHER: "query",
}
"""Kind of parser (a key of PARSERS) of each role's completions; other roles have none."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of an orchestration: AgentSpec("verifier1", Role.VERIFIER). also: further roles whose prompts it gets."""

    name: str
    role: Role = Role.SOLVER
    also: tuple[Role, ...] = ()

    @property
    def gives_verdicts(self) -> bool:
        """True if it judges its first input."""
        return self.role is Role.VERIFIER

    @property
    def advises(self) -> bool:
        """True if it gives neither answer nor verdict, so that its episode's outcome is its reward."""
        return self.role is Role.ADVISER

    @property
    def helps(self) -> bool:
        """True if its text serves another agent, so that only the outcome tells what it was worth."""
        return self.role in (Role.ROUTER, Role.SEARCHER, Role.DISTILLER)

    @property
    def solves(self) -> bool:
        """True if it answers a problem without other input."""
        return self.role in (Role.SOLVER, Role.DEBATER, Role.REASONER)
