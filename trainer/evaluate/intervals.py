"""95% intervals by bootstrap over problems (Efron and Tibshirani 1993, chapter 13, the percentile interval).

Draws of one problem are correlated: an interval that treats them as independent is too narrow. So the bootstrap resamples whole
problems with all their draws, and recomputes the statistic each time. The resamples are seeded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from marsrl.trainer.report.summary import UNKNOWN, Estimate, wilson_interval

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""Function from weights [B, P] to the statistic of each of B resamples, [B]; NaN if undefined. A weight is how often the resample
contains the problem."""

RESAMPLES = 2000
_BLOCK = 1 << 22  # most bootstrap weights (resamples x problems) in memory at once; 32 MiB
_SEED = 17


def bootstrap(num_problems: int, statistic: Statistic) -> tuple[float, float]:
    """Return the statistic's (2.5%, 97.5%) quantiles, or NaNs if it is never defined. Resamples depend only on num_problems."""
    statistics = np.concatenate([statistic(weights) for weights in _draws(num_problems)])
    statistics = statistics[np.isfinite(statistics)]
    if not len(statistics):
        return np.nan, np.nan
    low, high = np.percentile(statistics, [2.5, 97.5])
    return float(low), float(high)


def estimate_of(num_problems: int, num_samples: int, statistic: Statistic) -> Estimate:
    """Return the statistic, in [0, 1], over all problems, with its interval.

    If all resamples give the same value (all right, all wrong, one problem), Wilson's interval replaces the bootstrap.
    """
    mean = float(statistic(np.ones((1, num_problems)))[0]) if num_problems else np.nan
    if np.isnan(mean):
        return UNKNOWN
    mean = min(1.0, max(0.0, mean))
    low, high = bootstrap(num_problems, statistic)
    if high - low < 1e-12:
        low, high = wilson_interval(mean * num_problems, num_problems)
    return Estimate(mean=mean, low=max(0.0, min(low, mean)), high=min(1.0, max(high, mean)), n=num_samples)


def ratio(successes: Sequence[float] | Array, counts: Sequence[float] | Array) -> Statistic:
    """Return the statistic (sum of successes) / (sum of counts), from the values of each problem."""
    above, below = np.asarray(successes, float), np.asarray(counts, float)

    def statistic(weights: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            found: Array = (weights @ above) / (weights @ below)
        return found

    return statistic


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of the problems' values, with its interval. A value of NaN marks a problem without one."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return estimate_of(len(known), len(known), ratio(known.tolist(), [1.0] * len(known)))


def _draws(num_problems: int) -> list[Array]:
    """Return the bootstrap weights in blocks [B, P], RESAMPLES rows in total."""
    rows = max(1, min(RESAMPLES, _BLOCK // max(1, num_problems)))
    return [_block(num_problems, min(rows, RESAMPLES - first), first) for first in range(0, RESAMPLES, rows)]


@functools.lru_cache(maxsize=4)
def _block(num_problems: int, rows: int, first: int) -> Array:
    rng = np.random.default_rng((_SEED, num_problems, first))
    drawn = rng.integers(0, num_problems, (rows, num_problems)) + num_problems * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * num_problems).reshape(rows, num_problems).astype(float)
