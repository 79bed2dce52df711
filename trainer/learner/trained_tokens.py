"""Values of an update's own forward pass by token and by sample, for the logs. Imports no torch: `marsrl view` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marsrl.rollout.types import FloatArray

CLIPPED, GATED, MASKED = 1, 2, 4  # Bits of a mark.


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Sampled tokens [M] of one sample, in order, as an update evaluated them before it changed the weights.

    logprobs, entropy: float32, nats, at the sampling temperature, over the tokens that the sampler kept.
    marks: uint8, bits: CLIPPED (the ratio's clip is active), GATED (masked as well mastered), MASKED (the gate or loss.correction
        masks the token, so it has no loss term).
    update: number, from 1, of the step's update that trained the sample.
    """

    uid: str
    logprobs: FloatArray
    entropy: FloatArray
    marks: npt.NDArray[np.uint8]
    update: int = 1


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample's tokens in an update, or the part of them on one context-parallel rank.

    num_tokens: number of trained tokens, whatever the sample's weight.
    gap: sum of |log p_trainer - log p_rollout| over these tokens before the update, nats; NaN if rollout log-probs are unknown.
    is_applied: False if the update was skipped.
    update: number of the update in the step, from 1.
    """

    uid: str
    num_tokens: int
    gap: float
    is_applied: bool
    update: int = 1
