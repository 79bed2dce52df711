"""Compare a training step that computes shared prefixes once with a step of the flat batch (every sample whole).

    python benchmarks/shared_prefixes.py [--patterns thoughts group] [--micro-batch 4096] [--repeats 5] [--json FILE]

One policy with random weights trains on random tokens on one rank. On a CPU it has one thread, and time is process time. The
two steps take turns. If the norms of their gradients differ, no number is printed. fed: tokens of all samples. once: tokens that
are computed with trainer.shared_prefixes=on; a prefix that several micro-batches need counts in each. Patterns:

    chain     a session of 8 turns that only appends, so it is one sample and shares nothing
    thoughts  the same session, but the client strips thoughts from earlier turns, so each turn is a sample
    branches  4 branches of 2 turns after 4 common turns
    group     8 answers to a prompt that is 30 % of each sample
    short     8 answers to a prompt that is 5 % of each sample
    brief     8 answers of 40 tokens to each of 8 prompts of 100
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, THOUGHT, ANSWER, OUTPUT, TURNS = 300, 20, 40, 212, 8
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}

Sample = tuple[list[int], list[bool]]  # tokens, and which of them the policy sampled


class Tokens:
    """Source of random tokens. `given`: tokens of prompts and tools; `drawn`: tokens that the policy samples."""

    def __init__(self, vocabulary: int) -> None:
        self._rng, self._vocabulary = np.random.default_rng(0), vocabulary

    def given(self, number: int) -> Sample:
        return self._rng.integers(0, self._vocabulary, number).tolist(), [False] * number

    def drawn(self, number: int) -> Sample:
        return self.given(number)[0], [True] * number


def joined(*parts: Sample) -> Sample:
    return [token for tokens, _ in parts for token in tokens], [is_drawn for _, drawn in parts for is_drawn in drawn]


def untrained(sample: Sample) -> Sample:
    return sample[0], [False] * len(sample[0])


def chain(tokens: Tokens) -> list[Sample]:
    sample = tokens.given(PROMPT)
    for _ in range(TURNS):
        sample = joined(sample, tokens.drawn(THOUGHT + ANSWER), tokens.given(OUTPUT))
    return [sample]


def thoughts(tokens: Tokens) -> list[Sample]:
    history, samples = tokens.given(PROMPT), []
    for _ in range(TURNS):
        answer = tokens.drawn(ANSWER)
        samples.append(joined(history, tokens.drawn(THOUGHT), answer))
        history = untrained(joined(history, answer, tokens.given(OUTPUT)))
    return samples


def branches(tokens: Tokens) -> list[Sample]:
    def turns(number: int) -> Sample:
        return joined(*(joined(tokens.drawn(THOUGHT + ANSWER), tokens.given(OUTPUT)) for _ in range(number)))

    trunk = joined(tokens.given(PROMPT), turns(TURNS // 2))
    return [joined(trunk if number == 0 else untrained(trunk), turns(2)) for number in range(4)]


def group(tokens: Tokens, share: float = 0.3, length: int = 1000) -> list[Sample]:
    prompt = tokens.given(round(share * length))
    return [joined(prompt, tokens.drawn(length - len(prompt[0]))) for _ in range(8)]


def short(tokens: Tokens) -> list[Sample]:
    return group(tokens, 0.05)


def brief(tokens: Tokens) -> list[Sample]:
    prompts = [tokens.given(100) for _ in range(8)]
    return [joined(prompt, tokens.drawn(40)) for prompt in prompts for _ in range(8)]


PATTERNS: dict[str, Callable[[Tokens], list[Sample]]] = {
    pattern.__name__: pattern for pattern in (chain, thoughts, branches, group, short, brief)
}


def sequences(samples: list[Sample]) -> list[Any]:
    from marsrl.trainer.data.packing import TrainSequence

    out = []
    for number, (tokens, drawn) in enumerate(samples):
        first = drawn.index(True)
        fields: dict[str, Any] = {"agent": 0, "temperature": 1.0, "advantage": (-1.0) ** number * (1 + 0.1 * number)}
        ids = np.array(tokens, np.int32)
        logprobs = np.full(len(ids) - first, -9.0, np.float32)
        fields |= {"prompt_ids": ids[:first], "token_ids": ids[first:], "is_sampled": np.array(drawn[first:])}
        out.append(TrainSequence(uid=f"s{number}", rollout_logprobs=logprobs, **fields))
    return out


def measure(learner: Any, samples: list[Any], micro_batch: int, repeats: int, tolerance: float) -> dict[str, Any]:
    """Return tokens and seconds of both steps. Raises SystemExit if their gradients differ."""
    import torch

    from marsrl.trainer.data.scatter import Update, micro_batches

    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    normaliser = float(sum(s.num_sampled for s in samples))
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    norms, computed = dict[str, float](), dict[str, int]()
    for _ in range(repeats + 1):  # The first step is a warm-up.
        for prefixes, times in seconds.items():
            begin = clock()
            batches = tuple(micro_batches(samples, learner.shard(micro_batch, prefixes)))
            norms[prefixes] = learner.train_step([Update(batches, normaliser)], lr=0.0).grad_norm
            times.append(clock() - begin)
            computed[prefixes] = sum(batch.num_computed for batch in batches)
    if not abs(norms["on"] - norms["off"]) <= tolerance * norms["off"]:
        raise SystemExit(f"the gradients differ; norms {norms['off']} flat, {norms['on']} with shared prefixes")
    turns = [flat / tree for flat, tree in zip(seconds["off"][1:], seconds["on"][1:], strict=True)]
    return {
        "samples": len(samples),
        "fed": computed["off"],
        "once": computed["on"],
        "seconds": {prefixes: statistics.median(times[1:]) for prefixes, times in seconds.items()},
        "ratio": statistics.median(turns),
        "turns": turns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--model", default="bench", help="shape of marsrl's own models, or a model's directory")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--recompute", default="none", help="policies.<name>.recompute")
    parser.add_argument("--micro-batch", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    import torch
    from record import surroundings

    from marsrl.kernels import PolicyObjective
    from marsrl.trainer.config import MptConfig, PolicyConfig
    from marsrl.trainer.learner.learner import Learner
    from marsrl.trainer.models.init_model import init_model

    torch.set_num_threads(1)
    record = surroundings("cuda" if torch.cuda.is_available() else "cpu")
    policy = {"dtype": options.dtype, "recompute": options.recompute, "optimizer": {"lr": 1e-5}}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.model)
        if not (model / "config.json").is_file():
            init_model(options.model, "bytes", model := Path(folder), seed=0, dtype=options.dtype)
        learner = Learner(
            PolicyConfig.model_validate(policy), model, objectives=[PolicyObjective()],
            mpt=MptConfig(scope="off"), total_steps=100, seed=0,
        )  # fmt: skip
    print(f"{'pattern':10}{'samples':>8}{'fed':>8}{'once':>8}{'tokens':>8}{'flat s':>9}{'once s':>9}{'time':>7}  turns")
    rows = {}
    for name in options.patterns:
        samples = sequences(PATTERNS[name](Tokens(learner.vocab_size)))
        row = rows[name] = measure(learner, samples, options.micro_batch, options.repeats, TOLERANCE[options.dtype])
        print(
            f"{name:10}{row['samples']:8}{row['fed']:8,}{row['once']:8,}{row['fed'] / row['once']:7.2f}x"
            f"{row['seconds']['off']:9.2f}{row['seconds']['on']:9.2f}{row['ratio']:6.2f}x"
            f"  {min(row['turns']):.2f} to {max(row['turns']):.2f}",
            flush=True,
        )
    if options.json:
        given = {name: getattr(options, name) for name in ("model", "dtype", "recompute", "micro_batch")}
        record |= {**given, "load_after": os.getloadavg()[0], "results": rows}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
