"""A job of two trainer ranks (gloo), of which the first starts two processes that serve an engine each. See test_direct_sync.

They publish the same weights through files, then straight from the ranks in both ways, under every layout, and rank 0 notes
what the engines hold afterwards. Engines forget what they hold between two publishes. In the first case engines are lost in
the middle of publishes, too. A last publish is spoiled at one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from direct_engine import serve
from megatron_models import learner

from marsrl.rollout.engines.protocol import EngineLost
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Lost, OnLost, Timed, ignore_loss
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import DirectSync, FileSync, Standby, WeightSync

BUCKET = 4096  # bytes: most tensors take several
KINDS: tuple[Literal["nccl", "ipc"], ...] = ("nccl", "ipc")


class Processes:
    """Engines in the other processes, as the pool wants them (pool.Replicas, as far as a sync needs it).

    One that has ended, or was stopped, is lost: as an actor of Ray that has died, or is silent. restarts: who was made anew.
    """

    can_restart = True

    def __init__(self, num: int) -> None:
        """They end when this process does, or lets go of its connections."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["marsrl.rollout.engines.local.engine"])
        self.restarts: list[int] = []
        self._local: tuple[str, str] = ("", "")
        self.connections: dict[int, Connection] = {}
        self.processes: dict[int, psutil.Process] = {}
        for engine in range(num):
            self._start(engine)

    def _start(self, engine: int) -> None:
        self.connections[engine], theirs = self._context.Pipe()  # type: ignore[assignment]
        process = self._context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.processes[engine] = psutil.Process(process.pid)

    def end(self) -> None:
        for connection in self.connections.values():
            connection.close()

    def __len__(self) -> int:
        return len(self.connections)

    def call(self, method: str, arguments: Mapping[int, Any], on_lost: OnLost = ignore_loss) -> dict[int, Timed | Lost]:
        for engine, args in arguments.items():
            self.connections[engine].send((method, args))
        answers: dict[int, Timed | Lost] = {}
        while pending := {self.connections[engine]: engine for engine in arguments if engine not in answers}:
            came = [pending[each] for each in wait(list(pending), timeout=0.05)]  # type: ignore[index]
            for engine in came or pending.values():
                if (answer := self._answer(engine, has_come=bool(came))) is not None:
                    answers[engine] = answer
                    if isinstance(answer, Lost):
                        on_lost(engine, answer.reason)
        return answers

    def _answer(self, engine: int, has_come: bool) -> Timed | Lost | None:
        if not has_come:
            is_stopped = self.processes[engine].status() == psutil.STATUS_STOPPED
            return Lost("its process says nothing") if is_stopped else None
        try:
            answer = self.connections[engine].recv()
        except (EOFError, ConnectionResetError):
            return Lost("its process has died")
        if isinstance(answer.value, EngineLost):
            return Lost(str(answer.value))
        if isinstance(answer.value, Exception):
            raise answer.value
        return answer  # type: ignore[no-any-return]

    def call_one(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Timed | Lost:
        return self.call(method, {replica: arguments})[replica]

    def stop(self, replica: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.processes[replica].kill()

    def has_place(self, within_s: float) -> bool:
        return True

    def restart(self, replica: int) -> Lost | None:
        self.restarts.append(replica)
        self._start(replica)
        self.call("local", {replica: self._local})
        return None

    def ask(self, method: str, *args: Any) -> list[Any]:
        if method == "local":
            self._local = args  # type: ignore[assignment]
        return [answer.value for answer in self.call(method, dict.fromkeys(range(len(self)), args)).values()]  # type: ignore[union-attr]

    def tell(self, engine: int, method: str, *args: Any) -> Any:
        """An engine's answer."""
        answer = self.call_one(engine, method, args)
        assert isinstance(answer, Timed), answer
        return answer.value


def syncs_of(engines: CheckedEngines | None, dtype: str) -> dict[str, WeightSync]:
    """One of each kind, on this rank."""
    told: dict[str, Any] = {"bucket_bytes": BUCKET, "timeout_s": 60.0}
    in_engines: torch.dtype = getattr(torch, dtype)
    return {
        "shm": FileSync(engines, in_engines),
        "nccl": DirectSync(engines, in_engines, "nccl", **told),
        "ipc": DirectSync(engines, in_engines, "ipc", **told),
    }


def publishes(learner: Learner, model: str, dtype: str, engines: Processes | None, with_losses: bool) -> dict[str, Any]:
    """The engines' weights after a publish through files, and straight from the ranks by nccl and ipc; on rank 0."""
    found: dict[str, Any] = {}
    checked = None
    if engines:
        engines.ask("local", model, dtype)
        checked = CheckedEngines(EnginePool(engines), vocab_size=learner.vocab_size)  # type: ignore[arg-type]
    for kind, sync in syncs_of(checked, dtype).items():
        versions = [1] if kind == "shm" else [1, 2]  # the second over the same connection
        for version in versions:
            if engines:
                engines.ask("forget")
            report = sync.publish(learner, version)
        if engines and report:
            found[kind] = {
                "held": engines.ask("held"),
                "bytes": report.num_bytes,
                "probe": report.comparison and report.comparison.largest,
            }
        found.setdefault(kind, {})
        if kind != "shm":
            if with_losses:
                found[kind]["losses"] = publishes_with_losses(sync, learner, checked, engines)
            name = ""
            if engines:
                name = sorted(found[kind]["held"][0])[-2]
                engines.tell(1, "spoil", name)
            try:
                sync.publish(learner, 9)
            except RuntimeError as error:  # on rank 0
                found[kind]["spoiled"] = [name, str(error)]
        sync.close()
    return found


LOSSES: dict[str, list[tuple[int, str, int]]] = {
    "killed in the middle": [(1, "bucket 5", signal.SIGKILL)],
    "silent in the middle": [(0, "bucket 2", signal.SIGSTOP)],
    "both, before and after": [(0, "before", signal.SIGKILL), (1, "after", signal.SIGKILL)],
    "killed while it is compared": [(1, "score", signal.SIGKILL)],
}
"""Losses in one publish: (engine, where, signal)."""


def publishes_with_losses(
    sync: WeightSync, learner: Learner, checked: CheckedEngines | None, engines: Processes | None
) -> dict[str, Any]:
    """Weights of the engines after each loss, their versions, who was made anew; the same after a quiet publish."""
    found: dict[str, Any] = {}
    versions = {"main": 2}
    standby = Standby({"main": sync}, {"main": learner}, versions, {"main": checked.pool} if checked else None)
    for name, strikes in {**LOSSES, "quiet": []}.items():
        versions["main"] += 1
        if engines:
            engines.ask("forget")
            for engine, where, number in strikes:
                engines.tell(engine, "strike", where, number)
            engines.restarts.clear()
        report = sync.publish(learner, versions["main"], standing_by=standby.during)
        if engines and report:
            found[name] = {
                "held": engines.ask("held"),
                "versions": [version - versions["main"] for version in engines.ask("version")],
                "restarts": sorted(engines.restarts),
                "compared": report.comparison and report.comparison.num_tokens,
            }
    return found


def publish_to_halves(learner: Learner, engines: Processes | None, folder: Path) -> dict[str, str]:
    """To engines of two shards each: what those of the second hold, in folder/KIND_EXPERTS.pt, for both kinds of a sync and
    experts cut and spread; and what is said, by the same names, when a number of its second shard changes."""
    said = {}
    for experts in ("cut", "spread"):
        checked = None
        for kind in KINDS:
            if engines:
                engines.ask("halves", 2, experts == "spread")
                checked = CheckedEngines(EnginePool(engines), vocab_size=learner.vocab_size)  # type: ignore[arg-type]
            # they score nothing: no version is compared
            sync = DirectSync(checked, torch.float32, kind, verify_every=100, bucket_bytes=BUCKET, timeout_s=60.0)
            sync.publish(learner, 1)
            name = f"{kind}_{experts}"
            if engines:
                engines.call("save", {0: (str(folder / "first.pt"),), 1: (str(folder / f"{name}.pt"),)})
                engines.tell(1, "spoil", "lm_head.weight")
            try:
                sync.publish(learner, 2)
            except RuntimeError as error:  # on rank 0
                said[name] = str(error)
            sync.close()
    return said


def job(folder: str, cases: dict[str, tuple[str, dict[str, int], str, str]]) -> dict[str, Any]:
    """Findings of publishes() in each case, on rank 0; with engines in halves too, in the case that says so."""
    found: dict[str, Any] = {}
    engines: Processes | None = None
    for name, (model, layout, dtype, engine_dtype) in cases.items():
        policy = learner(model, layout=layout, dtype=dtype)
        if engines is None and dist.get_rank() == 0:
            engines = Processes(2)
        found[name] = publishes(policy, model, engine_dtype, engines, with_losses=not found)
        if name.endswith("halves"):
            found[name]["halves"] = publish_to_halves(policy, engines, Path(folder))
        parallel.stop(keep_world=True)
    if engines:
        engines.end()
    return found
