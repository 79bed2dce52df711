"""Verifier, Search and Answer agent over a search tool (Dr. MAS, arXiv:2602.08847, its team for search)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.prompts import NOTHING_SEARCHED, searched
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.config import Count, Settings
from marsrl.rollout.episode import Episode
from marsrl.rollout.types import Ask, Message, Sample, ToolCall


class SearchTeam(Orchestration):
    """Team for search: in each turn the Verifier decides whether the search results suffice.

    If so, the Answer agent answers. If not, the Search agent writes a query, whose results all agents see from then on, and the
    next turn begins.

        verifier -no-> search -> tool -> verifier -no-> search -> tool -> verifier -yes-> answer

    The last turn has no search: unless the verdict is yes, the episode ends without an answer. An unreadable verdict counts as
    no, unless agents.verifier.missing_verdict is "correct" (as in the published code); an unreadable query ends the turn without
    results. The team is trained on the outcome (credit.reward_scheme=outcome): verdicts and queries are rewarded only for being
    readable.
    """

    class Options(Settings):
        max_turns: Count = Field(4, description="maximum Verifier calls; the last one is not followed by a search")

    name = "search_team"
    agents = (
        AgentSpec("verifier", Role.ROUTER),
        AgentSpec("search", Role.SEARCHER),
        AgentSpec("answer", Role.ANSWERER),
    )
    tools = ("search",)
    options: SearchTeam.Options

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        queries: list[Sample] = []
        requests: list[Ask | ToolCall] = []
        for turn in range(1, self.options.max_turns + 1):
            verify = episode.ask("verifier", *queries)
            requests.append(verify)
            verdict = episode.said(verify)
            if verdict is None:
                break
            if self.accepts(verdict):
                requests.append(episode.ask("answer", *queries, verdict))
                break
            if turn == self.options.max_turns:
                break
            search = episode.ask("search", *queries, verdict)
            requests.append(search)
            query = episode.said(search)
            if query is None:
                break
            queries.append(query)
            if query.answer is not None:
                call = self._call(episode, query)
                requests.append(call)
                if episode.output(call) is None:
                    break
        return requests

    def most_samples(self) -> dict[str, int]:
        turns, size = self.options.max_turns, self.group_size
        return {"verifier": turns * size, "search": (turns - 1) * size, "answer": size}

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        """Show every agent all queries and results, and the Search agent the Verifier's report too."""
        inputs = episode.inputs(ask)
        found = [self._found(episode, sample) for sample in inputs if sample.agent == "search"]
        advice = "".join(sample.shown for sample in inputs if sample.agent == "verifier")
        history = "\n".join(found) or NOTHING_SEARCHED
        return self.prompt(ask.agent, self.spec(ask.agent).role, episode, report=advice, found=history)

    @staticmethod
    def _call(episode: Episode, query: Sample) -> ToolCall:
        return episode.call("search", query, query=query.answer)

    def _found(self, episode: Episode, query: Sample) -> str:
        if query.answer is None:
            return "<information>There was no query between <search> and </search>.</information>"
        output = episode.output(self._call(episode, query))
        found = "" if output is None else output.text
        return searched(query.answer, found)
