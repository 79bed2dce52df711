"""A search tool: one agent writes the query, and another answers from the results."""

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec, Role
from marsrl.rollout.types import Message


class Library(Orchestration):
    """Team of one query, one search and one answer."""

    agents = (AgentSpec("seeker", Role.ADVISER), AgentSpec("reader"))
    tools = ("search",)

    def search(self, episode, query):
        return episode.call("search", query, query=query.shown)

    def follow(self, episode):
        ask = episode.ask("seeker")
        query = episode.said(ask)
        if query is None:
            return [ask]
        call = self.search(episode, query)
        if episode.output(call) is None:
            return [ask, call]
        return [ask, call, episode.ask("reader", query)]

    def messages(self, episode, ask):
        question = episode.problem.question
        if ask.agent == "seeker":
            return [Message("user", f"{question}\n\nWrite the words to search for, and nothing else.")]
        (query,) = episode.inputs(ask)
        found = episode.output(self.search(episode, query)).text
        return [Message("user", f"{found}\n\n{question} Put your answer between <answer> and </answer>.")]
