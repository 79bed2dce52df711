"""The row kernels of csrc/cpu: statistics, coefficients and gradients in one walk over a row, beside the three calls."""

from dataclasses import replace

import pytest
import torch
from cuda_cases import exact_statistics, hard_rows, head_for
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.terms import policy_terms
from marsrl.kernels.rows.cpu import CpuPolicyTerms, CpuRowKernels
from marsrl.kernels.rows.protocol import Statistics
from marsrl.kernels.rows.selection import Rows
from marsrl.kernels.testing import assert_accurate
from marsrl.kernels.vocabulary import Head

PADDING = 3
COEFFICIENTS = torch.tensor([1.5, 0.0, -2.0, 3.0, 0.0, 0.5])  # rows 1 and 4 have nothing to train


def case(columns: int) -> tuple[Tensor, Head]:
    """Logits [6, columns + padding] of hard rows: p = 1, |z| of 200, -inf; and NaN in the padding."""
    z = torch.cat((hard_rows(columns), torch.full((6, PADDING), torch.nan)), dim=1)
    targets = torch.tensor([0, columns - 1, 0, columns - 1, 0, 0])
    return z, head_for(targets, columns + PADDING, columns, temperature=torch.rand(6) + 0.5)


def terms_for(statistics: Statistics, bonus: float, rows: int = 6) -> CpuPolicyTerms:
    """A loss -sum a_t log p_t - bonus sum H of two agents, one row of the first between rows of the second."""
    objective = PolicyObjective(mpt_probability=None, entropy_coef=bonus)
    tokens = policy_tokens(
        "case", rows, torch.device("cpu"), objective=objective, advantages=None, token_advantages=-COEFFICIENTS[:rows],
        mask=None, cu_seqlens=torch.tensor([0, 1, 2, rows]), agent_of=torch.tensor([1, 0, 1]), num_agents=2, gate=None,
        old_logprobs=None, rollout_logprobs=None, reference_logprobs=None, normaliser=1.0,
    )  # fmt: skip
    return policy_terms(CpuRowKernels(), objective, tokens, statistics.logprobs, statistics.entropy)


def one_walk(z: Tensor, head: Head, bonus: float) -> tuple[Statistics, CpuPolicyTerms, Tensor, Tensor]:
    """(statistics, terms, dz of the rows kept, their tokens)."""
    statistics, active, z = Statistics.zeros(6, z.device), torch.empty(6, dtype=torch.int64), z.clone()
    terms = terms_for(statistics, bonus)
    count = terms.in_one_walk(z, Rows.of(None, 6), head, statistics, active).wait()
    return statistics, terms, z[:count], active[:count]


def gradients(z: Tensor, head: Head, tokens: Tensor, bonus: float) -> Tensor:
    """dz of these rows at the dtype of z [6, columns], by autograd."""
    z = z.clone().requires_grad_()
    scaled = z * head.inverse_temperature.to(z.dtype)[:, None]
    logp = torch.log_softmax(scaled, -1)
    entropy = -(logp.exp() * logp.masked_fill(logp.isinf(), 0)).sum(-1)
    loss = (COEFFICIENTS.to(z.dtype) * logp.gather(1, head.targets[:, None])[:, 0] - bonus * entropy).sum()
    return torch.autograd.grad(loss, z)[0].nan_to_num(0)[tokens]


# 131: less than a block of sums; 8197: two blocks and a rest, an odd number
@pytest.mark.parametrize("columns", [1, 131, 8197])
@pytest.mark.parametrize("bonus", [0.0, 0.05])
def test_one_walk_gives_statistics_and_gradients_of_hard_rows(columns, bonus):
    z, head = case(columns)
    statistics, terms, dz, tokens = one_walk(z, head, bonus)
    assert tokens.tolist() == ([0, 2, 3, 5] if bonus == 0 else [0, 1, 2, 3, 4, 5])
    real = z[:, :columns]
    exact = exact_statistics(real.double(), head.targets, head.inverse_temperature.double())
    plain = exact_statistics(real, head.targets, head.inverse_temperature)
    assert_accurate("logprobs", statistics.logprobs, exact[0], plain[0])
    assert_accurate("entropy", statistics.entropy, exact[1], plain[1])
    expected = [gradients(values, head, tokens, bonus) for values in (real.double(), real)]
    for row, token in enumerate(tokens.tolist()):  # each by its own size; with a bonus log p + H cancels where p = 1
        assert_accurate(f"dz of row {token}", dz[row, :columns], expected[0][row], expected[1][row], scale=bonus)
    assert not dz[:, columns:].any() and torch.equal(terms.coefficient, COEFFICIENTS)


@pytest.mark.parametrize("bonus", [0.0, 0.05])
def test_one_walk_equals_the_three_calls(bonus):
    z, head = case(4099)
    statistics, terms, dz, tokens = one_walk(z, head, bonus)
    kernels, expected, active = CpuRowKernels(), Statistics.zeros(6, z.device), torch.empty(6, dtype=torch.int64)
    kernels.statistics(z, Rows.of(None, 6), head, expected)
    separate = terms_for(expected, bonus)
    separate.evaluate(Rows.of(None, 6))
    coefficients = separate.coefficient, separate.entropy_coefficient
    count = kernels.gradients(z, Rows.of(None, 6), head, expected, *coefficients, z, active).wait()
    assert torch.equal(tokens, active[:count])
    torch.testing.assert_close(terms.sums(), separate.sums(), rtol=1e-6, atol=1e-6)
    for name in ("logprobs", "entropy", "maximum", "log_sum"):  # multiply-adds may be fused in one and not in the other
        torch.testing.assert_close(getattr(statistics, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dz, z[:count], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("bonus", [0.0, 0.05])
def test_the_number_of_threads_is_not_seen_in_one_walk(bonus):
    z, head = case(8197)  # above the size that one thread keeps for itself
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _, terms, dz, tokens = one_walk(z, head, bonus)
        torch.set_num_threads(3)
        _, terms_of_3, dz_of_3, tokens_of_3 = one_walk(z, head, bonus)
    finally:
        torch.set_num_threads(before)
    assert (
        torch.equal(dz, dz_of_3) and torch.equal(tokens, tokens_of_3) and torch.equal(terms.sums(), terms_of_3.sums())
    )


def test_a_logit_of_minus_infinity_has_no_gradient_at_all():
    z, head = case(131)
    _, _, dz, tokens = one_walk(z, head, 0.0)
    assert tokens[-1] == 5 and dz[-1, 131 // 2] == 0 and dz.isfinite().all()


def test_a_target_that_is_no_column_is_caught_and_not_read():
    z, head = case(131)
    with pytest.raises(AssertionError, match="target of token 3 is out of range"):
        one_walk(z, replace(head, targets=head.targets.index_fill(0, torch.tensor([3]), 131)), 0.0)
