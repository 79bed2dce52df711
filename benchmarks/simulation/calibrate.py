"""The one fitted number: sigma of the log-normal lengths, so that a step of UloRL with one segment takes what they published.
What the model then says about two and four segments is a prediction, set beside their figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .cost_model import Constants, scaled
from .lengths import MEDIAN_TOKENS, Lengths
from .play import Setting, play

PUBLISHED_S = {1: 1240.0, 2: 774.0, 4: 601.0}
"""Seconds a step by segments: UloRL (arXiv:2507.19766), Qwen3-30B-A3B, 64k."""

ULORL = Setting(engines=16, problems=128, is_solver_only=True, steps=3)
"""128 prompts x 8 a step (MarsRL, by the same authors; UloRL's own batch is not in our notes). ASSUMED: 32 H100s; the
papers do not say how many."""

MISS = 0.15  # a prediction further off than this is a miss
_SIGMAS = (0.3, 2.5)
_WARMUP = 5  # steps before the measured ones: the longest samples take four stages


@dataclass(frozen=True)
class Fit:
    """sigma: None where none in the range gives the published time. step_s: by segments, simulated."""

    sigma: float | None
    step_s: dict[int, float]

    def error(self, segments: int) -> float:
        """Relative to the published time."""
        return self.step_s[segments] / PUBLISHED_S[segments] - 1


def fit(constants: Constants, setting: Setting = ULORL, median: float = MEDIAN_TOKENS, predict: bool = True) -> Fit:
    """Fit sigma to the time with one segment, then predict the others."""

    def step_s(sigma: float, segments: int = 1) -> float:
        warmup = 0 if segments == 1 else _WARMUP
        return play(replace(setting, segments=segments, warmup=warmup), constants, Lengths(sigma, median)).step_s

    sigma = find_root(lambda s: step_s(s) - PUBLISHED_S[1], *_SIGMAS, tolerance=2.0)
    if sigma is None:
        return Fit(None, {})
    segments = PUBLISHED_S if predict else {1: 0.0}
    return Fit(sigma, {n: step_s(sigma, n) for n in segments})


def find_root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float | None:
    """x in [low, high] with |f(x)| <= tolerance, for a rising f (regula falsi, Illinois); None where f has no change of sign.

    f may jump (a maximum over few samples does): when the bracket is narrower than 1e-4 its middle is the answer.
    """
    f_low, f_high = f(low), f(high)
    if f_low > tolerance or f_high < -tolerance:
        return None
    side = 0
    while high - low > 1e-4:
        x = (low * f_high - high * f_low) / (f_high - f_low)
        x = min(max(x, low + 0.02 * (high - low)), high - 0.02 * (high - low))
        value = f(x)
        if abs(value) <= tolerance:
            return x
        if value < 0:
            low, f_low = x, value
            f_high = f_high / 2 if side < 0 else f_high
            side = -1
        else:
            high, f_high = x, value
            f_low = f_low / 2 if side > 0 else f_low
            side = 1
    return (low + high) / 2


_USED = (
    "itl_scale", "itl_context", "hbm_bytes_per_s", "kv_bytes_per_token", "weight_bytes", "gpu_memory_bytes", "memory_share",
    "max_num_seqs", "active_params", "attention_flops", "compute_flops_per_s", "attention_flops_per_s", "sync_bytes_per_s",
    "solver_prompt",
)  # fmt: skip  # those that UloRL's single agent knows


def sensitivity(constants: Constants) -> dict[str, dict[float, Fit]]:
    """Fitted again with each constant at 0.8 and 1.2 of its value: {name: {factor: fit}}."""
    table: dict[str, dict[float, Fit]] = {}
    for name in _USED:
        table[name] = {factor: fit(scaled(constants, name, factor)) for factor in (0.8, 1.2)}
    for name in ("engines", "problems"):
        value = getattr(ULORL, name)
        table[name] = {f: fit(constants, replace(ULORL, **{name: round(value * f)})) for f in (0.8, 1.2)}
    table["median length"] = {f: fit(constants, median=MEDIAN_TOKENS * f) for f in (0.8, 1.2)}
    return table
