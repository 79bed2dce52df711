"""A job of two trainer ranks (gloo), of which the first starts two processes that serve an engine each. See test_direct_sync.

They publish the same weights through files, then straight from the ranks in both ways, under every layout, and rank 0 notes
what the engines hold afterwards. Engines forget what they hold between two publishes. A last publish is spoiled at one. Then
weights of another directory are sent, by what has changed.
"""

from __future__ import annotations

import itertools
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


class Publishing:
    """Publishes of a learner to engines, whose processes rank 0 has. dtype: of the engines."""

    def __init__(self, learner: Learner, dtype: str, engines: Processes | None) -> None:
        self.learner, self.engines = learner, engines
        self.dtype: torch.dtype = getattr(torch, dtype)

    def new(self, *kind: Any) -> CheckedEngines | None:
        """Engines of this kind in the place of those before; on rank 0."""
        if self.engines is None:
            return None
        self.engines.ask(*kind)
        return CheckedEngines(EnginePool(self.engines), vocab_size=self.learner.vocab_size)  # type: ignore[arg-type]

    def direct(self, engines: CheckedEngines | None, kind: Literal["nccl", "ipc"], **options: Any) -> DirectSync:
        return DirectSync(engines, self.dtype, kind, bucket_bytes=BUCKET, timeout_s=60.0, **options)

    def spoiled(self, sync: WeightSync, version: int, name: str) -> str:
        """What is said when a bit of this tensor changes in the second engine; on rank 0."""
        if self.engines:
            self.engines.call("spoil", {1: (name,)})
        try:
            sync.publish(self.learner, version)
        except RuntimeError as error:
            return str(error)
        return ""

    def whole(self, model: str, dtype: str) -> dict[str, Any]:
        """The engines' weights after a publish through files, and straight from the ranks by nccl and ipc; on rank 0."""
        found: dict[str, Any] = {}
        checked = self.new("local", model, dtype)
        syncs: dict[str, WeightSync] = {"shm": FileSync(checked, self.dtype)}
        syncs |= {kind: self.direct(checked, kind) for kind in KINDS}
        for kind, sync in syncs.items():
            for version in [1] if kind == "shm" else [1, 2]:  # the second over the same connection
                if self.engines:
                    self.engines.ask("forget")
                report = sync.publish(self.learner, version)
            if self.engines and report:
                found[kind] = {
                    "held": self.engines.ask("held"),
                    "bytes": report.num_bytes,
                    "probe": report.comparison and report.comparison.largest,
                }
            if kind != "shm":
                name = sorted(found[kind]["held"][0])[-2] if found else ""
                said = self.spoiled(sync, 9, name)
                if found:
                    found[kind]["spoiled"] = [name, said]
            sync.close()
        return found

    def changes(self, model: str, changed: str, dtype: str) -> dict[str, Any]:
        """What engines hold after changes alone were sent, after one engine lost its numbers, and after files; on rank 0."""
        checked = self.new("local", model, dtype)
        by_change = self.direct(checked, "nccl", delta=True)
        files = FileSync(checked, self.dtype)
        found: dict[str, Any] = {}
        for version, kind in enumerate(("first", "changes", "after a loss", "files")):
            if kind == "changes":
                self.learner.read_weights(changed)
            if kind == "after a loss" and self.engines:
                self.engines.call("forget", {1: ()})
            report = (files if kind == "files" else by_change).publish(self.learner, version)
            if self.engines and report:
                found[kind] = [self.engines.ask("held"), report.num_bytes, report.changed_share]
        by_change.close()
        files.close()
        return found

    def halves(self, folder: Path) -> dict[str, str]:
        """To engines of two shards each: what those of the second hold, in folder/KIND_EXPERTS.pt, for both kinds of a sync
        and experts cut and spread; and what is said, by the same names, when a number of its second shard changes."""
        said = {}
        for experts, kind in itertools.product(("cut", "spread"), KINDS):
            # they score nothing: no version is compared
            sync = self.direct(self.new("halves", 2, experts == "spread"), kind, verify_every=100)
            sync.publish(self.learner, 1)
            name = f"{kind}_{experts}"
            if self.engines:
                self.engines.call("save", {0: (str(folder / "first.pt"),), 1: (str(folder / f"{name}.pt"),)})
            said[name] = self.spoiled(sync, 2, "lm_head.weight")
            sync.close()
        return said


def job(folder: str, cases: dict[str, tuple[str, dict[str, int], str, str]]) -> dict[str, Any]:
    """Findings of Publishing in each case, on rank 0; with engines in halves too, in the case that says so."""
    found: dict[str, Any] = {}
    engines: Processes | None = None
    for name, (model, layout, dtype, engine_dtype) in cases.items():
        policy = learner(model, layout=layout, dtype=dtype)
        if engines is None and dist.get_rank() == 0:
            engines = Processes(2)
        publishing = Publishing(policy, engine_dtype, engines)
        found[name] = publishing.whole(model, engine_dtype)
        if name.endswith("halves"):
            found[name]["halves"] = publishing.halves(Path(folder))
        found[name]["changes"] = publishing.changes(model, f"{model}_changed", engine_dtype)
        parallel.stop(keep_world=True)
    if engines:
        engines.end()
    return found
