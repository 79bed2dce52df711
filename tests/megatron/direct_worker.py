"""A job of two trainer ranks (gloo), of which the first starts two processes that serve an engine each. See test_direct_sync.

They publish the same weights through files, then straight from the ranks in both ways, under every layout, and rank 0 notes
what the engines hold afterwards. Engines forget what they hold between two publishes. A last publish is spoiled at one. Then
weights of another directory are sent, by what has changed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from direct_engine import serve
from megatron_models import learner

from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import OnLost, Timed, ignore_loss
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import DirectSync, FileSync, WeightSync

BUCKET = 4096  # bytes: most tensors take several
KINDS: tuple[Literal["nccl", "ipc"], ...] = ("nccl", "ipc")


class Processes:
    """Engines in other processes, as far as a sync needs pool.Replicas. They end when this process does, or lets go of its
    connections."""

    can_restart = False

    def __init__(self, num: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["marsrl.rollout.engines.local.engine"])
        self.connections: list[Any] = []
        for _ in range(num):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs,), daemon=True).start()
            theirs.close()
            self.connections.append(ours)

    def end(self) -> None:
        for connection in self.connections:
            connection.close()

    def __len__(self) -> int:
        return len(self.connections)

    def call(self, method: str, arguments: Mapping[int, Any], on_lost: OnLost = ignore_loss) -> dict[int, Timed]:
        for engine, args in arguments.items():
            self.connections[engine].send((method, args))
        answers: dict[int, Timed] = {engine: self.connections[engine].recv() for engine in arguments}
        for answer in answers.values():
            if isinstance(answer.value, Exception):
                raise answer.value
        return answers

    def ask(self, method: str, *args: Any) -> list[Any]:
        return [answer.value for answer in self.call(method, dict.fromkeys(range(len(self)), args)).values()]


def syncs_of(engines: CheckedEngines | None, dtype: str) -> dict[str, WeightSync]:
    """One of each kind, on this rank."""
    told: dict[str, Any] = {"bucket_bytes": BUCKET, "timeout_s": 60.0}
    in_engines: torch.dtype = getattr(torch, dtype)
    return {
        "shm": FileSync(engines, in_engines),
        "nccl": DirectSync(engines, in_engines, "nccl", **told),
        "ipc": DirectSync(engines, in_engines, "ipc", **told),
    }


def publishes(learner: Learner, model: str, dtype: str, engines: Processes | None) -> dict[str, Any]:
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
            name = ""
            if engines:
                name = sorted(found[kind]["held"][0])[-2]
                engines.call("spoil", {1: (name,)})
            try:
                sync.publish(learner, 9)
            except RuntimeError as error:  # on rank 0
                found[kind]["spoiled"] = [name, str(error)]
        sync.close()
    return found


def publishes_of_changes(
    learner: Learner, model: str, changed: str, dtype: str, engines: Processes | None
) -> dict[str, Any]:
    """What engines hold after changes alone were sent, after one engine lost its numbers, and after files; on rank 0."""
    checked = None
    if engines:
        engines.ask("local", model, dtype)
        checked = CheckedEngines(EnginePool(engines), vocab_size=learner.vocab_size)  # type: ignore[arg-type]
    in_engines: torch.dtype = getattr(torch, dtype)
    by_change = DirectSync(checked, in_engines, "nccl", bucket_bytes=BUCKET, timeout_s=60.0, delta=True)
    syncs: dict[str, WeightSync] = {
        "first": by_change, "changes": by_change, "after a loss": by_change, "files": FileSync(checked, in_engines)
    }  # fmt: skip
    found: dict[str, Any] = {}
    for version, (kind, sync) in enumerate(syncs.items()):
        if kind == "changes":
            learner.read_weights(changed)
        if kind == "after a loss" and engines:
            engines.call("forget", {1: ()})
        if report := sync.publish(learner, version):
            assert engines
            found[kind] = [engines.ask("held"), report.num_bytes, report.changed_share]
    for sync in syncs.values():
        sync.close()
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
                engines.call("spoil", {1: ("lm_head.weight",)})
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
        found[name] = publishes(policy, model, engine_dtype, engines)
        if name.endswith("halves"):
            found[name]["halves"] = publish_to_halves(policy, engines, Path(folder))
        found[name]["changes"] = publishes_of_changes(policy, model, f"{model}_changed", engine_dtype, engines)
        parallel.stop(keep_world=True)
    if engines:
        engines.end()
    return found
