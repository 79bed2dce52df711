"""A job of two ranks that scatter batches both ways: as two data ranks, and as two ranks of one replica. See test_scatter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.trainer.data.packing import PackedBatch, TrainSequence
from marsrl.trainer.data.scatter import BatchShard, MiniBatch, Update, micro_batches, scatter
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.runs import collective
from marsrl.trainer.runs.collective import Routes, all_true, gather_bytes, rank

MAX_TOKENS = 64
ONE = Layout(tensor=1, expert=1, expert_tensor=1, pipeline=1, context=1)
LAYERS, TOP_K = 24, 8


def sequence(i: int, num_tokens: int) -> TrainSequence:
    """Half of it prompt; every array that a sequence may have."""
    rng = np.random.default_rng(i)
    n = num_tokens // 2
    ids = rng.integers(0, 99, num_tokens).astype(np.int32)
    return TrainSequence(
        f"s{i}", ids[:-n], ids[-n:], rng.random(n) < 0.8, -rng.random(n).astype(np.float32),
        advantage=float(rng.normal()), agent=i % 2, temperature=0.85, is_positive=i % 3 == 0, weight=1.0 + i,
        routed_experts=rng.integers(0, 128, (num_tokens - 1, LAYERS, TOP_K)).astype(np.uint8),
        kept_tokens=KeptTokens(ids[-n:].copy(), np.ones(n, np.int32)),
    )  # fmt: skip


def batch(*lengths: int, normaliser: float = 7.0) -> MiniBatch:
    return MiniBatch(tuple(sequence(i, length) for i, length in enumerate(lengths)), normaliser)


BATCHES = {
    "even": (batch(20, 20, 20, 20),),
    "uneven": (batch(60, 50, 9, 8, 7), batch(60, 10, 11, normaliser=0.5)),
    "an empty share": (batch(12),),
    "nothing at all": (MiniBatch((), 0.0),),
}


def same(ours: PackedBatch, other: PackedBatch) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if dataclasses.is_dataclass(a):
            return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
        return bool(a == b)

    return equal(ours, other)


def share_is_as_planned(batches: tuple[MiniBatch, ...], shard: BatchShard) -> list[bool]:
    """As if every rank had held all sequences."""
    found = scatter(batches if rank() == 0 else None, shard)
    planned = [Update(tuple(micro_batches(each.sequences, shard)), each.normaliser) for each in batches]
    return [
        ours.normaliser == other.normaliser
        and len(ours.micro_batches) == len(other.micro_batches)
        and all(map(same, ours.micro_batches, other.micro_batches))
        for ours, other in zip(found, planned, strict=True)
    ]


def failing(call: Callable[[], object]) -> str:
    """What it raises; afterwards the ranks still hear each other."""
    try:
        call()
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said if all_true(True) else "unheard"


def job() -> list[dict[str, Any]]:
    """What both ranks found, by rank."""
    dist.init_process_group("gloo")
    alone = [dist.new_group([r]) for r in range(2)]
    world = dist.group.WORLD
    assert world is not None and not isinstance(alone[rank()], int)
    found: dict[str, Any] = {}
    ways = {
        "data": BatchShard(rank(), 2, MAX_TOKENS, 1, Routes(world, alone[rank()])),
        "replica": BatchShard(0, 1, MAX_TOKENS, 8, Routes(alone[0] if rank() == 0 else None, world)),
    }
    whole = collective.SCATTER_BYTES
    for way, shard in ways.items():
        for name, batches in BATCHES.items():
            for most in (1000, whole):
                collective.SCATTER_BYTES = most
                found[f"{way}, {name}, {most}"] = share_is_as_planned(batches, shard)
    for axis in ("data", "tensor", "pipeline", "context"):
        parallel.start(ONE if axis == "data" else dataclasses.replace(ONE, **{axis: 2}), seed=0)
        num_shares = 2 if axis == "data" else 1
        shard = BatchShard(rank() % num_shares, num_shares, MAX_TOKENS, 4, parallel.routes())
        found[f"layout, {axis}"] = share_is_as_planned(BATCHES["uneven"], shard)
        parallel.stop(keep_world=True)
    found["too long"] = failing(lambda: scatter((batch(65, 4),) if rank() == 0 else None, ways["data"]))
    found["after all"] = share_is_as_planned(BATCHES["even"], ways["data"])
    both = [json.loads(each) for each in gather_bytes(json.dumps(found).encode())]
    dist.destroy_process_group()
    return both
