"""How weights get from the trainer to the engines of a policy, seen from rank 0: through files, or over wires.

prepare     what can be done while the engines still decode
deliver     the engines take the weights; what each must hold, and what it says it holds
settle      the version is proven: what was kept for its sake may go
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from marsrl.rollout.engines.protocol import EngineInfo, WeightReceipt, WeightUpdate
from marsrl.rollout.types import FloatArray, IntArray
from marsrl.rollout.weights.fused_layout import by_layer, untied_checksums, with_tied_head
from marsrl.trainer.weights.files import SHARD_BYTES, PrivateFolder, check_room, write_shards
from marsrl.trainer.weights.wire import HeldWeights, WireSender

_T = TypeVar("_T")
_S = TypeVar("_S")
_W = TypeVar("_W", contravariant=True)


class SyncTarget(Protocol):
    """The part of rollout.engines.pool.EnginePool that a sync needs."""

    def infos(self) -> list[EngineInfo]: ...

    def update_weights(self, update: WeightUpdate | Sequence[WeightUpdate]) -> list[WeightReceipt]: ...

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> list[list[FloatArray]]: ...


@dataclass(frozen=True, slots=True)
class Delivered:
    """expected: {fused tensor: checksum} of each engine; receipts: what each reports; num_bytes: of the model."""

    expected: Sequence[Mapping[str, int]]
    receipts: Sequence[WeightReceipt]
    num_bytes: int


class Carrier(Protocol[_W]):
    """One way to the engines, for weights in the form that it wants."""

    def prepare(self, weights: _W, version: int, clock: Clock) -> None: ...

    def deliver(self, pool: SyncTarget, version: int, clock: Clock) -> Delivered: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class FileCarrier:
    """Safetensors shards in a folder that the engines' hosts see: /dev/shm, or a file system they share.

    Tensors stream: while a layer is exported, checked and written, the one before is gone from the trainer's memory.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        directory: str | Path | None = None,
        num_elements: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Make a private directory, in /dev/shm where there is one (directory None).

        Args:
            num_elements: of the whole model, where it is known beforehand: room for it is checked before the first byte.
            shard_bytes: of one file, about.
        """
        self._dtype = dtype
        self._folder = PrivateFolder(directory)
        self._directory = self._folder.path
        self._num_bytes = (num_elements or 0) * dtype.itemsize
        self._shard_bytes = shard_bytes
        self._path = self._directory
        self._expected: dict[str, int] = {}

    def prepare(self, weights: Iterable[tuple[str, Tensor]], version: int, clock: Clock) -> None:
        """Write HF-named tensors. The last version stays until this one is proven.

        Raises:
            RuntimeError: they cannot be written.
            ValueError: the tensors of a layer do not come one after the other.
        """
        self._path = self._directory / f"version_{version}"
        expected: dict[str, int] = {}

        def checked() -> Iterator[tuple[str, Tensor]]:
            """The same tensors, a layer at a time, as the engines get them; their checksums are noted on the way."""
            for layer in clock.timed("export", by_layer(self._as_sent(weights))):
                with clock.of("checksum"):
                    expected.update(untied_checksums(layer, self._dtype))
                yield from layer.items()

        try:
            with clock.of("write"):
                check_room(self._directory, self._num_bytes)
                self._num_bytes = write_shards(self._path, checked(), self._shard_bytes)
        except OSError as error:
            raise RuntimeError(
                f"weight sync: version {version} could not be written to {self._path}: {error.strerror or error}; make room "
                "there (the version before stays until this one is proven, so it takes the model twice): a larger shared "
                "memory (docker run --shm-size), or another folder (sync.directory)"
            ) from error
        self._expected = with_tied_head(expected)

    def deliver(self, pool: SyncTarget, version: int, clock: Clock) -> Delivered:
        with clock.of("load"):
            receipts = pool.update_weights(WeightUpdate(str(self._path), version))
        return Delivered([self._expected] * len(receipts), receipts, self._num_bytes)

    def settle(self) -> None:
        for other in self._directory.iterdir():
            if other != self._path:
                shutil.rmtree(other)

    def close(self) -> None:
        """Remove the files; may be called twice."""
        self._folder.close()

    def _as_sent(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.detach().to("cpu", self._dtype).contiguous()


class WireCarrier:
    """Every rank's shards straight to the engines' tensors (wire.py). All other ranks `follow`."""

    def __init__(self, sender: WireSender, engines: Sequence[EngineInfo]) -> None:
        self._sender, self._dtype, self._num_engines = sender, engines[0].dtype, len(engines)
        self._weights: HeldWeights

    def prepare(self, weights: HeldWeights, version: int, clock: Clock) -> None:
        self._weights = weights

    def deliver(self, pool: SyncTarget, version: int, clock: Clock) -> Delivered:
        """The engines receive while the ranks send.

        Raises:
            RuntimeError: one side failed; the engines hold a mix of versions then, and serve nothing.
        """
        with clock.of("load"):
            self._sender.open(self._weights, self._dtype, [(0, 1)] * self._num_engines)
            updates = [WeightUpdate("", version, feed) for feed in self._sender.feeds()]
            receipts, expected = _side_by_side(lambda: pool.update_weights(updates), self._sender.send)
        return Delivered(expected, receipts, self._sender.num_bytes)

    def settle(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._sender.close()


def follow(weights: Any, sender: WireSender | None) -> None:
    """What ranks other than 0 do while rank 0 publishes: send theirs over wires, or hand them over for a file."""
    if sender is not None:
        sender.open(weights)
        sender.send()
        return
    for _ in weights:
        raise AssertionError("only rank 0 exports")


def _side_by_side(first: Callable[[], _T], second: Callable[[], _S]) -> tuple[_T, _S]:
    """Both results; the first error of either is raised at once, whatever the other still waits for."""
    found: dict[int, object] = {}
    errors: list[BaseException] = []
    changed = threading.Condition()

    def work(index: int, function: Callable[[], object]) -> None:
        try:
            value = function()
        except BaseException as error:  # raised by the caller's thread
            with changed:
                errors.append(error)
                changed.notify()
            return
        with changed:
            found[index] = value
            changed.notify()

    for index, function in enumerate((first, second)):
        threading.Thread(target=work, args=(index, function), name="marsrl-sync", daemon=True).start()
    with changed:
        changed.wait_for(lambda: errors or len(found) == 2)
    if errors:
        raise errors[0]
    return found[0], found[1]  # type: ignore[return-value]


class Clock:
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
