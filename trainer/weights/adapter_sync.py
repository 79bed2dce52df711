"""From an adapter's learner to its engines: one PEFT directory per version, in a folder visible to the engines' hosts.

Adapters are small (53 MB for attention of Qwen3-30B-A3B at rank 32), so they always travel as files. Each publish
has its own folder: engines key cached prefixes by its path. The previous one stays until the new one is proven.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from safetensors import SafetensorError

from marsrl.rollout.adapter import AdapterConfig, held_by_shard, write_adapter
from marsrl.rollout.engines.protocol import AdapterUpdate, WeightReceipt
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.files import WrittenWeights, check_room, not_written
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.weights.comparison import CheckedEngines, ComparisonReport, TrainerScores
from marsrl.trainer.weights.sync import FileSync, timed_part


class AdapterSync(FileSync):
    """Publishes one adapter: its policy's shared engines keep their weights and the other adapters."""

    def __init__(
        self, engines: CheckedEngines | None, dtype: torch.dtype, *, base: str, adapter: AdapterConfig, **common: Any
    ) -> None:
        """base: path of the adapted model. common: of FileSync."""
        super().__init__(engines, dtype, **common)
        self._base, self._shape, self._adapter = base, read_shape(base), adapter
        self._numbers = itertools.count()
        self._is_bare = False  # B is 0: the trainer's scores are also those of the bare model

    def _prepare(self, learner: Learner, version: int, seconds_of: dict[str, float]) -> None:
        """Gather the tensors from all ranks; rank 0 writes them."""
        with timed_part(seconds_of, "export"):
            exported = {n: each.detach().to("cpu", self._dtype).contiguous() for n, each in learner.held().export()}
        if self._files is None or self._engines is None:
            assert not exported, "only rank 0 exports"
            return
        with timed_part(seconds_of, "checksum"):
            of_shards = [
                held_by_shard(self._shape, self._adapter, exported, self._dtype, shard)
                for shard in self._engines.shards_of_each
            ]
            expected = [{name: checksum(tensor) for name, tensor in each} for each in of_shards]
        self._is_bare = not any(tensor.any() for name, tensor in exported.items() if ".lora_B." in name)
        num_bytes = sum(tensor.nbytes for tensor in exported.values())
        folder = self._files.path / f"version_{version}.{next(self._numbers)}"
        with timed_part(seconds_of, "write"):
            try:
                check_room(self._files.path, num_bytes)
                folder.mkdir()
                write_adapter(folder, self._shape, self._adapter, exported, self._base)
            except (OSError, SafetensorError) as error:
                raise not_written(version, folder, error) from error
        self._written = WrittenWeights(folder, expected, num_bytes)

    def _load(self, engines: CheckedEngines, folder: str, version: int) -> list[WeightReceipt]:
        return engines.pool.update_adapter(AdapterUpdate(engines.adapter, folder, version))

    def _compare(self, engines: CheckedEngines, scores: TrainerScores, version: int) -> ComparisonReport:
        if self._is_bare:
            engines.compare(scores, version, bare=True)
        return super()._compare(engines, scores, version)
