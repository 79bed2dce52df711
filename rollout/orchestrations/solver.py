"""Team of one agent, for single-agent RL."""

from __future__ import annotations

from collections.abc import Sequence

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec
from marsrl.rollout.episode import Episode
from marsrl.rollout.types import Ask


class Solver(Orchestration):
    """Solver alone (UloRL, arXiv:2507.19766; "only Solver's samples" of arXiv:2511.11373, Table 2)."""

    name = "solver"
    agents = (AgentSpec("solver"),)
    is_one_episode = True

    def most_samples(self) -> dict[str, int]:
        return {"solver": self.group_size}

    def follow(self, episode: Episode) -> Sequence[Ask]:
        return [episode.ask("solver", num_samples=self.group_size if episode.purpose == "train" else 1)]
