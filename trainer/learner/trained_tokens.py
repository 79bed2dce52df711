"""Per-token values of an update's own forward pass, for the token log. Nothing is computed twice for it.

Without torch where nobody trains: `marsrl view` reads the log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from marsrl.rollout.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

    from marsrl.trainer.data.packing import PackedBatch
    from marsrl.trainer.learner.megatron.head import HeadResult

CLIPPED, GATED, MASKED = 1, 2, 4  # bits of a mark


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The sampled tokens [M] of one sample, in order, as an update found them before it changed the weights.

    logprobs, entropy: float32, nats, at the sampling temperature, of what the sampler kept. marks: uint8, CLIPPED (the ratio's
    clip is active), GATED (well mastered: the gate masks it), MASKED (by the gate or by loss.correction: it lost every term).
    update: which of the step's updates trained it, from 1; the weights of later ones have moved on.
    """

    uid: str
    logprobs: FloatArray
    entropy: FloatArray
    marks: npt.NDArray[np.uint8]
    update: int = 1


def marks_of(result: HeadResult) -> Tensor:
    """[T] uint8 of this rank's part of a micro-batch."""
    import torch

    from marsrl.kernels import token_marks

    marks = token_marks(result.policy.logprobs, result.policy.entropy, result.inputs)
    bits = ((CLIPPED, marks.clipped), (GATED, marks.gated), (MASKED, marks.masked))
    return torch.stack([is_set.to(torch.uint8) * bit for bit, is_set in bits]).sum(0, dtype=torch.uint8)


def tokens_of(
    batch: PackedBatch, uids: Collection[str], logprobs: Tensor, entropy: Tensor, marks: Tensor
) -> Iterator[TrainedTokens]:
    """Values of the samples with these uids; logprobs, entropy, marks: [T] on the CPU, indexed by the whole batch."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.mask.cpu()
    for uid, start, end in zip(batch.uids, bounds[:-1], bounds[1:], strict=True):
        if uid in uids:
            rows = start + mask[start:end].nonzero()[:, 0]
            yield TrainedTokens(uid, logprobs[rows].numpy(), entropy[rows].numpy(), marks[rows].numpy())
