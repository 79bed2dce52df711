"""From the trainer's weights to every engine's, and the proof that they arrived.

    publish: write safetensors shards -> every engine loads them -> checksums of every tensor agree -> probe log-probs
    agree

Tensors stream: while a layer is exported, checked and written, the one before is gone from the trainer's memory.

Version v+1 exists for the rest of the program only after publish() has returned. Silent corruption on the way is the
failure that costs people weeks, so nothing here is sampled or optional but the probe's interval.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from marsrl.rollout.engines.fused_layout import by_layer, fused_checksums, untied_checksums, with_tied_head
from marsrl.rollout.engines.protocol import EngineInfo, WeightReceipt, WeightUpdate
from marsrl.rollout.types import FloatArray, IntArray
from marsrl.trainer.weight_files import SHARD_BYTES, check_room, write_shards

_PROBE_SEQUENCES = 3
_PROBE_TOKENS = 97  # three blocks of 32 of vLLM's prefix cache on a CPU lie before the last token
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_T = TypeVar("_T")


class SyncTarget(Protocol):
    """The part of rollout.engines.pool.EnginePool that a sync needs."""

    def infos(self) -> list[EngineInfo]: ...

    def update_weights(self, update: WeightUpdate) -> list[WeightReceipt]: ...

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> list[list[FloatArray]]: ...


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
    seconds_of: `seconds` by part: export (the trainer's tensors gathered), checksum (of what was sent), write, load
        (every engine), engine_checksum (the slowest engine's), probe.
    """

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    max_probe_difference: float | None
    num_probe_tokens: int
    seconds_of: Mapping[str, float]


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
        directory: str | Path | None = None,
        num_elements: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Make a private directory for the files, in /dev/shm where there is one (directory None).

        Args:
            num_elements: of the whole model, where it is known beforehand: room for it is checked before the first byte.
            shard_bytes: of one file, about.

        The engines score the probe once now, so that its prefix is in their caches when the first update comes: a
        cache that is not dropped then would be seen.
        """
        self._pool = pool
        self._tolerance = tolerance
        self._verify_every = verify_every
        self.probe = probe_sequences(vocab_size)
        self._dtype = _DTYPES[pool.infos()[0].dtype]
        parent = directory or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self._directory = Path(tempfile.mkdtemp(prefix="marsrl-weights-", dir=parent))
        self._num_bytes = (num_elements or 0) * self._dtype.itemsize
        self._shard_bytes = shard_bytes
        try:
            pool.score(self.probe)
        except BaseException:
            self.close()
            raise

    def publish(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        version: int,
        probe: Callable[[Sequence[IntArray]], Sequence[ProbeScore]] | None,
        engines_at_rest: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (it has no state)
    ) -> SyncReport:
        """Send HF-named tensors to every engine as `version` and verify what arrived.

        Args:
            probe: the trainer's scores of the given sequences at temperature 1; None skips the comparison.
            engines_at_rest: in its body, which begins when the file is there, the engines decode nothing; it ends when
                the new weights are proven.

        Raises:
            RuntimeError: the files cannot be written, an engine holds other numbers than were sent (the tensors are
                named), trainer and engine disagree on the probe by more than the tolerance, or nothing of it is comparable.
            ValueError: the tensors of a layer do not come one after the other, or some are missing.
        """
        clock = _Clock()
        path, expected = self._write(tensors, version, clock)
        with engines_at_rest:
            with clock.of("load"):
                receipts = self._pool.update_weights(WeightUpdate(str(path), version))
            clock.move("load", "engine_checksum", max(receipt.checksum_seconds for receipt in receipts))
            for engine, receipt in enumerate(receipts):
                _compare(expected, receipt, version, engine)
            difference, num_compared = None, 0
            if probe is not None and version % self._verify_every == 0:
                with clock.of("probe"):
                    difference, num_compared = self._compare_probe(probe(self.probe), version)
        self._remove_all_but(path)
        return SyncReport(
            version, clock.total, self._num_bytes, len(expected), difference, num_compared, clock.seconds_of
        )

    def close(self) -> None:
        """Remove the files; may be called twice."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write(self, tensors: Iterable[tuple[str, Tensor]], version: int, clock: _Clock) -> tuple[Path, dict[str, int]]:
        """(folder of this version, checksums of what was sent). The last version stays until this one is proven."""
        path = self._directory / f"version_{version}"
        expected: dict[str, int] = {}

        def checked() -> Iterator[tuple[str, Tensor]]:
            """The same tensors, a layer at a time, as the engines get them; their checksums are noted on the way."""
            for layer in clock.timed("export", by_layer(self._as_sent(tensors))):
                with clock.of("checksum"):
                    expected.update(untied_checksums(layer, self._dtype))
                yield from layer.items()

        try:
            with clock.of("write"):
                check_room(self._directory, self._num_bytes)
                self._num_bytes = write_shards(path, checked(), self._shard_bytes)
        except OSError as error:
            raise RuntimeError(
                f"weight sync: version {version} could not be written to {path}: {error.strerror or error}; make room "
                "there (the version before stays until this one is proven, so it takes the model twice): a larger shared "
                "memory (docker run --shm-size), or another folder (sync.directory)"
            ) from error
        return path, with_tied_head(expected)

    def _as_sent(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.detach().to("cpu", self._dtype).contiguous()

    def _remove_all_but(self, path: Path) -> None:
        for other in self._directory.iterdir():
            if other != path:
                shutil.rmtree(other)

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


class _Clock:
    """Seconds by part. A part that begins inside of another interrupts it."""

    def __init__(self) -> None:
        self.seconds_of: dict[str, float] = {}
        self._start = time.perf_counter()
        self._inside: list[float] = [0.0]  # of each open part, the seconds that went to parts inside of it

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds_of[part] = self.seconds_of.get(part, 0.0) + elapsed - self._inside.pop()
            self._inside[-1] += elapsed

    def move(self, part: str, to: str, seconds: float) -> None:
        """Book a share of one part under another."""
        seconds = min(seconds, self.seconds_of[part])
        self.seconds_of[part] -= seconds
        self.seconds_of[to] = self.seconds_of.get(to, 0.0) + seconds

    def timed(self, part: str, items: Iterator[_T]) -> Iterator[_T]:
        """The items; the time until each of them is there counts for `part`."""
        while True:
            with self.of(part):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


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
