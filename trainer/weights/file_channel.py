"""sync.backend=shm: rank 0 gathers the weights and writes safetensors files, which the engines read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from marsrl.rollout.engines.protocol import WeightUpdate
from marsrl.rollout.weights.engine_shard import EngineShard
from marsrl.rollout.weights.fused_layout import by_layer, untied_checksums, with_tied_head
from marsrl.rollout.weights.shard_layout import ShardTensors
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.weights.channel import Clock, WeightChannel
from marsrl.trainer.weights.checked_engines import CheckedEngines, Delivered
from marsrl.trainer.weights.files import SHARD_BYTES, PrivateFolder, check_room, write_shards


class FileChannel(WeightChannel):
    """Safetensors shards in a folder that the engines' hosts see: /dev/shm, or a file system they share.

    Tensors stream: while a layer is exported, checked and written, the one before is gone from the trainer's memory.
    """

    def __init__(
        self,
        engines: CheckedEngines | None,
        dtype: torch.dtype,
        *,
        verify_every: int = 1,
        cache_dtype: torch.dtype | None = None,
        directory: str | Path | None = None,
        num_elements: int = 0,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """On rank 0, make a private directory, in /dev/shm where there is one (directory None).

        Args:
            num_elements: of the whole model, where it is known beforehand: room for it is checked before the first byte.
            shard_bytes: of one file, about.
        """
        super().__init__(engines, dtype, verify_every=verify_every, cache_dtype=cache_dtype)
        self._folder = PrivateFolder(directory) if engines is not None else None
        self._num_bytes = num_elements * dtype.itemsize
        self._shard_bytes = shard_bytes
        self._path = Path()
        self._expected: dict[EngineShard, dict[str, int]] = {}

    def _prepare(self, learner: Learner, version: int, clock: Clock) -> None:
        """Rank 0 writes the tensors, which all ranks gather. The last version stays until this one is proven.

        Raises:
            RuntimeError: they cannot be written.
            ValueError: the tensors of a layer do not come one after the other.
        """
        with clock.of("export"):
            tensors = learner.export()
        if self._folder is None or self._engines is None:
            for _ in tensors:
                raise AssertionError("only rank 0 exports")
            return
        self._path = self._folder.path / f"version_{version}"
        expected: dict[EngineShard, dict[str, int]] = {each: {} for of in self._engines.shards for each in of}

        def checked() -> Iterator[tuple[str, Tensor]]:
            """The same tensors, a layer at a time, as the engines get them; their checksums are noted on the way."""
            as_sent = ((name, each.detach().to("cpu", self._dtype).contiguous()) for name, each in tensors)
            for layer in clock.timed("export", by_layer(as_sent)):
                with clock.of("checksum"):
                    for shard, found in expected.items():
                        found.update(untied_checksums(ShardTensors(layer, shard), self._dtype))
                yield from layer.items()

        try:
            with clock.of("write"):
                check_room(self._folder.path, self._num_bytes)
                self._num_bytes = write_shards(self._path, checked(), self._shard_bytes)
        except OSError as error:
            raise RuntimeError(
                f"weight sync: version {version} could not be written to {self._path}: {error.strerror or error}; make room "
                "there (the version before stays until this one is proven, so it takes the model twice): a larger shared "
                "memory (docker run --shm-size), or another folder (sync.directory)"
            ) from error
        self._expected = {shard: with_tied_head(found) for shard, found in expected.items()}

    def _deliver(self, learner: Learner, version: int, clock: Clock) -> Delivered | None:
        if self._engines is None:
            return None
        with clock.of("load"):
            receipts = self._engines.pool.update_weights(WeightUpdate(str(self._path), version))
        expected = [self._expected[shard] for shard in self._engines.shards_of_each]
        return Delivered(expected, dict(zip(self._engines.pool.engines, receipts, strict=True)), self._num_bytes)

    def _settle(self) -> None:
        for other in self._path.parent.iterdir():
            if other != self._path:
                shutil.rmtree(other)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
