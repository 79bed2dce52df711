"""Environment `chains` of the library verifiers: chains of sums, in the vocabulary of the default CPU policy."""

import random

import verifiers.v1 as vf

__all__ = ["Chains"]


class ChainData(vf.TaskData):
    answer: str


class Chain(vf.Task[ChainData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").rpartition("Answer:")[2].strip() == self.data.answer)


class Chains(vf.Taskset[Chain, vf.TasksetConfig]):
    def load(self):
        for i in range(2000):
            rng = random.Random(i)
            start, (first, second) = rng.randrange(10), rng.choices(range(1, 10), k=2)
            yield Chain(
                ChainData(prompt=f"a {start} b +{first} c -{second}", answer=str((start + first - second) % 10)),
                self.config.task,
            )
