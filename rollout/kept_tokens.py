"""Tokens that a truncating sampler kept at each position of a completion; stored with a sample.

    ids     int32, of all positions in order, ascending within a position
    counts  [N] int32, number of ids at each position; 0: no token was excluded, or the policy did not choose the token

The kept tokens depend on the logits at sampling, so they cannot be recomputed from the token ids. An id takes 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Ids and counts of kept tokens; see the module."""

    ids: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, places: Sequence[npt.NDArray[np.int32]]) -> KeptTokens:
        """Build from the ids of each position."""
        counts = np.array([len(ids) for ids in places], np.int32)
        return cls(np.concatenate([np.zeros(0, np.int32), *places]), counts)

    @classmethod
    def nothing_left_out(cls, num_tokens: int) -> KeptTokens:
        return cls(np.zeros(0, np.int32), np.zeros(num_tokens, np.int32))

    def followed_by(self, other: KeptTokens) -> KeptTokens:
        return KeptTokens(np.concatenate([self.ids, other.ids]), np.concatenate([self.counts, other.counts]))

    def lacks(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the positions, int64, whose token is not one of the kept ids; positions without kept ids do not count."""
        place = np.arange(len(self.counts)).repeat(self.counts)
        found = np.bincount(place[self.ids == token_ids[place]], minlength=len(self.counts))
        return np.flatnonzero((found == 0) & (self.counts > 0))
