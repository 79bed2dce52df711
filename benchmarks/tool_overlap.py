"""How much of an engine's time tools leave idle: 256 trajectories of System 1 and System 2 at once, tools that take up to 5 s.

    python benchmarks/tool_overlap.py [--json FILE] [--trajectories 256] [--slowest 5] [--shorten 1]

The engine is a script: each of its steps takes 20 ms and decodes 16 tokens of every sample that is under way, however many.
Player, team, tools' pool and bins are the project's own. System 2 takes six turns of 40 to 160 tokens, with a search or a
program in five of them. A search takes 0 to --slowest seconds, and System 1 reads what it finds; a program takes a tenth of that.
--shorten: all times are that much shorter.

    stage by stage   rollout.overlap=0: all that can be decoded is, then all tools are waited for, and so on
    event by event   rollout.overlap=1: a sample goes on as soon as what it waits for is there

busy: share of the time from the first request to the last result in which the engine was at a step. could have been: share in
which it was idle, though some tool had ended already, so that its sample could have gone on. `ratio:` is the share of busy time,
event by event over stage by stage. bins: CPU time to pack 10,000 outputs
of 1 to 3,000 tokens for System 1's 23,552.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.fitting import first_fit_decreasing
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.seed import derive_seed
from marsrl.rollout.tasks.data import DataCursor
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.tools.config import ToolLimits
from marsrl.rollout.tools.pool import ToolPool
from marsrl.rollout.types import Problem, Reward

STEP_S, TOKENS_A_STEP = 0.02, 16
TURNS, GROUP_SIZE = 6, 8
_LENGTH = 200  # characters, a token each, of a page


@dataclass(frozen=True, slots=True)
class Played:
    """busy, could_have_been: shares of the time from the first request to the last result."""

    scheduler: str
    wall_s: float
    busy: float
    could_have_been: float
    samples: int
    calls: int


@dataclass
class Clock:
    """When the engine was idle and when tools ended, in seconds; several threads write."""

    busy_s: float = 0.0
    first: float = 0.0
    last: float = 0.0
    idle: list[tuple[float, float]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def wasted_s(self) -> float:
        """Idle seconds after the first end of a tool in each idle span."""
        found = 0.0
        for start, end in self.idle:
            within = [t for t in self.ends if start <= t < end]
            found += end - min(within) if within else 0.0
        return found


class Steps(ScriptedEngine):
    """Takes its time."""

    def __init__(self, clock: Clock, step_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clock, self._step_s = clock, step_s
        self._rests_since = 0.0

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        now = time.perf_counter()
        if not self._under_way and requests:
            if self._rests_since:
                self._clock.idle.append((self._rests_since, now))
            self._clock.first = self._clock.first or now
        super().submit(requests, version=version)

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        if not self._under_way:
            time.sleep(min(timeout_s, self._step_s))
            return []
        start = time.perf_counter()
        time.sleep(self._step_s)
        results = super().collect(timeout_s)
        self._clock.last = self._rests_since = time.perf_counter()
        self._clock.busy_s += self._clock.last - start
        return results


@dataclass
class Slow:
    """A tool that takes between 0 and slowest_s; three pages."""

    name: str
    slowest_s: float
    clock: Clock
    argument: str = "text"
    is_deterministic: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, arguments: Mapping[str, object]) -> list[str] | str:
        time.sleep(random.Random(json.dumps(arguments)).random() * self.slowest_s)
        with self.lock:
            self.clock.ends.append(time.perf_counter())
        return ["p" * _LENGTH] * 3 if self.name == "search" else "7"

    def close(self) -> None:
        """Nothing is held."""


def says(request: DecodeRequest, renderer: ChatRenderer) -> list[int]:
    """The whole of it, whatever is there of it: a turn of System 2, or a reading."""
    turn = int((request.token_ids == renderer.eos_id).sum()) // 2
    rng = random.Random(derive_seed(0, request.uid, turn))
    if "/system1" in request.uid:
        words = "r" * rng.randrange(40, 160)
    elif turn == TURNS - 1:
        words = "x" * rng.randrange(40, 160) + "<answer>7</answer>"
    else:
        tool, name = rng.choice((("search", "queries"), ("python", "code")))
        wanted = {"tool": tool, "arguments": {name: f"{request.uid} {turn}"}, "purpose": ""}
        words = "x" * rng.randrange(40, 160) + f"<tool_call>{json.dumps(wanted)}</tool_call>"
    ids: list[int] = [*renderer.completion_ids(words).tolist(), renderer.eos_id]
    starts = np.flatnonzero(request.token_ids == renderer.encode_trusted("<|im_start|>")[0])
    num_known = len(request.token_ids) - int(starts[-1]) - len("xassistant\n")
    return ids[num_known:]


def play(folder: str, trajectories: int, slowest_s: float, step_s: float, overlap: int) -> Played:
    """All of them, once."""
    renderer, clock = ChatRenderer(folder), Clock()
    config = RolloutConfig(
        prompts_per_step=trajectories // GROUP_SIZE, group_size=GROUP_SIZE, pipeline="trajectory",
        max_response_tokens=8192, overlap=overlap,
    )  # fmt: skip
    agents = {"system2": AgentConfig(), "system1": AgentConfig(max_input_tokens=1400)}
    team = build_orchestration(
        "dual_system", agents, "qa", {"max_turns": TURNS}, config, tools=("search", "python"),
        renderers=dict.fromkeys(agents, renderer),
    )  # fmt: skip
    tools = ToolPool(
        {"search": Slow("search", slowest_s, clock), "python": Slow("python", slowest_s / 10, clock)},
        dict.fromkeys(("search", "python"), ToolLimits(concurrency=trajectories)),
    )
    engine = Steps(clock, step_s, lambda request: says(request, renderer), tokens_per_step=TOKENS_A_STEP)
    pool = EnginePool(LocalReplicas([engine]), slots=trajectories * 2, deadline_s=600)
    judge = WatchedJudge(lambda problem, answer: known(Reward(1.0, 1.0)))
    source = DataCursor([Problem(f"p{i}", f"question {i}", "7", "qa") for i in range(trajectories)], 0)
    players = Team(agents, team, {"main": renderer}, {"main": pool}, judge, tools=tools)
    rollout = Rollout(config, players, source, seed=0, trains_whole=True)
    batch = rollout.next_batch({"main": 0})
    wasted_s, busy_s = clock.wasted_s(), clock.busy_s  # of this batch: the next problems' follow
    wall_s = clock.last - clock.first
    rollout.close()
    tools.close()
    pool.close()
    samples = [sample for group in batch.groups for sample in group.samples]
    calls = sum(sample.turn for sample in samples)  # each of System 2's turns but the last
    name = "event by event" if overlap else "stage by stage"
    return Played(name, wall_s, busy_s / wall_s, wasted_s / wall_s, len(samples), calls)


def packed() -> tuple[int, float]:
    """(bins, ms of CPU) of 10,000 outputs."""
    sizes = random.Random(0).choices(range(1, 3001), k=10_000)
    begin = time.process_time()
    bins = first_fit_decreasing(sizes, 23_552)
    return len(bins), 1000 * (time.process_time() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--trajectories", type=int, default=256, help="at once; a multiple of 8")
    parser.add_argument("--slowest", type=float, default=5.0, help="seconds of the slowest search")
    parser.add_argument("--shorten", type=float, default=1.0, help="of all times")
    words = parser.parse_args()
    if words.trajectories % GROUP_SIZE or words.trajectories < GROUP_SIZE:
        parser.error(f"--trajectories {words.trajectories} is not a multiple of {GROUP_SIZE}")
    from marsrl.trainer.models.byte_tokenizer import write_byte_tokenizer

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder)
        for overlap in (0, 1):
            step_s, slowest_s = STEP_S / words.shorten, words.slowest / words.shorten
            row = play(folder, words.trajectories, slowest_s, step_s, overlap)
            rows.append(row)
            shares = f"busy {row.busy:.1%}, could have been {row.could_have_been:.1%}"
            print(
                f"{row.scheduler}: {row.wall_s:.1f} s, {shares}; {row.samples} samples, {row.calls} calls", flush=True
            )
    print("bins: 10,000 outputs in {} bins, {:.0f} ms of CPU".format(*packed()))
    by_stage, by_event = rows
    print(f"ratio: {by_event.busy / by_stage.busy:.2f}")
    if words.json:
        Path(words.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
