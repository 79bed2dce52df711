"""64 to 1,024 GPUs, simulated event by event: rank 0's part of a step, and what pipeline and overlap give.

    python benchmarks/simulated_cluster.py [--gpus 64 256] [--json FILE]       1024 too: several minutes and GiB more

The project's player, pool and team run with simulated H100s on a virtual clock (benchmarks/simulation/). Five agents, 64k: 128
problems a step, of at most 72 samples, for 64 GPUs, and as many for each GPU of more; rollout.overlap=1, 4 segments; 40 of 64
GPUs decode and 24 train. Seconds a step are those of 64 GPUs after 24 steps: more GPUs have as much to do, each.

    rank 0      CPU seconds of player, prompts, credit, mini-batches, packing plan, encoding, samples log and its ends of the
                messages to and from engines, all the project's own, in a process for each number of GPUs (simulated engines,
                which decode the texts, not counted): what the 5th to 7th step play, for each sample asked for there, and what
                becomes of the samples that the 7th trains, for each of these; a sample's times the samples of a step. There,
                completions have 1/64 of their tokens, for memory's sake; a token's seconds are those of 64 GPUs with 1/4
                beside 1/64
    pipeline    time a sample: whole trajectories on all 64 GPUs, in turn with the trainer, over the above
    overlap     time a sample, one agent, 32k: rollout.overlap=0 on all 64 GPUs over rollout.overlap=1, with three divisions of
                the GPUs, 1 and 4 segments
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import scale
from costless_engines import VOCABULARY, write_tokenizer
from simulation.calibrate import ULORL
from simulation.cost_model import Constants
from simulation.lengths import Lengths
from simulation.play import Outcome, Setting, Simulation, Texts, play
from simulation.simulated_pool import Written
from simulation.simulated_team import last_token, outcomes_of
from simulation.tables import columns

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.types import IntArray
from marsrl.trainer.config.read import read_config
from marsrl.trainer.runs.directory import RunDirectory

BASE = 64  # GPUs that the numbers below are of; more have as much for each
PROBLEMS, TRAINING, GROUP = 128, 24, 8
YOUNG = 4  # steps before the measured ones, until all five agents play
PLAYED = 3  # measured ones: they vary in size
STEADY = 24  # the same, until the samples of a step grow no more
COARSE, FINE = 64, 4  # real tokens that one of a completion stands for
LONG = 32_768  # tokens of the comparison with overlap
DIVISIONS = (0.5, 0.625, 0.75)  # shares of the GPUs that decode
LENGTHS = Lengths(scale.SIGMA)


@dataclass(frozen=True)
class RankZero:
    """Rank 0's CPU seconds, by part: of PLAYED steps that ask for `played` samples, and of the last one's trained `samples`.

    tokens: of the samples' arrays, of which each stands for `grain`.
    """

    gpus: int
    grain: int
    played: int
    samples: int
    tokens: int
    seconds: dict[str, float]
    peak_gib: float

    def part_s(self, part: str) -> float:
        """Seconds a sample."""
        return self.seconds[part] / (self.played if part in scale.PLAYED else self.samples)

    @property
    def sample_s(self) -> float:
        return sum(self.part_s(part) for part in self.seconds if part not in scale.BESIDE)

    @property
    def sample_tokens(self) -> float:
        return self.tokens / self.samples


def asynchronous(gpus: int) -> Setting:
    """The pipeline as configs/qwen3_30b_a3b.yaml has it, on so many GPUs."""
    training = TRAINING * gpus // BASE
    engines = round((gpus - training) / Constants.gpus_per_engine)
    return Setting(engines, PROBLEMS * gpus // BASE, "agentic", 4, overlap=1, trainer_gpus=training)


def trajectories(gpus: int) -> Setting:
    engines = round(gpus / Constants.gpus_per_engine)
    return Setting(engines, PROBLEMS * gpus // BASE, "trajectory", 1, steps=2)


def writer(renderer: ChatRenderer, constants: Constants) -> Written:
    """Random words, and an answer or a verdict at the end."""
    outcomes = outcomes_of(constants, LENGTHS)
    words = np.random.default_rng(0).integers(256, VOCABULARY, 1 << 20).astype(np.int32)
    shown = "this follows from the line before, and so on; " * 5
    said = ("", "\\boxed{7}", "\\boxed{8}", "Verdict: correct", "Verdict: wrong")
    ends = [renderer.encode_trusted(f"</think>\n{shown}\n{each}<|im_end|>") for each in said]

    def written(uid: str, num_tokens: int, num_left: int) -> IntArray:
        start = zlib.crc32(uid.encode()) % (len(words) - num_tokens)
        tokens = words[start : start + num_tokens].copy()
        if not num_left:
            end = ends[last_token(outcomes, uid)]
            tokens[-len(end) :] = end[-num_tokens:]
        return tokens

    return written


def measure(gpus: int, grain: int) -> RankZero:
    """Rank 0's work of the steps after YOUNG."""
    with imports_for_good():
        import pyarrow.parquet  # noqa: F401  by the samples log, once in a run

        config = read_config(scale.CONFIG, [])[0]
    constants, parts = Constants(), scale.Parts()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(folder)
        renderer = ChatRenderer(folder)
        texts = Texts(
            renderer, writer(renderer, constants), grain, lambda n: f"What is {n} modulo 7? " + "Think. " * 80
        )
        simulation = Simulation(asynchronous(gpus), constants, LENGTHS, texts=texts)
        for _ in range(YOUNG):
            simulation.step()
        for name, part in scale.PARTS_OF_RENDERER.items():
            setattr(renderer, name, parts.timed(part, getattr(renderer, name)))
        own_cpu_s = simulation.replicas.own_cpu_s
        with parts.of("books and pool"):
            step = [simulation.step() for _ in range(PLAYED)][-1]
        parts.seconds["books and pool"] -= simulation.replicas.own_cpu_s - own_cpu_s
        directory = RunDirectory(Path(folder) / "run")
        scale.trained(config, step.groups, parts, Counter(), directory, num_ranks=TRAINING * gpus // BASE)
    samples = [sample for group in step.groups for sample in group.samples]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    played = GROUP * parts.calls["prompts"]
    return RankZero(gpus, grain, played, len(samples), num_tokens, dict(parts.seconds), peak)


def in_its_own_process(gpus: int, grain: int) -> RankZero:
    words = [sys.executable, __file__, "--measure", json.dumps([gpus, grain])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return RankZero(**json.loads(done.stdout.splitlines()[-1]))


def token_s(coarse: RankZero, fine: RankZero) -> float:
    """CPU seconds of a token more in a completion."""
    return (fine.sample_s - coarse.sample_s) / (fine.sample_tokens - coarse.sample_tokens)


def overlap_gains() -> dict[str, Outcome]:
    """One agent, 32k: in turn with the trainer first, then beside it, by division of the GPUs and segments."""
    own = Constants.gpus_per_engine
    whole = Setting(round(BASE / own), ULORL.problems, is_solver_only=True, group_size=GROUP, max_tokens=LONG)
    found = {"overlap 0": play(replace(whole, steps=6, warmup=0), Constants(), LENGTHS)}
    for share in DIVISIONS:
        for segments in (1, 4):
            engines = round(share * BASE / own)
            beside = replace(
                whole, engines=engines, segments=segments, overlap=1, steps=12, warmup=12,
                trainer_gpus=BASE - round(engines * own),
            )  # fmt: skip
            name = f"overlap 1, {100 * share:.0f} % of the GPUs decode, segments {segments}"
            found[name] = play(beside, Constants(), LENGTHS)
    return found


def show_ranks(ranks: Sequence[RankZero], per_token_s: float, steady: Outcome) -> None:
    sample_tokens = steady.tokens_per_s * steady.s_per_sample
    rows = []
    for found in ranks:
        samples = steady.samples_per_step * found.gpus / BASE
        sample_s = found.sample_s + per_token_s * (sample_tokens - found.sample_tokens)
        share = samples * sample_s / steady.step_s
        rows.append(
            (
                f"{found.gpus:,}", f"{samples:,.0f}", f"{steady.step_s:,.0f}", f"{found.played:,}, {found.samples:,}",
                f"{1e6 * found.sample_s:.0f}", f"{1e6 * sample_s:.0f}", f"{samples * sample_s:.1f}", f"{100 * share:.2f}%",
            )
        )  # fmt: skip
    heads = (
        "GPUs", "samples a step", "step s", "played, trained", f"CPU us a sample, 1/{COARSE} of its tokens", "all of them",
        "CPU s a step", "of the step",
    )  # fmt: skip
    print(f"Rank 0; {sample_tokens:,.0f} tokens a sample, {1e9 * per_token_s:.0f} ns of CPU each")
    print(columns(heads, rows))
    for part in ranks[0].seconds:
        micros = (f"{1e6 * found.part_s(part):.0f}" for found in ranks)
        print(f"  {part:36} {', '.join(micros)} us a sample")
    if len(ranks) > 1:
        slope = scale.exponent([found.gpus for found in ranks], [found.gpus * found.sample_s for found in ranks])
        print(f"  exponent {slope:.2f}; at most {', '.join(f'{found.peak_gib:.1f}' for found in ranks)} GiB")


def show_gains(trajectory: Outcome, steady: Outcome, overlap: Mapping[str, Outcome]) -> None:
    print(f"Pipeline over trajectories: {trajectory.s_per_sample / steady.s_per_sample:.2f}")
    alone = overlap["overlap 0"]
    rows = [
        (
            name, f"{found.step_s:.0f}", f"{found.rollout_s:.0f}", f"{found.train_s:.0f}", f"{100 * found.idle_share:.0f}%",
            f"{found.staleness_mean:.1f}", f"{alone.s_per_sample / found.s_per_sample:.2f}",
        )
        for name, found in overlap.items()
    ]  # fmt: skip
    print("Overlap, one agent, 32k")
    print(columns(("", "step s", "rollout s", "train s", "idle", "staleness", "over overlap 0"), rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256], help="numbers of GPUs, multiples of 64")
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        print(json.dumps(asdict(measure(*json.loads(words.measure)))))
        return 0
    gc.disable()  # samples hold no cycles
    steady = play(replace(asynchronous(BASE), warmup=STEADY, steps=8), Constants(), LENGTHS)
    trajectory, overlap = play(trajectories(BASE), Constants(), LENGTHS), overlap_gains()
    show_gains(trajectory, steady, overlap)
    coarse, fine = (in_its_own_process(BASE, grain) for grain in (COARSE, FINE))
    ranks = [coarse if gpus == BASE else in_its_own_process(gpus, COARSE) for gpus in words.gpus]
    show_ranks(ranks, token_s(coarse, fine), steady)
    if words.json:
        record = {
            "steady": asdict(steady),
            "trajectory": asdict(trajectory),
            "overlap": {name: asdict(found) for name, found in overlap.items()},
            "rank_0": [asdict(found) for found in (fine, *ranks)],
        }
        Path(words.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
