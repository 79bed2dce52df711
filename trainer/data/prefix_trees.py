"""Order and cuts of samples that begin with the same tokens, so that a micro-batch computes each common prefix once.

Samples are paths of a tree from its root. In depth-first order a sample shares its longest prefix with the one before it, and
computes only the tokens after that prefix:

    sample       computes     shared
    a b c d      a b c d      0
    a b c e f          e f    3
    a b g          g          2
    h i          h i          0

Any part of the order is a batch: its first sample computes all of its tokens. A cut therefore repeats the tokens that the
sample after the cut shares with the sample before the cut.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from marsrl.rollout.fitting import first_fit_decreasing
from marsrl.trainer.data.packing import TrainSequence, check_lengths, cost, dealt


class Branch(NamedTuple):
    """Sample, by index, in depth-first order. shared: number of leading tokens that earlier samples compute, never all."""

    sample: int
    shared: int


def depth_first(
    sequences: Sequence[TrainSequence], kinds: Sequence[Hashable], adapters: Sequence[int]
) -> list[list[Branch]]:
    """Order the samples of each kind by adapter and tokens; return a list of branches per kind.

    kinds, adapters: kind and adapter of each sample. Samples of two kinds need different micro-batches; those of two adapters
    share nothing. Shared tokens are equal, at equal positions, and have equal recorded experts or none.
    """
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    tokens = [np.concatenate([s.prompt_ids, s.token_ids]) for s in sequences]
    # Bytes of big-endian numbers compare as the numbers do, and a prefix comes before its extensions.
    keys = [
        (numbers[kind], adapter, ids.astype(">u4").tobytes())
        for kind, adapter, ids in zip(kinds, adapters, tokens, strict=True)
    ]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    trees = []
    for _, members in groupby(order, key=lambda index: keys[index][0]):
        branches: list[Branch] = []
        for index in members:
            shared = 0
            if branches and adapters[before := branches[-1].sample] == adapters[index]:
                shared = _num_equal(tokens[before], tokens[index][:-1])
                shared = _num_equally_routed(sequences[before], sequences[index], shared)
            branches.append(Branch(index, shared))
        trees.append(branches)
    return trees


def plan_trees(
    trees: Sequence[Sequence[Branch]],
    lengths: Sequence[int],
    sampled: Sequence[int],
    num_ranks: int,
    max_tokens: int,
) -> list[list[list[Branch]]]:
    """Assign samples to micro-batches as plan_micro_batches does, but count a prefix once: plan[rank][micro_batch].

    trees: result of depth_first, one tree per kind; a micro-batch has samples of one tree. A tree of more than max_tokens is cut
        where the fewest tokens are repeated in total. If some ranks would have no micro-batch, the costliest one is cut as evenly
        as possible.
    lengths: number of tokens of each sample. sampled: number of these tokens that the head predicts.
    max_tokens: largest number of tokens that the layers compute in a micro-batch, and of tokens that its head predicts. The
        second limit is needed because samples share prefixes in the layers, but not in the head.

    Raises ValueError if a sample is longer than max_tokens.
    """
    check_lengths(lengths, max_tokens)
    bins = []
    for branches in trees:
        parts = _cut(branches, lengths, sampled, max_tokens)
        sizes = [max(num_computed(part, lengths), sum(sampled[i] for i, _ in part)) for part in parts]
        bins += [
            [branch for i in members for branch in parts[i]] for members in first_fit_decreasing(sizes, max_tokens)
        ]
    num_bins = max(1, -(-len(bins) // num_ranks)) * num_ranks
    while len(bins) < num_bins:
        bins = _halve_costliest(bins, lengths)
    return dealt(bins, [sum(_costs(part, lengths)) for part in bins], num_ranks)


def num_computed(branches: Sequence[Branch], lengths: Sequence[int]) -> int:
    """Return the number of tokens that these branches compute."""
    return sum(lengths[sample] - shared for sample, shared in branches)


def _num_equal(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """Return the number of leading entries that are equal."""
    most = min(len(first), len(second))
    differs = (first[:most] != second[:most]).any(axis=tuple(range(1, first.ndim)))
    return int(differs.argmax()) if differs.any() else most


def _num_equally_routed(first: TrainSequence, second: TrainSequence, most: int) -> int:
    """Return the number of leading tokens, at most `most`, with equal recorded experts, or with none in both samples."""
    one, other = first.routed_experts, second.routed_experts
    if one is None or other is None:
        return most if one is other else 0
    num_equal = _num_equal(one[:most], other[:most])
    return most if num_equal == len(one) == len(other) else num_equal


def _cut(
    branches: Sequence[Branch], lengths: Sequence[int], sampled: Sequence[int], max_tokens: int
) -> list[list[Branch]]:
    """Cut a tree into parts of at most max_tokens, with the fewest repeated tokens; also cut wherever no token is repeated."""
    shared = np.array([branch.shared for branch in branches])
    before = np.cumsum([0, *(lengths[sample] - shared_tokens for sample, shared_tokens in branches)])
    sampled_before = np.cumsum([0, *(sampled[branch.sample] for branch in branches)])
    repeated = np.zeros(len(branches) + 1)  # Smallest number of repeated tokens in the first n branches.
    starts = np.zeros(len(branches) + 1, np.int64)  # Start of the last part of the first n branches.
    for end in range(1, len(branches) + 1):
        first = int(np.searchsorted(before, before[end] - max_tokens))
        totals = repeated[first:end] + shared[first:end]
        num_tokens = before[end] - before[first:end] + shared[first:end]
        totals[np.maximum(num_tokens, sampled_before[end] - sampled_before[first:end]) > max_tokens] = np.inf
        # With equal totals, the shortest part fills micro-batches best.
        starts[end] = end - 1 - int(totals[::-1].argmin())
        repeated[end] = totals[starts[end] - first]
    parts: list[list[Branch]] = []
    end = len(branches)
    while end:
        parts.append(_from_root(branches[starts[end] : end]))
        end = int(starts[end])
    return parts[::-1]


def _from_root(branches: Sequence[Branch]) -> list[Branch]:
    """Return a part of a tree as a batch, in which the first sample computes all of its tokens."""
    return [Branch(branches[0].sample, 0), *branches[1:]]


def _halve_costliest(bins: list[list[Branch]], lengths: Sequence[int]) -> list[list[Branch]]:
    """Add a bin by cutting the costliest one with several samples as evenly as possible; add an empty bin if there is none."""
    several = [b for b, branches in enumerate(bins) if len(branches) > 1]
    if not several:
        return [*bins, []]
    b = max(several, key=lambda b: (sum(_costs(bins[b], lengths)), -b))
    branches, costs = bins[b], _costs(bins[b], lengths)
    halves = [
        max(sum(costs[:i]), cost(branches[i].shared) + sum(costs[i:]))  # The second half repeats a prefix.
        for i in range(1, len(branches))
    ]
    i = 1 + min(range(len(halves)), key=halves.__getitem__)
    return [*bins[:b], branches[:i], _from_root(branches[i:]), *bins[b + 1 :]]


def _costs(branches: Sequence[Branch], lengths: Sequence[int]) -> list[float]:
    return [cost(lengths[sample]) - cost(shared) for sample, shared in branches]
