"""pack, unpack, compact, uncompact in Triton."""

import packing_cases as cases
from hypothesis import given, settings

SETTINGS = settings(max_examples=12, deadline=None)


@SETTINGS
@given(cases.layouts)
def test_packing_keeps_every_row_once_and_unpacking_brings_it_back(layout):
    cases.check_pack_and_unpack(layout)


@SETTINGS
@given(cases.masks)
def test_compacting_keeps_the_rows_of_the_mask_and_uncompacting_puts_them_back(mask):
    cases.check_compact_and_uncompact(mask)


def test_what_a_layout_leaves_out_gets_no_gradient():
    cases.check_gradients()


def test_views_are_read_as_they_are():
    cases.check_views()


def test_a_mask_of_any_length_is_ranked():
    cases.check_long_masks()


def test_a_wrong_count_on_a_device_stays_in_bounds():
    from marsrl.kernels.packing import triton_impl

    cases.check_counts_that_are_wrong(triton_impl)
