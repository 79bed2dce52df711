"""Rank 0's own work for a step of 9,216 samples of up to 64k tokens, by part: CPU seconds, memory and bytes.

    python benchmarks/scale.py [--json FILE] [--problems 128] [--shorten 1] [--growth 16 32 64 128 256 512]

The player (stage by stage, and event by event), pool, team, credit, mini-batches, packing plan and encoding are the project's
own, with the settings of configs/qwen3_30b_a3b.yaml; 40 engines without cost return random tokens of a vocabulary of Qwen's size
(tokenizers' byte-level BPE, pieces of 2 to 8 letters), with the simulation's log-normal lengths (mean 13k) and an answer or a
verdict at the end. Short stages fill the pipeline first; then the samples of one step are played from first to last token, in 4
segments, and become a training step. Each measurement runs in a separate process.

    --shorten N     completions are 1/N as long
    --growth ...    problems a step, each 72 samples at most, 1/16 as long: how the seconds grow with the number of samples
                    (of parts that are played: of segments)

`ratio:` is 5 % of the planner's step over rank 0's seconds for it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from costless_engines import POLL_S, CostlessEngines, write_tokenizer
from simulation.lengths import Lengths
from simulation.simulated_team import problem_stream

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.stages import Stages, StepBatch
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.rewards.judge import known
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team, WatchedJudge
from marsrl.rollout.types import Group, Problem, Reward
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import TrainSequence, plan_micro_batches
from marsrl.trainer.plan.batch_plan import samples_of_a_step
from marsrl.trainer.plan.plan import make_plan
from marsrl.trainer.report.group_metrics import summarise
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.runs.directory import RunDirectory

CONFIG, GPUS, GPU = "configs/qwen3_30b_a3b.yaml", 64, "h100-80g"
SHARE = 0.05  # share of the planner's step that rank 0's own work may take
SIGMA = 1.369  # of lengths: the simulation's fit
FILLING = 4  # stages until every agent of the first problems has been asked
GROWTH_SHORTEN = 16


@dataclass
class Parts:
    """CPU seconds by part, all threads of the process; a nested part interrupts the outer one."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    _inside: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._book()
        self.calls[name] += 1
        self._inside.append(name)
        try:
            yield
        finally:
            self._book()
            self._inside.pop()

    def _book(self) -> None:
        now = time.process_time()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*words: Any, **options: Any) -> Any:
            with self.of(name):
                return function(*words, **options)

        return inside


@dataclass(frozen=True)
class Scale:
    """One measurement. seconds: of CPU, by part; calls: number by part; bytes: by part; peak_gib: peak memory of the process."""

    scheduler: str
    problems: int
    shorten: int
    samples: int
    tokens: int
    segments: int
    seconds: dict[str, float]
    calls: dict[str, int]
    bytes: dict[str, int]
    peak_gib: float

    @property
    def total_s(self) -> float:
        """Seconds of rank 0 alone in a step, without a checkpoint's state and the work of other ranks."""
        return sum(seconds for part, seconds in self.seconds.items() if part not in BESIDE)


BESIDE = ("checkpoint state (every 10 steps)", "another rank: decoding its share")
JUDGED = {True: Reward(1.0, 1.0), False: Reward(0.0, 0.0)}


def judge(problem: Problem, answer: str) -> Future[Reward]:
    return known(JUDGED[answer == problem.answer])


def measure(problems: int, shorten: int, overlap: int) -> Scale:
    """One step of so many problems, from its first token to the data for every rank."""
    config = read_config(CONFIG, [f"rollout.prompts_per_step={problems}", f"rollout.overlap={overlap}"])[0]
    parts, sent = Parts(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        renderer = ChatRenderer(folder)
        engines = CostlessEngines(
            config.rollout.engines, Lengths(SIGMA), shorten, config.rollout.max_response_tokens, renderer
        )
        for name, part in PARTS_OF_RENDERER.items():
            setattr(renderer, name, parts.timed(part, getattr(renderer, name)))
        groups = played(config, renderer, engines, parts, sent)
        tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
        trained(config, groups, parts, sent, RunDirectory(Path(folder) / "run"))
    name = "event by event" if overlap else "stage by stage"
    samples = sum(len(group.samples) for group in groups)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Scale(
        name,
        problems,
        shorten,
        samples,
        tokens,
        engines.num_results,
        dict(parts.seconds),
        dict(parts.calls),
        dict(sent),
        peak,
    )


PLAYED = ("books and pool", "prompts", "texts")  # they grow with the number of samples, picks included
PARTS_OF_RENDERER = {"render": "prompts", "decode": "texts"}


def played(
    config: RunConfig, renderer: ChatRenderer, engines: CostlessEngines, parts: Parts, sent: Counter[str]
) -> list[Group]:
    """The groups of one step's samples."""
    rollout = config.rollout.model_copy(update={"max_unfinished": 1})  # no new ones until these have ended
    team = Team(
        config.agents,
        build_orchestration(config.orchestration, config.agents, "math", None, rollout),
        {"main": renderer},
        {"main": EnginePool(engines, slots=rollout.slots)},
        WatchedJudge(judge),
    )
    source = problem_stream(lambda n: f"What is {n} modulo 7? " + "Think step by step. " * 20)
    stages = Stages(rollout, team, source, seed=0)
    groups: list[Group] = []
    stages.resume({"main": 0})

    def next_batch() -> StepBatch:
        stages.want()
        while (batch := stages.take()) is None:
            stages.advance(POLL_S)
        return batch

    for _ in range(FILLING):
        next_batch()
    parts.seconds.clear()
    parts.calls.clear()
    engines.own_cpu_s, engines.received, engines.returned, engines.num_results = 0.0, 0, 0, 0
    engines.num_long = num_left = sum(samples_of_a_step(config)[0].values())  # at most: of full pipelines
    gc.collect()
    while num_left > 0:
        with parts.of("books and pool"):
            batch = next_batch()
        own = [group for group in batch.groups if any(sample.uid in engines.long for sample in group.samples)]
        num_left -= sum(sample.uid in engines.long for group in own for sample in group.samples)
        if not groups:
            with parts.of(BESIDE[0]):
                sent["checkpoint state"] = len(encode(stages.snapshot()))
        groups += own
    parts.seconds["books and pool"] -= engines.own_cpu_s
    sent["to engines"], sent["from engines"] = engines.received, engines.returned
    return groups


RANKS = 24  # that train, of CONFIG's 64 GPUs


def trained(
    config: RunConfig,
    groups: Sequence[Group],
    parts: Parts,
    sent: Counter[str],
    directory: RunDirectory,
    num_ranks: int = RANKS,
) -> None:
    """All of rank 0's work on a step's groups except its own part of the update."""
    data_size = num_ranks // config.policies["main"].layout.tensor
    with parts.of("credit"):
        credited = credit(groups, config.credit, config.agents, success=config.mpt.success)
    average = Average(config.loss.aggregation, config.credit.denominator, config.rollout.max_response_tokens)
    with parts.of("mini-batches"):
        batches = mini_batches(
            credited.of(config.agents), config.trainer.updates_per_step, average, seed=config.run.seed, step=1
        )
    for each in batches:
        with parts.of("micro-batches planned"):
            lengths = [s.num_tokens for s in each.sequences]
            plan = plan_micro_batches(lengths, data_size, config.trainer.max_tokens_per_micro_batch)
        for data_rank, members in [(data_rank, members) for data_rank, share in enumerate(plan) for members in share]:
            with parts.of("encoding the batch"):
                data = encode([each.sequences[i] for i in members])
            sent["to the data ranks"] += len(data)
            if data_rank == 1:
                with parts.of(BESIDE[1]):
                    decode(list[TrainSequence], data)
    directory.samples.mkdir(parents=True)
    with parts.of("samples log"):
        path = write_samples(directory, 1, groups, credited.advantages)
    sent["samples log"] = path.stat().st_size
    with parts.of("metrics"):
        summarise(credited.groups, version=1, advantages=credited.advantages)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of seconds over sizes, both as logarithms: 1 is linear."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(seconds, 1e-9)), 1)[0])


def in_its_own_process(problems: int, shorten: int, overlap: int) -> Scale:
    words = ["--measure", json.dumps([problems, shorten, overlap])]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return Scale(**json.loads(done.stdout.splitlines()[-1]))


def show(scale: Scale, step_s: float) -> None:
    print(
        f"{scale.scheduler}: {scale.problems} problems, {scale.samples:,} samples, {scale.tokens / 1e6:,.1f}M tokens, "
        f"{scale.segments:,} segments, peak {scale.peak_gib:.2f} GiB"
    )
    for part, seconds in sorted(scale.seconds.items(), key=lambda item: -item[1]):
        print(f"  {part:36} {seconds:8.2f} s of CPU")
    for part, number in scale.bytes.items():
        print(f"  {part:36} {number / 2**20:8.1f} MiB")
    print(
        f"  rank 0 alone: {scale.total_s:.1f} s, {100 * scale.total_s / step_s:.2f} % of a step of {step_s:,.0f} s",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--problems", type=int, default=128, help="a step; 72 samples each at most")
    parser.add_argument("--shorten", type=int, default=1, help="completions are 1/N as long")
    parser.add_argument("--growth", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512], help="problems a step")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        print(json.dumps(asdict(measure(*json.loads(words.measure)))))
        return 0
    step_s = make_plan(read_config(CONFIG, [])[0], GPUS, GPU).step_s
    assert step_s is not None, f"{CONFIG} does not fit: marsrl plan says why"
    full = [in_its_own_process(words.problems, words.shorten, overlap) for overlap in (0, 1)]
    for scale in full:
        show(scale, step_s)
    exponents: dict[str, dict[str, float]] = {}
    grown: list[Scale] = []
    for overlap in (0, 1) if words.growth else ():
        own = [in_its_own_process(problems, GROWTH_SHORTEN, overlap) for problems in words.growth]
        sizes = [scale.samples for scale in own]
        found = {
            part: exponent(
                [scale.segments if part in PLAYED else scale.samples for scale in own],
                [scale.seconds[part] for scale in own],
            )
            for part in own[-1].seconds
        }
        found["rank 0 alone"] = exponent(sizes, [scale.total_s for scale in own])
        print(f"{own[0].scheduler}, {sizes[0]:,} to {sizes[-1]:,} samples, 1/{GROWTH_SHORTEN} as long:")
        for part, value in found.items():
            seconds = ", ".join(f"{scale.seconds.get(part, scale.total_s):.2f}" for scale in own)
            print(f"  {part:36} {seconds} s; exponent {value:.2f}", flush=True)
        exponents[own[0].scheduler] = found
        grown += own
    if words.json:
        record = {
            "step_s": step_s,
            "full": [asdict(s) for s in full],
            "growth": [asdict(s) for s in grown],
            "exponents": exponents,
        }
        Path(words.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"ratio: {SHARE * step_s / max(scale.total_s for scale in full):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
