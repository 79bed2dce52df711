"""The three roles of the Verifier-Corrector system and how agents that play them follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an agent does. Two agents may play one role (one prompt) and still be counted apart."""

    SOLVER = "solver"  # problem -> solution
    VERIFIER = "verifier"  # problem, solution -> report with a verdict
    CORRECTOR = "corrector"  # problem, solution, report -> refined solution


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of an orchestration. predecessor: the agent whose outputs it is asked about; None = the problem."""

    name: str
    role: Role
    predecessor: str | None
