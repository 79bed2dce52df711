"""Engines without a model on a virtual clock, behind the project's own EnginePool.

A token that the scheduler sees stands for TOKEN_GRAIN real ones (its arrays would not fit into memory otherwise); the
engines count real tokens. Nothing of the scheduler, the pool or the team is replaced: only what an engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marsrl.rollout.engines.pool import Timed
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.types import Finish

from .cost_model import CostModel
from .engine_timeline import Job, run_engine
from .lengths import Lengths

TOKEN_GRAIN = 128
"""Real tokens that one simulated token stands for: 64k are 512, a length is off by less than 1.6% of 8k."""


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0


@dataclass(slots=True)
class EngineLoad:
    """What the engines did, over all calls; busy_s is engine-seconds."""

    busy_s: float = 0.0
    num_preempted: int = 0
    decoded_tokens: int = 0
    prefilled_tokens: int = 0


class SimulatedReplicas:
    """The engines of one policy: a call lasts as long as its slowest engine, and the clock moves on by that.

    length_of: whole length of a completion by uid, in real tokens. last_token: the final token of a finished one.
    first_token_s: by uid, when its first token came.
    """

    def __init__(
        self,
        num_engines: int,
        cost: CostModel,
        lengths: Lengths,
        last_token: Callable[[str], int],
        clock: VirtualClock,
    ) -> None:
        self._num_engines, self._cost, self._lengths, self._last_token = num_engines, cost, lengths, last_token
        self.clock = clock
        self.load = EngineLoad()
        self.first_token_s: dict[str, float] = {}
        self._left: dict[str, int] = {}  # simulated tokens still to come, by uid of an unfinished completion

    def __len__(self) -> int:
        return self._num_engines

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None
    ) -> list[Timed]:
        if method != "generate":
            raise ValueError(f"simulated engines serve generate, not {method}: they hold no weights")
        start = self.clock.now_s
        answers = [self._serve(requests, version, start) for requests, version in arguments]
        self.clock.now_s = max(answer.end for answer in answers)
        return answers

    def num_decoded(self) -> list[int]:
        return [self.load.decoded_tokens] + [0] * (self._num_engines - 1)

    def close(self) -> None:
        self._left.clear()

    def _serve(self, requests: Sequence[DecodeRequest], version: int, start: float) -> Timed:
        jobs, results, prompts_seen = [], [], set()
        for request in requests:
            left = self._left.pop(request.uid, None)
            is_new = left is None
            if left is None:
                left = -(-self._lengths.tokens(request.uid) // TOKEN_GRAIN)
            num_new = min(left, request.max_new_tokens)
            token_ids = np.zeros(num_new, np.int32)
            if num_new == left:
                token_ids[-1] = self._last_token(request.uid)
            else:
                self._left[request.uid] = left - num_new
            finish = Finish.STOP if num_new == left else Finish.LENGTH
            results.append(DecodeResult(request.uid, token_ids, np.zeros(num_new, np.float32), finish, version))
            # New weights emptied the prefix cache: a group's first request computes the prompt, a carried-over one its all.
            context = len(request.token_ids) * TOKEN_GRAIN
            cached = context if is_new and request.affinity in prompts_seen else 0
            if is_new:
                prompts_seen.add(request.affinity)
            jobs.append(Job(context, cached, num_new * TOKEN_GRAIN))
            self.load.prefilled_tokens += context - cached
            self.load.decoded_tokens += num_new * TOKEN_GRAIN
        timeline = run_engine(jobs, self._cost)
        for request, first_s in zip(requests, timeline.first_s):
            self.first_token_s.setdefault(request.uid, start + first_s)
        self.load.busy_s += timeline.busy_s
        self.load.num_preempted += timeline.num_preempted
        return Timed(results, start, start + timeline.busy_s)


