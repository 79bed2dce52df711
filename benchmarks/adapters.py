"""Measure CPU seconds of a step of N adapters on one base, and of their publish, with the same tokens for every N.

    python benchmarks/adapters.py [--json FILE] [--adapters 1 5 32] [--repeats 5] [--model bench] [--sequences 64] [--rank 8]
                                  [--verify-every N]

The same sequences are dealt out to N agents, each with an adapter of attention. The publish goes to a local engine in this
process, which uses one thread. In each turn, one step and one publish run for every N; the first turn is left out. The median,
the smallest and the largest of the turns are printed, and the ratio to the first N. The seconds are CPU time, so that other
programs on the machine matter little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

PARTS = ("forward", "backward", "optimizer", "rest", "step", "publish", "step + publish")


def train_and_publish(
    model: Path, number: int, vocab_size: int, rank: int, clock: Any, sequences: list[Any], verify_every: int | None
) -> Any:
    """Return a function that trains `number` adapters for a step, publishes them, and returns the seconds of each part.

    Without sequences it only publishes.
    """
    import torch

    from marsrl.kernels import PolicyObjective
    from marsrl.rollout.adapter import AdapterConfig
    from marsrl.rollout.engines.local.engine import LocalEngine
    from marsrl.rollout.engines.protocol import EngineSpec
    from marsrl.rollout.pool.pool import EnginePool
    from marsrl.rollout.pool.replicas import LocalReplicas
    from marsrl.trainer.config import MptConfig, PolicyConfig
    from marsrl.trainer.data.scatter import MiniBatch, joined, scatter
    from marsrl.trainer.learner.learner import Learner, groups
    from marsrl.trainer.weights.comparison import CheckedEngines
    from marsrl.trainer.weights.sync import AdapterSync, publish

    names = [f"adapter{i}" for i in range(number)]
    adapter = AdapterConfig(rank=rank, alpha=2 * rank, targets=("attention",))
    policy = PolicyConfig.model_validate(
        {"model": str(model), "adapter": adapter.model_dump(), "dtype": "float32", "optimizer": {"lr": 1e-4}}
    )
    learners: dict[str, Learner] = {}
    for name in names:
        base = learners[names[0]].base if learners else None
        objectives = [PolicyObjective()] * number
        mpt = MptConfig(scope="off")
        learners[name] = Learner(policy, model, objectives=objectives, mpt=mpt, total_steps=100, seed=0, base=base)
        trained = learners[name].adapter
        assert trained is not None
        with torch.no_grad():
            for part, weight in trained.named_parameters():
                if "lora_B" in part:
                    weight.normal_(std=0.02)
    engine = LocalEngine(EngineSpec("local", str(model), "float32", 2048, adapters=dict.fromkeys(names, adapter)))
    pool, (group,) = EnginePool(LocalReplicas([engine])), groups(learners, names)
    syncs = {}
    for turn_of, name in enumerate(names):
        engines = CheckedEngines(pool, vocab_size=vocab_size, adapter=name)
        common: dict[str, Any] = {"verify_every": verify_every, "turn": turn_of}
        syncs[name] = AdapterSync(engines, torch.float32, base=str(model), adapter=adapter, **common)
    dealt = [replace(sequence, agent=i % number, advantage=1.0 - i % 2 * 2) for i, sequence in enumerate(sequences)]
    parts = []
    for agent in range(number if dealt else 0):
        own = tuple(sequence for sequence in dealt if sequence.agent == agent)
        parts.append((MiniBatch(own, float(sum(sequence.num_sampled for sequence in own))),))
    version = 0

    def turn() -> dict[str, float]:
        nonlocal version
        version += 1
        clock.start()
        begin = time.process_time()
        if parts:
            group.train_step(scatter(joined(parts), group.shard(2048)))
        trained_s = time.process_time() - begin
        seconds = clock.seconds() if parts else {}
        begin = time.process_time()
        publish(learners, syncs, dict.fromkeys(names, version), group=group)
        published_s = time.process_time() - begin
        return {**seconds, "step": trained_s, "publish": published_s, "step + publish": trained_s + published_s}

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 5, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="bench", help="shape of the random base")
    parser.add_argument("--sequences", type=int, default=64, help="0: no steps, only publishes")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--verify-every", type=int, help="sync.verify_every: publishes between probes of an adapter")
    options = parser.parse_args()
    import torch
    from part_clock import PartClock
    from record import surroundings
    from step_problem import PROBLEMS, batch

    from marsrl.rollout.model_shape import read_shape
    from marsrl.trainer.learner.megatron import shim
    from marsrl.trainer.models.init_model import init_model

    torch.set_num_threads(1)
    shim.install()  # before the clock imports megatron
    clock = PartClock(is_cuda=False)
    with tempfile.TemporaryDirectory() as folder:
        model = init_model(options.model, "bytes", Path(folder) / "model", dtype="float32")
        vocab_size = read_shape(model).vocab_size
        sequences = batch(replace(PROBLEMS["bench"], vocab_size=vocab_size))[: options.sequences]
        print(f"{sum(sequence.num_tokens for sequence in sequences)} tokens, adapters of rank {options.rank}")
        turns = {
            number: train_and_publish(model, number, vocab_size, options.rank, clock, sequences, options.verify_every)
            for number in options.adapters
        }
        seconds: dict[int, dict[str, list[float]]] = {number: defaultdict(list) for number in turns}
        for repeat in range(options.repeats + 1):
            for number, turn in turns.items():
                for part, spent in turn().items():
                    seconds[number][part] += [spent] if repeat else []
        first = options.adapters[0]
        for number, of_parts in seconds.items():
            for part in PARTS:
                if spent := of_parts[part]:
                    ratio = median(spent) / median(seconds[first][part])
                    print(
                        f"{number:4} {part:15} {median(spent):8.4f} ({min(spent):.4f} to {max(spent):.4f}) {ratio:6.2f}x"
                    )
    if options.json:
        record = {**surroundings("cpu"), "arguments": vars(options), "seconds": seconds}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
