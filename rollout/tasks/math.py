"""Math problems from files, judged by math-verify in processes of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence

from marsrl.rollout.rewards.workers import RewardPool
from marsrl.rollout.tasks.config import MathOptions
from marsrl.rollout.tasks.data import DataCursor
from marsrl.rollout.types import Problem, Reward


class MathTask:
    """Problems read by `data.read_problems`. Close it: it owns processes."""

    name = "math"
    prompts = "math"

    def __init__(self, train: Sequence[Problem], held_out: Sequence[Problem], options: MathOptions) -> None:
        self._train = tuple(train)
        self._held_out = tuple(held_out)
        self._pool = RewardPool(options.workers, options.timeout_s, options.max_answer_chars)

    @property
    def pool(self) -> RewardPool:
        """For its counts of timeouts and crashes."""
        return self._pool

    def problems(self, seed: int) -> DataCursor:
        return DataCursor(self._train, seed)

    def held_out(self, num_problems: int, seed: int) -> list[Problem]:
        """A seeded draw without replacement, all of them if there are fewer; [] without evaluation data."""
        order = random.Random(f"math/held-out/{seed}").sample(range(len(self._held_out)), len(self._held_out))
        return [self._held_out[index] for index in sorted(order[:num_problems])]

    def judge(self, answers: Sequence[tuple[Problem, str]]) -> list[Reward]:
        return self._pool.judge(answers)

    def close(self) -> None:
        self._pool.close()
