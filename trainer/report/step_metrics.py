"""Metrics of a training step under verl's names, overall and per agent; and spikes of gradient norms."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from marsrl.trainer.learner.step_stats import StepStats

WINDOW = 50  # number of norms in a median
FACTOR = 5.0  # multiple of the median above which a norm is a spike
FEWEST = 5  # fewest norms for a meaningful median; with fewer, nothing is a spike

_NORM, _SPIKES = "grad_norm", "grad_spikes"
_MEANS = {  # Means over trained tokens: the metric, and its sum in StepStats.
    "actor/entropy": "entropy",
    "actor/clip_fraction": "clipped_tokens",
    "actor/clamp_fraction": "clamped_tokens",
    "mpt/fraction_masked": "masked_tokens",
}


def step_metrics(stats: StepStats, agents: Sequence[str]) -> dict[str, float]:
    """Return actor/*, mpt/*, router/* and train_rollout/* of one policy's step.

    Means are over trained tokens; an agent without any has no entry, and a mean over nothing is left out.
    actor/{agent}/grad_norm exists in steps that measured it (trainer.agent_grad_norm_every).
    """
    sums = {name: dict(zip(agents, values, strict=True)) for name, values in stats.agent_sums.items()}
    tokens = sum(sums["tokens"].values())
    metrics: dict[str, float] = {
        "actor/loss": stats.loss,
        "actor/grad_norm": stats.grad_norm,
        "actor/lr": stats.lr,
        "actor/tokens": tokens,
        "actor/updates": stats.num_updates,
        "actor/empty_steps": float(stats.is_empty),
        "actor/skipped_steps": float(stats.is_skipped),
        "mpt/gated_samples": stats.gated_samples,
    }
    if tokens:
        for name, counted in _MEANS.items():
            metrics[name] = sum(sums[counted].values()) / tokens
        metrics["actor/kl"] = sum(sums["kl"].values()) / tokens
    if stats.prob_diff_mean == stats.prob_diff_mean:  # NaN: rollout log-probs are unknown.
        metrics["train_rollout/prob_diff_mean"] = stats.prob_diff_mean
        metrics["train_rollout/prob_diff_max"] = stats.prob_diff_max
        metrics["train_rollout/k3"] = stats.k3
    if stats.replay is not None and stats.replay.tokens:
        metrics["router/replayed_differ"] = stats.replay.tokens_differ / stats.replay.tokens
        metrics["router/replayed_choices_differ"] = stats.replay.choices_differ / stats.replay.choices
    if stats.load is not None:
        metrics["router/aux_loss"] = stats.load.aux_loss
        metrics["router/load_max"] = stats.load.largest
        metrics["router/load_min"] = stats.load.smallest
    if stats.num_shared:
        metrics["actor/shared_tokens"] = stats.num_shared / (stats.num_tokens + stats.num_shared)
    for agent in agents:
        count = sums["tokens"][agent]
        if count:
            metrics[f"actor/{agent}/tokens"] = count
            for name, counted in _MEANS.items():
                metrics[name.replace("/", f"/{agent}/")] = sums[counted][agent] / count
    for agent, norm in zip(agents, stats.agent_grad_norms, strict=bool(stats.agent_grad_norms)):
        if norm is not None:
            metrics[f"actor/{agent}/grad_norm"] = norm
    return metrics


class GradSpikes:
    """Detector of gradient-norm spikes: compares every norm with the median of the last 50 norms of the same name.

    rows: metrics of earlier steps, from which a resumed run restores the medians.
    Norms of 0 (from steps that trained nothing) and non-finite norms are left out of the medians.
    """

    def __init__(self, rows: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._norms: dict[str, deque[float]] = {}
        for row in rows:
            self._add(row)

    def found(self, row: Mapping[str, float | None]) -> dict[str, float]:
        """Return {.../grad_spikes: 1 or 0} for each .../grad_norm of a step's metrics, and add these norms to the medians.

        1: above 5 times the median, or not finite.
        """
        spikes = {
            name.removesuffix(_NORM) + _SPIKES: float(norm is None or self._is_spike(name, norm))
            for name, norm in _norms(row).items()
        }
        self._add(row)
        return spikes

    def _is_spike(self, name: str, norm: float) -> bool:
        before = self._norms.get(name, ())
        return not math.isfinite(norm) or (len(before) >= FEWEST and norm > FACTOR * statistics.median(before))

    def _add(self, row: Mapping[str, float | None]) -> None:
        for name, norm in _norms(row).items():
            if norm is not None and math.isfinite(norm) and norm > 0:
                self._norms.setdefault(name, deque(maxlen=WINDOW)).append(norm)


def _norms(row: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: norm for name, norm in row.items() if name.endswith(f"/{_NORM}")}
