"""pack, kept_rows in Triton."""

import packing_cases as cases
from hypothesis import given, settings

SETTINGS = settings(max_examples=12, deadline=None)


@SETTINGS
@given(cases.layouts)
def test_a_position_predicts_the_next_token_of_its_sequence(layout):
    cases.check_layout(layout)


def test_what_is_not_given_is_not_made():
    cases.check_what_is_not_given_is_not_made()


def test_views_are_read_as_they_are():
    cases.check_views()


def test_sequences_of_any_length():
    cases.check_long_ones()
