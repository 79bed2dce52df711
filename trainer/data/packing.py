"""Packing of credited samples into micro-batches, first-fit-decreasing, and their split over ranks.

The target shift is made once, by kernels.pack: position t predicts token t+1 of its own sequence, and `mask[t]` says
whether that token was sampled by the policy (not prompt, not tool text, not padding). Everything downstream is elementwise
in t.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import marsrl.kernels as kernels
from marsrl.kernels import Support
from marsrl.rollout.fitting import first_fit_decreasing
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray, not_recorded
from marsrl.rollout.types import BoolArray, FloatArray, IntArray
from marsrl.trainer.machine import training_device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sample with its credit, ready to be packed.

        TrainSequence(
            "000017/solver:3", prompt_ids=[11, 12], token_ids=[13, 14], is_sampled=[True, True],
            rollout_logprobs=[-0.2, -1.1], advantage=0.5, agent=0, temperature=1.0, is_positive=True,
        )

    Completion arrays are [N]: token_ids int32, is_sampled bool, rollout_logprobs float32 (None: not known, as in
    demonstrations), token_advantages float32 (advantages with a teacher, weights in demonstrations; None: every token has
    `advantage`).
    routed_experts: [tokens of prompt and completion that the engine was fed, layers, top_k] (rollout/routed_experts.py).
    kept_tokens: for each token of the completion, the tokens that the sampler kept (rollout/kept_tokens.py); None: all.
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
    weight: float = 1.0  # factor on every term of the sample's tokens, such as 1 / its number of tokens
    token_advantages: FloatArray | None = None
    routed_experts: ExpertArray | None = None
    kept_tokens: KeptTokens | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.is_sampled))


@dataclass(frozen=True, slots=True)
class Paths:
    """Tokens that the model computes for a micro-batch whose samples share prefixes (prefix_trees.py).

    Run of a sample: its tokens that no earlier sample computes; all runs together have U tokens. Path of a sample: the
    tokens that it shares with earlier samples, then its run; all paths together have K tokens.

    cu_seqlens [S+1] int32: bounds of the runs. cu_seqlens_k [S+1] int32: bounds of the paths. tokens [K] int64: the computed
    token at each place of each path. predicting [T] int64: the computed token that predicts each target.
    """

    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    tokens: Tensor
    predicting: Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch: S concatenated sequences, T tokens (alignment padding included).

    Example: prompt 11 12 with completion 13 14, and prompt 21 with completion 22 23 24, in which a tool wrote 23:

        token_ids    11 12 13 14   21 22 23 24      position_ids  0 1 2 3   0 1 2 3
        targets      12 13 14  0   22 23 24  0      mask          . x x .   x . x .
        cu_seqlens    0  4  8                       trained_rows  1 2 4 6

    All [T] arrays are indexed by the position that *predicts* the token. cu_seqlens covers T, so padding belongs to the last
    sequence, whose mask is False there.

    With `paths`, token_ids, position_ids, is_padding and routed_experts are arrays [U] of the tokens that the model computes. All
    other arrays have only the T positions that predict a sampled token; one computed token often has several of these positions.
    """

    uids: tuple[str, ...]
    token_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, restarts at every sequence
    targets: Tensor  # [T] int64; 0 at the last token of a sequence
    mask: Tensor  # [T] bool
    advantages: Tensor  # [S] float32
    token_advantages: Tensor | None  # [T] float32, in place of `advantages`; None: no sequence has per-token ones
    rollout_logprobs: Tensor | None  # [T] float32, 0 where mask is False
    temperature: Tensor | float  # [T] float32, or one number for the batch
    cu_seqlens: Tensor  # [S+1] int32
    max_seqlen: int
    is_padding: Tensor  # [T] bool
    agent_of: Tensor  # [S] int64
    agents: tuple[int, ...]  # [S], agent_of on the host, without synchronisation
    is_positive: Tensor  # [S] bool
    weights: Tensor | None  # [S] float32, factor on every term of a sequence's tokens; None: 1 for all
    trained_rows: Tensor  # [R] int64, where mask is True; their number is known on the host
    positive_rows: Tensor  # [P] int64, those trained_rows that are tokens of positive samples
    routed_experts: Tensor | None = None  # [T, layers, top_k] uint8 or int16; not_recorded() if there is no record
    support: Support | None = None  # tokens that each target was drawn from; None: the whole vocabulary for all
    paths: Paths | None = None  # None: the model computes all T tokens

    @property
    def num_tokens(self) -> int:
        return self.targets.numel()

    @property
    def num_computed(self) -> int:
        return self.token_ids.numel()

    @property
    def num_shared(self) -> int:
        """Number of the sequences' tokens that are not computed, because another sequence begins with them."""
        return 0 if self.paths is None else self.paths.tokens.numel() - self.num_computed

    @property
    def runs(self) -> Tensor:
        """Bounds of each sequence's computed tokens, [S+1] int32."""
        return self.cu_seqlens if self.paths is None else self.paths.cu_seqlens

    def of_tokens(self, of_sequences: Tensor) -> Tensor:
        """Return the value of each token's sequence, [T] from [S], without synchronisation."""
        return of_sequences.repeat_interleave(self.cu_seqlens.diff().long(), output_size=self.num_tokens)


def padding(agent: int = 0) -> TrainSequence:
    """Return a sequence of one masked token."""
    empty = np.zeros(1, np.int32)
    return TrainSequence("padding", empty, empty[:0], np.zeros(0, bool), np.zeros(0, np.float32), 0.0, agent, 1.0)


def rows_of(
    mask: Tensor, is_positive: Tensor, cu_seqlens: Tensor, num_rows: tuple[int | None, int | None] = (None, None)
) -> list[Tensor]:
    """Return [trained_rows, positive_rows] of a batch.

    num_rows: lengths of the two results; None: the host waits for the device to count.
    """
    of_positive = is_positive.repeat_interleave(cu_seqlens.diff(), output_size=mask.numel())
    return [kernels.kept_rows(row_mask, num_kept=num) for row_mask, num in zip((mask, mask & of_positive), num_rows)]


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, kinds: Sequence[Hashable] | None = None
) -> list[list[list[int]]]:
    """Assign sequences to micro-batches: plan[rank][micro_batch] = indices.

    Sequences are packed first-fit-decreasing by tokens into bins of max_tokens. The number of bins is a multiple of num_ranks,
    because collectives require the same number of forward passes on every rank. Bins are dealt to ranks so that costs are even
    (`dealt`); a sequence costs its tokens plus a quadratic term for attention. A micro-batch may be empty only if there are fewer
    sequences than ranks. All sequences of a micro-batch have one kind.

    kinds: kind of each sequence; None: all have the same kind.

    Raises ValueError if a sequence is longer than max_tokens.
    """
    check_lengths(lengths, max_tokens)
    members: dict[Hashable, list[int]] = {}
    for i in range(len(lengths)):
        members.setdefault(kinds[i] if kinds is not None else None, []).append(i)
    bins = [
        [indices[index] for index in bin_indices]
        for indices in members.values()
        for bin_indices in first_fit_decreasing([lengths[i] for i in indices], max_tokens)
    ]
    num_bins = max(1, -(-len(bins) // num_ranks)) * num_ranks
    while len(bins) < num_bins:
        bins = _split_largest(bins, lengths)
    return dealt(bins, [sum(cost(lengths[i]) for i in b) for b in bins], num_ranks)


def check_lengths(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise ValueError if a sequence is longer than max_tokens."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"packing: a sequence has {longest} tokens but trainer.max_tokens_per_micro_batch is {max_tokens}; raise it, or "
            "lower rollout.max_response_tokens or the agents' max_input_tokens"
        )


def cost(length: int) -> float:
    """Return the relative cost of a sequence: linear layers plus causal attention, which cost the same near 16k tokens."""
    return length * (1.0 + length / 16384.0)


def dealt(bins: Sequence[T], costs: Sequence[float], num_ranks: int) -> list[list[T]]:
    """Give each rank equally many bins: the costliest bin goes first, to the rank with the lowest cost so far."""
    ranks: list[list[T]] = [[] for _ in range(num_ranks)]
    cost_of = [0.0] * num_ranks
    for b in sorted(range(len(bins)), key=lambda b: (-costs[b], b)):
        rank = min(
            (r for r in range(num_ranks) if len(ranks[r]) < len(bins) // num_ranks), key=lambda r: (cost_of[r], r)
        )
        ranks[rank].append(bins[b])
        cost_of[rank] += costs[b]
    return ranks


def _split_largest(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Add a bin by halving the fullest one with several sequences; add an empty bin if there is none."""
    several = [b for b, members in enumerate(bins) if len(members) > 1]
    if not several:
        return [*bins, []]
    b = max(several, key=lambda b: (sum(lengths[i] for i in bins[b]), -b))
    return [*bins[:b], bins[b][::2], bins[b][1::2], *bins[b + 1 :]]


def pack(sequences: Sequence[TrainSequence], *, align: int = 1, shared: Sequence[int] = ()) -> PackedBatch:
    """Concatenate sequences on the learner's device.

    align: the number of computed tokens is padded to a multiple of it (tensor parallelism splits them).
    shared: number of leading tokens of each sequence that are computed for the one before it; (): 0 for all.

    The host concatenates the sequences' arrays, from which kernels.pack computes each position's input and target. An empty
    list packs to one masked token, so that a rank without work still takes part in every collective.

    Raises ValueError if a token is not among those that its sampler recorded as kept.
    """
    sequences = sequences or [padding()]
    starts = np.cumsum([0, *(s.num_tokens for s in sequences)])
    total = int(starts[-1]) + (sum(shared) - int(starts[-1])) % align
    num_real = int(starts[-1]) if any(len(s.token_ids) for s in sequences) else 0  # padding() has an empty completion
    bounds = np.array([*starts[:-1], total], np.int32)
    cu_seqlens = _on_device(bounds)
    logprobs = [s.rollout_logprobs for s in sequences if s.rollout_logprobs is not None]
    of_tokens = None
    if any(s.token_advantages is not None for s in sequences):
        uniform = (np.full(len(s.token_ids), s.advantage, np.float32) for s in sequences)
        per_token = [
            sample_advantages if s.token_advantages is None else s.token_advantages
            for s, sample_advantages in zip(sequences, uniform, strict=True)
        ]
        of_tokens = _of_tokens(sequences, per_token)
    packed = kernels.pack(
        _on_device(np.concatenate([part for s in sequences for part in (s.prompt_ids, s.token_ids)])),
        _of_tokens(sequences, [s.is_sampled for s in sequences]),
        cu_seqlens,
        total,
        logprobs=_of_tokens(sequences, logprobs) if len(logprobs) == len(sequences) else None,
        weights=of_tokens,
    )
    is_positive = _on_device([s.is_positive for s in sequences], np.bool_)
    num_sampled = sum(s.num_sampled for s in sequences), sum(s.num_sampled for s in sequences if s.is_positive)
    trained_rows, positive_rows = rows_of(packed.mask, is_positive, cu_seqlens, num_sampled)
    own_weights = [s.weight for s in sequences]
    temperatures = [s.temperature for s in sequences]
    batch = PackedBatch(
        uids=tuple(s.uid for s in sequences),
        token_ids=packed.token_ids,
        position_ids=packed.position_ids,
        targets=packed.targets,
        mask=packed.mask,
        advantages=_on_device([s.advantage for s in sequences], np.float32),
        token_advantages=packed.weights,
        rollout_logprobs=packed.logprobs,
        temperature=temperatures[0]
        if len(set(temperatures)) == 1
        else _on_device(temperatures, np.float32).repeat_interleave(cu_seqlens.diff(), output_size=total),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(np.diff(bounds).max()),
        is_padding=_on_device(np.arange(total) >= num_real),
        agent_of=_on_device([s.agent for s in sequences], np.int64),
        agents=tuple(s.agent for s in sequences),
        is_positive=is_positive,
        weights=_on_device(own_weights, np.float32) if any(weight != 1.0 for weight in own_weights) else None,
        trained_rows=trained_rows,
        positive_rows=positive_rows,
        routed_experts=_routed_experts(sequences, starts, total),
        support=_support(sequences, starts, total),
    )
    return _with_paths(batch, sequences, bounds, shared) if any(shared) else batch


def _with_paths(
    batch: PackedBatch, sequences: Sequence[TrainSequence], bounds: npt.NDArray[np.int32], shared: Sequence[int]
) -> PackedBatch:
    """Reduce a batch to the tokens to compute and the positions that predict sampled tokens. bounds: cu_seqlens on the host."""
    num_own = np.diff(bounds) - shared
    runs = np.concatenate([[0], num_own.cumsum()])
    path, paths = np.empty(0, np.int64), []
    for begin, end, num_shared in zip(runs[:-1], runs[1:], shared, strict=True):
        path = np.concatenate([path[:num_shared], np.arange(begin, end)])
        paths.append(path)
    computed = _on_device(np.concatenate([np.arange(end - n, end) for end, n in zip(bounds[1:], num_own, strict=True)]))
    tokens, rows = _on_device(np.concatenate(paths)), batch.trained_rows
    cu_seqlens = _on_device(np.cumsum([0, *(s.num_sampled for s in sequences)]), np.int32)
    mask = batch.mask[rows]
    trained_rows, positive_rows = rows_of(mask, batch.is_positive, cu_seqlens, (len(rows), len(batch.positive_rows)))
    of_rows: dict[str, Any] = {
        name: values[rows]
        for name in ("targets", "token_advantages", "rollout_logprobs", "temperature")
        if isinstance(values := getattr(batch, name), Tensor)
    }
    return replace(
        batch,
        **of_rows,
        token_ids=batch.token_ids[computed],
        position_ids=batch.position_ids[computed],
        is_padding=batch.is_padding[computed],
        routed_experts=None if batch.routed_experts is None else batch.routed_experts[computed],
        mask=mask,
        support=None if batch.support is None else batch.support.take(rows),
        cu_seqlens=cu_seqlens,
        trained_rows=trained_rows,
        positive_rows=positive_rows,
        paths=Paths(_on_device(runs, np.int32), batch.cu_seqlens, tokens, tokens[rows]),
    )


def _on_device(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Copy the values to the learner's device, without synchronisation."""
    return torch.from_numpy(np.asarray(values, dtype)).to(training_device(), non_blocking=True)


def _of_tokens(sequences: Sequence[TrainSequence], of_completions: Sequence[npt.NDArray[Any]]) -> Tensor:
    """Return the completions' values, and 0 at prompt tokens, [N]."""
    pairs = zip(sequences, of_completions, strict=True)
    return _on_device(
        np.concatenate([part for s, values in pairs for part in (np.zeros(len(s.prompt_ids), values.dtype), values)])
    )


def _routed_experts(sequences: Sequence[TrainSequence], starts: npt.NDArray[np.int64], total: int) -> Tensor | None:
    """Return the recorded experts, [T, layers, top_k]; None if no sequence has a record.

    Tokens of a sequence without a record stay unrecorded.
    """
    recorded = [(start, s.routed_experts) for start, s in zip(starts, sequences) if s.routed_experts is not None]
    if not recorded:
        return None
    rows = np.concatenate([start + np.arange(len(experts)) for start, experts in recorded])
    values = _on_device(np.concatenate([experts for _, experts in recorded]))
    fill = not_recorded(recorded[0][1].dtype)
    return values.new_full((total, *values.shape[1:]), fill).index_copy_(0, _on_device(rows), values)


def _support(sequences: Sequence[TrainSequence], starts: npt.NDArray[np.int64], total: int) -> Support | None:
    """Return the tokens that each of the T positions was sampled from; None if no position is restricted."""
    counts = np.zeros(total, np.int64)
    ids = []
    for start, s in zip(starts, sequences):
        if s.kept_tokens is None or not s.kept_tokens.ids.size:
            continue
        if (missing := s.kept_tokens.lacks(s.token_ids)).size:
            first_missing = int(missing[0])
            raise ValueError(
                f"packing: token {first_missing} of sample {s.uid} is {s.token_ids[first_missing]}, but it is not among the "
                f"{s.kept_tokens.counts[first_missing]} tokens that its sampler kept there; check the engine's records"
            )
        assert len(s.prompt_ids), f"sample {s.uid} has no prompt: no position predicts its first token"
        first = start + len(s.prompt_ids) - 1  # Position that predicts the completion's first token.
        counts[first : first + len(s.token_ids)] = s.kept_tokens.counts
        ids.append(s.kept_tokens.ids)
    if not ids:
        return None
    starts_of_ids = counts.cumsum() - counts
    return Support(_on_device(np.concatenate(ids)), _on_device(starts_of_ids), _on_device(counts), int(counts.max()))
