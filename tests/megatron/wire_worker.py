"""Started once by torchrun with four processes: two trainer ranks (gloo), two that serve an engine each. See test_weight_wire.

Rank 0 publishes the same weights through files, then over each kind of wire, under every layout, and notes what the engines
hold afterwards. Engines forget what they hold between two publishes. A last publish is spoiled at one engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from marsrl.kernels import PolicyObjective
from marsrl.rollout.engines.checksum import checksum
from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.pool import EnginePool
from marsrl.rollout.engines.protocol import WeightReceipt, WeightUpdate
from marsrl.rollout.engines.receive import Receiver
from marsrl.rollout.engines.replicas import Timed
from marsrl.rollout.engines.wires import GroupWire, SharedWire
from marsrl.trainer.collective import gather_bytes
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner import Learner
from marsrl.trainer.megatron import parallel
from marsrl.trainer.run import packed_for_scoring
from marsrl.trainer.weight_carriers import FileCarrier, WireCarrier, follow
from marsrl.trainer.weight_sync import ProbeScore, WeightSync, probe_score, probe_sequences
from marsrl.trainer.weight_wire import WireOptions, WireSender

BUCKET = 4096  # bytes: most tensors take several
_SPOILED: list[str] = []  # fused tensors of which one number is changed on arrival
_PEAK = [0]  # bytes of other processes that this one held at once


def count_foreign_bytes() -> None:
    """Note what comes over any wire, and what a gate takes from other ranks."""
    held = [0]

    def receive(self: Any, rank: int, num_elements: int, *, plain: Any) -> torch.Tensor:
        flat: torch.Tensor = plain(self, rank, num_elements)
        held[0] += flat.nbytes
        _PEAK[0] = max(_PEAK[0], held[0])
        return flat

    def release(self: Any, *, plain: Any) -> None:
        held[0] = 0
        plain(self)

    for kind in (GroupWire, SharedWire):
        taken, freed = kind.receive, kind.release
        kind.receive = lambda self, rank, n, plain=taken: receive(self, rank, n, plain=plain)  # type: ignore[assignment]
        kind.release = lambda self, plain=freed: release(self, plain=plain)  # type: ignore[assignment]
    plain_recv = dist.recv

    def recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        _PEAK[0] = max(_PEAK[0], tensor.nbytes)
        return plain_recv(tensor, *args, **kwargs)

    dist.recv = recv  # type: ignore[assignment]


class Shard:
    """A tensor-parallel engine shard without an engine around it: zeros of the shapes that its feed names."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._receiver = Receiver(torch.device("cpu"))

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        assert update.feed is not None
        self.weights = {name: torch.zeros(shape) for name, shape in update.feed.shapes.items()}
        self._receiver.take(update.feed, self.weights)
        return WeightReceipt(update.version, {name: checksum(t) for name, t in self.weights.items()}, 0.0)


class SpoilingEngine(LocalEngine):
    """Changes one bit of what `spoil` named, once it is there."""

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        take = self._receiver.take

        def spoiled(feed: Any, targets: Any) -> None:
            take(feed, targets)
            while _SPOILED:
                targets[_SPOILED.pop()].view(-1)[-1:].view(torch.uint8)[0] ^= 1

        self._receiver.take = spoiled  # type: ignore[method-assign]
        try:
            return super().update_weights(update)
        finally:
            self._receiver.take = take  # type: ignore[method-assign]


def serve(address: str) -> None:
    """An engine's process: does what rank 0 asks until it says `end`."""
    while not Path(address).exists():
        time.sleep(0.05)
    connection = Client(address, "AF_UNIX")
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
                value, _PEAK[0] = _PEAK[0], 0
            else:
                value = getattr(engine, method)(*args)
        except Exception as error:  # raised on rank 0
            value = error
        connection.send(Timed(value, start, max(start, time.time())))


class Processes:
    """Engines in the other processes, as the pool wants them (pool.Replicas, as far as a sync needs it)."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections

    def __len__(self) -> int:
        return len(self.connections)

    def call(self, method: str, arguments: Any, on_wait: Any = None) -> list[Timed]:
        for connection, args in zip(self.connections, arguments, strict=True):
            connection.send((method, args))
        answers = [connection.recv() for connection in self.connections]
        for answer in answers:
            if isinstance(answer.value, Exception):
                raise answer.value
        return answers

    def ask(self, method: str, *args: Any) -> list[Any]:
        return [answer.value for answer in self.call(method, [args] * len(self))]


def new_learner(model: str, layout: dict[str, int], dtype: str) -> Learner:
    policy = PolicyConfig(dtype=dtype, layout=layout)  # type: ignore[arg-type]
    mpt = MptConfig(scope="off")
    return Learner(policy, model, objective=PolicyObjective(), mpt=mpt, num_agents=1, total_steps=1, seed=0)


def scores(learner: Learner) -> list[ProbeScore]:
    """Collective."""
    sequences = probe_sequences(learner.vocab_size)
    found = learner.score_with_margins([packed_for_scoring(s, learner.align) for s in sequences])
    return [probe_score(*each, len(s), 1e-4) for s, each in zip(sequences, found, strict=True)]


def publishes(learner: Learner, model: str, dtype: str, engines: Processes | None) -> dict[str, Any]:
    """The engines' weights after a publish through files, and over each wire; on rank 0."""
    probe = scores(learner)
    found: dict[str, Any] = {}
    pool = EnginePool(engines) if engines else None  # type: ignore[arg-type]
    if engines:
        engines.ask("local", model, dtype)
        engines.ask("peak")
    senders: dict[str, Any] = {"shm": None}
    senders |= {kind: WireSender(WireOptions(kind, BUCKET, 60.0)) for kind in ("nccl", "ipc")}  # type: ignore[arg-type]
    for kind, sender in senders.items():
        weights = learner.export() if sender is None else learner.held()
        if pool is None or engines is None:
            follow(weights, sender)
            if sender is None:
                _PEAK[0] = 0
            else:
                follow(learner.held(), sender)
                follow(learner.held(), sender)
            continue
        carrier: Any = FileCarrier(getattr(torch, dtype)) if sender is None else WireCarrier(sender, pool.infos())
        sync = WeightSync(
            pool, vocab_size=learner.vocab_size, carrier=carrier, tolerance=1e-4 if dtype == "float32" else 9
        )
        engines.ask("forget")
        report = sync.publish(weights, 1, lambda _: probe)
        if sender is not None:  # over the same wire again
            engines.ask("forget")
            report = sync.publish(learner.held(), 2, lambda _: probe)
        found[kind] = {"held": engines.ask("held"), "bytes": report.num_bytes, "probe": report.max_probe_difference}
        found[kind]["peak"] = engines.ask("peak")
        if sender is not None:
            name = sorted(found[kind]["held"][0])[-2]
            engines.connections[1].send(("spoil", (name,)))
            engines.connections[1].recv()
            try:
                sync.publish(learner.held(), 3, lambda _: probe)
            except RuntimeError as error:
                found[kind]["spoiled"] = [name, str(error)]
        sync.close()
        if sender is None:  # rank 0 gathers whole tensors for files
            found["shm"]["rank_peak"], _PEAK[0] = _PEAK[0], 0
    for sender in senders.values():
        if sender is not None:
            sender.close()
    found["rank_peaks"] = [int(told) for told in gather_bytes(str(_PEAK[0]).encode())]
    return found


def publish_to_shards(learner: Learner, engines: Processes | None, folder: Path) -> None:
    """Halves of every tensor, as two tensor-parallel engine shards hold them, into folder/shard_*.pt."""
    sender = WireSender(WireOptions("nccl", BUCKET, 60.0))
    sender.open(learner.held(), "float32", [(0, 2), (1, 2)])
    receipts: list[WeightReceipt] = []
    thread = None
    if engines:
        engines.ask("shard")
        updates = [WeightUpdate("", 1, feed) for feed in sender.feeds()]
        thread = threading.Thread(
            target=lambda: receipts.extend(a.value for a in engines.call("update_weights", [(u,) for u in updates]))
        )
        thread.start()
    expected = sender.send()
    if engines and thread:
        thread.join()
        assert [receipt.checksums for receipt in receipts] == expected
        engines.call("save", [(str(folder / f"shard_{i}.pt"),) for i in range(2)])
    sender.close()


def main() -> None:
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    count_foreign_bytes()
    rank = int(os.environ["RANK"])
    address = str(out.parent / "engines")
    if rank >= 2:
        return serve(address)
    os.environ["WORLD_SIZE"] = "2"
    engines = None
    if rank == 0:
        listener = Listener(address, "AF_UNIX")
        engines = Processes([listener.accept() for _ in range(2)])
    found: dict[str, Any] = {}
    for name, (model, layout, dtype, engine_dtype) in cases.items():
        learner = new_learner(model, layout, dtype)
        found[name] = publishes(learner, model, engine_dtype, engines)
        if name.endswith("shards"):
            publish_to_shards(learner, engines, out.parent)
        parallel.stop(keep_world=True)
    if engines:
        out.write_text(json.dumps(found))
        for connection in engines.connections:
            connection.send(("end", ()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
