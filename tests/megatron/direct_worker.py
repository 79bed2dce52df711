"""A job of two trainer ranks (gloo), of which the first starts two processes that serve an engine each. See test_direct_channel.

They publish the same weights through files, then straight from the ranks in both ways, under every layout, and rank 0 notes
what the engines hold afterwards. Engines forget what they hold between two publishes. A last publish is spoiled at one.
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
from marsrl.rollout.weights.engine_shard import EngineShard
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.runs.collective import gather_bytes
from marsrl.trainer.weights.channel import WeightChannel
from marsrl.trainer.weights.checked_engines import CheckedEngines
from marsrl.trainer.weights.direct_channel import IpcChannel, NcclChannel
from marsrl.trainer.weights.file_channel import FileChannel

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
                str(Path(__file__).parent / "direct_engine.py"),
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

    def call_one(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Timed:
        self.connections[replica].send((method, arguments))
        answer = self.connections[replica].recv()
        assert not isinstance(answer.value, Exception), answer.value
        return answer  # type: ignore[no-any-return]

    def ask(self, method: str, *args: Any) -> list[Any]:
        return [answer.value for answer in self.call(method, [args] * len(self))]


def new_learner(model: str, layout: dict[str, int], dtype: str) -> Learner:
    policy = PolicyConfig(dtype=dtype, layout=layout)  # type: ignore[arg-type]
    mpt = MptConfig(scope="off")
    return Learner(policy, model, objective=PolicyObjective(), mpt=mpt, num_agents=1, total_steps=1, seed=0)


def channels_of(engines: CheckedEngines | None, dtype: str) -> dict[str, WeightChannel]:
    """One of each kind, on this rank."""
    told: dict[str, Any] = {"bucket_bytes": BUCKET, "timeout_s": 60.0}
    in_engines: torch.dtype = getattr(torch, dtype)
    return {
        "shm": FileChannel(engines, in_engines),
        "nccl": NcclChannel(engines, in_engines, **told),
        "ipc": IpcChannel(engines, in_engines, **told),
    }


def publishes(learner: Learner, model: str, dtype: str, engines: Processes | None) -> dict[str, Any]:
    """The engines' weights after a publish through files, and straight from the ranks by nccl and ipc; on rank 0."""
    found: dict[str, Any] = {}
    checked = None
    if engines:
        engines.ask("local", model, dtype)
        checked = CheckedEngines(EnginePool(engines), vocab_size=learner.vocab_size)  # type: ignore[arg-type]
        engines.ask("peak")
    for kind, channel in channels_of(checked, dtype).items():
        versions = [1] if kind == "shm" else [1, 2]  # the second over the same connection
        for version in versions:
            if engines:
                engines.ask("forget")
            report = channel.publish(learner, version)
        if engines and report:
            found[kind] = {
                "held": engines.ask("held"),
                "bytes": report.num_bytes,
                "probe": report.comparison and report.comparison.largest,
                "peak": engines.ask("peak"),
            }
        if kind != "shm":
            found.setdefault(kind, {})["again"] = sent_again(channel, learner, checked, engines)
        if kind == "shm":  # rank 0 gathers whole tensors for files
            found.setdefault(kind, {})["rank_peak"] = peak()
        else:
            name = ""
            if engines:
                name = sorted(found[kind]["held"][0])[-2]
                engines.connections[1].send(("spoil", (name,)))
                engines.connections[1].recv()
            try:
                channel.publish(learner, 3)
            except RuntimeError as error:  # on rank 0
                found[kind]["spoiled"] = [name, str(error)]
        channel.close()
    found["rank_peaks"] = [int(told) for told in gather_bytes(str(peak()).encode())]
    return found


def sent_again(
    channel: WeightChannel, learner: Learner, checked: CheckedEngines | None, engines: Processes | None
) -> list[Any]:
    """What the engines hold after the second has forgotten everything and got it back alone, and after a publish to both."""
    if checked is None or engines is None:
        channel.send_again(learner, 2, None)
        channel.publish(learner, 2)
        return []
    engines.connections[1].send(("forget", ()))
    engines.connections[1].recv()
    channel.send_again(learner, 2, 1)
    alone = engines.ask("held")
    checked.pool._recovery._num_restarts += 1  # for all that the channel knows it is another process
    engines.ask("forget")
    channel.publish(learner, 2)
    return [alone, engines.ask("held")]


def publish_to_shards(learner: Learner, engines: Processes | None, folder: Path) -> None:
    """Halves of every tensor, as two tensor-parallel engine shards hold them, into folder/shard_*.pt."""
    channel = NcclChannel(None, torch.float32, bucket_bytes=BUCKET, timeout_s=60.0)
    held = learner.held()
    channel._agree(held, [EngineShard(0, 2, 2), EngineShard(1, 2, 2)])
    receipts: list[WeightReceipt] = []
    thread = None
    if engines:
        engines.ask("shard")
        updates = [WeightUpdate("", 1, (plan,)) for plan in channel._receive_plans()]
        thread = threading.Thread(
            target=lambda: receipts.extend(a.value for a in engines.call("update_weights", [(u,) for u in updates]))
        )
        thread.start()
    expected = channel._send(held)
    if engines and thread:
        thread.join()
        assert [receipt.checksums[0] for receipt in receipts] == expected
        engines.call("save", [(str(folder / f"shard_{i}.pt"),) for i in range(2)])
    channel.close()


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
