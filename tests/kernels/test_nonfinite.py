"""Logits that are not finite, on the CPU."""

import pytest
from nonfinite_cases import KINDS, check_logprobs, check_loss


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_plain_pytorchs_and_no_other(kind, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_logprobs(kind)
    check_loss(kind)
