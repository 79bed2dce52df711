"""From the trainer's weights to every engine's, and the proof that they arrived.

    publish: a carrier brings them (carriers.py) -> checksums of every tensor agree -> probe log-probs agree

Version v+1 exists for the rest of the program only after publish() has returned. Silent corruption on the way is the
failure that costs people weeks, so nothing here is sampled or optional but the probe's interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsrl.rollout.engines.protocol import EngineInfo, WeightReceipt
from marsrl.rollout.types import IntArray
from marsrl.rollout.weights.fused_layout import fused_checksums
from marsrl.trainer.weights.carriers import Carrier, Clock, FileCarrier, SyncTarget
from marsrl.trainer.weights.probe import ProbeComparison, ProbeReport, ProbeScore, probe_sequences

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A publish that was verified.

    probe: None where it was not due (sync.verify_every).
    seconds_of: `seconds` by part. Files: export (the trainer's tensors gathered), checksum (of what was sent), write, load
        (every engine), engine_checksum (the slowest engine's), probe. Wires: load (sending, receiving and the checksums of
        what was sent, side by side), engine_checksum, probe.
    """

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    probe: ProbeReport | None
    seconds_of: Mapping[str, float]


def engine_dtype(pool: SyncTarget) -> torch.dtype:
    """What the engines compute in."""
    return _DTYPES[pool.infos()[0].dtype]


def expected_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """{name in the engines' fused layout: checksum} of HF-named tensors, in the engines' dtype."""
    return fused_checksums(tensors, dtype)


class WeightSync:
    """Publishes one policy's weights to its engines and verifies every publish.

    sync = WeightSync(pool, vocab_size=64)
    report = sync.publish(hf_tensors(), version=1, probe=scores_of_the_trainer)

    probe: the sequences that trainer and engines are compared on.
    """

    def __init__(
        self,
        pool: SyncTarget,
        *,
        vocab_size: int,
        settings: Mapping[str, float] | None = None,
        verify_every: int = 1,
        carrier: Carrier[Any] | None = None,
    ) -> None:
        """settings: ModelShape.settings() of the trainer's model, compared with what the engines compute with; None: not.
        carrier: how the weights travel; default: files in /dev/shm.

        The engines score the probe once now, so that its prefix is in their caches when the first update comes: a
        cache that is not dropped then would be seen.

        Raises:
            ValueError: an engine computes with other settings (a router's top-k, a norm's eps, ...).
        """
        for engine, info in enumerate(pool.infos() if settings else ()):
            _compare_settings(settings or {}, info, engine)
        self._pool = pool
        self._verify_every = verify_every
        self._comparison = ProbeComparison()
        self.probe = probe_sequences(vocab_size)
        self._carrier = carrier or FileCarrier(engine_dtype(pool))
        try:
            pool.score(self.probe)
        except BaseException:
            self.close()
            raise

    def publish(
        self,
        weights: Any,
        version: int,
        probe: Callable[[Sequence[IntArray]], ProbeScore] | None,
        engines_at_rest: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (it has no state)
    ) -> SyncReport:
        """Send the weights to every engine as `version` and verify what arrived.

        Args:
            weights: in the form of the carrier: HF-named tensors for files, Learner.held() for wires.
            probe: the trainer's scores of the given sequences at temperature 1; None skips the comparison.
            engines_at_rest: in its body, which begins when the engines can take the weights, they decode nothing; it ends
                when the new weights are proven.

        Raises:
            RuntimeError: the weights did not arrive, an engine holds other numbers than were sent (the tensors are
                named), or trainer and engine disagree on the probe (probe.py).
            ValueError: the tensors of a layer do not come one after the other, or some are missing.
        """
        clock = Clock()
        self._carrier.prepare(weights, version, clock)
        with engines_at_rest:
            delivered = self._carrier.deliver(self._pool, version, clock)
            clock.move("load", "engine_checksum", max(receipt.checksum_seconds for receipt in delivered.receipts))
            for engine, (expected, receipt) in enumerate(zip(delivered.expected, delivered.receipts, strict=True)):
                _compare(expected, receipt, version, engine)
            found: ProbeReport | None = None
            if probe is not None and version % self._verify_every == 0:
                with clock.of("probe"):
                    found = self._compare_probe(probe(self.probe), version)
        self._carrier.settle()
        num_tensors = len(delivered.expected[0])
        return SyncReport(version, clock.total, delivered.num_bytes, num_tensors, found, clock.seconds_of)

    def close(self) -> None:
        """Remove files, leave wires; may be called twice."""
        self._carrier.close()

    def _compare_probe(self, trainer: ProbeScore, version: int) -> ProbeReport:
        return self._comparison.compare(trainer, self._pool.score(self.probe), version)


def _compare_settings(expected: Mapping[str, float], info: EngineInfo, engine: int) -> None:
    """What the engine cannot tell is left to the probe."""
    for name, values in info.settings.items():
        wrong = [value for value in values if not math.isclose(value, expected.get(name, math.nan), rel_tol=1e-6)]
        if wrong:
            raise ValueError(
                f"weight sync: engine {engine} ({info.engine_class}) computes with {name} {wrong[0]:g}, the trainer with "
                f"{expected.get(name, math.nan):g}: the two read config.json differently, or an option of the engine overrides it"
            )


def _compare(expected: Mapping[str, int], receipt: WeightReceipt, version: int, engine: int) -> None:
    if receipt.version != version:
        raise RuntimeError(
            f"weight sync: engine {engine} reports version {receipt.version} after version {version} was sent"
        )
    held = receipt.checksums
    wrong = [name for name in expected if held.get(name) != expected[name]] + [n for n in held if n not in expected]
    if wrong:
        first = "; ".join(f"{name} ({_what(name, expected, held)})" for name in wrong[:3])
        raise RuntimeError(
            f"weight sync: version {version}: engine {engine} does not hold what was sent: {len(wrong)} of "
            f"{len(expected)} tensors "
            f"differ, first {first}"
        )


def _what(name: str, expected: Mapping[str, int], held: Mapping[str, int]) -> str:
    if name not in held:
        return "not in the engine"
    return "not sent" if name not in expected else f"checksum {held[name]:#x}, expected {expected[name]:#x}"
