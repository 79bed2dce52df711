"""How a packed batch is cut over context-parallel ranks, checked place by place without any ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_models import sequences

from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.trainer.data.packing import PackedBatch, pack


@dataclass(frozen=True)
class Group:
    number: int
    ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


@pytest.fixture(scope="module")
def context() -> Any:
    from marsrl.trainer.learner.megatron import shim

    shim.install()
    from marsrl.trainer.learner.megatron import context

    return context


def batch() -> PackedBatch:
    rng = np.random.default_rng(0)
    found = [
        replace(
            s,
            routed_experts=rng.integers(0, 8, (s.num_tokens - 1, 2, 3)).astype(np.uint8),
            kept_tokens=KeptTokens.of([token * np.ones(token % 2, np.int32) for token in s.token_ids]),
        )
        for s in sequences(5)
    ]
    return pack(found, align=2)


def sequence_of(part: PackedBatch) -> torch.Tensor:
    """[T'] the sequence that each token is in."""
    return torch.arange(len(part.agent_of)).repeat_interleave(part.cu_seqlens.diff().long())


@pytest.mark.parametrize(("size", "align"), [(2, 1), (2, 4), (3, 1), (3, 2), (4, 1)])
def test_every_token_is_on_one_rank_with_all_that_belongs_to_it(context: Any, size: int, align: int) -> None:
    whole = batch()
    cuts = [context.cut(whole, rank, size, align) for rank in range(size)]
    places = torch.cat([each.rows[rank] for rank, each in enumerate(cuts)])
    assert torch.equal(places[places < whole.num_tokens].sort().values, torch.arange(whole.num_tokens))
    assert len({each.batch.num_tokens for each in cuts}) == 1 and cuts[0].batch.num_tokens % align == 0
    for rank, each in enumerate(cuts):
        mine, rows = each.batch, each.rows[rank]
        is_real = rows < whole.num_tokens
        for name in ("token_ids", "position_ids", "targets", "mask", "rollout_logprobs", "routed_experts"):
            assert torch.equal(getattr(mine, name)[is_real], getattr(whole, name)[rows[is_real]]), name
        assert mine.support is not None and whole.support is not None and mine.support.ids is whole.support.ids
        for name in ("starts", "counts"):
            own, all_of_them = getattr(mine.support, name), getattr(whole.support, name)
            assert torch.equal(own[is_real], all_of_them[rows[is_real]]) and not own[~is_real].any()
        assert not bool(mine.mask[~is_real].any()) and bool((mine.routed_experts[~is_real] == 255).all())
        assert torch.equal(mine.trained_rows, mine.mask.nonzero()[:, 0])
        sample = torch.searchsorted(whole.cu_seqlens.long(), rows[mine.positive_rows], right=True) - 1
        assert bool(whole.is_positive[sample].all()) and bool(mine.mask[mine.positive_rows].all())
    assert sum(len(each.batch.positive_rows) for each in cuts) == len(whole.positive_rows) > 0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_query_sees_the_keys_of_its_sequence_up_to_itself(context: Any, size: int) -> None:
    whole = batch()
    cuts = [context.cut(whole, rank, size, 1) for rank in range(size)]
    everyone = torch.cat([each.batch.position_ids for each in cuts])  # what a gather from all ranks gives
    owner = torch.cat([sequence_of(each.batch) for each in cuts])
    for rank, each in enumerate(cuts):
        keys = context.Keys.of(each.batch.cu_seqlens, each.batch.num_tokens, Group(rank, size))
        assert len(keys.places) == int(keys.cu_seqlens_k[-1])
        for segment in range(len(keys.cu_seqlens) - 1):
            queries = slice(int(keys.cu_seqlens[segment]), int(keys.cu_seqlens[segment + 1]))
            seen = keys.places[int(keys.cu_seqlens_k[segment]) : int(keys.cu_seqlens_k[segment + 1])]
            position = each.batch.position_ids[queries]
            # keys 0 .. last query in order, all of one sequence: the causal mask of the last positions does the rest
            assert torch.equal(everyone[seen], torch.arange(int(position[-1]) + 1))
            assert set(owner[seen].tolist()) == {segment // 2} and len(position) == int(position[-1] - position[0]) + 1
