"""The tokens that a truncating sampler kept at each place of a completion, as they travel with a sample.

    ids     int32, of all places in order, ascending within a place
    counts  [N] int32, number of ids of each place; 0: no token was left out there, or the policy did not choose the token

The set depends on the logits at sampling, so it cannot be recomputed from the token ids. An id takes 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """See the module."""

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, places: Sequence[npt.NDArray[np.int32]]) -> KeptTokens:
        """From the ids of each place."""
        counts = np.array([len(ids) for ids in places], np.int32)
        return cls(np.concatenate([np.zeros(0, np.int32), *places]), counts)

    @classmethod
    def nothing_left_out(cls, num_tokens: int) -> KeptTokens:
        return cls(np.zeros(0, np.int32), np.zeros(num_tokens, np.int32))

    def followed_by(self, other: KeptTokens) -> KeptTokens:
        return KeptTokens(np.concatenate([self.ids, other.ids]), np.concatenate([self.counts, other.counts]))

    def lacks(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """[N] bool: the token was not among those kept at its place."""
        place = np.arange(len(self.counts)).repeat(self.counts)
        found = np.bincount(place[self.ids == token_ids[place]], minlength=len(self.counts))
        return np.flatnonzero((found == 0) & (self.counts > 0))
