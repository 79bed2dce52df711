"""Runs whose engines say what a test wants, in place of those that rollout.engine names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import Engine
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas


def pools_of(engine: Callable[[], Engine]) -> Callable[..., EnginePool]:
    """make_pool (rollout/pool/build.py) with engines of this kind, in this process, as many as the policy has."""

    def make_pool(policy: str, model_dir: str, config: RolloutConfig, **others: Any) -> EnginePool:
        replicas = LocalReplicas([engine() for _ in range(config.engines)])
        return EnginePool(replicas, policy, deadline_s=config.deadline_s, sleeps=config.placement == "colocated")

    return make_pool
