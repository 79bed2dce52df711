"""Tasks whose problems are a list, read from files or made by a user's class, judged in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from marsrl.rollout.rewards.workers import RewardPool
from marsrl.rollout.tasks.data import draw_held_out
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.tasks.train_files import draw_endlessly
from marsrl.rollout.types import Problem, Reward


class ListedTask:
    """Problems, and the pool that judges their answers. Close it: it owns processes.

    prompts: name of the prompt set. train, held_out: problems of the two splits, which do not change.
    """

    def __init__(
        self, name: str, prompts: str, train: Sequence[Problem], held_out: Sequence[Problem], pool: RewardPool
    ) -> None:
        self.name = name
        self.prompts = prompts
        self._train = train
        self._held_out = tuple(held_out)
        self._pool = pool

    def problems(self, seed: int) -> ProblemSource:
        return draw_endlessly(self._train, seed)

    def held_out(self, num_problems: int | None, seed: int) -> list[Problem]:
        """A seeded draw without replacement, all of them if there are fewer, or None is asked for; [] without evaluation data."""
        return draw_held_out(self._held_out, num_problems, self.name, seed)

    def judge(self, problem: Problem, answer: str) -> Future[Reward]:
        return self._pool.submit(problem, answer)

    def close(self) -> None:
        self._pool.close()
