"""Metrics of each agent from a step's groups: rewards, advantages, lengths and verdicts.

Pure functions. An undefined value (the mean of no reward) is left out, never NaN or 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean

from marsrl.rollout.gateway.changes import BRANCH, kind_of
from marsrl.rollout.types import Fate, Finish, Group, Sample
from marsrl.trainer.report.unread import Ended

ONE_SIDED = 0.95
FEW_CALLS = 1.5  # calls per sample below which a warning explains the cause
MIN_VERDICTS = 20  # 1 / (1 - ONE_SIDED); with fewer verdicts, a single one is a larger share than 1 - ONE_SIDED


def summarise(
    groups: Iterable[Group],
    *,
    version: int,
    num_unfinished: int = 0,
    advantages: Mapping[str, float] | None = None,
    verifiers: Collection[str] | None = None,
    frozen: Collection[str] = (),
) -> dict[str, float]:
    """Return the metrics of the groups that one step consumes; docs/metrics.md explains them.

    groups: finished groups of all agents.
    version: policy version that consumes the groups, from which staleness is measured.
    num_unfinished: samples carried over to a later stage.
    advantages: {sample uid: advantage}, as trained on; None: no advantage metrics.
    verifiers: agents that give verdicts; default: agents with at least one readable verdict.
    frozen: agents of frozen policies; their samples are never stale.
    """
    groups = list(groups)
    samples = [sample for group in groups for sample in group.samples]
    # A sample that failed before its first token has no segment and no age.
    staleness = [version - s.oldest_version for s in samples if s.segments and s.agent not in frozen]
    metrics: dict[str, float] = {
        "rollout/groups": len(groups),
        "rollout/samples": len(samples),
        "rollout/unfinished": num_unfinished,
        **{f"rollout/finish_{finish.value}": sum(sample.finish is finish for sample in samples) for finish in Finish},
        **_means({"rollout/staleness_mean": staleness, "reward/all/mean": _rewards(samples)}),
    }
    if staleness:
        metrics["rollout/staleness_max"] = max(staleness)
    turns = [turn for sample in samples for turn in sample.turns]
    if turns:  # A program played the episodes.
        tokens = {fate: sum(turn.end - turn.start for turn in turns if turn.fate is fate) for fate in Fate}
        metrics["session/unread_tokens"] = tokens[Fate.UNREAD]
        metrics["session/superseded_tokens"] = tokens[Fate.SUPERSEDED]
        played = [sample for sample in samples if sample.turns]
        num_tokens = sum(len(sample.prompt_ids) + len(sample.token_ids) for sample in played)
        metrics["session/merge"] = len(turns) / len(played)
        metrics["session/duplicated"] = sum(s.behind.num_tokens for s in played if s.behind is not None) / num_tokens
    by_agent: dict[str, list[Sample]] = {}
    for sample in samples:
        by_agent.setdefault(sample.agent, []).append(sample)
    for agent, agent_samples in sorted(by_agent.items()):
        metrics |= _reward_metrics(agent, agent_samples) | _length_metrics(agent, agent_samples)
        if advantages is not None:
            zero = sum(advantages.get(sample.uid, 0.0) == 0 for sample in agent_samples)
            metrics[f"advantage/{agent}/fraction_zero"] = zero / len(agent_samples)
        if agent in verifiers if verifiers is not None else any(sample.verdict is not None for sample in agent_samples):
            metrics |= _verdict_metrics(agent, agent_samples)
    return metrics


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each name that has values."""
    return {name: fmean(numbers) for name, numbers in values.items() if numbers}


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [sample.reward.value for sample in samples if not sample.reward.is_missing]


def team_metrics(counted: Mapping[str, float]) -> dict[str, float]:
    """Return team/{name}: means of the orchestration's own metrics over the episodes that ended in the batch."""
    num_episodes = counted.get("rollout/episodes", 0)
    return {name: total / num_episodes for name, total in counted.items() if name.startswith("team/")}


def one_sided_verdicts(groups: Iterable[Group]) -> list[str]:
    """Return a warning for every agent with over 95% equal readable verdicts: it no longer tells solutions apart.

    An agent with fewer than 20 verdicts gets no warning.
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
            verdict, count = ("wrong", wrong) if wrong > correct else ("correct", correct)
            warnings.append(
                f"{agent} said '{verdict}' in {count} of {total} verdicts: it no longer tells right from wrong; "
                f"agents.{agent}.pick=paired or balanced shows it both kinds of solutions"
            )
    return warnings


def poor_merges(groups: Iterable[Group]) -> list[str]:
    """Return a warning, with an example, if programs make fewer than 1.5 calls per sample because they change their chats.

    Returns [] for programs whose calls are all new contexts or branches, or that make one call per session.
    """
    played = [sample for group in groups for sample in group.samples if sample.turns]
    rewritten = [sample.rewritten for sample in played if sample.rewritten not in ("", BRANCH)]
    merge = sum(len(sample.turns) for sample in played) / max(1, len(played))
    if merge >= FEW_CALLS or not rewritten:
        return []
    ((kind, number),) = Counter(map(kind_of, rewritten)).most_common(1)
    example = next(change for change in rewritten if kind_of(change) == kind)
    return [
        f"programs make {merge:.1f} calls per sample: {number} of {len(played)} samples do not continue an earlier one because "
        f"{example} (docs/external.md: calls that merge)"
    ]


def endings(groups: Iterable[Group], is_read: Callable[[Sample], bool]) -> dict[str, list[Ended]]:
    """Return the ends of each agent's samples, without samples whose engine failed. is_read: Team.is_read."""
    ends: dict[str, list[Ended]] = {}
    for sample in (sample for group in groups for sample in group.samples if sample.finish is not Finish.ERROR):
        ended = Ended(is_read(sample), sample.finish is Finish.LENGTH, len(sample.token_ids), sample.text)
        ends.setdefault(sample.agent, []).append(ended)
    return ends


def _reward_metrics(agent: str, samples: Sequence[Sample]) -> dict[str, float]:
    values = _rewards(samples)
    correct = [sample.reward.correct for sample in samples if not math.isnan(sample.reward.correct)]
    overlong = [sample.reward.parts["overlong"] for sample in samples if "overlong" in sample.reward.parts]
    means = _means(
        {f"reward/{agent}/mean": values, f"reward/{agent}/correct": correct, f"reward/{agent}/overlong": overlong}
    )
    return {f"reward/{agent}/missing": len(samples) - len(values)} | means


def _length_metrics(agent: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of completion lengths. A program's sample counts up to the last answer that the program read."""
    counted = [sample for sample in samples if sample.length or not sample.turns]
    if not counted:
        return {}
    lengths = [sample.length for sample in counted]
    return {
        f"response_length/{agent}/mean": fmean(lengths),
        f"response_length/{agent}/min": min(lengths),
        f"response_length/{agent}/max": max(lengths),
        f"response_length/{agent}/clip_ratio": fmean([sample.finish is Finish.LENGTH for sample in counted]),
    }


def _verdict_metrics(agent: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of an agent's verdicts; recall_wrong is the detection recall of arXiv:2511.11373, Figure 5."""
    verdicts = [sample.verdict for sample in samples if sample.verdict is not None]
    # The reward tells whether the verdict was true (Orchestration.reward). Reward and verdict together tell whether the solution
    # was right.
    judged = [(s.verdict, s.reward.parts["verdict"]) for s in samples if "verdict" in s.reward.parts]
    means: dict[str, Sequence[float]] = {
        "fraction_wrong": [not verdict for verdict in verdicts],
        "recall_wrong": [agrees for verdict, agrees in judged if verdict == (agrees == 0)],
        "precision_wrong": [agrees for verdict, agrees in judged if not verdict],
    }
    metrics = _means({f"verdicts/{agent}/{name}": values for name, values in means.items()})
    return {f"verdicts/{agent}/missing": 1 - len(verdicts) / len(samples)} | metrics
