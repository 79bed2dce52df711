"""Simulate clusters of 64 to 1,024 GPUs event by event: cost of rank 0 per step, and gains of pipeline and overlap.

    python benchmarks/studies/simulated_cluster.py [--gpus 64 256] [--json FILE]     # 1024 takes several more minutes and GiB

The project's own player, pool and team run with simulated H100s on a virtual clock (simulation/). The setting has five agents,
responses of up to 64k tokens, rollout.overlap=1 and 4 segments. On 64 GPUs a step has 128 problems of at most 72 samples each;
larger clusters have proportionally more problems. Of 64 GPUs, 40 decode and 24 train. Step times are those of 64 GPUs after 24
steps, because each GPU of a larger cluster has the same load.

Prints:

    rank 0      CPU seconds of player, prompts, credit, mini-batches, packing plan, encoding, samples log, and rank 0's side of
                the messages to and from engines. All of it is the project's own code. Each cluster size is measured in its own
                process, without the simulated engines (which also decode the texts). Playing is measured on steps 5 to 7 per
                requested sample, and training on step 7 per trained sample; both are multiplied by the samples of a step.
                To save memory, completions have 1/64 of their tokens. The seconds per token are measured with 64 GPUs, by
                comparing runs with 1/4 and with 1/64 of the tokens.
    pipeline    tokens/s in the setting above, relative to whole trajectories on all 64 GPUs that alternate with the trainer
    overlap     tokens/s of one agent with 32k tokens and rollout.overlap=1, for three splits of the GPUs and 1 or 4 segments,
                relative to rollout.overlap=0 on all 64 GPUs

Rates are in tokens, because the number of samples that a few steps train varies between seeds: 8,435 and 11,092 a step in runs
with equally many tokens.
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
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from simulation.calibrate import ULORL
from simulation.cost_model import Constants
from simulation.lengths import Lengths
from simulation.play import Outcome, Setting, Simulation, Texts, play
from simulation.simulated_pool import Written
from simulation.simulated_team import last_token, outcomes_of
from simulation.tables import columns

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Group, IntArray
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import TrainSequence, plan_micro_batches
from marsrl.trainer.report.group_metrics import summarise
from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.runs.directory import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[1]))
from random_models import VOCABULARY, write_large_tokenizer

CONFIG = "configs/qwen3_30b_a3b.yaml"
BASE = 64  # number of GPUs to which the numbers below refer; larger clusters have the same work per GPU
PROBLEMS, TRAINING, GROUP = 128, 24, 8
YOUNG = 4  # steps before the measured ones; after them all five agents play
PLAYED = 3  # measured steps, which vary in size
STEADY = 24  # steps until the samples per step stop growing
COARSE, FINE = 64, 4  # real tokens per simulated token
TIMES = 3  # repetitions of the measurement for 64 GPUs, because CPU seconds vary by a third
END = 512  # tokens at the end of a completion that are decoded; its answer or verdict takes about 250
LONG = 32_768  # tokens of the completions in the comparison with overlap
DIVISIONS = (0.5, 0.625, 0.75)  # shares of the GPUs that decode
LENGTHS = Lengths(1.369)  # sigma as fitted by pipeline.py


# These parts' seconds grow with the played samples; those of other parts with the trained samples.
PLAYED_PARTS = ("books and pool", "prompts", "texts")
# Parts that are shown, but not counted in a step of rank 0.
BESIDE = ("checkpoint state (every 10 steps)", "another rank: decoding its share")


@dataclass
class Parts:
    """CPU seconds by part, over all threads of the process; while a nested part runs, the outer part does not count."""

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
        now_s = time.process_time()
        if self._inside:
            self.seconds[self._inside[-1]] += now_s - self._since
        self._since = now_s

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*words: Any, **options: Any) -> Any:
            with self.of(name):
                return function(*words, **options)

        return inside


@dataclass(frozen=True)
class RankZero:
    """CPU seconds of rank 0 by part, over PLAYED steps, which request `played` samples. The last step trains `samples` samples.

    tokens: number of tokens in the arrays of the samples; each stands for `grain` real tokens. bytes: size of messages and files,
    by content.
    """

    gpus: int
    grain: int
    played: int
    samples: int
    tokens: int
    seconds: dict[str, float]
    bytes: dict[str, int]
    peak_gib: float

    def part_s(self, part: str) -> float:
        """Return the part's seconds per sample."""
        return self.seconds[part] / (self.played if part in PLAYED_PARTS else self.samples)

    @property
    def sample_s(self) -> float:
        return sum(self.part_s(part) for part in self.seconds if part not in BESIDE)

    @property
    def sample_tokens(self) -> float:
        return self.tokens / self.samples


def asynchronous(gpus: int) -> Setting:
    """Return the setting of configs/qwen3_30b_a3b.yaml on this number of GPUs."""
    training = TRAINING * gpus // BASE
    engines = round((gpus - training) / Constants.gpus_per_engine)
    return Setting(engines, PROBLEMS * gpus // BASE, "agentic", 4, overlap=1, trainer_gpus=training)


def trajectories(gpus: int) -> Setting:
    engines = round(gpus / Constants.gpus_per_engine)
    return Setting(engines, PROBLEMS * gpus // BASE, "trajectory", 1, steps=2)


def writer(renderer: ChatRenderer, constants: Constants) -> Written:
    """Return a writer of random words, with an answer or a verdict at the end."""
    outcomes = outcomes_of(constants, LENGTHS)
    random_words = np.random.default_rng(0).integers(256, VOCABULARY, 1 << 20).astype(np.int32)
    thought = "this follows from the line before, and so on; " * 5
    endings = ("", "\\boxed{7}", "\\boxed{8}", "Verdict: correct", "Verdict: wrong")
    ends = [renderer.encode_trusted(f"</think>\n{thought}\n{ending}<|im_end|>") for ending in endings]

    def written(uid: str, num_tokens: int, num_left: int) -> IntArray:
        start = zlib.crc32(uid.encode()) % (len(random_words) - num_tokens)
        tokens = random_words[start : start + num_tokens].copy()
        if not num_left:
            end = ends[last_token(outcomes, uid)]
            tokens[-len(end) :] = end[-num_tokens:]
        return tokens

    return written


def teller(renderer: ChatRenderer) -> Callable[[IntArray], str]:
    """Return a function that makes the text of a completion: it decodes the last tokens, and uses ready-made words for the rest.

    Decoding everything, as engines do, would take most of the time and would evict rank 0's data from the caches.
    """
    decode = renderer.decode  # the original method, not the one that is timed
    decoded = decode(np.random.default_rng(1).integers(256, VOCABULARY, 1 << 18).astype(np.int32))
    chars_per_token = len(decoded) / (1 << 18)

    def told(ids: IntArray) -> str:
        num_rest = max(0, len(ids) - END)
        start = int(ids[0]) if num_rest else 0
        return decoded[start : start + round(num_rest * chars_per_token)] + decode(ids[num_rest:])

    return told


def measure(gpus: int, grain: int, overlap: int = 1) -> RankZero:
    """Measure rank 0's work in the steps after YOUNG."""
    with imports_for_good():
        import pyarrow.parquet  # noqa: F401  the samples log imports it, once in a run

        config = read_config(CONFIG, [])[0]
    constants, parts, sent_bytes = Constants(), Parts(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        write_large_tokenizer(folder)
        renderer = ChatRenderer(folder)
        written_by, text_of = writer(renderer, constants), teller(renderer)
        texts = Texts(renderer, written_by, text_of, grain, lambda n: f"What is {n} modulo 7? " + "Think. " * 80)
        simulation = Simulation(replace(asynchronous(gpus), overlap=overlap), constants, LENGTHS, texts=texts)
        for _ in range(YOUNG):
            simulation.step()
        for name, part in (("render", "prompts"), ("decode", "texts")):
            setattr(renderer, name, parts.timed(part, getattr(renderer, name)))
        engines = simulation.replicas
        before = engines.own_cpu_s, engines.received, engines.returned
        with parts.of("books and pool"):
            step = [simulation.step() for _ in range(PLAYED)][-1]
        parts.seconds["books and pool"] -= engines.own_cpu_s - before[0]
        sent_bytes |= {"to engines": engines.received - before[1], "from engines": engines.returned - before[2]}
        with parts.of(BESIDE[0]):
            sent_bytes["checkpoint state"] = len(encode(simulation.stages.snapshot()))
        directory = RunDirectory(Path(folder) / "run")
        trained(config, step.groups, parts, sent_bytes, directory, num_ranks=TRAINING * gpus // BASE)
    samples = [sample for group in step.groups for sample in group.samples]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    played = GROUP * parts.calls["prompts"]
    return RankZero(gpus, grain, played, len(samples), num_tokens, dict(parts.seconds), dict(sent_bytes), peak)


def trained(
    config: RunConfig,
    groups: Sequence[Group],
    parts: Parts,
    sent: Counter[str],
    directory: RunDirectory,
    num_ranks: int,
) -> None:
    """Do all of rank 0's work on a step's groups except its part of the update."""
    data_size = num_ranks // config.policies["main"].layout.tensor
    with parts.of("credit"):
        credited = credit(groups, config.credit, config.agents, success=config.mpt.success)
    average = Average(config.loss.aggregation, config.credit.denominator, config.rollout.max_response_tokens)
    with parts.of("mini-batches"):
        batches = mini_batches(
            credited.of(config.agents), config.trainer.updates_per_step, average, seed=config.run.seed, step=1
        )
    for batch in batches:
        with parts.of("micro-batches planned"):
            lengths = [s.num_tokens for s in batch.sequences]
            plan = plan_micro_batches(lengths, data_size, config.trainer.max_tokens_per_micro_batch)
        for data_rank, members in [(data_rank, members) for data_rank, share in enumerate(plan) for members in share]:
            with parts.of("encoding the batch"):
                data = encode([batch.sequences[i] for i in members])
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
    """Return the exponent of the growth of seconds with sizes (the slope of their logarithms); 1 is linear."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(seconds, 1e-9)), 1)[0])


def in_its_own_process(gpus: int, grain: int, times: int = 1) -> RankZero:
    """Measure in this number of separate processes, and return the median."""
    command = [sys.executable, __file__, "--measure", json.dumps([gpus, grain])]
    measured = []
    for _ in range(times):
        completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        measured.append(RankZero(**json.loads(completed.stdout.splitlines()[-1])))
    return sorted(measured, key=lambda rank_zero: rank_zero.sample_s)[times // 2]


def token_s(coarse: RankZero, fine: RankZero) -> float:
    """Return the CPU seconds that one more token in a completion costs."""
    return (fine.sample_s - coarse.sample_s) / (fine.sample_tokens - coarse.sample_tokens)


def overlap_gains() -> dict[str, Outcome]:
    """Simulate one agent at 32k tokens: alternating with the trainer, then in parallel with it, by GPU split and segments."""
    gpus_per_engine = Constants.gpus_per_engine
    setting = Setting(
        round(BASE / gpus_per_engine), ULORL.problems, is_solver_only=True, group_size=GROUP, max_tokens=LONG
    )
    outcomes = {"overlap 0": play(replace(setting, steps=6, warmup=0), Constants(), LENGTHS)}
    for share in DIVISIONS:
        for segments in (1, 4):
            engines = round(share * BASE / gpus_per_engine)
            beside = replace(
                setting, engines=engines, segments=segments, overlap=1, steps=12, warmup=12,
                trainer_gpus=BASE - round(engines * gpus_per_engine),
            )  # fmt: skip
            name = f"overlap 1, {100 * share:.0f} % of the GPUs decode, segments {segments}"
            outcomes[name] = play(beside, Constants(), LENGTHS)
    return outcomes


def show_ranks(ranks: Sequence[RankZero], per_token_s: float, steady: Outcome, sample_tokens: float) -> None:
    rows = []
    for rank_zero in ranks:
        samples = steady.tokens_per_s * steady.step_s / sample_tokens * rank_zero.gpus / BASE
        sample_s = rank_zero.sample_s + per_token_s * (sample_tokens - rank_zero.sample_tokens)
        share = samples * sample_s / steady.step_s
        rows.append(
            (
                f"{rank_zero.gpus:,}", f"{samples:,.0f}", f"{steady.step_s:,.0f}", f"{rank_zero.played:,}, {rank_zero.samples:,}",
                f"{1e6 * rank_zero.sample_s:.0f}", f"{1e6 * sample_s:.0f}", f"{samples * sample_s:.1f}", f"{100 * share:.2f}%",
            )
        )  # fmt: skip
    heads = (
        "GPUs", "samples a step", "step s", "played, trained", f"CPU us a sample, 1/{COARSE} of its tokens", "all of them",
        "CPU s a step", "of the step",
    )  # fmt: skip
    print(f"Rank 0; {sample_tokens:,.0f} tokens a sample, {1e9 * per_token_s:.0f} ns of CPU each")
    print(columns(heads, rows))
    for part in ranks[0].seconds:
        micros = (f"{1e6 * rank_zero.part_s(part):.0f}" for rank_zero in ranks)
        print(f"  {part:36} {', '.join(micros)} us a sample")
    for name in ranks[0].bytes:
        print(f"  {name:36} {', '.join(f'{rank_zero.bytes[name] / 2**20:.1f}' for rank_zero in ranks)} MiB")
    if len(ranks) > 1:
        slope = exponent(
            [rank_zero.gpus for rank_zero in ranks], [rank_zero.gpus * rank_zero.sample_s for rank_zero in ranks]
        )
        print(f"  exponent {slope:.2f}; at most {', '.join(f'{rank_zero.peak_gib:.1f}' for rank_zero in ranks)} GiB")


def show_gains(trajectory: Outcome, steady: Outcome, overlap: Mapping[str, Outcome]) -> None:
    print(f"Pipeline: {steady.tokens_per_s / trajectory.tokens_per_s:.2f} times the tokens/s of whole trajectories")
    alone = overlap["overlap 0"]
    rows = [
        (
            name, f"{gain.step_s:.0f}", f"{gain.rollout_s:.0f}", f"{gain.train_s:.0f}", f"{100 * gain.idle_share:.0f}%",
            f"{gain.staleness_mean:.1f}", f"{gain.tokens_per_s / alone.tokens_per_s:.2f}",
        )
        for name, gain in overlap.items()
    ]  # fmt: skip
    print("Overlap, one agent, 32k tokens; last column: tokens/s relative to overlap 0")
    print(columns(("", "step s", "rollout s", "train s", "idle", "staleness", "over overlap 0"), rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256], help="numbers of GPUs, multiples of 64")
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(asdict(measure(*json.loads(options.measure)))))
        return 0
    gc.disable()  # samples have no reference cycles
    steady = play(replace(asynchronous(BASE), warmup=STEADY, steps=8), Constants(), LENGTHS)
    trajectory, overlap = play(trajectories(BASE), Constants(), LENGTHS), overlap_gains()
    show_gains(trajectory, steady, overlap)
    coarse, fine = (in_its_own_process(BASE, grain, TIMES) for grain in (COARSE, FINE))
    ranks = [coarse if gpus == BASE else in_its_own_process(gpus, COARSE) for gpus in options.gpus]
    show_ranks(ranks, token_s(coarse, fine), steady, sample_tokens=trajectory.tokens_per_s * trajectory.s_per_sample)
    if options.json:
        record = {
            "steady": asdict(steady),
            "trajectory": asdict(trajectory),
            "overlap": {name: asdict(outcome) for name, outcome in overlap.items()},
            "rank_0": [asdict(outcome) for outcome in (fine, *ranks)],
        }
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
