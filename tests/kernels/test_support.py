"""The head over the columns that a token was drawn from: against a dense softmax in float64."""

import pytest
import torch
from fused_head import (
    Head,
    arguments_for,
    head_case,
    linear_policy_loss,
    support_of,
)
from torch import Tensor

from marsrl.kernels import PolicyObjective, Support, linear_logprob
from marsrl.kernels.head.rows.subset import Rows


def is_kept(support: Support, vocab: int) -> Tensor:
    """[T, V] bool."""
    kept = torch.zeros(len(support.counts), vocab, dtype=torch.bool)
    for row, start, count in zip(kept, support.starts.tolist(), support.counts.tolist()):
        row[support.ids[start : start + count].long()] = True
        if count == 0:
            row.fill_(True)
    return kept


def dense(case: Head, support: Support, temperature: Tensor | float, columns: int) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) by exponentials divided by their sum over what is kept: no -inf, no kernel, no reference of ours."""
    hidden, weight, targets = case
    divisor = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    logits = hidden @ weight[:columns].t() / divisor
    kept = is_kept(support, columns)
    share = torch.where(kept, (logits - logits.detach().amax(-1, keepdim=True)).exp(), 0.0)
    share = share / share.sum(-1, keepdim=True)
    logs = torch.where(kept, share, 1.0).log()
    return logs.gather(1, targets[:, None])[:, 0], -(share * logs).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, "per token"])
def test_log_probs_entropy_and_gradients_are_those_of_the_softmax_over_the_support(dtype, temperature):
    torch.manual_seed(0)
    columns, width = 1531, 1600  # two tiles of the vocabulary of a bfloat16 weight, and padding
    hidden, weight, targets = head_case(40, 16, width)
    hidden, weight, targets = hidden.to(dtype), weight.to(dtype), targets % columns
    heat = torch.rand(40) + 0.5 if temperature == "per token" else temperature
    support = support_of(targets, columns)
    upstream = torch.randn(2, 40, dtype=torch.float64)

    def run(function, dtype):
        leaves = [each.detach().to(dtype).requires_grad_() for each in (hidden, weight)]
        found = function(*leaves)
        sum((up * each.double()).sum() for up, each in zip(upstream, found)).backward()
        return [*(each.detach().double() for each in found), *(leaf.grad.double() for leaf in leaves)]

    def ours(hidden, weight):
        found = linear_logprob(hidden, weight, targets, temperature=heat, real_vocab_size=columns, support=support)
        return found.logprobs, found.entropy

    exact = run(lambda h, w: dense((h, w, targets), support, heat, columns), torch.float64)
    found = run(ours, dtype)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float64: 1e-6}[dtype]
    for one, other in zip(found, exact):
        torch.testing.assert_close(one, other, atol=tolerance * float(other.abs().max()), rtol=tolerance)
    assert not found[3][columns:].any() and float(found[0].max()) <= 0
    alone = support.counts == 1
    assert alone.any() and not found[0][alone].any() and not found[1][alone].any() and not found[2][alone].any()


def test_columns_outside_of_the_support_have_no_gradient_at_all():
    torch.manual_seed(2)
    hidden, weight, targets = head_case(30, 16, 400)
    support = support_of(targets, 400, whole=0.0, most=4)
    objective = PolicyObjective(entropy_coef=0.1)
    arguments = arguments_for((hidden, weight, targets), "pseudo on-policy", support=support, objective=objective)
    weight.requires_grad_()
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    used = is_kept(support, 400)[arguments["mask"]].any(0)
    assert int((~used).sum()) > 30 and not weight.grad[~used].any() and weight.grad[used].any()


def test_every_column_kept_is_the_same_as_no_support():
    torch.manual_seed(3)
    hidden, weight, targets = head_case(20, 16, 50)
    everything = torch.arange(50, dtype=torch.int32).repeat(20)
    support = Support(everything, torch.arange(20) * 50, torch.full((20,), 50), 50)
    found = linear_logprob(hidden, weight, targets, support=support)
    right = linear_logprob(hidden, weight, targets)
    assert torch.equal(found.logprobs, right.logprobs) and torch.equal(found.entropy, right.entropy)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_part_of_the_vocabulary_keeps_its_own_columns(parts):
    torch.manual_seed(4)
    targets = torch.randint(0, 50, (12,))
    support = support_of(targets, 50, most=6)
    logits, width = torch.randn(12, 50), 50 // parts
    right = logits.masked_fill(~is_kept(support, 50), -torch.inf)
    ids = torch.tensor([1, 2, 7, 11])
    for rows in (Rows(None, 3, 6), Rows(ids, 0, 4)):
        for part in range(parts):
            piece = rows.take(logits)[:, part * width : (part + 1) * width].clone()
            support.restrict_(piece, rows, part * width, width)
            assert torch.equal(piece, rows.take(right)[:, part * width : (part + 1) * width])
