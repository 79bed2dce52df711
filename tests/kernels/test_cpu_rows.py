"""The row kernels of csrc/cpu: statistics, coefficients and gradients in one walk over a row, beside the three calls."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from row_cases import exact_statistics, hard_rows, head_for
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective
from marsrl.kernels.head.rows.cpu import CpuPolicyTerms, CpuRowKernels, CpuTileKernels
from marsrl.kernels.head.rows.protocol import Slopes, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.shards import combined, put_statistics
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.terms import policy_terms
from marsrl.kernels.testing import assert_accurate

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
        "case",
        rows,
        torch.device("cpu"),
        LossInputs(
            objective,
            torch.tensor([0, 1, 2, rows]),
            1.0,
            token_advantages=-COEFFICIENTS[:rows],
            agent_of=torch.tensor([1, 0, 1]),
            num_agents=2,
        ),
    )
    return policy_terms(CpuRowKernels(), tokens, statistics.logprobs, statistics.entropy)


def one_walk(z: Tensor, head: Head, bonus: float) -> tuple[Statistics, CpuPolicyTerms, Tensor, Tensor]:
    """(statistics, terms, dz of the rows kept, their tokens)."""
    statistics, active = Statistics.zeros(6, z.device), torch.empty(6, dtype=torch.int64)
    terms = terms_for(statistics, bonus)
    logits = z.clone()
    count = terms.in_one_walk(logits, Rows.of(None, 6), head, statistics, logits, active).wait()
    return statistics, terms, logits[:count], active[:count]


def three_calls(z: Tensor, head: Head, bonus: float) -> tuple[Statistics, CpuPolicyTerms, Tensor, Tensor]:
    """The same by the calls that the walk stands for."""
    kernels, statistics, active = CpuRowKernels(), Statistics.zeros(6, z.device), torch.empty(6, dtype=torch.int64)
    logits = z.clone()
    kernels.statistics(logits, Rows.of(None, 6), head, statistics)
    terms = terms_for(statistics, bonus)
    terms.evaluate(Rows.of(None, 6))
    slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
    count = kernels.gradients(logits, Rows.of(None, 6), head, slopes, logits, active).wait()
    return statistics, terms, logits[:count], active[:count]


def gradients(z: Tensor, head: Head, tokens: Tensor, bonus: float) -> Tensor:
    """dz of these rows at the dtype of z [6, columns], by autograd."""
    z = z.clone().requires_grad_()
    scaled = z * head.inverse_temperature.to(z.dtype)[:, None]
    logp = torch.log_softmax(scaled, -1)
    entropy = -(logp.exp() * logp.masked_fill(logp.isinf(), 0)).sum(-1)
    loss = (COEFFICIENTS.to(z.dtype) * logp.gather(1, head.targets[:, None])[:, 0] - bonus * entropy).sum()
    return torch.autograd.grad(loss, z)[0].nan_to_num(0)[tokens]


# 131: less than a block of 512; 1024: two blocks; 8197: more and a rest, an odd number
@pytest.mark.parametrize("columns", [1, 131, 1024, 8197])
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
    expected, separate, expected_dz, expected_tokens = three_calls(z, head, bonus)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(terms.sums(), separate.sums(), rtol=1e-6, atol=1e-6)
    for name in ("logprobs", "entropy", "maximum", "log_sum"):  # multiply-adds may be fused in one and not in the other
        torch.testing.assert_close(getattr(statistics, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dz, expected_dz, rtol=1e-5, atol=1e-30)


def by_tiles(z: Tensor, head: Head, bonus: float, width: int) -> tuple[Statistics, CpuPolicyTerms, Tensor, Tensor]:
    """The same for tiles of this width, through bfloat16 exponentials."""
    kernels, statistics, rows = CpuTileKernels(), Statistics.zeros(6, z.device), Rows.of(None, 6)
    tiles = [slice(begin, min(begin + width, head.width)) for begin in range(0, head.width, width)]
    inverse = head.inverse_temperature_at(rows)
    parts = torch.full((len(tiles), 4, 6), torch.nan, dtype=torch.float64)
    kept = [torch.full((6, tile.stop - tile.start), torch.nan, dtype=torch.bfloat16) for tile in tiles]
    for tile, part, exponentials in zip(tiles, parts, kept, strict=True):
        kernels.exponentials(z[:, tile].contiguous(), head.tile(tile), head.targets, inverse, part, exponentials)
    put_statistics(combined(parts, inverse), head, rows, True, statistics)
    terms = terms_for(statistics, bonus)
    terms.evaluate(rows)
    slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
    active = ((slopes.coefficient != 0) | (slopes.entropy_coefficient != 0)).nonzero()[:, 0]
    dz = [torch.full((active.numel(), tile.stop - tile.start), torch.nan) for tile in tiles]
    for tile, part, exponentials, out in zip(tiles, parts, kept, dz, strict=True):
        kernels.gradients(exponentials, part[0], active, active, head.tile(tile), slopes, out)
    return statistics, terms, torch.cat(dz, 1), active


# 1000: the last tile holds padding alone; 600: a block and a rest
@pytest.mark.parametrize(("columns", "width"), [(131, 1000), (2000, 1000), (4099, 600)])
@pytest.mark.parametrize("bonus", [0.0, 0.05])
def test_tiles_give_exact_statistics_and_gradients_rounded_once_to_bfloat16(columns, width, bonus):
    z, head = case(columns)
    statistics, _, dz, tokens = by_tiles(z, head, bonus, width)
    real = z[:, :columns]
    exact = exact_statistics(real.double(), head.targets, head.inverse_temperature.double())
    plain = exact_statistics(real, head.targets, head.inverse_temperature)
    assert_accurate("logprobs", statistics.logprobs, exact[0], plain[0])
    assert_accurate("entropy", statistics.entropy, exact[1], plain[1])
    _, _, expected, expected_tokens = one_walk(z, head, bonus)
    assert torch.equal(tokens, expected_tokens)
    # 2^-8: half an ulp of bfloat16; with a bonus the logarithm of the rounded exponential is off by as much
    torch.testing.assert_close(dz, expected, rtol=1.01 * 2**-8, atol=bonus * 2**-8 + 1e-30)
    at_target = torch.arange(tokens.numel()), head.targets[tokens]
    torch.testing.assert_close(dz[at_target], expected[at_target], rtol=1e-5, atol=1e-7)
    assert not dz[:, columns:].any()


def test_the_maximum_may_rise_in_any_block_and_blocks_of_minus_infinity_add_nothing():
    columns = 5 * 512 + 3
    z = torch.randn(6, columns) + torch.arange(columns) * 0.02  # rises by 10 a block
    z[1] = z[1].flip(0)
    z[2, : 3 * 512], z[3, 512:] = -torch.inf, -torch.inf
    z[4, 700] = 300.0  # everything before shrinks to nothing
    head = head_for(torch.tensor([0, 5, columns - 1, 7, 700, 9]), columns, columns, temperature=torch.rand(6) + 0.5)
    statistics, _, dz, tokens = one_walk(z, head, 0.0)
    exact = exact_statistics(z.double(), head.targets, head.inverse_temperature.double())
    plain = exact_statistics(z, head.targets, head.inverse_temperature)
    assert_accurate("logprobs", statistics.logprobs, exact[0], plain[0])
    assert_accurate("entropy", statistics.entropy, exact[1], plain[1])
    assert_accurate("dz", dz, *(gradients(values, head, tokens, 0.0) for values in (z.double(), z)))


@pytest.mark.parametrize("place_of_nan", [3, 600])
def test_a_nan_logit_makes_its_row_nan(place_of_nan):
    z, head = case(1024)
    z[0, place_of_nan] = torch.nan
    z[2, :], z[2, place_of_nan] = -torch.inf, torch.nan
    statistics, *_ = one_walk(z, head, 0.0)
    assert statistics.logprobs.isnan().tolist() == statistics.entropy.isnan().tolist()
    assert statistics.logprobs.isnan().tolist() == [True, False, True, False, False, False]


@pytest.mark.parametrize("bonus", [0.0, 0.05])
@pytest.mark.parametrize("walk", [one_walk, three_calls, partial(by_tiles, width=4000)])
def test_the_number_of_threads_is_not_seen(walk, bonus):
    z, head = case(8197)  # above the size that one thread keeps for itself
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        _, terms, dz, tokens = walk(z, head, bonus)
        torch.set_num_threads(3)
        _, terms_of_3, dz_of_3, tokens_of_3 = walk(z, head, bonus)
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
