"""Distribution of rank 0's batch: every data-parallel rank gets only the arrays of its own micro-batches.

One micro-batch per data rank is sent at a time. In host memory, rank 0 holds data_size encoded micro-batches and every other rank
one; a device holds at most collective.SCATTER_BYTES. A micro-batch takes some 13 bytes per token, and layers x top_k bytes per
token more with recorded experts: 37 MiB for 98,304 tokens of Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from marsrl.kernels import PolicyObjective
from marsrl.rollout.state import decode, encode
from marsrl.trainer.config import SharedPrefixes
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack, padding, plan_micro_batches
from marsrl.trainer.data.prefix_trees import Branch, depth_first, num_computed, plan_trees
from marsrl.trainer.runs.collective import (
    Routes,
    broadcast_bytes,
    gather_bytes,
    scatter_bytes,
    stopping_together,
    world_size,
)

WORTHWHILE = 1.15  # shared_prefixes=auto: least ratio of all tokens to computed tokens at which prefixes are shared


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Training input of one optimizer update: MiniBatch((sequence, another), normaliser=5120.0).

    normaliser: denominator of the loss over all ranks; sequences may also have weights of their own.
    """

    sequences: tuple[TrainSequence, ...]
    normaliser: float


@dataclass(frozen=True, slots=True)
class Update:
    """A rank's part of one optimizer update: its micro-batches, and the normaliser over all ranks."""

    micro_batches: tuple[PackedBatch, ...]
    normaliser: float


@dataclass(frozen=True, slots=True)
class BatchShard:
    """Share of a batch that this rank packs (the same for ranks of one data_rank), and the packing rules.

    align: divisor of the number of tokens that a micro-batch computes.
    routes: the transport from rank 0; None if every rank holds the sequences, or there is one rank.
    objectives: objective of each agent, in order; the samples of a micro-batch have the same one. (): all agents have the same.
    shared_prefixes: on: a micro-batch computes each prefix that its samples share only once (prefix_trees.py); auto: as on, but
        only in updates whose samples have over WORTHWHILE times as many tokens as `on` computes; off: never.
    adapters: index of each agent's adapter, by which samples are grouped. (): there is at most one. is_apart: a
        micro-batch has only one adapter.
    """

    data_rank: int
    data_size: int
    max_tokens: int
    align: int
    routes: Routes | None = None
    objectives: tuple[PolicyObjective, ...] = ()
    adapters: tuple[int, ...] = ()
    is_apart: bool = False
    shared_prefixes: SharedPrefixes = "off"


@dataclass(frozen=True, slots=True)
class _Members:
    """Samples of a micro-batch. shared: as in pack()."""

    sequences: tuple[TrainSequence, ...]
    shared: tuple[int, ...]

    def packed(self, align: int) -> PackedBatch:
        return pack(self.sequences, align=align, shared=self.shared)


def joined(of_policies: Sequence[tuple[MiniBatch, ...]]) -> tuple[MiniBatch, ...]:
    """Join the updates of policies that share micro-batches; each sample's weight then contains its policy's denominator."""
    if len(of_policies) == 1:
        return of_policies[0]
    together = []
    for parts in zip_longest(*of_policies, fillvalue=MiniBatch((), 0.0)):
        weighed = (replace(s, weight=s.weight / part.normaliser) for part in parts for s in part.sequences)
        together.append(MiniBatch(tuple(weighed), 1.0))
    return tuple(together)


def scatter(mini_batches: tuple[MiniBatch, ...] | None, shard: BatchShard) -> list[Update]:
    """Return this rank's packed micro-batches of every update. Collective; mini_batches are on rank 0, None elsewhere.

    Every rank gets the same number of micro-batches per update, because forward passes contain collectives.

    Raises RuntimeError on all ranks if the batch cannot be planned.
    """
    if world_size() == 1:
        assert mini_batches is not None, "scatter: a single rank needs the batch"
        return [
            Update(tuple(micro_batches(mini_batch.sequences, shard)), mini_batch.normaliser)
            for mini_batch in mini_batches
        ]
    with stopping_together("scatter: the step's batch cannot be split into micro-batches", ValueError):
        plans = [_plan(mini_batch.sequences, shard) for mini_batch in mini_batches or ()]
    outline = None  # (number of micro-batches, normaliser) per update.
    if mini_batches is not None:
        outline = [(len(plan[0]), mini_batch.normaliser) for plan, mini_batch in zip(plans, mini_batches, strict=True)]
    outlines = decode(list[tuple[int, float]], broadcast_bytes(encode(outline) if outline is not None else None))
    data_ranks = [int(rank_text) for rank_text in gather_bytes(str(shard.data_rank).encode())]
    assert shard.routes is not None, "scatter: several ranks need routes"
    updates = []
    for number, (num_micro_batches, normaliser) in enumerate(outlines):
        packed = []
        for i in range(num_micro_batches):
            parts = [encode(share[i]) for share in plans[number]] if outline is not None else None
            data = scatter_bytes(parts, data_ranks, shard.routes)
            packed.append(decode(_Members, data).packed(shard.align))
        updates.append(Update(tuple(packed), normaliser))
    return updates


def micro_batches(sequences: Sequence[TrainSequence], shard: BatchShard) -> list[PackedBatch]:
    """Return this rank's micro-batches of sequences that every rank holds (supervised training)."""
    return [members.packed(shard.align) for members in _plan(sequences, shard)[shard.data_rank]]


def _plan(sequences: Sequence[TrainSequence], shard: BatchShard) -> list[list[_Members]]:
    """Assign sequences to the micro-batches of each data rank.

    With shard.is_apart, micro-batches at the same index have the same adapter on all ranks, because experts process rows of many
    ranks.
    """
    if shard.is_apart:
        alone = replace(shard, is_apart=False)
        share: list[list[_Members]] = [[] for _ in range(shard.data_size)]
        for adapter in sorted({shard.adapters[s.agent] for s in sequences}):
            own_sequences = [s for s in sequences if shard.adapters[s.agent] == adapter]
            nothing = _Members((padding(own_sequences[0].agent),), (0,))
            for batches_of_rank, part in zip(share, _plan(own_sequences, alone), strict=True):
                batches_of_rank += [members if members.sequences else nothing for members in part]
        return share if sequences else _plan(sequences, alone)
    kinds = [shard.objectives[s.agent] for s in sequences] if shard.objectives else [None] * len(sequences)
    adapters = [shard.adapters[s.agent] if shard.adapters else 0 for s in sequences]
    lengths = [s.num_tokens for s in sequences]
    plan: list[list[list[Branch]]] | None = None
    if shard.shared_prefixes != "off":
        trees, sampled = depth_first(sequences, kinds, adapters), [s.num_sampled for s in sequences]
        plan = plan_trees(trees, lengths, sampled, shard.data_size, shard.max_tokens)
        once = sum(num_computed(branches, lengths) for batches in plan for branches in batches)
        if shard.shared_prefixes == "auto" and sum(lengths) <= WORTHWHILE * once:
            plan = None
    if plan is None:
        flat = plan_micro_batches(lengths, shard.data_size, shard.max_tokens, kinds)
        plan = [[[Branch(i, 0) for i in indices] for indices in batches] for batches in flat]

    def members(branches: list[Branch]) -> _Members:
        in_order = sorted(branches, key=lambda branch: adapters[branch.sample])
        return _Members(tuple(sequences[i] for i, _ in in_order), tuple(shared for _, shared in in_order))

    return [[members(branches) for branches in batches] for batches in plan]
