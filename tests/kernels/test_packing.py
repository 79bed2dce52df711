"""pack, unpack, compact, uncompact: every row once, bit for bit, and back; C++, PyTorch, and CUDA on the CPU."""

import packing_cases as cases
import pytest
from emulated_cuda import use_emulated_cuda
from hypothesis import HealthCheck, given, settings

from marsrl.kernels.packing import cuda

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # the fixture is the same for every example


@pytest.fixture(params=["cpu", "reference", "cuda"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)
    if request.param == "cuda":
        use_emulated_cuda(monkeypatch)


@SETTINGS
@given(cases.layouts)
def test_packing_keeps_every_row_once_and_unpacking_brings_it_back(implementation, layout):
    cases.check_pack_and_unpack(layout)


@SETTINGS
@given(cases.masks)
def test_compacting_keeps_the_rows_of_the_mask_and_uncompacting_puts_them_back(implementation, mask):
    cases.check_compact_and_uncompact(mask)


def test_what_a_layout_leaves_out_gets_no_gradient(implementation):
    cases.check_gradients()


def test_a_compiled_caller_gets_the_same(implementation):
    cases.check_compiled_callers()


def test_views_are_read_as_they_are(implementation):
    cases.check_views()


def test_a_mask_of_any_length_is_ranked(implementation):
    cases.check_long_masks()


def test_wrong_arguments_are_named_with_what_was_expected():
    cases.check_errors()


def test_a_wrong_count_on_a_device_stays_in_bounds(monkeypatch):
    use_emulated_cuda(monkeypatch)
    cases.check_counts_that_are_wrong(cuda)
