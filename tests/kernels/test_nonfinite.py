"""Numbers that are not finite, on the CPU."""

import pytest
from nonfinite_cases import KINDS, SETTINGS, check_given_logprobs, check_head, check_logprobs, check_loss


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_plain_pytorchs_and_no_other(kind, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_logprobs(kind)
    check_loss(kind)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_what_a_trained_token_reads_makes_the_loss_not_finite_and_nothing_else_does(setting, implementation):
    check_given_logprobs(setting, implementation)


@pytest.mark.parametrize("design", ["cpu", "cpu bfloat16", "reference"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_same_of_a_head(setting, design):
    check_head(setting, design)
