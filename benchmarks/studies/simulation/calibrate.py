"""Fit sigma of the log-normal lengths, so that UloRL's step with one segment takes the published time.

No other number is fitted. The times for two and four segments are predictions, which are compared with the published times.

The paper does not say how many new samples a stage plays if some are carried over from the previous stage. Two interpretations
are simulated with the same sigma; they agree for one segment, where nothing is carried over:

    step_s      rollout.stage_size=new: each stage has as many new problems as with one segment, and also carried-over samples
    steady_s    rollout.stage_size=total: each stage has as many samples as with one segment, carried-over ones included
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from simulation.cost_model import Constants
from simulation.lengths import Lengths
from simulation.play import Outcome, Setting, StageSize, play

PUBLISHED_S = {1: 1240.0, 2: 774.0, 4: 601.0}
"""Published seconds per step by number of segments: UloRL (arXiv:2507.19766), Qwen3-30B-A3B, 64k tokens."""

READINGS = {"step_s": "128 new problems", "steady_s": "1024 samples in all"}
"""Interpretations of what a stage plays, by field of Fit."""

ULORL = Setting(engines=16, problems=128, is_solver_only=True, steps=6)
"""128 prompts x 8 samples per step, as in MarsRL by the same authors; we do not know UloRL's batch. ASSUMED: 32 H100s, a number
that the papers do not state.
"""

MISS = 0.15  # a larger relative error of a prediction is a miss
_SIGMAS = (0.3, 2.5)
_WARMUP = 6  # steps before the measured ones, because the longest samples take four stages


@dataclass(frozen=True)
class Fit:
    """Result of the fit. step_s, steady_s: seconds per step by segments. samples: samples trained per step in steady_s."""

    sigma: float
    step_s: dict[int, float]
    steady_s: dict[int, float]
    samples: dict[int, float]

    def error(self, reading: str, segments: int) -> float:
        """Return the relative error of a predicted time. reading: a key of READINGS."""
        return float(getattr(self, reading)[segments]) / PUBLISHED_S[segments] - 1


def fit(constants: Constants) -> Fit:
    """Fit sigma to the time with one segment, then predict the others."""

    def outcome(sigma: float, segments: int = 1, stage_size: StageSize = "new") -> Outcome:
        warmup, steps = (0, 3) if segments == 1 else (_WARMUP, ULORL.steps)
        changed = replace(ULORL, segments=segments, warmup=warmup, steps=steps, stage_size=stage_size)
        return play(changed, constants, Lengths(sigma))

    sigma = find_root(lambda s: outcome(s).step_s - PUBLISHED_S[1], *_SIGMAS, tolerance=2.0)
    if sigma is None:
        raise RuntimeError("no sigma gives UloRL's time with one segment: a constant must be wrong by far")
    steady = {n: outcome(sigma, n, "total" if n > 1 else "new") for n in PUBLISHED_S}
    return Fit(
        sigma,
        {n: outcome(sigma, n).step_s if n > 1 else steady[n].step_s for n in PUBLISHED_S},
        {n: steady_outcome.step_s for n, steady_outcome in steady.items()},
        {n: steady_outcome.samples_per_step for n, steady_outcome in steady.items()},
    )


def find_root(f: Callable[[float], float], low: float, high: float, tolerance: float) -> float | None:
    """Return x in [low, high] with |f(x)| <= tolerance, by regula falsi (Illinois); None if f does not change its sign.

    f must rise. It may jump, as a maximum over few samples does; once the bracket is narrower than 1e-4, its middle is returned.
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
