"""Usage and cost of agents and policies, and latency of episodes."""

from __future__ import annotations

import io

import pytest

from marsrl.rollout.config import AgentConfig
from marsrl.trainer.config import PolicyConfig, PriceConfig
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.cost import EpisodeClock, cost_metrics, failing_tools, latency, tool_shares
from marsrl.trainer.report.summary import AgentEstimate, Evaluation, ToolUsage, Usage, estimate

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


def test_a_million_tokens_cost_their_price_and_cached_ones_their_own() -> None:
    price = PriceConfig(input=2, cached_input=0.4, output=10)
    assert price.of(1_000_000, 250_000, 500_000) == pytest.approx(0.75 * 2 + 0.25 * 0.4 + 5)
    assert PriceConfig(input=2, output=10).of(1_000_000, 250_000, 0) == 2


def test_agents_and_policies_have_tokens_and_cost_and_one_without_a_price_tokens_alone() -> None:
    agents = {"solver": AgentConfig(), "verifier": AgentConfig(policy="judge"), "idle": AgentConfig()}
    policies = {"main": PolicyConfig(price=PriceConfig(input=2, output=10)), "judge": PolicyConfig()}
    assert cost_metrics(COUNTED, agents, policies) == {
        "cost/solver/spent": 7.0,
        "policy_cost/main/input_tokens": 1_000_000,
        "policy_cost/main/cached_tokens": 250_000,
        "policy_cost/main/output_tokens": 500_000,
        "policy_cost/main/seconds": 40.0,
        "policy_cost/main/spent": 7.0,
        "policy_cost/judge/input_tokens": 2_000_000,
        "policy_cost/judge/cached_tokens": 0,
        "policy_cost/judge/output_tokens": 100_000,
        "policy_cost/judge/seconds": 2.5,
    }
    shared = cost_metrics(COUNTED, {"solver": AgentConfig(), "verifier": AgentConfig()}, policies)
    assert shared["policy_cost/main/spent"] == shared["cost/solver/spent"] + shared["cost/verifier/spent"] == 12.0
    assert "policy_cost/judge/spent" not in shared and shared["policy_cost/main/seconds"] == 42.5


def test_an_episode_takes_from_its_first_ask_to_its_end() -> None:
    now = [0.0]
    clock = EpisodeClock(lambda: now[0])
    assert clock.metrics() == {}
    for i in range(20):
        clock(f"e{i}", False)
    clock("of another process", True)
    for i in range(20):
        now[0] = float(i + 1)
        clock(f"e{i}", True)
    assert clock.metrics() == {"latency_s/episode_p50": 10.0, "latency_s/episode_p95": 19.0}
    assert clock.metrics() == {}


def test_teams_stand_side_by_side_with_what_an_episode_takes() -> None:
    used = {
        "solver": Usage(policy="big", calls=8, input_tokens=400, output_tokens=1000, spent=0.02, seconds=6.0),
        "verifier": Usage(policy="small", calls=4, input_tokens=600, output_tokens=200, spent=0.004, seconds=1.0),
    }
    right = AgentEstimate(**estimate(3, 4).model_dump())
    one = Evaluation(agents={"solver": right}, system=estimate(3, 4), num_episodes=4, usage=used)
    one = one.model_copy(update={"tools": {"search": ToolUsage(calls=6, seconds=0.5)}})
    slow = one.model_copy(update={"usage": {}, "latency": latency([float(i) for i in range(1, 41)])})
    free = {"solver": used["solver"].model_copy(update={"spent": None})}
    shown = io.StringIO()
    RunConsole(stream=shown).teams(
        [("two.yaml", one, 12.34), ("one.yaml", one.model_copy(update={"usage": free}), 5.0), ("slow.yaml", slow, 50.0)]
    )
    rows = [" ".join(line.replace("│", " ").split()) for line in shown.getvalue().splitlines()]
    assert "two.yaml 0.750 (0.301-0.954, n 4) 3.0 250.0 300.0 0.006 1.75 12.3" in rows
    assert "solver (big) 0.750 (0.301-0.954, n 4) 2.0 100.0 250.0 0.005 1.5" in rows
    assert "verifier (small) not measured 1.0 150.0 50.0 0.001 0.25" in rows
    assert "search (tool) 1.5 0.125" in rows
    assert "one.yaml 0.750 (0.301-0.954, n 4) 2.0 100.0 250.0 no price 1.5 5.0" in rows
    assert "slow.yaml 0.750 (0.301-0.954, n 4) 20 38 50.0" in rows


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
