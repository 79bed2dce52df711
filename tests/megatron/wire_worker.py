"""A job of two trainer ranks (gloo), of which the first starts two processes that serve an engine each. See test_weight_wire.

Rank 0 publishes the same weights through files, then over each kind of wire, under every layout, and notes what the engines
hold afterwards. Engines forget what they hold between two publishes. A last publish is spoiled at one engine.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from foreign_bytes import counted, peak

from marsrl.kernels import PolicyObjective
from marsrl.rollout.engines.protocol import WeightReceipt, WeightUpdate
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Timed
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.runs.collective import gather_bytes
from marsrl.trainer.weights.carriers import FileCarrier, WireCarrier, follow
from marsrl.trainer.weights.probe import score_probe
from marsrl.trainer.weights.sync import WeightSync
from marsrl.trainer.weights.wire import WireOptions, WireSender

BUCKET = 4096  # bytes: most tensors take several


class Processes:
    """Engines in the other processes, as the pool wants them (pool.Replicas, as far as a sync needs it)."""

    def __init__(self, connections: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
        self.connections, self._processes = connections, processes

    @classmethod
    def start(cls, num: int) -> Processes:
        """Engines that end when this process does, or lets go of its connections."""
        connections, processes = [], []
        for _ in range(num):
            mine, theirs = socket.socketpair()
            command = [
                sys.executable,
                "-W",
                "ignore",
                str(Path(__file__).parent / "wire_engine.py"),
                str(theirs.fileno()),
            ]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
            theirs.close()
            connections.append(Connection(mine.detach()))
        return cls(connections, processes)

    def end(self) -> None:
        for connection, process in zip(self.connections, self._processes, strict=True):
            connection.send(("end", ()))
            process.wait()

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


def publishes(learner: Learner, model: str, dtype: str, engines: Processes | None) -> dict[str, Any]:
    """The engines' weights after a publish through files, and over each wire; on rank 0."""
    probe = score_probe(learner, getattr(torch, dtype))
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
                peak()
            else:
                follow(learner.held(), sender)
                follow(learner.held(), sender)
            continue
        carrier: Any = FileCarrier(getattr(torch, dtype)) if sender is None else WireCarrier(sender, pool.infos())
        sync = WeightSync(pool, vocab_size=learner.vocab_size, carrier=carrier)
        engines.ask("forget")
        report = sync.publish(weights, 1, lambda _: probe)
        if sender is not None:  # over the same wire again
            engines.ask("forget")
            report = sync.publish(learner.held(), 2, lambda _: probe)
        found[kind] = {
            "held": engines.ask("held"),
            "bytes": report.num_bytes,
            "probe": report.probe and report.probe.largest,
        }
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
            found["shm"]["rank_peak"] = peak()
    for sender in senders.values():
        if sender is not None:
            sender.close()
    found["rank_peaks"] = [int(told) for told in gather_bytes(str(peak()).encode())]
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


def job(folder: str, cases: dict[str, tuple[str, dict[str, int], str, str]]) -> dict[str, Any]:
    """What publishes() found in each case, on rank 0; shard_*.pt in the folder, of the case that says so."""
    found: dict[str, Any] = {}
    engines: Processes | None = None
    with counted():
        for name, (model, layout, dtype, engine_dtype) in cases.items():
            learner = new_learner(model, layout, dtype)
            if engines is None and dist.get_rank() == 0:
                engines = Processes.start(2)
            found[name] = publishes(learner, model, engine_dtype, engines)
            if name.endswith("shards"):
                publish_to_shards(learner, engines, Path(folder))
            parallel.stop(keep_world=True)
    if engines:
        engines.end()
    return found
