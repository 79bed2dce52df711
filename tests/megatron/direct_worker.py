"""A job of two trainer ranks (gloo), of which the first starts two processes that serve an engine each. See test_direct_channel.

They publish the same weights through files, then straight from the ranks in both ways, under every layout, and rank 0 notes
what the engines hold afterwards. Engines forget what they hold between two publishes. A last publish is spoiled at one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from foreign_bytes import counted, peak

from marsrl.kernels import PolicyObjective
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Timed
from marsrl.rollout.weights.receiver import ReceivePlan
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.runs.collective import gather_bytes
from marsrl.trainer.weights.channel import WeightChannel
from marsrl.trainer.weights.checked_engines import CheckedEngines
from marsrl.trainer.weights.direct_channel import DirectChannel, IpcChannel, NcclChannel
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

    def call(self, method: str, arguments: Mapping[int, Any]) -> dict[int, Timed]:
        for engine, args in arguments.items():
            self.connections[engine].send((method, args))
        answers = {engine: self.connections[engine].recv() for engine in arguments}
        for answer in answers.values():
            if isinstance(answer.value, Exception):
                raise answer.value
        return answers

    def call_one(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Timed:
        self.connections[replica].send((method, arguments))
        answer = self.connections[replica].recv()
        assert not isinstance(answer.value, Exception), answer.value
        return answer  # type: ignore[no-any-return]

    def ask(self, method: str, *args: Any) -> list[Any]:
        return [answer.value for answer in self.call(method, dict.fromkeys(range(len(self)), args)).values()]


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
        plans: list[ReceivePlan] = []
        versions = [1] if kind == "shm" else [1, 2]  # the second over the same connection
        for version in versions:
            if engines:
                engines.ask("forget")
            report = channel.publish(learner, version)
            plans += channel._receive_plans() if isinstance(channel, DirectChannel) else []
        if engines and report:
            found[kind] = {
                "held": engines.ask("held"),
                "bytes": report.num_bytes,
                "probe": report.comparison and report.comparison.largest,
                "peak": engines.ask("peak"),
            }
        if kind == "shm":  # rank 0 gathers whole tensors for files
            found.setdefault(kind, {})["rank_peak"] = peak()
        else:
            assert isinstance(channel, DirectChannel)
            found.setdefault(kind, {})["plans"] = len({id(plan) for plan in [*plans, *channel._receive_plans()]})
            found[kind]["again"] = sent_again(channel, learner, checked, engines)
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
    checked.pool.generation += 1  # for all that the channel knows it is another process
    engines.ask("forget")
    channel.publish(learner, 2)
    return [alone, engines.ask("held")]


def publish_to_halves(learner: Learner, engines: Processes | None, folder: Path) -> dict[str, str]:
    """To engines of two shards each: what those of the second hold, in folder/KIND_EXPERTS.pt, for both kinds of a channel and
    experts cut and spread; and what is said, by the same names, when a number of its second shard changes."""
    said = {}
    for experts in ("cut", "spread"):
        checked = None
        for kind in (NcclChannel, IpcChannel):
            if engines:
                engines.ask("halves", 2, experts == "spread")
                checked = CheckedEngines(EnginePool(engines), vocab_size=learner.vocab_size)  # type: ignore[arg-type]
            # they score nothing: no version is compared
            channel = kind(checked, torch.float32, verify_every=100, bucket_bytes=BUCKET, timeout_s=60.0)
            channel.publish(learner, 1)
            name = f"{kind.__name__}_{experts}"
            if engines:
                engines.call("save", {0: (str(folder / "first.pt"),), 1: (str(folder / f"{name}.pt"),)})
                engines.connections[1].send(("spoil", ("lm_head.weight",)))
                engines.connections[1].recv()
            try:
                channel.publish(learner, 2)
            except RuntimeError as error:  # on rank 0
                said[name] = str(error)
            channel.close()
    return said


def job(folder: str, cases: dict[str, tuple[str, dict[str, int], str, str]]) -> dict[str, Any]:
    """What publishes() found in each case, on rank 0; with engines in halves too, in the case that says so."""
    found: dict[str, Any] = {}
    engines: Processes | None = None
    with counted():
        for name, (model, layout, dtype, engine_dtype) in cases.items():
            learner = new_learner(model, layout, dtype)
            if engines is None and dist.get_rank() == 0:
                engines = Processes.start(2)
            found[name] = publishes(learner, model, engine_dtype, engines)
            if name.endswith("halves"):
                found[name]["halves"] = publish_to_halves(learner, engines, Path(folder))
            parallel.stop(keep_world=True)
    if engines:
        engines.end()
    return found
