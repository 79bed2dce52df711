"""Kernels reach what lies beyond 2^31 elements. Their IR is looked at for the rest: ahead_of_time.py, narrow_products."""

import far_cases
import pytest
import torch
from far_cases import far_apart
from small_tiles import use_small_blocks

from marsrl.kernels.attention_varlen import triton_impl as attention
from marsrl.kernels.grouped_linear import triton_impl as grouped
from marsrl.kernels.head.rows import triton_impl as rows
from marsrl.kernels.head.rows.protocol import Slopes, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import make_head

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_blocks_on_clean_memory(monkeypatch):
    use_small_blocks(monkeypatch)
    tiles = attention.Tiles(8, 8, 4, 1)
    monkeypatch.setattr(attention, "plan_tiles", lambda head_size, dtype: attention.TilePlan(tiles, tiles, tiles))
    monkeypatch.setattr(grouped, "plan_tiles", lambda dtype: grouped.Tiles(4, 16, 16, 4, 1))


@pytest.mark.parametrize("dim", [0, 1])
def test_hidden_states_and_weights(dim):
    far_cases.check_head(dim, BF16)


@pytest.mark.parametrize("check", ["check_attention", "check_decoding", "check_experts", "check_norm"])
def test_what_other_ops_read(check):
    getattr(far_cases, check)()


def test_rows_of_logits_and_of_their_gradients():
    logits, targets = torch.randn(3, 40), torch.tensor([0, 39, 7])
    head = make_head("case", torch.zeros(3, 1), torch.zeros(40, 1), targets, 1.0, None, None)
    taken, kernels = Rows(None, 0, 3), rows.TritonRowKernels()
    found = []
    for of, dz in (
        (logits, torch.zeros(3, 40, dtype=BF16)),
        (far_apart(logits), far_apart(torch.zeros(3, 40, dtype=BF16))),
    ):
        statistics, active = Statistics.zeros(3, logits.device), torch.empty(3, dtype=torch.int64)
        kernels.statistics(of, taken, head, statistics)
        slopes = Slopes(statistics, torch.tensor([1.0, -2.0, 0.5]), torch.full((3,), 0.1))
        kernels.gradients(of, taken, head, slopes, dz, active)
        found.append([statistics.logprobs, statistics.entropy, kernels.partials(of, taken, head), dz])
    for one, other in zip(*found, strict=True):
        assert one.any(1 if one.dim() > 1 else 0).all() and torch.equal(one, other)
