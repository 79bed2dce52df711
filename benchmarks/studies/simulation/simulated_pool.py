"""Engines without a model on a virtual clock, behind the project's own EnginePool.

A token in the player stands for several real tokens, because the arrays would otherwise not fit into memory; the engines count
real tokens. Only the engines are replaced; player, pool and team are the project's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.pool.replicas import OnLost, Replicas, Timed, ignore_loss
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish, IntArray
from simulation.cost_model import CostModel
from simulation.engine_timeline import EngineTimeline, Job
from simulation.lengths import Lengths

TOKEN_GRAIN = 128
"""Real tokens per simulated token: 64k tokens become 512, and the error of a length of 8k is below 1.6%."""

Written = Callable[[str, int, int], IntArray]
"""Function (uid, number of tokens, tokens left after these) -> next tokens of a completion, [N] int32; its end if 0 are left."""

_TOGETHER_S = 1.0  # seconds within which finished results are collected together


@dataclass(slots=True)
class VirtualClock:
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    request: DecodeRequest
    left: int  # simulated tokens until the completion ends
    version: int


class SimulatedReplicas(Replicas):
    """The engines of one policy. `collect` runs them until a completion ends.

    lengths: gives the length of a completion, in real tokens. written: gives its next tokens. texts: gives its text; None:
        engines return no texts.
    grain, prompt_grain: real tokens per simulated token in completions and in prompts.
    first_token_s: {uid: time of the first token}; readers remove the entries that they have read.
    own_cpu_s: CPU seconds of the simulation itself, including texts and the engines' side of messages.
    received, returned: bytes of the messages to the engines and back.
    """

    def __init__(
        self,
        num_engines: int,
        cost: CostModel,
        lengths: Lengths,
        written: Written,
        clock: VirtualClock,
        grain: int = TOKEN_GRAIN,
        prompt_grain: int = TOKEN_GRAIN,
        texts: Texts | None = None,
    ) -> None:
        self.grain, self.prompt_grain = grain, prompt_grain
        self.own_cpu_s = 0.0
        self.received = self.returned = 0
        self.engines = [EngineTimeline(cost) for _ in range(num_engines)]
        self.clock = clock
        self.decoded_tokens = 0
        self.first_token_s: dict[str, float] = {}
        self._lengths, self._written, self._texts = lengths, written, texts
        self._left: dict[str, int] = {}  # simulated tokens left, by uid of an unfinished completion
        self._cached: dict[str, tuple[int, int]] = {}  # uid or affinity: (replica, version) that holds its prefix
        self._under_way: list[dict[str, _UnderWay]] = [{} for _ in range(num_engines)]
        self._aborted: dict[int, bytes] = {}
        self._next_s = [math.inf] * num_engines  # time of each engine's next change of batch

    @property
    def busy_s(self) -> float:
        """Return the engine-seconds of work so far."""
        return sum(engine.busy_s for engine in self.engines)

    @property
    def num_preempted(self) -> int:
        return sum(engine.num_preempted for engine in self.engines)

    def __len__(self) -> int:
        return len(self.engines)

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> dict[int, Timed]:
        raise ValueError(f"simulated engines only decode: they hold no weights, and have no {method}")

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        message = encode(requests)
        begin = time.process_time()
        self.received += len(message)
        engine, now_s = self.engines[replica], self.clock.now_s
        assert not engine.run(now_s), "finished sequences must be collected before more are submitted"
        for request in decode(list[DecodeRequest], message):
            num_left = self._left.pop(request.uid, None)
            prefix = request.affinity if num_left is None else request.uid
            full_length = -(-self._lengths.tokens(request.uid) // self.grain)
            if num_left is None:
                num_left = full_length
            num_known = full_length - num_left
            context = (len(request.token_ids) - num_known) * self.prompt_grain + num_known * self.grain
            # New weights start a new prefix cache. Evictions of a waiting sample's prefix by running sequences are ignored.
            cached = context if self._cached.get(prefix) == (replica, version) else 0
            self._cached[prefix] = (replica, version)
            self._under_way[replica][request.uid] = _UnderWay(request, num_left, version)
            num_new = min(num_left, request.max_new_tokens) * self.grain
            engine.add(Job(request.uid, context, cached, num_new), now_s)
        self._next_s[replica] = engine.next_event_s()
        self.own_cpu_s += time.process_time() - begin

    def collect(self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True) -> list[tuple[int, Timed]]:
        begin, start = time.process_time(), self.clock.now_s
        answers, self._aborted = self._aborted, {}
        if not answers:
            self._run(busy, start + timeout_s, answers)
        self.own_cpu_s += time.process_time() - begin
        self.returned += sum(map(len, answers.values()))
        return [
            (replica, Timed(decode(list[DecodeResult], replica_answers), start, self.clock.now_s))
            for replica, replica_answers in answers.items()
        ]

    def _run(self, busy: Sequence[int], limit: float, answers: dict[int, bytes]) -> None:
        """Run the engines until a completion ends, or until `limit`. Adds the results to `answers`."""
        last_s = self.clock.now_s
        self.clock.now_s = min(limit, min(self._next_s) + _TOGETHER_S)
        for replica in busy:
            ended: list[str] = []
            while self._next_s[replica] <= self.clock.now_s:
                last_s = max(last_s, self._next_s[replica])
                ended += self.engines[replica].run(self.clock.now_s)
                self._next_s[replica] = self.engines[replica].next_event_s()
            if ended:
                answers[replica] = encode(self._results(replica, ended))
        if answers and min(self._next_s) == math.inf:
            self.clock.now_s = last_s  # no engine has work left, so the clock stops at the last event

    def abort(self, busy: Sequence[int], adapter: str | None = None) -> None:
        assert adapter is None, "one policy without adapters is simulated"
        begin = time.process_time()
        for replica in busy:
            assert not self.engines[replica].run(self.clock.now_s), (
                "finished sequences must be collected before the rest is aborted"
            )
            self._next_s[replica] = math.inf
            results = []
            for uid, decoded in self.engines[replica].abort():
                results.append(self._result(replica, uid, decoded // self.grain, is_cut=True))
            self._aborted[replica] = encode(results)
        self.own_cpu_s += time.process_time() - begin

    def num_decoded(self, within_s: float) -> list[int]:
        return [self.decoded_tokens] + [0] * (len(self.engines) - 1)

    def close(self) -> None:
        self._left.clear()

    def _results(self, replica: int, ended: Sequence[str]) -> list[DecodeResult]:
        results = []
        for uid in ended:
            under_way = self._under_way[replica][uid]
            num_new = min(under_way.left, under_way.request.max_new_tokens)
            results.append(self._result(replica, uid, num_new, is_cut=False))
        return results

    def _result(self, replica: int, uid: str, num_new: int, *, is_cut: bool) -> DecodeResult:
        under_way = self._under_way[replica].pop(uid)
        first_s = self.engines[replica].first_token_s.pop(uid, None)
        if first_s is not None:  # None: the engine never admitted the sequence
            self.first_token_s.setdefault(uid, first_s)
        is_whole = num_new == under_way.left and not is_cut
        token_ids = self._written(uid, num_new, under_way.left - num_new)
        if is_whole:
            self._cached.pop(uid, None)
            finish = Finish.STOP
        else:
            self._left[uid] = under_way.left - num_new
            self._cached[uid] = (replica, under_way.version)
            finish = Finish.UNFINISHED if is_cut else Finish.LENGTH
        self.decoded_tokens += num_new * self.grain
        result = DecodeResult(uid, token_ids, np.zeros(num_new, np.float32), finish, under_way.version)
        return result if self._texts is None else self._texts.told(under_way.request, result)
