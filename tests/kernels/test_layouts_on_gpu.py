"""On a GPU: packing, group_advantage, mpt_gate and the row kernels of csrc/cuda, by the bodies of the CPU's tests."""

import cuda_cases
import packing_cases
import pytest
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

from marsrl.kernels import compact, mpt_gate, pack, uncompact, unpack
from marsrl.kernels.cuda_library import machine_lacks_cuda

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


@pytest.fixture(params=["triton", "cuda"])
def implementation(request, monkeypatch):
    if request.param == "cuda" and machine_lacks_cuda() is not None:
        pytest.skip(machine_lacks_cuda())
    monkeypatch.setenv("MARSRL_KERNELS", request.param)


@pytest.fixture
def cuda_library():
    if machine_lacks_cuda() is not None:
        pytest.skip(machine_lacks_cuda())


@SETTINGS
@given(packing_cases.layouts)
def test_packing_keeps_every_row_once_and_unpacking_brings_it_back(implementation, layout):
    packing_cases.check_pack_and_unpack(layout)


@SETTINGS
@given(packing_cases.masks)
def test_compacting_keeps_the_rows_of_the_mask_and_uncompacting_puts_them_back(implementation, mask):
    packing_cases.check_compact_and_uncompact(mask)


def test_what_a_layout_leaves_out_gets_no_gradient(implementation):
    packing_cases.check_gradients()


def test_views_are_read_as_they_are(implementation):
    packing_cases.check_views()


def test_a_mask_of_any_length_is_ranked(implementation):
    packing_cases.check_long_masks()


def test_large_layouts_and_counts_from_the_host_never_wait(implementation):
    lengths = torch.randint(0, 3000, (64,))
    num_tokens = int(lengths.sum())
    padded = torch.randn(64, 3000, 128, dtype=torch.bfloat16)
    mask = torch.rand(num_tokens) < 0.5
    num_kept = int(mask.sum())
    entropy, positive = torch.rand(num_tokens), torch.rand(64) < 0.5

    def all_of_them():
        packed = pack(padded, lengths, num_tokens=num_tokens)
        kept = compact(packed.values, mask, num_kept=num_kept)
        rows = uncompact(kept.values, kept.ids, num_tokens)
        mpt_gate(entropy, mask, packed.cu_seqlens, positive)
        return packed.values, kept.ids, rows, unpack(rows, packed.cu_seqlens, max_length=3000)

    all_of_them()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed, ids, rows, again = all_of_them()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    is_token = torch.arange(3000) < lengths[:, None]
    assert torch.equal(packed, padded[is_token]) and torch.equal(ids, mask.nonzero()[:, 0])
    assert torch.equal(rows, packed * mask[:, None]) and torch.equal(again[is_token], rows)


@pytest.mark.parametrize("columns", [*cuda_cases.COLUMNS, 151936, 152063])
def test_statistics_are_those_of_the_row_and_of_no_other(columns, cuda_library):
    cuda_cases.check_statistics(columns)


@pytest.mark.parametrize("columns", [*cuda_cases.COLUMNS, 151936, 152063])
@pytest.mark.parametrize("dtype, padding", [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 3)])
def test_rows_with_a_coefficient_become_gradients_side_by_side(columns, dtype, padding, cuda_library):
    cuda_cases.check_gradients(columns, dtype, padding)


def test_partials_of_a_shard(cuda_library):
    cuda_cases.check_partials()


def test_a_bad_target_gives_nan(cuda_library):
    cuda_cases.check_bad_targets_give_nan()


def test_the_sums_of_many_agents_are_kept_apart(implementation):
    cuda_cases.check_many_agents()
