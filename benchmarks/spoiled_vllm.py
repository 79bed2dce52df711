"""Engine of vLLM whose computation can be corrupted, for benchmarks/probe.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.protocol import EngineSpec
from marsrl.rollout.engines.vllm.arguments import vllm_environment
from marsrl.rollout.engines.vllm.engine import VllmEngine


class SpoiledVllm(VllmEngine):
    """Engine whose layers compute wrongly between spoil("norm eps x 100") and mend(); their weights do not change."""

    def __init__(self, model_dir: str, dtype: str) -> None:
        os.environ.update(vllm_environment(threads=1))
        super().__init__(EngineSpec("vllm", model_dir, dtype, 256, vllm=VllmOptions(max_num_seqs=16, kv_cache_mib=32)))
        self._model: Any = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        self._undo: list[Callable[[], None]] = []
        self._refusals: list[str] = []

    def spoil(self, what: str) -> int:
        """Corrupt the computation; return the number of changed modules."""
        ways: dict[str, Callable[[], None]] = {
            "rope theta x 5": self._theta,
            "rope not stretched": self._unstretched,
            "norm eps x 100": self._eps,
            "top-k + 1": partial(self._top_k, 1),
            "top-k - 1": partial(self._top_k, -1),
            "no q/k norm": self._no_qk_norm,
            "stale prefix cache": self._stale_cache,
        }
        ways[what]()
        return len(self._undo)

    def mend(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _with(self, attribute: str) -> list[Any]:
        return [module for module in self._model.modules() if hasattr(module, attribute)]

    def _theta(self) -> None:
        for rope in self._with("cos_sin_cache"):
            self._set(rope, "base", rope.base * 5)
            self._turn_again(rope)

    def _unstretched(self) -> None:
        for rope in self._with("low_freq_factor"):
            self._set(rope, "scaling_factor", 1.0)
            self._turn_again(rope)

    def _turn_again(self, rope: Any) -> None:
        self._set(rope, "cos_sin_cache", rope._compute_cos_sin_cache().to(rope.cos_sin_cache.dtype))

    def _eps(self) -> None:
        for norm in self._with("variance_epsilon"):
            self._set(norm, "variance_epsilon", norm.variance_epsilon * 100)

    def _top_k(self, more: int) -> None:
        for router in [layer.router for layer in self._with("router") if hasattr(layer.router, "top_k")]:
            self._set(router, "top_k", router.top_k + more)

    def _no_qk_norm(self) -> None:
        for name in ("q_norm", "k_norm"):
            for attention in self._with(name):
                self._set(getattr(attention, name), "forward", lambda x, *_: x)

    def _stale_cache(self) -> None:
        """Keep the prefix cache over an update. The engine's own error is suppressed, so that only the probe can detect it."""
        self._set(self, "_reset_prefix_cache", lambda: None)
        self._set(self, "_refuse_old_prefixes", self._keep_refusal)

    def _keep_refusal(self, num_cached_tokens: int, adapter: str) -> None:
        try:
            VllmEngine._refuse_old_prefixes(self, num_cached_tokens, adapter)
        except RuntimeError as refusal:
            self._refusals.append(str(refusal))

    def take_refusals(self) -> list[str]:
        """Return the engine's errors that were suppressed since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals
