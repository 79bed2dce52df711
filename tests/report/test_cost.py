"""Usage and cost of agents and policies, and latency of episodes."""

from __future__ import annotations

from marsrl.rollout.config import AgentConfig
from marsrl.trainer.config import PolicyConfig, PriceConfig
from marsrl.trainer.report.cost import cost_metrics, failing_tools, tool_shares

COUNTED = {
    "rollout/tokens": 999,
    "cost/solver/input_tokens": 1_000_000,
    "cost/solver/cached_tokens": 250_000,
    "cost/solver/output_tokens": 500_000,
    "cost/solver/seconds": 40.0,
    "cost/verifier/seconds": 2.5,
    "cost/verifier/input_tokens": 2_000_000,
    "cost/verifier/cached_tokens": 0,
    "cost/verifier/output_tokens": 100_000,
}


def test_agents_and_policies_have_tokens_and_cost_cached_ones_their_own_and_one_without_a_price_tokens_alone() -> None:
    agents = {"solver": AgentConfig(), "verifier": AgentConfig(policy="judge"), "idle": AgentConfig()}
    policies = {"main": PolicyConfig(price=PriceConfig(input=2, cached_input=0.4, output=10)), "judge": PolicyConfig()}
    assert cost_metrics(COUNTED, agents, policies) == {
        "cost/solver/spent": 6.6,
        "policy_cost/main/input_tokens": 1_000_000,
        "policy_cost/main/cached_tokens": 250_000,
        "policy_cost/main/output_tokens": 500_000,
        "policy_cost/main/seconds": 40.0,
        "policy_cost/main/spent": 6.6,
        "policy_cost/judge/input_tokens": 2_000_000,
        "policy_cost/judge/cached_tokens": 0,
        "policy_cost/judge/output_tokens": 100_000,
        "policy_cost/judge/seconds": 2.5,
    }
    shared = cost_metrics(COUNTED, {"solver": AgentConfig(), "verifier": AgentConfig()}, policies)
    assert shared["policy_cost/main/spent"] == shared["cost/solver/spent"] + shared["cost/verifier/spent"] == 11.6
    assert PriceConfig(input=2, output=10).of(1_000_000, 250_000, 0) == 2  # cached ones cost as others
    assert "policy_cost/judge/spent" not in shared and shared["policy_cost/main/seconds"] == 42.5


def test_a_tool_s_share_is_of_all_calls_those_of_no_tool_among_them() -> None:
    counted = {"tools/search/calls": 6, "tools/scholar/calls": 0, "tools/unknown/calls": 2, "tools/search/errors": 3}
    assert tool_shares(counted) == {"tools/search/share": 0.75, "tools/scholar/share": 0, "tools/unknown/share": 0.25}
    counted |= {"tools/pages/calls": 80, "tools/pages/errors": 3}  # the search reads them
    assert tool_shares(counted)["tools/search/share"] == 0.75 and "tools/pages/share" not in tool_shares(counted)
    assert tool_shares({"tools/search/calls": 0.0}) == tool_shares({}) == {}


def test_a_tool_most_of_whose_calls_are_errors_is_warned_of_with_what_it_said_last() -> None:
    def counted(calls: int, errors: int) -> dict[str, float]:
        return {
            "tools/search/calls": calls,
            "tools/search/errors": errors,
            "tools/unknown/calls": 99,
            "tools/unknown/errors": 99,
        }

    last = {"search": "error: http://h: HTTP 429: 'run out of searches'" + "x" * 5000}
    (said,) = failing_tools(counted(40, 21), last)
    assert (
        said.startswith("tools.search: 21 of 40 calls were errors")
        and "run out of searches" in said
        and len(said) < 500
    )
    for few in (counted(40, 20), counted(7, 7), counted(0, 0), {}):
        assert not failing_tools(few, last)
    assert not failing_tools(counted(40, 40), {})  # calls that no tool could read
