"""What an episode of an evaluation takes, as rows of a table: `marsrl evaluate` and `marsrl compare` show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marsrl.trainer.report.summary import Estimate, Evaluation, Usage, estimate

COLUMNS = ("calls", "input tokens", "output tokens", "cost", "engine s", "median s", "p95 s")
MEANING = (
    "an episode of each: calls, tokens, cost and seconds of engines and tools are means; median s and p95 s: from its first "
    "request to its end, beside the others"
)


@dataclass(frozen=True, slots=True)
class EpisodeCost:
    """A row: what takes it (an agent with its policy, the judge, a tool), how often it is right, None where it does not answer,
    and text for each of COLUMNS."""

    name: str
    correct: Estimate | None
    cells: tuple[str, ...]


def episode_costs(evaluation: Evaluation) -> tuple[EpisodeCost, list[EpisodeCost]]:
    """The whole team's row, and one for each part of it: agents in the order of play, the judge, tools, the team's own
    metrics (in the place of the calls)."""
    episodes, used, latency = max(1, evaluation.num_episodes), evaluation.usage, evaluation.latency
    took = ("", "") if latency is None else (_seconds(latency.median_s), _seconds(latency.p95_s))
    whole = EpisodeCost("", evaluation.system, (*_used([*used.values()], episodes), *took))
    unknown = estimate(0, 0)
    parts: list[tuple[str, Estimate | None, tuple[str, ...]]] = [
        (f"{name} ({own.policy})", evaluation.agents.get(name, unknown), _used([own], episodes))
        for name, own in used.items()
    ]
    if (judge := evaluation.judge) is not None:
        parts.append((f"judge ({judge.policy})", None, _used([judge], episodes)))
    for tool, ran in evaluation.tools.items():
        cells = f"{ran.calls / episodes:,.1f}", "", "", "", _seconds(ran.seconds / episodes)
        parts.append((f"{tool} (tool)", None, cells))
    parts += [(name, None, (f"{value:,.1f}", "", "", "", "")) for name, value in evaluation.team.items()]
    return whole, [EpisodeCost(name, correct, (*cells, "", "")) for name, correct, cells in parts]


def _used(used: Sequence[Usage], episodes: int) -> tuple[str, ...]:
    """Calls, tokens in and out, cost, where all have a price, and seconds of engines, where they are known."""
    if not used:
        return ("",) * 5
    spent = [each.spent for each in used]
    known = [value for value in spent if value is not None]
    seconds = [each.seconds for each in used if each.seconds is not None]
    sums = (sum(getattr(each, what) for each in used) / episodes for what in ("calls", "input_tokens", "output_tokens"))
    return (
        *(f"{value:,.1f}" for value in sums),
        f"{sum(known) / episodes:.3g}" if len(known) == len(spent) else "no price",
        _seconds(sum(seconds) / episodes) if len(seconds) == len(used) else "",
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
