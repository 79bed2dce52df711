"""An engine in a process of its own for direct_worker, which forks it from a server that has imported torch. No megatron here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import EngineInfo, WeightReceipt, WeightUpdate
from marsrl.rollout.pool.replicas import Timed
from marsrl.rollout.state import decode
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.direct import ReceivePlan, WeightReceiver
from marsrl.rollout.weights.layout import EngineShard, shard_layout


def spoil(weights: dict[str, torch.Tensor], names: list[str]) -> None:
    """Change one bit of each of these fused tensors, once."""
    while names:
        weights[names.pop()].view(-1)[-1:].view(torch.uint8)[0] ^= 1


class Halves:
    """Two tensor-parallel shards without an engine around them: zeros of the shapes that their plans name."""

    def __init__(self, num_kv_heads: int, spreads_experts: bool) -> None:
        shards = [EngineShard.of(part, 2, num_kv_heads, spreads_experts=spreads_experts) for part in range(2)]
        self._info = EngineInfo("halves", "Halves", "marsrl", "0", "cpu", "float32", shards=tuple(shards))
        self._receivers = [WeightReceiver(torch.device("cpu")) for _ in shards]
        self.weights: list[dict[str, torch.Tensor]] = []
        self._spoiled: list[str] = []

    def info(self) -> EngineInfo:
        return self._info

    def score(self, sequences: list[np.ndarray], adapter: str = "") -> list[np.ndarray]:
        return [np.zeros(len(sequence) - 1, np.float32) for sequence in sequences]

    def spoil(self, name: str) -> None:
        self._spoiled.append(name)

    def save(self, file: str) -> None:
        torch.save(self.weights, file)

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Both receive at once, as two processes would."""
        plans = [decode(ReceivePlan, each) for each in update.receive_plans]
        layouts = [shard_layout(plan.hf_shapes, plan.shard) for plan in plans]
        self.weights = [{name: torch.zeros(shape) for name, shape in layout.shapes.items()} for layout in layouts]
        with ThreadPoolExecutor(len(plans)) as threads:
            list(threads.map(WeightReceiver.receive, self._receivers, plans, [held.get for held in self.weights]))
        spoil(self.weights[1], self._spoiled)
        checksums = [{name: checksum(tensor) for name, tensor in held.items()} for held in self.weights]
        return WeightReceipt(update.version, checksums, 0.0)


class SpoilingEngine(LocalEngine):
    """Changes one bit of what `spoil` named, once it is there."""

    def __init__(self, model: str, dtype: str) -> None:
        super().__init__(model, dtype=dtype, max_model_len=128)
        self._spoiled: list[str] = []

    def spoil(self, name: str) -> None:
        self._spoiled.append(name)

    def forget(self) -> None:
        for tensor in self._model.weights.values():
            tensor.fill_(7)

    def held(self) -> dict[str, str]:
        tensors = {name: tensor.view(torch.uint8).numpy() for name, tensor in self._model.weights.items()}
        return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().update_weights(update)
        if self._spoiled:
            spoil(self._model.weights, self._spoiled)
            checksums = {name: checksum(tensor) for name, tensor in self._model.weights.items()}
            receipt = replace(receipt, checksums=(checksums,))
        return receipt


def serve(connection: Connection) -> None:
    """Does what rank 0 asks, as long as it is there: makes an engine of a kind, or calls a method of the last one."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[..., Any]] = {"local": SpoilingEngine, "halves": Halves}
    engine: Any = None
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        start = time.time()
        value: Any = None
        try:
            if method in kinds:
                engine = kinds[method](*args)
            else:
                value = getattr(engine, method)(*args)
        except Exception as error:  # raised on rank 0
            value = error
        connection.send(Timed(value, start, max(start, time.time())))
