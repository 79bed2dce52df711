"""pack pairs each position with its sequence's next token and reads no masked value; kept_rows lists a mask's rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marsrl.kernels import kept_rows, mpt_gate, pack

# For each sequence, which of its tokens are sampled. Sequences may be empty, but there is at least one, to which padding can
# belong.
FLAGS = st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(FLAGS, st.integers(0, 3))
def test_a_position_predicts_the_next_token_of_its_sequence(flags, padding):
    """Compare each position with a result computed by a loop; values that must not be read are NaN."""
    sampled = [flag for each in flags for flag in each]
    token_ids = torch.randint(1, 1000, (len(sampled),), dtype=torch.int32)
    values = torch.rand(2, len(sampled)).masked_fill(~torch.tensor(sampled, dtype=torch.bool), math.nan)
    bounds = torch.tensor([0, *map(len, flags)]).cumsum(0)
    bounds[-1] += padding
    is_sampled = torch.tensor(sampled, dtype=torch.bool)
    packed = pack(token_ids, is_sampled, bounds.int(), int(bounds[-1]), logprobs=values[0], weights=values[1])
    ids, numbers, rows, start = token_ids.tolist(), values.tolist(), [], 0
    for sequence in flags:
        for position in range(len(sequence)):
            following, has_next = start + position + 1, position + 1 < len(sequence)
            is_trained = has_next and sequence[position + 1]
            row = ids[following - 1], position, ids[following] if has_next else 0, is_trained
            rows.append(row + tuple(number[following] if is_trained else 0.0 for number in numbers))
        start += len(sequence)
    rows += [(0, len(flags[-1]) + position, 0, False, 0.0, 0.0) for position in range(padding)]
    assert list(zip(*(each.tolist() for each in vars(packed).values()))) == rows
    dtypes = [torch.int64, torch.int64, torch.int64, torch.bool, torch.float32, torch.float32]
    assert [each.dtype for each in vars(packed).values()] == dtypes


def test_missing_inputs_give_no_outputs():
    found = pack(torch.tensor([3, 4]), torch.tensor([False, True]), torch.tensor([0, 2]), 2)
    assert found.logprobs is None and found.weights is None
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = pack(nothing, nothing.bool(), torch.tensor([0]), 0)
    assert [each.shape for each in vars(empty).values() if each is not None] == [(0,)] * 4


def test_rows_of_a_mask_are_listed_in_order():
    for size in (0, 1, 1025):
        mask = torch.rand(size) < 0.3
        assert torch.equal(kept_rows(mask), mask.nonzero()[:, 0])
        assert torch.equal(kept_rows(mask, num_kept=int(mask.sum())), mask.nonzero()[:, 0])


@pytest.mark.gpu
def test_packing_and_gating_on_a_gpu_do_not_synchronise(monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    lengths = torch.randint(1, 3000, (64,), device="cuda")
    num_tokens = int(lengths.sum())
    bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    token_ids, is_sampled = torch.arange(num_tokens, device="cuda"), torch.rand(num_tokens, device="cuda") < 0.5
    num_kept = int(is_sampled.sum() - is_sampled[bounds[:-1]].sum())  # the first token of a sequence is not predicted
    entropy, positive = torch.rand(num_tokens, device="cuda"), torch.rand(64, device="cuda") < 0.5

    def all_of_it():
        packed = pack(token_ids, is_sampled, bounds, num_tokens, logprobs=entropy)
        mpt_gate(entropy, packed.mask, bounds, positive)
        return packed, kept_rows(packed.mask, num_kept=num_kept)

    all_of_it()  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, rows = all_of_it()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(packed.token_ids, token_ids) and torch.equal(rows, packed.mask.nonzero()[:, 0])
    assert torch.equal(packed.logprobs[rows], entropy[rows + 1])
    # A wrong num_kept causes no access out of bounds.
    mask = torch.tensor([True, False, True, True], device="cuda")
    assert kept_rows(mask, num_kept=2).tolist() == [0, 2] and kept_rows(mask, num_kept=5).tolist() == [0, 2, 3, -1, -1]
