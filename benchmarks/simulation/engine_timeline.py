"""One engine's work through time: admission, prefill, decoding in a batch, preemption. Events are admissions and ends of
sequences, never single tokens.

    waiting --admitted while there is a slot and KV cache--> running --its last token--> done
       ^------------------- the latest is put back when the cache is full -----'
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .cost_model import CostModel

_WATERMARK = 0.01  # share of the KV cache that stays free at an admission, as in vLLM


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence: `context` tokens are there, of which the first `cached` need no prefill; decode num_new more."""

    context: int
    cached: int
    num_new: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """first_s, end_s: by job, when its first and its last token came, in seconds from the start. busy_s: all work."""

    first_s: list[float]
    end_s: list[float]
    busy_s: float
    num_preempted: int


def run_engine(jobs: Sequence[Job], cost: CostModel) -> Timeline:
    """Serve all jobs, in their order, as soon as they fit.

    Raises:
        ValueError: one job alone does not fit into the KV cache.
    """
    for job in jobs:
        if job.context + job.num_new > cost.kv_capacity:
            raise ValueError(
                f"engine: a sequence of {job.context + job.num_new} tokens does not fit into a KV cache of "
                f"{cost.kv_capacity}; give the engine more GPUs"
            )
    room = int(cost.kv_capacity * (1 - _WATERMARK))
    first_s, end_s = [-1.0] * len(jobs), [0.0] * len(jobs)
    waiting = deque((i, job.context, job.cached, job.num_new) for i, job in enumerate(jobs))
    ends: list[tuple[int, int, int]] = []  # heap of (step of the last token, order of admission, job)
    running: dict[int, tuple[int, int, int]] = {}  # order of admission: (job, context at admission, step of admission)
    now, step, held, admitted, num_preempted = 0.0, 0, 0, 0, 0
    while waiting or running:
        fresh = []
        while waiting and len(running) < cost.max_num_seqs and (held + waiting[0][1] < room or not running):
            i, context, cached, num_new = waiting.popleft()
            now += cost.prefill_s(min(cached, context), context)
            heapq.heappush(ends, (step + num_new, admitted, i))
            running[admitted] = (i, context, step)
            fresh.append(i)
            held += context
            admitted += 1
        num_seqs = len(running)
        for i in fresh:
            if first_s[i] < 0:
                first_s[i] = now + cost.decode_s(num_seqs, held, 1)
        while ends[0][1] not in running:  # preempted since
            heapq.heappop(ends)
        num_steps = min(ends[0][0] - step, (cost.kv_capacity - held) // num_seqs)
        now += cost.decode_s(num_seqs, held, num_steps)
        step += num_steps
        held += num_seqs * num_steps
        if ends[0][0] > step:  # the cache is full: the latest goes back to the head of the queue, and is prefilled again
            order = next(reversed(running))
            i, context, since = running.pop(order)
            context += step - since
            held -= context
            left = jobs[i].context + jobs[i].num_new - context
            waiting.appendleft((i, context, 0, left))
            num_preempted += 1
        while ends and (ends[0][0] <= step or ends[0][1] not in running):
            _, order, i = heapq.heappop(ends)
            if order in running:
                _, context, since = running.pop(order)
                held -= context + step - since
                end_s[i] = now
    return Timeline(first_s, end_s, now, num_preempted)
