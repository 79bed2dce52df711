"""Usage of agents and policies, and latency of episodes."""

from __future__ import annotations

from collections.abc import Mapping

from marsrl.rollout.config import AgentConfig
from marsrl.trainer.report.cost import cost_metrics, failing_tools, tool_shares

SOLVER = {"input_tokens": 1_000_000, "cached_tokens": 250_000, "output_tokens": 500_000, "seconds": 40.0}
VERIFIER = {"input_tokens": 2_000_000, "cached_tokens": 0, "output_tokens": 100_000, "seconds": 2.5}


def under(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def test_a_policy_has_the_usage_of_its_agents() -> None:
    counted = {"rollout/tokens": 999, **under("cost/solver", SOLVER), **under("cost/verifier", VERIFIER)}
    agents = {"solver": AgentConfig(), "verifier": AgentConfig(policy="judge"), "idle": AgentConfig()}
    of_policies = under("policy_cost/main", SOLVER) | under("policy_cost/judge", VERIFIER)
    assert cost_metrics(counted, agents) == of_policies
    shared = cost_metrics(counted, {"solver": AgentConfig(), "verifier": AgentConfig()})
    assert shared["policy_cost/main/input_tokens"] == 3_000_000 and shared["policy_cost/main/seconds"] == 42.5


def test_a_tools_share_is_of_all_calls_including_unknown_tools() -> None:
    counted = {"tools/search/calls": 6, "tools/scholar/calls": 0, "tools/unknown/calls": 2, "tools/search/errors": 3}
    assert tool_shares(counted) == {"tools/search/share": 0.75, "tools/scholar/share": 0, "tools/unknown/share": 0.25}
    # Pages are read by the tool `search`, not because a model calls a tool `pages`.
    counted |= {"tools/pages/calls": 80, "tools/pages/errors": 3}
    assert tool_shares(counted)["tools/search/share"] == 0.75 and "tools/pages/share" not in tool_shares(counted)
    assert tool_shares({"tools/search/calls": 0.0}) == tool_shares({}) == {}


def test_a_mostly_failing_tool_is_warned_about_with_its_error() -> None:
    def counted(calls: int, errors: int) -> dict[str, float]:
        unknown = under("tools/unknown", {"calls": 99, "errors": 99})
        return under("tools/search", {"calls": calls, "errors": errors}) | unknown

    last = {"search": "error: http://h: HTTP 429: 'run out of searches'" + "x" * 5000}
    (said,) = failing_tools(counted(40, 21), last)
    assert said.startswith("tools.search: 21 of 40 calls were errors") and len(said) < 500
    assert "run out of searches" in said
    for few in (counted(40, 20), counted(7, 7), counted(0, 0), {}):
        assert not failing_tools(few, last)
    assert not failing_tools(counted(40, 40), {})  # there is no last error, as for calls that no tool could parse
