"""The charts of a run: which metrics stand together, under which title, in which unit."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart: its title, its unit, and the metrics on it, as prefix + anything + suffix.

    of_policies: where a run has several policies, their names stand before the prefix. middle: a regular expression of what is
    between prefix and suffix. A metric with <name>/low and <name>/high beside it has its interval around it.
    """

    title: str
    unit: str
    prefix: str
    suffix: str = ""
    is_activities: bool = False  # coloured as in the timeline
    of_policies: bool = False
    middle: str = ".*"

    def label(self, name: str) -> str | None:
        """Label of the metric on the chart; None if it is not plotted."""
        policy, _, rest = (
            name.partition("/") if self.of_policies and not name.startswith(self.prefix) else ("", "", name)
        )
        if name == "timing_s/total" or not (rest.startswith(self.prefix) and rest.endswith(self.suffix)):
            return None
        middle = rest[len(self.prefix) : len(rest) - len(self.suffix)].strip("/")
        if not re.fullmatch(self.middle, middle):
            return None
        return "/".join(part for part in (policy, middle) if part) or name.rpartition("/")[2]


PLANS = (
    ChartPlan("Reward", "mean per agent", "reward/", "/mean"),
    ChartPlan("Groups without advantage", "share of samples with advantage 0", "advantage/", "/fraction_zero"),
    ChartPlan("Verdicts", "share of 'wrong' among readable verdicts", "verdicts/", "/fraction_wrong"),
    ChartPlan("Response length", "mean, tokens", "response_length/", "/mean"),
    ChartPlan("Entropy", "nats", "actor/entropy", of_policies=True),
    ChartPlan("Gradient norm", "before clipping; of an agent: of its share", "actor/", "grad_norm", of_policies=True),
    ChartPlan("Gradient spikes", "1: above 5 running medians", "actor/", "grad_spikes", of_policies=True),
    ChartPlan("Masked well-mastered tokens", "share", "mpt/fraction_masked", of_policies=True),
    ChartPlan(
        "Trainer and rollout probabilities", "|p_train - p_rollout|", "train_rollout/prob_diff_", of_policies=True
    ),
    ChartPlan("Tokens", "per second", "perf/tokens_per_s"),
    ChartPlan("Engines' time per step, by agent", "seconds", "cost/", "/seconds"),
    ChartPlan("Staleness", "policy versions", "rollout/staleness_"),
    ChartPlan("Evaluation", "share of held-out problems", "eval/", middle="(?!tokens$|spent$)[^/]+"),
    ChartPlan("Cost per step", "in the currency of policies.*.price", "cost/", "/spent"),
    ChartPlan("Time per step", "seconds", "timing_s/", is_activities=True),
)
