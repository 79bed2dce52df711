"""What the player itself costs: its share of a core and its memory, with 4,096 samples under way.

    python benchmarks/scheduler.py [--json FILE] [--samples 4096] [--shorten 32]

The engines are timers: a request of n tokens comes back after n / 30 s (each sample at its own rate, within 10%), with
real token and log-prob arrays; samples take 4 segments of 16k tokens. Rendering, decoding of texts, parsing and judging
are the project's own, with a byte tokenizer. CPU time is that of this process, less what the timers take.

    real time   segments are 1/shorten as long, so that a run takes a minute: events come `shorten` times as often as they
                would, with arrays 1/shorten as long. An upper bound of what events and polling cost.
    full size   segments of 16k tokens, without waiting for the timers, over the time that the tokens would have taken: what
                events, arrays and texts cost. Played with an eighth of the samples (the tokens of all would fill 4 GiB) and
                multiplied by eight: a segment costs the same whatever waits beside it, which `real time` shows.
    memory      of a sample that waits between two stages, by tracemalloc, beyond its tokens and log-probs (8 bytes a token).

Stage by stage (rollout.overlap 0), and event by event (1). The targets are 5% of one core and 4 KB.
`ratio:` is 5% over the larger of the full-size shares.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from namespace import map_marsrl

if __name__ == "__main__":
    map_marsrl()

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.orchestrations.solver import Solver
from marsrl.rollout.player.stages import Stages, StepBatch
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Irreplaceable, OnLost, Timed, ignore_loss
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.simulation.simulated_team import problem_stream
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import Finish, Problem, Reward

TOKENS_PER_S = 30.0
SEGMENTS, SEGMENT_LENGTH, GROUP_SIZE = 4, 16_384, 8
MAX_SHARE, MAX_BYTES = 0.05, 4096
_POLL_S = 0.1  # as player/rollout.py does


class Timers(Irreplaceable):
    """Engines that are clocks. own_cpu_s: what they take of this process themselves.

    is_waiting: real time passes; else a result is there at once, and waited_s says when it would have come.
    """

    def __init__(self, num_engines: int, *, is_waiting: bool) -> None:
        self.own_cpu_s = 0.0
        self.waited_s = 0.0
        self._num_engines, self._is_waiting = num_engines, is_waiting
        self._due: list[tuple[float, int, int, DecodeRequest, int]] = []  # heap of (time, ticket, replica, ...)
        self._num_submitted = 0
        self._letters = np.random.default_rng(0).integers(97, 123, SEGMENT_LENGTH, np.int32)

    def __len__(self) -> int:
        return self._num_engines

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> dict[int, Timed]:
        raise ValueError(f"timers only decode: they have no {method}")

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        begin = time.thread_time()
        now = self._now()
        for request in requests:
            self._num_submitted += 1
            rate = TOKENS_PER_S * (0.9 + 0.2 * random.Random(request.affinity).random())
            due = now + request.max_new_tokens / rate
            heapq.heappush(self._due, (due, self._num_submitted, replica, request, version))
        self.own_cpu_s += time.thread_time() - begin

    def collect(self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True) -> list[tuple[int, Timed]]:
        now = self._now()
        if self._is_waiting:
            pause = min(timeout_s, max(0.0, self._due[0][0] - now) if self._due else timeout_s)
            time.sleep(pause)
        elif self._due:
            self.waited_s = max(self.waited_s, self._due[0][0] + 0.01)
        begin = time.thread_time()
        now = self._now()
        answers: dict[int, list[DecodeResult]] = {}
        while self._due and self._due[0][0] <= now:
            _, _, replica, request, version = heapq.heappop(self._due)
            tokens = self._letters[: request.max_new_tokens].copy()
            result = DecodeResult(request.uid, tokens, np.full(len(tokens), -0.5, np.float32), Finish.LENGTH, version)
            answers.setdefault(replica, []).append(result)
        self.own_cpu_s += time.thread_time() - begin
        return [(replica, Timed(results, 0.0, 0.0)) for replica, results in answers.items()]

    def abort(self, busy: Sequence[int]) -> None:
        raise NotImplementedError("timers are never interrupted here")

    def num_decoded(self) -> list[int]:
        return [0] * self._num_engines

    def close(self) -> None:
        self._due.clear()

    def _now(self) -> float:
        return time.monotonic() if self._is_waiting else self.waited_s


def typical_text(number: int) -> str:
    """A problem of a typical length."""
    return f"What is {number} modulo 7? " + "Think step by step. " * 20


def judge(problem: Problem, answer: str) -> Future[Reward]:
    return known(Reward(0.0, 0.0))


@dataclass(frozen=True)
class Share:
    """cpu_s: of the player. wall_s: of the decoding. num_results: segments that came back. factor: by which fewer samples
    were played than the share is for."""

    scheduler: str
    segment_length: int
    cpu_s: float
    wall_s: float
    num_results: int
    factor: int = 1

    @property
    def of_one_core(self) -> float:
        return self.factor * self.cpu_s / self.wall_s


def setup(
    model_dir: str, num_samples: int, segment_length: int, overlap: int, *, is_waiting: bool
) -> tuple[Stages, Timers]:
    timers = Timers(8, is_waiting=is_waiting)
    config = RolloutConfig(
        engines=len(timers),
        prompts_per_step=num_samples // GROUP_SIZE,
        group_size=GROUP_SIZE,
        segments=SEGMENTS,
        max_response_tokens=SEGMENTS * segment_length,
        overlap=overlap,
        max_unfinished=1,  # no new problems until these have ended
    )
    agents = {"solver": AgentConfig()}
    team = Team(
        agents,
        Solver(agents, "math", rollout=config),
        {"main": ChatRenderer(model_dir)},
        {"main": EnginePool(timers)},
        WatchedJudge(judge),
    )
    return Stages(config, team, problem_stream(typical_text, "1"), seed=0), timers


def measure(model_dir: str, num_samples: int, segment_length: int, overlap: int, *, is_waiting: bool) -> Share:
    """One generation of samples from their first token to their last."""
    stages, timers = setup(model_dir, num_samples, segment_length, overlap, is_waiting=is_waiting)
    gc.collect()
    begin_cpu, begin, num_trained = time.process_time(), time.monotonic(), 0
    stages.resume({"main": 0})
    while num_trained < num_samples:
        num_trained += sum(len(group.samples) for group in next_batch(stages).groups)
    cpu_s = time.process_time() - begin_cpu - timers.own_cpu_s
    wall_s = time.monotonic() - begin if is_waiting else timers.waited_s
    if num_trained != num_samples:
        raise RuntimeError(f"{num_trained} samples were trained, {num_samples} were wanted")
    name = "event by event" if overlap else "stage by stage"
    return Share(name, segment_length, cpu_s, wall_s, num_samples * SEGMENTS)


def next_batch(stages: Stages) -> StepBatch:
    stages.want()
    while (batch := stages.take()) is None:
        stages.advance(_POLL_S)
    return batch


def waiting_bytes(model_dir: str, num_samples: int, segment_length: int = 64) -> float:
    """Memory of one sample that waits for its second stage, without its 8 bytes a token."""
    stages, _ = setup(model_dir, num_samples, segment_length, 0, is_waiting=False)
    stages.resume({"main": 0})
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    next_batch(stages)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    waiting = stages.num_unfinished
    if waiting != num_samples:
        raise RuntimeError(f"{waiting} samples wait after one stage, {num_samples} were wanted")
    return held / waiting - 8 * segment_length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--samples", type=int, default=4096, help="under way at once; a multiple of 8")
    parser.add_argument("--shorten", type=int, default=32, help="of the segments in real time")
    words = parser.parse_args()
    if words.samples % GROUP_SIZE or words.samples < GROUP_SIZE:
        parser.error(f"--samples {words.samples} is not a multiple of {GROUP_SIZE}")
    from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder)
        memory = waiting_bytes(folder, words.samples)
        verdict = _held(memory <= MAX_BYTES)
        print(f"memory: {memory:,.0f} bytes a waiting sample beyond its tokens (at most {MAX_BYTES}: {verdict})")
        shares: dict[str, list[Share]] = {"real time": [], "full size": []}
        fewer = 8 if words.samples % (8 * GROUP_SIZE) == 0 else 1
        for kind, is_waiting, length, factor in (
            ("full size", False, SEGMENT_LENGTH, fewer),
            ("real time", True, SEGMENT_LENGTH // words.shorten, 1),
        ):
            for overlap in (0, 1):
                played = measure(folder, words.samples // factor, length, overlap, is_waiting=is_waiting)
                share = replace(played, factor=factor)
                shares[kind].append(share)
                print(
                    f"{kind}, {share.scheduler}: {SEGMENTS} segments of {length} tokens, {share.factor * share.cpu_s:.2f} s "
                    f"of CPU in {share.wall_s:.0f} s: {100 * share.of_one_core:.2f}% of one core, "
                    f"{1e6 * share.cpu_s / share.num_results:.0f} us a segment",
                    flush=True,
                )
    largest = max(share.of_one_core for share in shares["full size"])
    print(f"at most {100 * MAX_SHARE:.0f}% of one core: {_held(largest <= MAX_SHARE)}")
    if words.json:
        rows = {kind: [{**asdict(s), "of_one_core": s.of_one_core} for s in each] for kind, each in shares.items()}
        record = {"samples": words.samples, "bytes_a_waiting_sample": memory, "shares": rows}
        Path(words.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"ratio: {MAX_SHARE / largest:.2f}")
    return 0


def _held(is_held: bool) -> str:
    return "held" if is_held else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
