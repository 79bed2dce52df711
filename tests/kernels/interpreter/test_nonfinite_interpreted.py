"""Logits that are not finite, in Triton."""

import pytest
from nonfinite_cases import KINDS, check_logprobs, check_loss


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_plain_pytorchs_and_no_other(kind):
    check_logprobs(kind)
    check_loss(kind)
