"""Played samples as a learner gets them."""

from __future__ import annotations

from collections.abc import Sequence

from marsrl.rollout.types import Sample
from marsrl.trainer.data.packing import TrainSequence


def train_sequences(samples: Sequence[Sample], temperature: float) -> list[TrainSequence]:
    """Samples as one agent's; every second one is right."""
    return [
        TrainSequence(
            uid=s.uid,
            prompt_ids=s.prompt_ids,
            token_ids=s.token_ids,
            is_sampled=s.is_sampled,
            rollout_logprobs=s.rollout_logprobs,
            advantage=float(index % 2) - 0.5,
            agent=0,
            temperature=temperature,
            is_positive=index % 2 == 1,
            kept_tokens=s.kept_tokens,
            routed_experts=s.routed_experts,
        )
        for index, s in enumerate(samples)
    ]
