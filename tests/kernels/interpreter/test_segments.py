"""group_advantage and mpt_gate in Triton: the tests of the C++ once more."""

from test_group_advantage import (
    test_a_group_by_hand,
    test_a_group_of_one_has_no_baseline_unless_raw_is_asked_for,
    test_a_missing_reward_is_left_out_and_gets_zero,
    test_an_all_equal_group_trains_nothing,
    test_every_implementation_equals_the_definition,
    test_groups_do_not_mix_whatever_their_order,
    test_no_samples_give_no_advantages,
    test_of_each_group_the_mean_is_zero_and_the_spread_one_or_nothing,
    test_the_normalisations_of_dr_mas_by_hand,
    test_the_order_of_samples_and_a_shift_of_all_rewards_change_nothing,
)
from test_mpt_gate import (
    test_a_sample_is_gated_by_its_own_mean_entropy_over_trained_tokens,
    test_long_sequences_are_summed_in_double,
    test_the_batch_is_gated_as_one,
    test_without_trained_tokens_nothing_is_gated,
)

__all__ = [
    "test_a_group_by_hand",
    "test_a_group_of_one_has_no_baseline_unless_raw_is_asked_for",
    "test_a_missing_reward_is_left_out_and_gets_zero",
    "test_a_sample_is_gated_by_its_own_mean_entropy_over_trained_tokens",
    "test_an_all_equal_group_trains_nothing",
    "test_every_implementation_equals_the_definition",
    "test_groups_do_not_mix_whatever_their_order",
    "test_long_sequences_are_summed_in_double",
    "test_no_samples_give_no_advantages",
    "test_of_each_group_the_mean_is_zero_and_the_spread_one_or_nothing",
    "test_the_batch_is_gated_as_one",
    "test_the_normalisations_of_dr_mas_by_hand",
    "test_the_order_of_samples_and_a_shift_of_all_rewards_change_nothing",
    "test_without_trained_tokens_nothing_is_gated",
]
