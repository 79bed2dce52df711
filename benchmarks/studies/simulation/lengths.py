"""Length and outcome of a simulated completion, as functions of its uid.

Every schedule therefore plays the same completions, and each length is a smooth function of sigma.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist

MEDIAN_TOKENS = 6665
"""Median length of the 792 completions of Qwen3-30B-A3B-Thinking-2507 on GPQA that the ML.ENERGY leaderboard publishes (runs on
one and two GPUs with 8 to 128 sequences). The standard deviation of the log-lengths is 0.67.
"""

_NORMAL = NormalDist()


def uniforms(seed: int, uid: str) -> tuple[float, float]:
    """Return two independent uniform numbers in (0, 1), determined by seed and uid."""
    digest = hashlib.blake2b(f"{seed}\x1f{uid}".encode(), digest_size=16).digest()
    first, second = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return (first + 0.5) / 2**64, (second + 0.5) / 2**64


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths, median * exp(sigma * z), drawn independently from one distribution for all agents.

    Real lengths of samples of the same problem are correlated, so real groups wait less than simulated groups.
    """

    sigma: float
    median: float = MEDIAN_TOKENS
    seed: int = 0

    def tokens(self, uid: str) -> int:
        """Return the whole length of a completion, at least 1; the player applies the global maximum."""
        z = _NORMAL.inv_cdf(uniforms(self.seed, uid)[0])
        return max(1, round(self.median * math.exp(self.sigma * z)))


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Correctness of completions. A Verifier is right if its verdict agrees with the truth about the solution."""

    solver_accuracy: float
    verifier_agreement: float
    seed: int = 0

    def is_right(self, uid: str) -> bool:
        agent = uid[uid.rindex("/") + 1 :]
        share = self.verifier_agreement if agent.startswith("verifier") else self.solver_accuracy
        return uniforms(self.seed, uid)[1] < share

    def says_correct(self, uid: str) -> bool:
        """Return the verdict of a Verifier's completion, whose uid names the solution that it judged."""
        return self.is_right(uid) == self.is_right(uid[: uid.rindex("/")])
