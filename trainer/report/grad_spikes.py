"""Which gradient norms stand out of those before them: the spikes of an unstable training."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

WINDOW = 50  # norms that a median is of
FACTOR = 5.0  # a norm above so many medians is a spike
FEWEST = 5  # norms without which a median says little; until then nothing is a spike

_NORM, _SPIKES = "grad_norm", "grad_spikes"


class GradSpikes:
    """Compares every gradient norm with the running median of the last 50 of its name.

    rows: the metrics of the steps before, where a run goes on: what metrics.jsonl has is all the state there is.
    Steps that trained nothing (norm 0) and norms that are not finite are in no median.
    """

    def __init__(self, rows: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._norms: dict[str, deque[float]] = {}
        for row in rows:
            self._add(row)

    def found(self, row: Mapping[str, float | None]) -> dict[str, float]:
        """{.../grad_spikes: 1 or 0} for each .../grad_norm of a step's metrics, which then count for the next step.

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
