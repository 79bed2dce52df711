"""pack, kept_rows: the shift is made once, nothing is read that may not be; in PyTorch."""

import packing_cases as cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from marsrl.kernels.packing.reference import kept_rows_reference

# the fixture is the same for every example
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["cpu", "reference"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)


@SETTINGS
@given(cases.layouts)
def test_a_position_predicts_the_next_token_of_its_sequence(implementation, layout):
    cases.check_layout(layout)


def test_what_is_not_given_is_not_made(implementation):
    cases.check_what_is_not_given_is_not_made()


def test_views_are_read_as_they_are(implementation):
    cases.check_views()


def test_sequences_of_any_length(implementation):
    cases.check_long_ones()


def test_wrong_arguments_are_named_with_what_was_expected():
    cases.check_errors()


def test_a_wrong_count_on_a_device_stays_in_bounds():
    mask = torch.tensor([True, False, True, True])
    assert kept_rows_reference(mask, 2).tolist() == [0, 2]
    assert kept_rows_reference(mask, 5).tolist() == [0, 2, 3, -1, -1]
