"""Metrics of each agent from a step's groups: rewards, advantages, lengths and verdicts.

Pure functions. An undefined value (the mean of no reward) is left out, never NaN or 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean

from marsrl.rollout.types import Fate, Finish, Group, Sample
from marsrl.trainer.report.unread import Ended

ONE_SIDED = 0.95
MIN_VERDICTS = 20  # 1 / (1 - ONE_SIDED): among fewer, a single dissenting verdict already exceeds the share


def summarise(
    groups: Iterable[Group],
    *,
    version: int,
    num_unfinished: int = 0,
    advantages: Mapping[str, float] | None = None,
    verifiers: Collection[str] | None = None,
    frozen: Collection[str] = (),
) -> dict[str, float]:
    """The metrics of the groups that one step consumes, as docs/metrics.md explains them.

    groups: finished groups, every agent.
    version: the policy version that consumes them: staleness is measured here.
    num_unfinished: samples carried over to a later stage.
    advantages: {sample uid: advantage}, as trained on; without it no advantage metric.
    verifiers: agents that give verdicts; default: those with at least one that could be read.
    frozen: agents of frozen policies; their samples are never stale.
    """
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    # a sample that failed before its first token has no segment and no age
    staleness = [version - s.oldest_version for s in samples if s.segments and s.agent not in frozen]
    metrics: dict[str, float] = {
        "rollout/groups": len(groups),
        "rollout/samples": len(samples),
        "rollout/unfinished": num_unfinished,
        **{f"rollout/finish_{each.value}": sum(sample.finish is each for sample in samples) for each in Finish},
        **_means({"rollout/staleness_mean": staleness, "reward/all/mean": _rewards(samples)}),
    }
    if staleness:
        metrics["rollout/staleness_max"] = max(staleness)
    turns = [turn for sample in samples for turn in sample.turns]
    if turns:  # a program played
        tokens = {fate: sum(turn.end - turn.start for turn in turns if turn.fate is fate) for fate in Fate}
        metrics["session/unread_tokens"] = tokens[Fate.UNREAD]
        metrics["session/superseded_tokens"] = tokens[Fate.SUPERSEDED]
    by_agent: dict[str, list[Sample]] = {}
    for sample in samples:
        by_agent.setdefault(sample.agent, []).append(sample)
    for agent, own in sorted(by_agent.items()):
        metrics |= _reward_metrics(agent, own) | _length_metrics(agent, own)
        if advantages is not None:
            zero = sum(advantages.get(sample.uid, 0.0) == 0 for sample in own)
            metrics[f"advantage/{agent}/fraction_zero"] = zero / len(own)
        if agent in verifiers if verifiers is not None else any(sample.verdict is not None for sample in own):
            metrics |= _verdict_metrics(agent, own)
    return metrics


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of each that has a value."""
    return {name: fmean(own) for name, own in values.items() if own}


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [sample.reward.value for sample in samples if not sample.reward.is_missing]


def team_metrics(counted: Mapping[str, float]) -> dict[str, float]:
    """team/{name}, of the batch's metrics, as means over the episodes that ended in it (Orchestration.metrics)."""
    num_episodes = counted.get("rollout/episodes", 0)
    return {name: total / num_episodes for name, total in counted.items() if name.startswith("team/")}


def one_sided_verdicts(groups: Iterable[Group]) -> list[str]:
    """A warning for every agent with over 95% equal readable verdicts: it no longer judges.

    Fewer than 20 verdicts of an agent give no warning.
    """
    counts: dict[str, list[int]] = {}
    for group in groups:
        for sample in group.samples:
            if sample.verdict is not None:
                counts.setdefault(sample.agent, [0, 0])[sample.verdict] += 1
    warnings = []
    for agent, (wrong, correct) in sorted(counts.items()):
        total = wrong + correct
        if total >= MIN_VERDICTS and max(wrong, correct) > ONE_SIDED * total:
            said, count = ("wrong", wrong) if wrong > correct else ("correct", correct)
            warnings.append(
                f"{agent} said '{said}' in {count} of {total} verdicts: it no longer tells right from wrong; "
                f"agents.{agent}.pick=paired or balanced shows it both"
            )
    return warnings


def endings(groups: Iterable[Group], is_read: Callable[[Sample], bool]) -> dict[str, list[Ended]]:
    """Return the ends of samples by agent, without those that an engine gave up. is_read: Team.is_read."""
    found: dict[str, list[Ended]] = {}
    for sample in (sample for group in groups for sample in group.samples if sample.finish is not Finish.ERROR):
        ended = Ended(is_read(sample), sample.finish is Finish.LENGTH, len(sample.token_ids), sample.text)
        found.setdefault(sample.agent, []).append(ended)
    return found


def _reward_metrics(agent: str, samples: Sequence[Sample]) -> dict[str, float]:
    values = _rewards(samples)
    correct = [sample.reward.correct for sample in samples if not math.isnan(sample.reward.correct)]
    overlong = [sample.reward.parts["overlong"] for sample in samples if "overlong" in sample.reward.parts]
    means = _means(
        {f"reward/{agent}/mean": values, f"reward/{agent}/correct": correct, f"reward/{agent}/overlong": overlong}
    )
    return {f"reward/{agent}/missing": len(samples) - len(values)} | means


def _length_metrics(agent: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths of completions, up to the last answer that a program read; completions without such an answer do not count."""
    read = [sample for sample in samples if sample.length or not sample.turns]
    if not read:
        return {}
    lengths = [sample.length for sample in read]
    return {
        f"response_length/{agent}/mean": fmean(lengths),
        f"response_length/{agent}/min": min(lengths),
        f"response_length/{agent}/max": max(lengths),
        f"response_length/{agent}/clip_ratio": fmean([sample.finish is Finish.LENGTH for sample in read]),
    }


def _verdict_metrics(agent: str, samples: Sequence[Sample]) -> dict[str, float]:
    """recall_wrong is the detection recall of arXiv:2511.11373, Figure 5."""
    verdicts = [sample.verdict for sample in samples if sample.verdict is not None]
    # The reward tells if the verdict agrees with the solution (Orchestration.reward), and so if the solution was right.
    judged = [(s.verdict, s.reward.parts["verdict"]) for s in samples if "verdict" in s.reward.parts]
    means: dict[str, Sequence[float]] = {
        "fraction_wrong": [not verdict for verdict in verdicts],
        "recall_wrong": [agrees for verdict, agrees in judged if verdict == (agrees == 0)],
        "precision_wrong": [agrees for verdict, agrees in judged if not verdict],
    }
    found = _means({f"verdicts/{agent}/{name}": values for name, values in means.items()})
    return {f"verdicts/{agent}/missing": 1 - len(verdicts) / len(samples)} | found
