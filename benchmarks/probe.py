"""Measure the faults that the probe of a weight sync detects, and its false alarms, with Megatron and the real vLLM.

    python benchmarks/probe.py                    # every mutation x dtype x model: statistics, detecting checks (10 minutes)
    python benchmarks/probe.py --honest 200       # two syncs of each random model; none may be refused (15 minutes)
    [--json FILE] [--kinds dense moe llama mistral] [--layers 2 4 6] [--dtypes float32 bfloat16]

Models are random Qwen3, Qwen3-MoE, Llama and Mistral of width 64, whose matrices and biases have a standard deviation of 0.02 to
0.2. One engine is started per shape and dtype; the weights of further models are sent to it as updates. The last column names the
checks that detect a mutation:

    median, share, last tokens  this statistic of the probe is too large; (later): only by the narrower bound of later comparisons
    settings                    the settings that the engine reports differ
    checksums                   the checksums of the weights differ
    engine                      vLLM counts cached prefixes right after an update
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_process import EngineProcess
from random_models import FAMILIES, write_model
from safetensors.torch import load_file, save_file
from spoiled_vllm import SpoiledVllm
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.rollout.engines.protocol import WeightUpdate
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.layout import fuse
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import (
    EngineComparison,
    TrainerScores,
    comparison_sequences,
    measure,
    trainer_scores,
)

_STDS = (0.02, 0.06, 0.2)
# Sizes by which each number of the weights moves up or down at random, as in Adam's first step.
_UPDATES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
_VOCABULARY = 160
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    kind: str
    layers: int
    dtype: str
    std: float
    what: str
    ratio: float
    share: float
    num_last: int
    largest: float
    noise: float
    notices: str


class Pair:
    """A learner and an engine with the same model shape and dtype."""

    def __init__(self, kind: str, layers: int, dtype: str, folder: Path) -> None:
        self.kind, self.layers, self.dtype, self._folder = kind, layers, dtype, folder
        self._model = write_model(kind, layers, folder / "model")
        self.settings = read_shape(self._model).settings()
        self._write(self.weights(0.05, 0))
        mpt, policy = MptConfig(scope="off"), PolicyConfig(dtype=dtype)
        self.learner = Learner(policy, self._model, objectives=[PolicyObjective()], mpt=mpt, total_steps=1, seed=0)
        self.process = EngineProcess(str(self._model), dtype, SpoiledVllm, "spawn")
        self.pool = EnginePool(self.process)  # type: ignore[arg-type]
        self.version = 0

    def weights(self, std: float, seed: int) -> Weights:
        """Return random weights: matrices and biases with this standard deviation, norms near 1.

        The head is 10 times as large for every fourth seed, so that some distributions are sharp.
        """
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: tensor.shape for name, tensor in _tensors(self._model).items()}
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        weights = {name: 1 + 0.1 * x if name.endswith("norm.weight") else x * std for name, x in drawn.items()}
        weights["lm_head.weight"] *= 10 if seed % 4 == 3 else 1
        return weights

    def train(self, weights: Weights) -> TrainerScores:
        """Set the learner's weights, and return its log-probs."""
        self._write(weights)
        self.learner.read_weights(self._model)
        return trainer_scores(self.learner, Precision(getattr(torch, self.dtype)))

    def send(self, weights: Weights) -> None:
        """Send these weights to the engine."""
        self._write(weights)
        self.version += 1
        self.pool.update_weights(WeightUpdate(str(self._model), self.version))

    def score(self) -> list[Any]:
        return self.pool.score(comparison_sequences(_VOCABULARY))[0]

    def row(self, std: float, what: str, trainer: TrainerScores, engine: list[Any], notices: str) -> Row:
        ours, rounded, engine_scores = (
            np.concatenate(x).astype(float) for x in (trainer.logprobs, trainer.rounded, engine)
        )
        last = np.cumsum([len(sequence) for sequence in trainer.logprobs]) - 1
        r = measure(np.abs(engine_scores - ours), np.abs(rounded - ours), last)
        numbers = (r.ratio, r.share, r.num_last, r.largest, r.noise)
        return Row(self.kind, self.layers, self.dtype, std, what, *numbers, notices)

    def close(self) -> None:
        self.pool.close()
        parallel.stop()

    def _write(self, weights: Weights) -> None:
        cast = {name: tensor.to(getattr(torch, self.dtype)) for name, tensor in weights.items()}
        save_file(cast, self._model / "model.safetensors", metadata={"format": "pt"})


@cache
def _tensors(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def moved(weights: Weights, size: float, part: str = "") -> Weights:
    """Return the weights with each number moved up or down by `size`, in the tensors whose names contain `part`."""
    generator = torch.Generator().manual_seed(5)
    coins = {name: torch.randint(2, x.shape, generator=generator) * 2 - 1 for name, x in weights.items()}
    return {name: x + size * coins[name] if part in name else x for name, x in weights.items()}


def swapped(weights: Weights, layer: int) -> Weights:
    """Return the weights with experts 3 and 5 of the layer swapped."""
    swapped_weights = dict(weights)
    for name in ("gate", "up", "down"):
        first, second = (f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight" for expert in (3, 5))
        swapped_weights[first], swapped_weights[second] = weights[second], weights[first]
    return swapped_weights


def refusal(comparison: EngineComparison, trainer: TrainerScores, engine: list[Any]) -> str:
    """Return the name of the statistic by which the probe rejects the engine; "" if it accepts."""
    try:
        comparison.compare(trainer, [engine], 0)
    except RuntimeError as error:
        statistic_of = {"the median": "median", "the share": "share", "of the": "last tokens"}
        problem = str(error).split("explains: ")[1]
        return next(statistic for start, statistic in statistic_of.items() if problem.startswith(start))
    return ""


def mutated(pair: Pair) -> Iterator[Row]:
    last = pair.layers - 1
    for std in _STDS:
        weights = pair.weights(std, seed=17)
        trainer = pair.train(weights)
        pair.send(weights)
        honest = pair.score()

        def row(
            what: str, others: str = "", std: float = std, trainer: TrainerScores = trainer, honest: Any = honest
        ) -> Row:
            scores = pair.score()
            later = EngineComparison()
            later.compare(trainer, [honest], 0)
            first = refusal(EngineComparison(), trainer, scores)
            probe = first or (f"{later_refusal} (later)" if (later_refusal := refusal(later, trainer, scores)) else "")
            return pair.row(std, what, trainer, scores, ", ".join(filter(None, (probe, others))))

        yield row("honest")
        applies = {
            "rope theta x 5": True,
            "rope not stretched": "rope_factor" in pair.settings,
            "norm eps x 100": True,
            "no q/k norm": pair.settings["has_qk_norm"],
            "top-k + 1": pair.kind == "moe",
            "top-k - 1": pair.kind == "moe",
        }
        for what, is_there in applies.items():
            if is_there:
                assert pair.process.call("spoil", [(what,)])[0].value
                engine_settings = pair.pool.infos()[0].settings
                is_told = any(set(values) != {float(pair.settings[name])} for name, values in engine_settings.items())
                yield row(what, "settings" if is_told else "")
                pair.process.call("mend", [()])
        wrong = {"expert pair swapped": swapped(weights, last)} if pair.kind == "moe" else {}
        for layer in (0, last):
            for size in _UPDATES:
                wrong[f"layer {layer} older by {size:g}"] = moved(weights, size, f"layers.{layer}.")
        dtype = getattr(torch, pair.dtype)
        expected = {name: checksum(tensor) for name, tensor in fuse(weights, dtype)}
        for what, held in wrong.items():
            pair.send(held)
            is_seen = {name: checksum(tensor) for name, tensor in fuse(held, dtype)} != expected
            yield row(what, "checksums" if is_seen else "")
        for size in _UPDATES:
            pair.send(moved(weights, size))
            pair.score()
            pair.process.call("spoil", [("stale prefix cache",)])
            pair.send(weights)
            found = row(f"stale prefix cache, update {size:g}")
            is_seen = pair.process.call("take_refusals", [()])[0].value
            yield replace(found, notices=", ".join(filter(None, (found.notices, "engine" if is_seen else ""))))
            pair.process.call("mend", [()])
            pair.send(weights)


def honest(pair: Pair, num: int, first: int) -> Iterator[Row]:
    """Compare trainer and engine on `num` random models, each at version 0, and at version 1 after a small change."""
    for i in range(num):
        std = math.exp(np.random.default_rng(first + i).uniform(math.log(0.02), math.log(0.2)))
        weights = pair.weights(std, first + i)
        comparison = EngineComparison()
        for version, new in enumerate((weights, moved(weights, std * 0.1))):
            trainer = pair.train(new)
            pair.send(new)
            scores = pair.score()
            problem = refusal(comparison, trainer, scores)
            yield pair.row(std, f"honest, version {version}", trainer, scores, problem)


def _line(row: Row) -> str:
    rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in asdict(row).items()}
    return json.dumps(rounded)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--honest", type=int, default=0, help="number of random models, in total over all shapes; each is synced twice"
    )
    parser.add_argument("--kinds", nargs="+", choices=FAMILIES, default=["dense", "moe"])
    parser.add_argument("--layers", type=int, nargs="+", default=None)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", help="write every number to this file")
    args = parser.parse_args()
    layers = args.layers or ([2, 4, 6] if args.honest else [2])
    pairs = [(kind, n, dtype) for kind in args.kinds for n in layers for dtype in args.dtypes]
    rows: list[Row] = []
    for index, (kind, n, dtype) in enumerate(pairs):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            pair = Pair(kind, n, dtype, Path(folder))
            num = -(-args.honest // len(pairs))
            for row in honest(pair, num, 1000 * (index + 1)) if args.honest else mutated(pair):
                rows.append(row)
                if not args.honest or row.notices:
                    print(
                        f"{row.kind:7} {row.layers} {row.dtype:8} std {row.std:.2g}  {row.what:34} median/noise {row.ratio:10.3g}"
                        f"  share {row.share:.3f}  last {row.num_last:2}/16  {row.notices or '-'}",
                        flush=True,
                    )
            pair.close()
        if args.honest:
            syncs = rows[-2 * num :]
            print(
                f"{kind:7} {n} {dtype:8} {num} models, {len(syncs)} syncs: median/noise {min(r.ratio for r in syncs):.2f} to "
                f"{max(r.ratio for r in syncs):.2f}, share up to {max(r.share for r in syncs):.3f}, last tokens up to "
                f"{max(r.num_last for r in syncs)}/16, largest difference {max(r.largest for r in syncs):.2g} nats; "
                f"refused: {sum(bool(r.notices) for r in syncs)}",
                flush=True,
            )
    if args.honest:
        print(f"false alarms: {sum(bool(row.notices) for row in rows)} of {len(rows)} honest syncs of random models")
    if args.json:
        Path(args.json).write_text("[\n" + ",\n".join(map(_line, rows)) + "\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
