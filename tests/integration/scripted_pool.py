"""Runs whose engines say what a test wants, in place of those that rollout.engine names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import Engine, WeightReceipt, WeightUpdate
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas
from marsrl.rollout.types import FloatArray, IntArray


def pools_of(engine: Callable[[], Engine]) -> Callable[..., EnginePool]:
    """make_pool (rollout/pool/build.py) with engines of this kind, in this process, as many as the policy has."""

    def make_pool(policy: str, model_dir: str, config: RolloutConfig, **others: Any) -> EnginePool:
        replicas = LocalReplicas([engine() for _ in range(config.engines)])
        return EnginePool(replicas, policy, deadline_s=config.deadline_s, sleeps=config.placement == "colocated")

    return make_pool


class ScriptedWithWeights(ScriptedEngine):
    """Says what the script says, and scores a weight sync's probe with the weights that it was sent."""

    def __init__(self, model: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._local = LocalEngine(model, dtype="float32", max_model_len=256)

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        return self._local.score(sequences)

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        super().update_weights(update)
        return self._local.update_weights(update)
