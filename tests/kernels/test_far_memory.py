"""Kernels on the CPU address more than 2^31 elements.

Tensors whose elements are that far apart give the results of contiguous tensors, and a head has more than 2^31 logits.
"""

from functools import partial

import pytest
import torch
from every_op import TIERS, force
from layout_cases import OPS, check_every_layout, far_apart

from marsrl.kernels import LossInputs, PolicyObjective, linear_policy_loss
from marsrl.kernels.testing import assert_accurate


@pytest.mark.parametrize("name, tier", [each for each in TIERS if each[0] in OPS])
def test_tensors_spread_over_2_to_the_31_elements_are_read(name, tier, monkeypatch):
    force(monkeypatch, name, tier)
    dims = (0, 2) if name.startswith("grouped_linear") else range(4)  # BLAS cannot address columns of x that far apart
    check_every_layout(name, {f"far apart, {dim}": partial(far_apart, dim=dim) for dim in dims})


@pytest.mark.slow  # 2.2 billion logits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beyond_2_to_the_31_logits_are_correct(dtype):
    """All rows get log-probs and entropies. Only rows at both ends and around logit 2^31 have gradients."""
    num_tokens, size, vocab = 14_208, 8, 151_936
    crossing = 2**31 // vocab
    rows = torch.tensor([0, 1, crossing - 1, crossing, crossing + 1, num_tokens - 2, num_tokens - 1])
    hidden, weight = torch.randn(num_tokens, size).to(dtype), torch.randn(vocab, size).to(dtype)
    targets = torch.randint(0, vocab, (num_tokens,))
    targets[-1] = vocab - 1
    advantages = torch.zeros(num_tokens).index_fill_(0, rows, -2.0)
    bounds = torch.tensor([0, num_tokens])
    inputs = LossInputs(PolicyObjective(mpt_probability=None), bounds, 7.0, token_advantages=advantages)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = linear_policy_loss(hidden, weight, targets, inputs)
    result.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.equal(hidden.grad.any(1).nonzero()[:, 0], rows) and result.entropy.isfinite().all()

    def plain(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        selected, head = (each.detach().to(dtype).requires_grad_() for each in (hidden[rows], weight))
        logp = torch.log_softmax(selected @ head.t(), dim=-1)
        taken, entropy = logp.gather(1, targets[rows, None])[:, 0], -(logp.exp() * logp).sum(-1)
        (2 * taken / 7).sum().backward()
        assert selected.grad is not None and head.grad is not None
        return taken.detach(), entropy.detach(), selected.grad, head.grad

    results = result.logprobs[rows], result.entropy[rows], hidden.grad[rows], weight.grad
    names = ("logprobs", "entropy", "hidden.grad", "weight.grad")
    for name, *values in zip(names, results, plain(torch.float64), plain(dtype), strict=True):
        assert_accurate(name, *values)
