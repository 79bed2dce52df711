"""From the trainer's weights to every engine's, and the proof that they arrived.

    publish: a carrier brings them (weight_carriers.py) -> checksums of every tensor agree -> probe log-probs agree

Version v+1 exists for the rest of the program only after publish() has returned. Silent corruption on the way is the
failure that costs people weeks, so nothing here is sampled or optional but the probe's interval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marsrl.rollout.engines.fused_layout import fused_checksums
from marsrl.rollout.engines.protocol import WeightReceipt
from marsrl.rollout.types import FloatArray, IntArray
from marsrl.trainer.weight_carriers import Carrier, Clock, FileCarrier, SyncTarget

_PROBE_SEQUENCES = 3
_PROBE_TOKENS = 97  # three blocks of 32 of vLLM's prefix cache on a CPU lie before the last token
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ProbeScore:
    """What the trainer makes of one probe sequence of N tokens.

    logprobs: [N-1] float32 of its tokens 1..N-1, nats.
    num_certain: so many of them, from the front, are comparable: before the first token at which rounding could make
        another program choose other experts. N-1 in a dense model.
    """

    logprobs: FloatArray
    num_certain: int


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A publish that was verified.

    max_probe_difference: nats, over the tokens compared; None where the probe was not due (sync.verify_every).
    num_probe_tokens: how many log-probs were compared, per engine.
    seconds_of: `seconds` by part. Files: export (the trainer's tensors gathered), checksum (of what was sent), write, load
        (every engine), engine_checksum (the slowest engine's), probe. Wires: load (sending, receiving and the checksums of
        what was sent, side by side), engine_checksum, probe.
    """

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    max_probe_difference: float | None
    num_probe_tokens: int
    seconds_of: Mapping[str, float]


def engine_dtype(pool: SyncTarget) -> torch.dtype:
    """What the engines compute in."""
    return _DTYPES[pool.infos()[0].dtype]


def expected_checksums(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """{name in the engines' fused layout: checksum} of HF-named tensors, in the engines' dtype."""
    return fused_checksums(tensors, dtype)


def probe_sequences(vocab_size: int) -> list[IntArray]:
    """Fixed token sequences, [97] int32 each: long enough that a stale prefix cache shows."""
    generator = np.random.default_rng(20240229)
    return [generator.integers(0, vocab_size, _PROBE_TOKENS).astype(np.int32) for _ in range(_PROBE_SEQUENCES)]


def probe_score(logprobs: Tensor, margins: Tensor, num_tokens: int, tolerance: float) -> ProbeScore:
    """The probe score of a sequence of num_tokens from what Learner.score_with_margins says of its packed batch.

    Programs whose log-probs agree to `tolerance` have router logits that agree to a tenth of it, or better.
    """
    count = num_tokens - 1  # the last position predicts nothing; padding stands behind it
    undecided = (margins[:count] < tolerance / 10).nonzero()
    return ProbeScore(logprobs[:count].numpy(), int(undecided[0]) if len(undecided) else count)


class WeightSync:
    """Publishes one policy's weights to its engines and verifies every publish.

    sync = WeightSync(pool, vocab_size=64, tolerance=1e-4)
    report = sync.publish(hf_tensors(), version=1, probe=scores_of_the_trainer)

    probe: the sequences that trainer and engines are compared on.
    """

    def __init__(
        self,
        pool: SyncTarget,
        *,
        vocab_size: int,
        tolerance: float = 1e-4,
        verify_every: int = 1,
        carrier: Carrier[Any] | None = None,
    ) -> None:
        """carrier: how the weights travel; default: files in /dev/shm.

        The engines score the probe once now, so that its prefix is in their caches when the first update comes: a
        cache that is not dropped then would be seen.
        """
        self._pool = pool
        self._tolerance = tolerance
        self._verify_every = verify_every
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
        probe: Callable[[Sequence[IntArray]], Sequence[ProbeScore]] | None,
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
                named), trainer and engine disagree on the probe by more than the tolerance, or nothing of it is comparable.
            ValueError: the tensors of a layer do not come one after the other, or some are missing.
        """
        clock = Clock()
        self._carrier.prepare(weights, version, clock)
        with engines_at_rest:
            delivered = self._carrier.deliver(self._pool, version, clock)
            clock.move("load", "engine_checksum", max(receipt.checksum_seconds for receipt in delivered.receipts))
            for engine, (expected, receipt) in enumerate(zip(delivered.expected, delivered.receipts, strict=True)):
                _compare(expected, receipt, version, engine)
            difference, num_compared = None, 0
            if probe is not None and version % self._verify_every == 0:
                with clock.of("probe"):
                    difference, num_compared = self._compare_probe(probe(self.probe), version)
        self._carrier.settle()
        num_tensors = len(delivered.expected[0])
        return SyncReport(
            version, clock.total, delivered.num_bytes, num_tensors, difference, num_compared, clock.seconds_of
        )

    def close(self) -> None:
        """Remove files, leave wires; may be called twice."""
        self._carrier.close()

    def _compare_probe(self, trainer: Sequence[ProbeScore], version: int) -> tuple[float, int]:
        """(largest difference over all engines, number of log-probs compared in each)."""
        num_compared = sum(score.num_certain for score in trainer)
        if num_compared == 0:
            raise RuntimeError(
                f"weight sync: version {version}: nothing of the probe can be compared: in all {len(trainer)} sequences "
                f"two experts are within {self._tolerance / 10:g} of each other at the first token; lower "
                "sync.tolerance, or compare less often (sync.verify_every): the checksums of every tensor agreed"
            )
        worst = 0.0
        for engine, scores in enumerate(self._pool.score(self.probe)):
            for sequence, (ours, theirs) in enumerate(zip(trainer, scores, strict=True)):
                if ours.num_certain == 0:
                    continue
                value, at = _largest(ours.logprobs[: ours.num_certain], theirs[: ours.num_certain])
                if value > self._tolerance:
                    raise RuntimeError(
                        f"weight sync: version {version}: trainer and engine disagree on the probe by up to "
                        f"{value:.3g} nats at engine {engine}, sequence {sequence}, token {at + 1} of "
                        f"{len(ours.logprobs)}: trainer {ours.logprobs[at]:.6f}, engine {theirs[at]:.6f}; expected "
                        f"at most {self._tolerance:g} (sync.tolerance; bfloat16 needs more). Every tensor's checksum "
                        "agreed, so look at stale prefix caches, at the two models' settings (rope, norm eps, "
                        "routing), or at the dtype"
                    )
                worst = max(worst, value)
        return worst, num_compared


def _largest(ours: FloatArray, theirs: FloatArray) -> tuple[float, int]:
    """(largest absolute difference, its place); what is not a number counts as infinite."""
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    difference = np.where(np.isfinite(difference), difference, np.inf)
    at = int(difference.argmax())
    return float(difference[at]), at


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
