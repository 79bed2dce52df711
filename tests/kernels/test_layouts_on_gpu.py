"""On a GPU: packing, group_advantage, mpt_gate and the sums of a policy loss, by the bodies of the CPU's tests."""

import packing_cases
import pytest
import row_cases
import torch
from hypothesis import HealthCheck, given, settings
from test_group_advantage import (
    test_a_group_by_hand,
    test_a_group_of_one_has_no_baseline_unless_raw_is_asked_for,
    test_a_missing_reward_is_left_out_and_gets_zero,
    test_an_all_equal_group_trains_nothing,
    test_groups_do_not_mix_whatever_their_order,
    test_the_normalisations_of_dr_mas_by_hand,
)
from test_mpt_gate import (
    test_a_sample_is_gated_by_its_own_mean_entropy_over_trained_tokens,
    test_long_sequences_are_summed_in_double,
    test_the_batch_is_gated_as_one,
    test_without_trained_tokens_nothing_is_gated,
)

from marsrl.kernels import kept_rows, mpt_gate, pack

__all__ = [
    "test_a_group_by_hand",
    "test_a_group_of_one_has_no_baseline_unless_raw_is_asked_for",
    "test_a_missing_reward_is_left_out_and_gets_zero",
    "test_a_sample_is_gated_by_its_own_mean_entropy_over_trained_tokens",
    "test_an_all_equal_group_trains_nothing",
    "test_groups_do_not_mix_whatever_their_order",
    "test_long_sequences_are_summed_in_double",
    "test_the_batch_is_gated_as_one",
    "test_the_normalisations_of_dr_mas_by_hand",
    "test_without_trained_tokens_nothing_is_gated",
]
pytestmark = pytest.mark.gpu
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _tensors_on_the_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")


@SETTINGS
@given(packing_cases.layouts)
def test_a_position_predicts_the_next_token_of_its_sequence(triton, layout):
    packing_cases.check_layout(layout)


def test_what_is_not_given_is_not_made(triton):
    packing_cases.check_what_is_not_given_is_not_made()


def test_views_are_read_as_they_are(triton):
    packing_cases.check_views()


def test_sequences_of_any_length(triton):
    packing_cases.check_long_ones()


def test_a_large_batch_is_packed_and_gated_without_a_wait(triton):
    lengths = torch.randint(1, 3000, (64,))
    num_tokens = int(lengths.sum())
    bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    token_ids, is_sampled = torch.arange(num_tokens), torch.rand(num_tokens) < 0.5
    num_kept = int(is_sampled.sum() - is_sampled[bounds[:-1]].sum())  # nobody predicts the first of a sequence
    entropy, positive = torch.rand(num_tokens), torch.rand(64) < 0.5

    def all_of_it():
        packed = pack(token_ids, is_sampled, bounds, num_tokens, logprobs=entropy)
        mpt_gate(entropy, packed.mask, bounds, positive)
        return packed, kept_rows(packed.mask, num_kept=num_kept)

    all_of_it()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, rows = all_of_it()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(packed.token_ids, token_ids) and torch.equal(rows, packed.mask.nonzero()[:, 0])
    assert torch.equal(packed.logprobs[rows], entropy[rows + 1])


def test_the_sums_of_many_agents_are_kept_apart(triton):
    row_cases.check_many_agents()
