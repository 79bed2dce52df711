"""trainer/main.py with a biased estimator in place of credit.turns=returns: turn_credit.summed_means, for toll.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import fsum
from unittest.mock import patch

from turn_credit import summed_means

from marsrl.rollout.types import Sample
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.main import main


def advantages(samples: Iterable[Sample], config: CreditConfig) -> dict[str, list[float]]:
    """Return {uid: advantages of the sample's turns}. Each session must have one sample."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if not sample.reward.is_missing and sample.trained_turns:
            groups.setdefault(sample.group_id, []).append(sample)
    by_uid: dict[str, list[float]] = {}
    for group in groups.values():
        sessions = []
        for sample in group:
            rewards = list(sample.reward.turns) or [0.0] * len(sample.trained_turns)
            rewards[-1] += sample.reward.value - fsum(sample.reward.turns)
            sessions.append(rewards)
        by_uid |= {sample.uid: list(own) for sample, own in zip(group, summed_means(sessions), strict=True)}
    return by_uid


if __name__ == "__main__":
    with patch("marsrl.trainer.data.credit.turn_advantages", advantages):
        sys.exit(main())
