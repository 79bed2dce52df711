"""Numbers that are not finite, in Triton."""

import pytest
from nonfinite_cases import FEW, KINDS, check_given_logprobs, check_head, check_logprobs, check_loss


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_plain_pytorchs_and_no_other(kind):
    check_logprobs(kind)
    check_loss(kind)


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_what_a_trained_token_reads_makes_the_loss_not_finite_and_nothing_else_does(setting):
    check_given_logprobs(setting, "triton")


@pytest.mark.parametrize("design", ["triton", "triton without compaction", "triton_gemm"])
@pytest.mark.parametrize("setting", FEW, ids=str)
def test_the_same_of_a_head(setting, design):
    check_head(setting, design)
