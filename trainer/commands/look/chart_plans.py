"""The charts of a run: their metrics, titles and units."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart: its title, its unit, and a pattern of the metrics on it, whose groups are their labels.

    A metric with <name>/low and <name>/high is drawn with that interval.
    """

    title: str
    unit: str
    pattern: str
    is_activities: bool = False  # coloured as in the timeline

    def label(self, name: str) -> str | None:
        """Label of the metric on the chart; None if it is not plotted."""
        found = re.fullmatch(self.pattern, name)
        return found and ("/".join(filter(None, found.groups())) or name.rpartition("/")[2])


_OF_POLICY = "(?:([^/]+)/)?"  # prefix in runs with several policies
PLANS = (
    ChartPlan("Reward", "mean per agent", "reward/(.+)/mean"),
    ChartPlan("Groups without advantage", "share of samples with advantage 0", "advantage/(.+)/fraction_zero"),
    ChartPlan("Verdicts", "share of 'wrong' among readable verdicts", "verdicts/(.+)/fraction_wrong"),
    ChartPlan("Response length", "mean, tokens", "response_length/(.+)/mean"),
    ChartPlan("Entropy", "nats", f"{_OF_POLICY}actor/entropy"),
    ChartPlan("Gradient norm", "before clipping; of an agent: of its share", f"{_OF_POLICY}actor/(?:(.+)/)?grad_norm"),
    ChartPlan("Gradient spikes", "1: above 5 running medians", f"{_OF_POLICY}actor/(?:(.+)/)?grad_spikes"),
    ChartPlan("Masked well-mastered tokens", "share", f"{_OF_POLICY}mpt/fraction_masked"),
    ChartPlan(
        "Trainer and rollout probabilities", "|p_train - p_rollout|", f"{_OF_POLICY}train_rollout/prob_diff_(.+)"
    ),
    ChartPlan("Tokens", "per second", "perf/tokens_per_s"),
    ChartPlan("Engines' time per step, by agent", "seconds", "cost/(.+)/seconds"),
    ChartPlan("Staleness", "policy versions", "rollout/staleness_(.+)"),
    ChartPlan("Evaluation", "share of held-out problems", "eval/(?!tokens$|spent$)([^/]+)"),
    ChartPlan("Cost per step", "in the currency of policies.*.price", "cost/(.+)/spent"),
    ChartPlan("Time per step", "seconds", "timing_s/(?!total$)(.+)", is_activities=True),
)
