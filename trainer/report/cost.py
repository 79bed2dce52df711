"""Usage and latency of agents, policies and the judge.

They appear in a step's metrics, and in an evaluation's table of `marsrl evaluate` and `marsrl compare`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from marsrl.rollout.config import AgentConfig
from marsrl.trainer.report.summary import UNKNOWN, Estimate, Evaluation, JudgeUsage, Latency, Usage

_ENOUGH_CALLS = 8  # fewest calls in a step for which a tool's errors are meaningful
_MOST_OF_AN_ERROR = 300  # characters of an error to show
COLUMNS = ("calls", "input tokens", "output tokens", "engine s", "median s", "p95 s")
MEANING = (
    "calls, tokens, and seconds of engines and tools: means per episode; median s and p95 s: from an episode's first "
    "request to its end, under concurrent load"
)
_COUNTED = ("input_tokens", "cached_tokens", "output_tokens", "seconds")


def cost_metrics(counted: Mapping[str, float], agents: Mapping[str, AgentConfig]) -> dict[str, float]:
    """Return policy_cost/{policy}/... of one step, the sums of its agents' usage (docs/metrics.md).

    counted: the batch's metrics, with cost/{agent}/... of rollout/player/player.py.
    """
    metrics: dict[str, float] = {}
    for agent, name in ((agent, settings.policy) for agent, settings in agents.items()):
        if f"cost/{agent}/output_tokens" not in counted:
            continue
        for quantity in _COUNTED:
            total = f"policy_cost/{name}/{quantity}"
            metrics[total] = metrics.get(total, 0) + counted[f"cost/{agent}/{quantity}"]
    return metrics


def tool_shares(counted: Mapping[str, float]) -> dict[str, float]:
    """Return tools/<name>/share of all tools' calls in one step; empty without calls (MARS, figures of tool use).

    Reading a page does not count as a call, because a tool reads the page, not an agent. counted: the batch's metrics
    (rollout/tools/pool.py).
    """
    calls = {key: num for key, num in counted.items() if key.startswith("tools/") and key.endswith("/calls")}
    calls.pop("tools/pages/calls", None)
    total = sum(calls.values())
    return {f"{key.removesuffix('calls')}share": value / total for key, value in calls.items()} if total else {}


def failing_tools(counted: Mapping[str, float], last_errors: Mapping[str, str]) -> list[str]:
    """Return warnings about tools whose calls were mostly errors in a step, as with a lost server or an exhausted key.

    counted: the batch's metrics. last_errors: text of each tool's last failed run. Tools without such a text get no warning:
    they did not fail, but their calls were invalid.
    """
    warnings = []
    for name, error in last_errors.items():
        calls, errors = (counted.get(f"tools/{name}/{quantity}", 0) for quantity in ("calls", "errors"))
        if calls >= _ENOUGH_CALLS and errors > calls / 2:
            warnings.append(
                f"tools.{name}: {errors:.0f} of {calls:.0f} calls were errors, which the agents read in place of an answer; the "
                f"last: {error[:_MOST_OF_AN_ERROR]}"
            )
    return warnings


def judge_metrics(counted: Mapping[str, float]) -> dict[str, float]:
    """Return judge/missing_share, judge/yes_share, and judge/agreement with the task's own judgement.

    counted: metrics of a batch or an evaluation by ModelJudge.take_counts; {} if nothing was judged.
    """
    calls = counted.get("judge/calls", 0)
    if not calls:
        return {}
    num_missing, num_compared = counted["judge/missing"], counted["judge/compared"]
    metrics = {"judge/missing_share": num_missing / calls}
    if calls > num_missing:
        metrics["judge/yes_share"] = counted["judge/yes"] / (calls - num_missing)
    if num_compared:
        metrics["judge/agreement"] = counted["judge/agreed"] / num_compared
    return metrics


def judge_usage(counted: Mapping[str, float], policy: str) -> JudgeUsage | None:
    """Return the judge's usage in an evaluation; None if nothing was judged."""
    metrics = judge_metrics(counted)
    if not metrics:
        return None
    numbers = {name: int(counted[f"judge/{name}"]) for name in ("calls", "missing", "input_tokens", "output_tokens")}
    shares = {name: metrics.get(f"judge/{name}") for name in ("yes_share", "agreement")}
    return JudgeUsage.model_validate({"policy": policy, **numbers, **shares})


def usage(used: Mapping[str, Sequence[tuple[int, int, float]]], agents: Mapping[str, AgentConfig]) -> dict[str, Usage]:
    """Return the usage of each agent. used: {agent: (input tokens, output tokens, engine seconds) of each uncached call}."""
    usage_of = {}
    for agent, settings in agents.items():
        if calls_of := used.get(agent):
            inputs, outputs, seconds = zip(*calls_of, strict=True)
            usage_of[agent] = Usage(
                policy=settings.policy,
                calls=len(calls_of),
                input_tokens=sum(inputs),
                output_tokens=sum(outputs),
                seconds=math.fsum(seconds),
            )
    return usage_of


def latency(seconds: Sequence[float]) -> Latency | None:
    """Return median and 95th percentile of episodes' seconds, by the nearest rank; None without episodes."""
    if not seconds:
        return None
    median_s, p95_s = np.percentile(seconds, [50, 95], method="inverted_cdf").tolist()
    return Latency(median_s=median_s, p95_s=p95_s, n=len(seconds))


class EpisodeClock:
    """Clock of the seconds from an episode's first request to its end. Called by a rollout, from any thread.

    Episodes that began before this process (in a resumed run) are not counted.
    """

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._seconds: list[float] = []

    def __call__(self, episode: str, has_ended: bool) -> None:
        if not has_ended:
            self._began[episode] = time.monotonic()
        elif (began := self._began.pop(episode, None)) is not None:
            self._seconds.append(time.monotonic() - began)

    def metrics(self) -> dict[str, float]:
        """Return latency_s/episode_p50 and _p95 of the episodes that ended since the last call; empty without any."""
        quantiles, self._seconds = latency(self._seconds), []
        if quantiles is None:
            return {}
        return {"latency_s/episode_p50": quantiles.median_s, "latency_s/episode_p95": quantiles.p95_s}


@dataclass(frozen=True, slots=True)
class EpisodeCost:
    """Row of the cost table: the team or a part of it.

    correct: accuracy; None without answers. cells: text of the columns.
    """

    name: str
    correct: Estimate | None
    cells: tuple[str, ...]


def episode_costs(evaluation: Evaluation) -> tuple[EpisodeCost, list[EpisodeCost]]:
    """Return the rows of the table of costs: one for the team, and one for each part of the team.

    Parts are agents in the order of play, the judge, tools, and the team's own metrics (in the column of calls).
    """
    episodes, usages, latency = max(1, evaluation.num_episodes), evaluation.usage, evaluation.latency
    took = ("", "") if latency is None else (_seconds(latency.median_s), _seconds(latency.p95_s))
    team_row = EpisodeCost("", evaluation.system, (*_used([*usages.values()], episodes), *took))
    parts: list[tuple[str, Estimate | None, tuple[str, ...]]] = [
        (f"{name} ({usage_of.policy})", evaluation.agents.get(name, UNKNOWN), _used([usage_of], episodes))
        for name, usage_of in usages.items()
    ]
    if (judge := evaluation.judge) is not None:
        parts.append((f"judge ({judge.policy})", None, _used([judge], episodes)))
    for tool, ran in evaluation.tools.items():
        cells = f"{ran.calls / episodes:,.1f}", "", "", _seconds(ran.seconds / episodes)
        parts.append((f"{tool} (tool)", None, cells))
    parts += [(name, None, (f"{value:,.1f}", "", "", "")) for name, value in evaluation.team.items()]
    return team_row, [EpisodeCost(name, correct, (*cells, "", "")) for name, correct, cells in parts]


def _used(used: Sequence[Usage], episodes: int) -> tuple[str, ...]:
    """Return calls, tokens in and out, and engine seconds if known, per episode, as text."""
    if not used:
        return ("",) * 4
    seconds = [usage_of.seconds for usage_of in used if usage_of.seconds is not None]
    sums = (
        sum(getattr(usage_of, field) for usage_of in used) / episodes
        for field in ("calls", "input_tokens", "output_tokens")
    )
    return (
        *(f"{value:,.1f}" for value in sums),
        _seconds(sum(seconds) / episodes) if len(seconds) == len(used) else "",
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
