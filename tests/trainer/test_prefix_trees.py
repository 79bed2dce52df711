"""Trees of samples that begin with the same tokens: their order, how they are cut into micro-batches, and what these compute."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marsrl.kernels import PolicyObjective
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.trainer.config import SharedPrefixes
from marsrl.trainer.data.packing import TrainSequence, pack
from marsrl.trainer.data.prefix_trees import Branch, depth_first, num_computed, plan_trees
from marsrl.trainer.data.scatter import BatchShard, micro_batches


def sample(prompt: str, completion: str, **changes: Any) -> TrainSequence:
    """Return a sample whose tokens are characters."""
    number = len(completion)
    fields: dict[str, Any] = {
        "uid": prompt + completion,
        "prompt_ids": np.array([*map(ord, prompt)], np.int32),
        "token_ids": np.array([*map(ord, completion)], np.int32),
        "is_sampled": np.ones(number, bool),
        "rollout_logprobs": -np.arange(1, number + 1, dtype=np.float32),
        "advantage": 1.0,
        "agent": 0,
        "temperature": 1.0,
    }
    return TrainSequence(**fields | changes)


def text(ids: torch.Tensor) -> str:
    return "".join(map(chr, ids.tolist()))


def tree(samples: list[TrainSequence]) -> list[Branch]:
    (branches,) = depth_first(samples, [None] * len(samples), [0] * len(samples))
    return branches


def test_a_sample_shares_its_prefix_with_the_one_before() -> None:
    samples = [sample("hi", ""), sample("ab", "cef"), sample("a", "bcd"), sample("ab", "g"), sample("ab", "c")]
    assert tree(samples) == [(4, 0), (2, 3), (1, 3), (3, 2), (0, 0)]
    assert tree([samples[1], samples[1]]) == [(0, 0), (1, 4)]  # A copy computes its last token.


def test_a_micro_batch_computes_a_prefix_once() -> None:
    first = sample("ab", "cd", agent=1, advantage=0.5, is_sampled=np.array([True, False]))
    second = sample(
        "a",
        "bxy",
        is_positive=True,
        temperature=0.5,
        kept_tokens=KeptTokens.of([np.array(ids, np.int32) for ids in ([], [120, 7], [])]),
    )
    batch = pack([first, second, sample("q", "r")], align=4, shared=[0, 2, 0])
    assert text(batch.token_ids) == "abcd" + "xy" + "qr" and batch.num_computed == 8
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    assert text(batch.targets) == "c" + "bxy" + "r" and batch.num_tokens == 5
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 5] and batch.mask.all()
    assert batch.runs.tolist() == [0, 4, 6, 8]
    assert batch.paths is not None
    assert batch.paths.cu_seqlens_k.tolist() == [0, 4, 8, 10]
    assert batch.paths.tokens.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7]
    assert batch.paths.predicting.tolist() == [1, 0, 1, 4, 6]  # Token b predicts c and x.
    assert batch.trained_rows.tolist() == [0, 1, 2, 3, 4] and batch.positive_rows.tolist() == [1, 2, 3]
    assert batch.of_tokens(batch.agent_of).tolist() == [1, 0, 0, 0, 0]
    assert isinstance(batch.temperature, torch.Tensor) and batch.temperature.tolist() == [1.0, 0.5, 0.5, 0.5, 1.0]
    assert batch.rollout_logprobs is not None and batch.rollout_logprobs.tolist() == [-1, -1, -2, -3, -1]
    assert batch.support is not None and batch.support.counts.tolist() == [0, 0, 2, 0, 0]
    assert batch.max_seqlen == 4
    padded = pack([first, second], align=8, shared=[0, 2])
    assert padded.is_padding.tolist() == [False] * 6 + [True] * 2
    assert padded.paths is not None and padded.paths.tokens.tolist()[4:] == [0, 1, 4, 5, 6, 7]


def test_a_micro_batch_that_shares_nothing_is_flat() -> None:
    samples = [sample("a", "b"), sample("c", "d")]
    assert pack(samples, shared=[0, 0]).paths is None


def test_samples_without_a_trained_token_share_too() -> None:
    samples = [sample("ab", "c", is_sampled=np.zeros(1, bool)), sample("ab", "d", is_sampled=np.zeros(1, bool))]
    batch = pack(samples, shared=[0, 2])
    assert (batch.num_computed, batch.num_tokens) == (4, 0)


def experts(*of_tokens: int) -> np.ndarray[Any, Any]:
    return np.array(of_tokens, np.uint8)[:, None, None]


def test_tokens_with_other_experts_are_not_shared() -> None:
    one = sample("ab", "cd", routed_experts=experts(1, 2, 3))
    longer = sample("ab", "cde", routed_experts=experts(1, 2, 3, 4))
    other = sample("ab", "cdf", routed_experts=experts(1, 0, 3, 4))
    assert tree([one, longer]) == [(0, 0), (1, 3)]  # The last token of `one` has no recorded experts.
    assert tree([one, other]) == [(0, 0), (1, 1)]
    assert tree([one, sample("ab", "cdg")]) == [(0, 0), (1, 0)]
    assert tree([one, one]) == [(0, 0), (1, 3)]


def test_adapters_and_objectives_share_nothing() -> None:
    samples = [sample("ab", "c"), sample("ab", "d"), sample("ab", "e"), sample("ab", "f")]
    assert depth_first(samples, ["x", "y", "x", "x"], [1, 0, 0, 1]) == [[(2, 0), (0, 0), (3, 2)], [(1, 0)]]


texts = st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=12)


def prefixes(texts: list[str]) -> set[str]:
    """Return the nodes of the tree of these texts: all of their prefixes."""
    return {text[:end] for text in texts for end in range(1, len(text) + 1)}


@given(texts=texts, ranks=st.integers(1, 3), limit=st.integers(9, 40), cuts=st.integers(1, 3))
def test_each_sample_is_planned_once_in_a_part_that_fits(texts: list[str], ranks: int, limit: int, cuts: int) -> None:
    samples, lengths = [sample(text, "") for text in texts], [*map(len, texts)]
    kinds, sampled = [i % cuts for i in range(len(texts))], [length - length // 3 for length in lengths]
    plan = plan_trees(depth_first(samples, kinds, [0] * len(texts)), lengths, sampled, ranks, limit)
    parts = [branches for rank in plan for branches in rank]
    assert sorted(i for branches in parts for i, _ in branches) == [*range(len(texts))]
    assert len({len(rank) for rank in plan}) == 1
    assert all(len({kinds[i] for i, _ in branches}) <= 1 for branches in parts)
    assert all(num_computed(branches, lengths) <= limit for branches in parts)
    assert all(sum(sampled[i] for i, _ in branches) <= limit for branches in parts)
    for branches in parts:
        assert not branches or branches[0].shared == 0
        for (before, _), (index, shared) in pairwise(branches):
            assert shared < lengths[index] and texts[before][:shared] == texts[index][:shared]
            assert shared <= lengths[before]


@given(texts=texts.map(lambda texts: sorted(set(texts))))
def test_a_tree_that_fits_computes_each_prefix_once(texts: list[str]) -> None:
    samples, lengths = [sample(text, "") for text in texts], [*map(len, texts)]
    ((branches, *_),) = plan_trees([tree(samples)], lengths, [0] * len(texts), 1, 1000)
    assert len(prefixes(texts)) == sum(num_computed(part, lengths) for part in (branches, *_))


@given(texts=texts.map(lambda texts: sorted(set(texts))[:7]), limit=st.integers(9, 20))
def test_cuts_repeat_the_fewest_tokens(texts: list[str], limit: int) -> None:
    """No other way to cut the order into parts that fit the limit repeats fewer tokens."""
    samples, lengths = [sample(text, "") for text in texts], [*map(len, texts)]

    def sizes(cuts: tuple[int, ...]) -> list[int]:
        return [len(prefixes(texts[begin:end])) for begin, end in pairwise((0, *cuts, len(texts)))]

    ways = [cuts for number in range(len(texts)) for cuts in combinations(range(1, len(texts)), number)]
    least = min(sum(sizes(cuts)) for cuts in ways if max(sizes(cuts)) <= limit)
    (parts,) = plan_trees([tree(samples)], lengths, [0] * len(texts), 1, limit)
    assert sum(num_computed(branches, lengths) for branches in parts) == least


def test_an_idle_rank_takes_half_of_the_costliest_part() -> None:
    texts = ["aaaab", "aaaac", "aaaad", "aaaae", "xy"]
    samples, lengths = [sample(text, "") for text in texts], [*map(len, texts)]
    # This cut gives parts of 7 and 7 tokens; a cut after the second sample would give 6 and 8.
    assert plan_trees([tree(samples)], lengths, [0] * 5, 2, 100) == [[[(0, 0), (1, 4), (2, 4)]], [[(3, 0), (4, 0)]]]
    assert plan_trees([tree(samples[:1])], lengths[:1], [0], 2, 100) == [[[(0, 0)]], [[]]]
    with pytest.raises(ValueError, match="5 tokens but trainer.max_tokens_per_micro_batch is 4"):
        plan_trees([tree(samples)], lengths, [0] * 5, 1, 4)


def test_equal_answers_are_bounded_by_their_sampled_tokens() -> None:
    batches = micro_batches([sample("ab", "cdef") for _ in range(8)], BatchShard(0, 1, 12, 1, shared_prefixes="on"))
    assert [(batch.num_computed, batch.num_tokens) for batch in batches] == [(8, 12), (8, 12), (7, 8)]


def computed(samples: list[TrainSequence], prefixes: SharedPrefixes, **options: Any) -> list[int]:
    shard = BatchShard(0, 1, 1000, 1, shared_prefixes=prefixes, **options)
    return [batch.num_computed for batch in micro_batches(samples, shard)]


def test_prefixes_are_shared_automatically_if_it_is_worthwhile() -> None:
    worthwhile = [sample("abcdefgh", "ij"), sample("abcdefgh", "kl")]  # 20 tokens, of which trees compute 12
    little = [sample("ab", "cdefghij"), sample("ab", "klmnopqr")]  # 20 tokens, of which trees compute 18
    assert [computed(worthwhile, prefixes) for prefixes in ("off", "auto", "on")] == [[20], [12], [12]]
    assert [computed(little, prefixes) for prefixes in ("off", "auto", "on")] == [[20], [20], [18]]


def test_two_objectives_or_adapters_are_computed_apart() -> None:
    samples = [sample("abcdefgh", "ij", agent=i % 2) for i in range(4)]
    assert computed(samples, "on", objectives=(PolicyObjective(), PolicyObjective(clip_low=0.1))) == [11, 11]
    assert computed(samples, "on", adapters=(0, 1)) == [22]
    assert computed(samples, "on", adapters=(0, 1), is_apart=True) == [11, 11]
    assert computed(samples, "on", adapters=(0, 0)) == [13]
