"""What stays the same over a step's optimizer updates: computed once, under the weights that the step starts with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fixed:
    """Of one micro-batch, as far as this rank holds it.

    old_logprobs, reference_logprobs: [T] float32, nats, 0 outside the mask; None: pseudo on-policy, no KL term; on
        pipeline stages before the last nobody reads them.
    experts: {MoE layer, from 0 in the whole model: [T, K] uint8 or int16}, the experts to force, for this rank's layers
        and its part of the tokens; None: the router chooses.
    """

    old_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    experts: dict[int, Tensor] | None
