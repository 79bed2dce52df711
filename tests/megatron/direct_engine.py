"""An engine's process of direct_worker: python direct_engine.py DESCRIPTOR (of its socket). No megatron here."""

from __future__ import annotations

import hashlib
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from foreign_bytes import counted, peak

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import WeightReceipt, WeightUpdate
from marsrl.rollout.pool.replicas import Timed
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.receiver import WeightReceiver

_SPOILED: list[str] = []  # fused tensors of which one number is changed on arrival


class Shard:
    """A tensor-parallel engine shard without an engine around it: zeros of the shapes that its plan names."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._receiver = WeightReceiver(torch.device("cpu"))

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        (plan,) = update.receive_plans
        self.weights = {name: torch.zeros(shape) for name, shape in plan.shapes.items()}
        self._receiver.receive(plan, self.weights)
        return WeightReceipt(update.version, ({name: checksum(t) for name, t in self.weights.items()},), 0.0)


class SpoilingEngine(LocalEngine):
    """Changes one bit of what `spoil` named, once it is there."""

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receive = self._receiver.receive

        def spoiled(plan: Any, targets: Any) -> None:
            receive(plan, targets)
            while _SPOILED:
                targets[_SPOILED.pop()].view(-1)[-1:].view(torch.uint8)[0] ^= 1

        self._receiver.receive = spoiled  # type: ignore[method-assign]
        try:
            return super().update_weights(update)
        finally:
            self._receiver.receive = receive  # type: ignore[method-assign]


def serve(connection: Connection) -> None:
    """Does what rank 0 asks until it says `end`."""
    engine: Any = None
    while True:
        method, args = connection.recv()
        if method == "end":
            return
        start = time.time()
        value: Any = None
        try:
            if method == "local":
                engine = SpoilingEngine(args[0], dtype=args[1], max_model_len=128)
            elif method == "shard":
                engine = Shard()
            elif method == "held":
                weights = engine.weights if isinstance(engine, Shard) else engine._model.weights
                value = {
                    n: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in weights.items()
                }
            elif method == "save":
                torch.save({n: t.clone() for n, t in engine.weights.items()}, args[0])
            elif method == "forget":
                for tensor in engine._model.weights.values():
                    tensor.fill_(7)
            elif method == "spoil":
                _SPOILED.append(args[0])
            elif method == "peak":
                value = peak()
            else:
                value = getattr(engine, method)(*args)
        except Exception as error:  # raised on rank 0
            value = error
        connection.send(Timed(value, start, max(start, time.time())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with counted():
        serve(Connection(int(sys.argv[1])))
