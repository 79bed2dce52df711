"""A job of two trainer ranks (gloo); rank 0 has two engines, each in a thread. See test_direct_sync.

Under every layout, the ranks publish the same weights through files, by nccl and by ipc. Rank 0 records what the engines hold
after each publish; before the next one, their weights are overwritten. In a further publish, a bit of the second engine's weights
is flipped. Finally, the weights of another directory are published by sending only the changes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron_models import learner

from marsrl.rollout.engines.local.engine import LocalEngine
from marsrl.rollout.engines.protocol import EngineInfo, EngineSpec, WeightReceipt, WeightUpdate
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas, Lost, OnLost, Timed, ignore_loss
from marsrl.rollout.state import decode
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.direct import ReceivePlan, WeightReceiver
from marsrl.rollout.weights.layout import EngineShard, shard_layout
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import DirectSync, FileSync, WeightSync

BUCKET = 4096  # bytes; most tensors take several buckets
KINDS: tuple[Literal["nccl", "ipc"], ...] = ("nccl", "ipc")


def spoil(weights: dict[str, torch.Tensor], names: list[str]) -> None:
    """Flip one bit of each fused tensor in `names`, and empty the list."""
    while names:
        weights[names.pop()].view(-1)[-1:].view(torch.uint8)[0] ^= 1


def checksums(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: checksum(tensor) for name, tensor in weights.items()}


class Halves:
    """Stand-in for an engine of two tensor-parallel shards, which receive into tensors of zeros."""

    def __init__(self, num_kv_heads: int, spreads_experts: bool) -> None:
        shards = [EngineShard.of(part, 2, num_kv_heads, spreads_experts=spreads_experts) for part in range(2)]
        self._info = EngineInfo("halves", "Halves", "marsrl", "0", "cpu", "float32", shards=tuple(shards))
        self._receivers = [WeightReceiver(torch.device("cpu")) for _ in shards]
        self.weights: list[dict[str, torch.Tensor]] = []
        self.spoils: list[str] = []

    def info(self) -> EngineInfo:
        return self._info

    def score(self, sequences: list[np.ndarray], adapter: str = "") -> list[np.ndarray]:
        return [np.zeros(len(sequence) - 1, np.float32) for sequence in sequences]

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Let both shards receive at the same time, as two processes would."""
        plans = [decode(ReceivePlan, each) for each in update.receive_plans]
        layouts = [shard_layout(plan.shapes, plan.shard) for plan in plans]
        self.weights = [{name: torch.zeros(shape) for name, shape in layout.shapes.items()} for layout in layouts]
        with ThreadPoolExecutor(len(plans)) as threads:
            list(threads.map(WeightReceiver.receive, self._receivers, plans, [held.get for held in self.weights]))
        spoil(self.weights[1], self.spoils)
        return WeightReceipt(update.version, [checksums(held) for held in self.weights])


class SpoilingEngine(LocalEngine):
    """Engine that flips one bit of each tensor named in `spoils` after the next update."""

    def __init__(self, model: str, dtype: str) -> None:
        super().__init__(EngineSpec("local", model, dtype, 128))
        self.spoils: list[str] = []

    def forget(self) -> None:
        for tensor in self._model.weights.values():
            tensor.fill_(7)

    def held(self) -> dict[str, str]:
        tensors = {name: tensor.view(torch.uint8).numpy() for name, tensor in self._model.weights.items()}
        return {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        receipt = super().update_weights(update)
        if self.spoils:
            spoil(self._model.weights, self.spoils)
            receipt = replace(receipt, checksums=(checksums(self._model.weights),))
        return receipt


class AtOnce(LocalReplicas):
    """Engines of this process that are called at the same time."""

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        call = super().call
        with ThreadPoolExecutor(len(arguments)) as threads:
            answers = threads.map(lambda replica: call(method, {replica: arguments[replica]}), arguments)
            return {replica: answer for each in answers for replica, answer in each.items()}


class Publishing:
    """Publishes a learner's weights to two engines on rank 0. dtype: the engines' dtype."""

    def __init__(self, learner: Learner, dtype: str) -> None:
        self.learner = learner
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.engines: list[Any] = []

    def new(self, kind: Callable[..., Any], *words: Any) -> CheckedEngines | None:
        """Replace the engines by two new ones of this kind, on rank 0."""
        if dist.get_rank() > 0:
            return None
        self.engines = [kind(*words) for _ in range(2)]
        return CheckedEngines(EnginePool(AtOnce(self.engines)), vocab_size=self.learner.vocab_size)

    def direct(self, engines: CheckedEngines | None, kind: Literal["nccl", "ipc"], **options: Any) -> DirectSync:
        return DirectSync(engines, self.dtype, kind, bucket_bytes=BUCKET, timeout_s=60.0, **options)

    def held(self) -> list[dict[str, str]]:
        return [engine.held() for engine in self.engines]

    def spoiled(self, sync: WeightSync, version: int, name: str) -> str:
        """Publish while a bit of the tensor `name` flips in the second engine; return the error, on rank 0."""
        for engine in self.engines[1:]:
            engine.spoils.append(name)
        try:
            sync.publish(self.learner, version)
        except RuntimeError as error:
            return str(error)
        return ""

    def whole(self, model: str, dtype: str) -> dict[str, Any]:
        """Return the engines' weights after a publish through files, and directly by nccl and ipc, on rank 0."""
        results: dict[str, Any] = {}
        checked = self.new(SpoilingEngine, model, dtype)
        syncs: dict[str, WeightSync] = {"shm": FileSync(checked, self.dtype)}
        syncs |= {kind: self.direct(checked, kind) for kind in KINDS}
        for kind, sync in syncs.items():
            for version in [1] if kind == "shm" else [1, 2]:  # version 2 uses the connection of version 1
                for engine in self.engines:
                    engine.forget()
                report = sync.publish(self.learner, version)
            if report:
                probe = report.comparison and report.comparison.largest
                results[kind] = {"held": self.held(), "bytes": report.num_bytes, "probe": probe}
            if kind != "shm":
                name = sorted(results[kind]["held"][0])[-2] if results else ""
                error = self.spoiled(sync, 9, name)
                if results:
                    results[kind]["spoiled"] = [name, error]
            if kind != "nccl":  # nccl is refused for engines on the trainer's GPUs
                for engine in self.engines:
                    engine.forget()
                self.learner.sleeps = True
                sync.publish(self.learner, 3)
                if kind == "ipc":  # as for an engine that replaces a lost one
                    for engine in self.engines[1:]:
                        engine.forget()
                    sync.send_again(self.learner, 3, 1 if results else None)
                if results:
                    results[kind]["asleep"] = self.held()
                self.learner.sleeps = False
                self.learner.wake()
            sync.close()
        return results

    def changes(self, model: str, changed: str, dtype: str) -> dict[str, Any]:
        """Return {kind of sync: [the engines' weights, bytes sent, share of changed weights]} on rank 0.

        The first sync sends all weights, the second only changes. Before the third, an engine loses its weights. The last one
        uses files.
        """
        checked = self.new(SpoilingEngine, model, dtype)
        by_change = self.direct(checked, "nccl", sends_deltas=True)
        files = FileSync(checked, self.dtype)
        results: dict[str, Any] = {}
        for version, kind in enumerate(("first", "changes", "after a loss", "files")):
            if kind == "changes":
                self.learner.read_weights(changed)
            if kind == "after a loss" and self.engines:
                self.engines[1].forget()
            if report := (files if kind == "files" else by_change).publish(self.learner, version):
                results[kind] = [self.held(), report.num_bytes, report.changed_share]
        by_change.close()
        files.close()
        return results

    def halves(self, folder: Path) -> dict[str, str]:
        """Publish to engines of two shards by both kinds of sync, with experts cut in halves or spread whole.

        Save the second engine's tensors to folder/KIND_EXPERTS.pt. Return {KIND_EXPERTS: error of a publish during which a bit of
        the second engine's second shard flips}.
        """
        errors = {}
        for experts, kind in itertools.product(("cut", "spread"), KINDS):
            # Halves cannot score, so version 1 is not compared: verify_every is large.
            sync = self.direct(self.new(Halves, 2, experts == "spread"), kind, verify_every=100)
            sync.publish(self.learner, 1)
            name = f"{kind}_{experts}"
            for engine in self.engines[1:]:
                torch.save(engine.weights, folder / f"{name}.pt")
            errors[name] = self.spoiled(sync, 2, "lm_head.weight")
            sync.close()
        return errors


def job(folder: str, cases: dict[str, tuple[str, dict[str, int], str, str]]) -> dict[str, Any]:
    """Return the findings of Publishing in each case, on rank 0; cases whose name ends in `halves` also publish to Halves."""
    findings: dict[str, Any] = {}
    for name, (model, layout, dtype, engine_dtype) in cases.items():
        publishing = Publishing(learner(model, layout=layout, dtype=dtype), engine_dtype)
        findings[name] = publishing.whole(model, engine_dtype)
        if name.endswith("halves"):
            findings[name]["halves"] = publishing.halves(Path(folder))
        findings[name]["changes"] = publishing.changes(model, f"{model}_changed", engine_dtype)
        parallel.stop(keep_world=True)
    return findings
