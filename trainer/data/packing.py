"""How credited samples become packed micro-batches: cut over ranks, first-fit-decreasing into bins, laid end to end.

The target shift is made here, once: position t predicts token t+1 of its own sequence, and `mask[t]` says whether that
token was sampled by the policy (not prompt, not tool text, not padding). Everything downstream is elementwise in t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from marsrl.rollout.routed_experts import ExpertArray, not_recorded
from marsrl.rollout.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sample with its credit, ready to be packed.

    Completion arrays are [N]: token_ids int32, is_sampled bool, rollout_logprobs float32 (None: not known, as in
    supervised traces), token_weights float32 (None outside supervised training; there it replaces the advantage).
    routed_experts: [tokens of prompt and completion that the engine was fed, layers, top_k] (rollout/routed_experts.py).
    """

    uid: str
    prompt_ids: IntArray
    token_ids: IntArray
    is_sampled: BoolArray
    rollout_logprobs: FloatArray | None
    advantage: float
    agent: int  # index into the run's agents
    temperature: float
    is_positive: bool = False  # a success with an advantage above 0 (DMMPT; credit.py)
    weight: float = 1.0  # factor on every term of its tokens: the part of the loss's denominator that is its own
    token_weights: FloatArray | None = None
    routed_experts: ExpertArray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.is_sampled))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: S sequences end to end, T tokens (padding of the last alignment included).

    All [T] arrays are in the frame of the *predicting* position. cu_seqlens covers T, so padding belongs to the last
    sequence, whose mask is False there.
    """

    uids: tuple[str, ...]
    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarts at every sequence
    targets: Tensor  # [T] int64, 0 where there is none
    mask: Tensor  # [T] bool
    advantages: Tensor  # [S] float32
    token_advantages: Tensor | None  # [T] float32; given instead of `advantages` in supervised training
    rollout_logprobs: Tensor | None  # [T] float32, 0 where mask is False
    temperature: Tensor | float  # [T] float32, or one number for the batch
    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int
    agent_of: Tensor  # [S] int64
    is_positive: Tensor  # [S] bool
    weights: Tensor | None  # [S] float32, factor on every term of a sequence's tokens; None: 1 for all
    trained_rows: (
        Tensor  # [R] int64, where mask is True: known here, so that a device need not be asked how many there are
    )
    positive_rows: Tensor  # [P] int64, of these, the tokens of positive samples
    routed_experts: Tensor | None = None  # [T, layers, top_k] uint8 or int16; not_recorded() where there is no record

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


def rows_of(mask: Tensor, is_positive: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(trained_rows, positive_rows) of a batch on the host."""
    of_positive = is_positive.repeat_interleave(cu_seqlens.diff())
    return mask.nonzero()[:, 0], (mask & of_positive).nonzero()[:, 0]


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Which sequence goes into which micro-batch of which rank: plan[rank][micro_batch] = indices.

    First-fit-decreasing by tokens into bins of max_tokens; the number of bins is a multiple of num_ranks (every rank
    runs the same number of forward passes, as its collectives need), and bins are dealt out so that the ranks' costs
    are even. Cost of a sequence: its tokens plus a quadratic term for attention, the heaviest bin first to the
    lightest rank. A micro-batch may be empty only where there are fewer sequences than ranks.

    Raises:
        ValueError: a sequence is longer than max_tokens.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"packing: a sequence has {longest} tokens but trainer.max_tokens_per_micro_batch is {max_tokens}; raise it, or "
            "lower rollout.max_response_tokens or the agents' max_input_tokens"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _first_fit(order, lengths, max_tokens)
    num_bins = max(1, -(-len(bins) // num_ranks)) * num_ranks
    while len(bins) < num_bins:
        bins = _split_largest(bins, lengths)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    cost_of = [sum(_cost(lengths[i]) for i in b) for b in bins]
    cost = [0.0] * num_ranks
    for b in sorted(range(num_bins), key=lambda b: (-cost_of[b], b)):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < num_bins // num_ranks), key=lambda r: (cost[r], r))
        ranks[rank].append(bins[b])
        cost[rank] += cost_of[b]
    return ranks


def _cost(length: int) -> float:
    """Relative work of one sequence: linear layers plus causal attention (length^2; equal to the rest near 16k tokens)."""
    return length * (1.0 + length / 16384.0)


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, free in enumerate(room):
            if lengths[i] <= free:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(max_tokens - lengths[i])
    return bins


def _split_largest(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """One bin more: the fullest bin that holds several sequences is halved; an empty bin where none does."""
    several = [b for b, members in enumerate(bins) if len(members) > 1]
    if not several:
        return [*bins, []]
    b = max(several, key=lambda b: (sum(lengths[i] for i in bins[b]), -b))
    return [*bins[:b], bins[b][::2], bins[b][1::2], *bins[b + 1 :]]


def pack(sequences: Sequence[TrainSequence], *, align: int = 1) -> PackedBatch:
    """Lay sequences end to end. T is padded up to a multiple of `align` (tensor parallelism cuts T).

    An empty list packs to one masked token, so that a rank without work still takes part in every collective.
    """
    if not sequences:
        empty = np.zeros(1, np.int32)
        sequences = [
            TrainSequence("padding", empty, empty[:0], np.zeros(0, bool), np.zeros(0, np.float32), 0.0, 0, 1.0)
        ]
    lengths = [s.num_tokens for s in sequences]
    padding = -sum(lengths) % align
    total = sum(lengths) + padding
    tokens = np.zeros(total, np.int64)
    positions = np.zeros(total, np.int64)
    targets = np.zeros(total, np.int64)
    mask = np.zeros(total, bool)
    temperature = np.ones(total, np.float32)
    rollout = np.zeros(total, np.float32)
    weights = np.zeros(total, np.float32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for sequence, start, end in zip(sequences, starts[:-1], starts[1:], strict=True):
        ids = np.concatenate([sequence.prompt_ids, sequence.token_ids])
        tokens[start:end] = ids
        positions[start:end] = np.arange(len(ids))
        targets[start : end - 1] = ids[1:]
        temperature[start:end] = sequence.temperature
        predicts = slice(
            start + len(sequence.prompt_ids) - 1, end - 1
        )  # the positions whose target is a completion token
        mask[predicts] = sequence.is_sampled
        if sequence.rollout_logprobs is not None:
            rollout[predicts] = np.where(sequence.is_sampled, sequence.rollout_logprobs, 0)
        if sequence.token_weights is not None:
            weights[predicts] = sequence.token_weights
    cu_seqlens = np.array([*starts[:-1], total], np.int32)
    positions[total - padding :] = np.arange(padding) + lengths[-1]
    known = all(s.rollout_logprobs is not None for s in sequences)
    weighted = any(s.token_weights is not None for s in sequences)
    own = [s.weight for s in sequences]
    same_temperature = len({s.temperature for s in sequences}) == 1
    trained = torch.from_numpy(mask)
    bounds = torch.from_numpy(cu_seqlens)
    is_positive = torch.tensor([s.is_positive for s in sequences], dtype=torch.bool)
    trained_rows, positive_rows = rows_of(trained, is_positive, bounds)
    return PackedBatch(
        uids=tuple(s.uid for s in sequences),
        token_ids=torch.from_numpy(tokens),
        position_ids=torch.from_numpy(positions),
        targets=torch.from_numpy(targets),
        mask=trained,
        advantages=torch.tensor([s.advantage for s in sequences], dtype=torch.float32),
        token_advantages=torch.from_numpy(weights) if weighted else None,
        rollout_logprobs=torch.from_numpy(rollout) if known else None,
        temperature=sequences[0].temperature if same_temperature else torch.from_numpy(temperature),
        cu_seqlens=bounds,
        max_seqlen=int(np.diff(cu_seqlens).max()),
        agent_of=torch.tensor([s.agent for s in sequences], dtype=torch.int64),
        is_positive=is_positive,
        weights=torch.tensor(own, dtype=torch.float32) if any(weight != 1.0 for weight in own) else None,
        trained_rows=trained_rows,
        positive_rows=positive_rows,
        routed_experts=_routed_experts(sequences, starts, total),
    )


def _routed_experts(sequences: Sequence[TrainSequence], starts: IntArray, total: int) -> Tensor | None:
    """[T, layers, top_k]; a sequence without a record leaves its tokens unrecorded. None where no sequence has one."""
    known = [s.routed_experts for s in sequences if s.routed_experts is not None]
    if not known:
        return None
    packed = np.full((total, *known[0].shape[1:]), not_recorded(known[0].dtype), known[0].dtype)
    for sequence, start in zip(sequences, starts[:-1], strict=True):
        if sequence.routed_experts is not None:
            packed[start : start + len(sequence.routed_experts)] = sequence.routed_experts
    return torch.from_numpy(packed)
