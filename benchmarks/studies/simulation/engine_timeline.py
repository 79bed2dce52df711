"""Timeline of an engine: admission, prefill, batched decoding, preemption.

Events are admissions and ends of sequences, not single tokens.

    waiting --admitted while there is a slot and KV cache--> running --its last token--> ended
       ^------------------- the latest is put back when the cache is full -----'
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from simulation.cost_model import CostModel

_WATERMARK = 0.01  # share of the KV cache that stays free at an admission, as in vLLM


@dataclass(frozen=True, slots=True)
class Job:
    """Sequence with `context` tokens, of which the first `cached` need no prefill, and num_new tokens to decode."""

    uid: str
    context: int
    cached: int
    num_new: int


@dataclass(slots=True)
class _Running:
    job: Job
    context: int  # tokens at admission
    since: int  # step of admission


class EngineTimeline:
    """Engine with its own clock, which `run` advances.

        engine.add(job, at_s=0.0)
        engine.run(until_s=10.0) -> ["uid that has ended", ...]
        engine.first_token_s.pop(uid)

    now_s: time up to which work is simulated. Decode steps are not split, so now_s may lag behind until_s by one step.
    """

    def __init__(self, cost: CostModel) -> None:
        self.now_s = 0.0
        self.busy_s = 0.0
        self.num_preempted = 0
        self.first_token_s: dict[str, float] = {}
        self._cost = cost
        self._room = int(cost.kv_capacity * (1 - _WATERMARK))
        self._waiting: deque[tuple[Job, int, int]] = deque()  # (job, context, cached)
        self._running: dict[int, _Running] = {}  # keyed by order of admission
        self._ends: list[tuple[int, int]] = []  # heap of (step of the last token, order of admission)
        self._step = self._held = self._num_admitted = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, job: Job, at_s: float) -> None:
        """Queue a sequence.

        Raises:
            ValueError: the sequence alone does not fit into the KV cache.
        """
        if job.context + job.num_new > self._cost.kv_capacity:
            raise ValueError(
                f"engine: sequence {job.uid} of {job.context + job.num_new} tokens does not fit into a KV cache of "
                f"{self._cost.kv_capacity}; give the engine more GPUs"
            )
        if not self.is_busy:
            self.now_s = max(self.now_s, at_s)
        self._waiting.append((job, job.context, job.cached))

    def run(self, until_s: float = math.inf) -> list[str]:
        """Work until `until_s`; return the uids of finished sequences, in order."""
        ended: list[str] = []
        while self.is_busy and self.now_s < until_s:
            self._admit()
            num_steps = self._steps_to_event()
            seconds = self._cost.decode_s(len(self._running), self._held, num_steps)
            if self.now_s + seconds > until_s:
                num_steps = self._cost.steps_within(len(self._running), self._held, until_s - self.now_s)
                self._decode(num_steps, self._cost.decode_s(len(self._running), self._held, num_steps))
                break
            self._decode(num_steps, seconds)
            if self._ends[0][0] > self._step:
                self._preempt()
            else:
                self._end(ended)
        return ended

    def next_event_s(self) -> float:
        """Admit sequences that fit, and return the time of the next change of the batch; infinite without work."""
        if not self.is_busy:
            return math.inf
        self._admit()
        return self.now_s + self._cost.decode_s(len(self._running), self._held, self._steps_to_event())

    def abort(self) -> list[tuple[str, int]]:
        """Abort all sequences; return (uid, number of tokens decoded by this engine) of each."""
        cut = [(r.job.uid, r.context + self._step - r.since - r.job.context) for r in self._running.values()]
        cut += [(job.uid, context - job.context) for job, context, _ in self._waiting]
        self._waiting.clear()
        self._running.clear()
        self._ends.clear()
        self._held = 0
        return cut

    def _admit(self) -> None:
        fresh = []
        while self._waiting and len(self._running) < self._cost.max_num_seqs:
            job, context, cached = self._waiting[0]
            if self._running and self._held + context >= self._room:
                break
            self._waiting.popleft()
            seconds = self._cost.prefill_s(cached, context)
            self.now_s += seconds
            self.busy_s += seconds
            self._running[self._num_admitted] = _Running(job, context, self._step)
            num_left = job.context + job.num_new - context
            heapq.heappush(self._ends, (self._step + num_left, self._num_admitted))
            self._held += context
            self._num_admitted += 1
            fresh.append(job.uid)
        if fresh:
            first_s = self.now_s + self._cost.decode_s(len(self._running), self._held, 1)
            for uid in fresh:
                self.first_token_s.setdefault(uid, first_s)

    def _steps_to_event(self) -> int:
        """Return the number of decode steps until a sequence ends or the KV cache is full."""
        while self._ends[0][1] not in self._running:  # the sequence has been preempted since
            heapq.heappop(self._ends)
        return min(self._ends[0][0] - self._step, (self._cost.kv_capacity - self._held) // len(self._running))

    def _decode(self, num_steps: int, seconds: float) -> None:
        self.now_s += seconds
        self.busy_s += seconds
        self._step += num_steps
        self._held += len(self._running) * num_steps

    def _preempt(self) -> None:
        """Move the latest sequence back to the head of the queue; all its tokens must be prefilled again."""
        _, latest = self._running.popitem()
        context = latest.context + self._step - latest.since
        self._held -= context
        self._waiting.appendleft((latest.job, context, 0))
        self.num_preempted += 1

    def _end(self, ended: list[str]) -> None:
        while self._ends and (self._ends[0][0] <= self._step or self._ends[0][1] not in self._running):
            order = heapq.heappop(self._ends)[1]
            if order in self._running:
                finished = self._running.pop(order)
                self._held -= finished.context + self._step - finished.since
                ended.append(finished.job.uid)
