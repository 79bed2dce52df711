"""Rank 0's end of a weight channel: the engines of one policy, and what they are asked before a version is announced.

When it is made, every engine must compute with the trainer's settings (rope, norms, routing). `check`: it holds what was
sent, tensor by tensor. `compare`: its log-probs are the trainer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from marsrl.rollout.engines.protocol import EngineInfo, WeightReceipt
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.weights.engine_shard import EngineShard
from marsrl.trainer.weights.comparison import ComparisonReport, EngineComparison, TrainerScores, comparison_sequences


@dataclass(frozen=True, slots=True)
class Delivered:
    """expected: of each shard of an engine {fused tensor: checksum}; receipts: what each engine reports, by its number;
    num_bytes: of the model; lost: engines that were lost on the way and are still to be replaced, and why."""

    expected: Sequence[Mapping[str, int]]
    receipts: Mapping[int, WeightReceipt]
    num_bytes: int
    lost: Mapping[int, str] = field(default_factory=dict)


class CheckedEngines:
    """A pool whose engines must prove what they hold and what they compute with it.

    shards: of each engine that serves, what each of its workers holds of the model: the same of all.
    """

    def __init__(self, pool: EnginePool, *, vocab_size: int, settings: Mapping[str, float] | None = None) -> None:
        """settings: ModelShape.settings() of the trainer's model, compared with what the engines compute with; None: not.

        The engines score the comparison's sequences once now, so that these prefixes are in their caches when the first
        update comes: a cache that is not dropped then would be seen.

        Raises:
            ValueError: an engine computes with other settings (a router's top-k, a norm's eps, ...).
        """
        infos = pool.infos()
        for engine, info in enumerate(infos if settings else ()):
            _compare_settings(settings or {}, info, engine)
        self.pool, self.shards_of_each = pool, infos[0].shards
        self._comparison = EngineComparison()
        self._sequences = comparison_sequences(vocab_size)
        pool.score(self._sequences)

    @property
    def shards(self) -> list[tuple[EngineShard, ...]]:
        return [self.shards_of_each] * self.pool.num_engines

    def check(self, delivered: Delivered, version: int) -> None:
        """Raise RuntimeError where an engine holds other numbers than were sent; with the tensors' names."""
        for engine, receipt in delivered.receipts.items():
            _compare(delivered.expected, receipt, version, engine)

    def compare(self, scores: TrainerScores, version: int) -> ComparisonReport:
        """How far the engines' log-probs are from the trainer's; RuntimeError where that is too far (comparison.py)."""
        return self._comparison.compare(scores, self.pool.score(self._sequences), version)


def _compare_settings(expected: Mapping[str, float], info: EngineInfo, engine: int) -> None:
    """What the engine cannot tell is left to the comparison of log-probs."""
    for name, values in info.settings.items():
        wrong = [value for value in values if not math.isclose(value, expected.get(name, math.nan), rel_tol=1e-6)]
        if wrong:
            raise ValueError(
                f"weight sync: engine {engine} ({info.engine_class}) computes with {name} {wrong[0]:g}, the trainer with "
                f"{expected.get(name, math.nan):g}: the two read config.json differently, or an option of the engine overrides it"
            )


def _compare(expected: Sequence[Mapping[str, int]], receipt: WeightReceipt, version: int, engine: int) -> None:
    if receipt.version != version:
        raise RuntimeError(
            f"weight sync: engine {engine} reports version {receipt.version} after version {version} was sent"
        )
    wrong: list[str] = []
    for shard, (sent, held) in enumerate(zip(expected, receipt.checksums, strict=True)):
        of = f"shard {shard} of {len(expected)}: " if len(expected) > 1 else ""
        names = [name for name in sent if held.get(name) != sent[name]] + [name for name in held if name not in sent]
        wrong += [f"{of}{name} ({_what(name, sent, held)})" for name in names]
    if wrong:
        raise RuntimeError(
            f"weight sync: version {version}: engine {engine} does not hold what was sent: {len(wrong)} of "
            f"{sum(map(len, expected))} tensors differ, first {'; '.join(wrong[:3])}"
        )


def _what(name: str, expected: Mapping[str, int], held: Mapping[str, int]) -> str:
    if name not in held:
        return "not in the engine"
    return "not sent" if name not in expected else f"checksum {held[name]:#x}, expected {expected[name]:#x}"
