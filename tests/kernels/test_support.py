"""The head over the columns that a token was drawn from: against a dense softmax in float64."""

import pytest
import torch
from fused_head import (
    Head,
    head_case,
    support_of,
)
from torch import Tensor

from marsrl.kernels import Support, linear_logprob


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
