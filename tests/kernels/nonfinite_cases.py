"""What becomes of a row whose logits are not finite: what plain PyTorch makes of it, and the other rows are as without."""

import torch
from fused_head import linear_policy_loss
from torch import Tensor

from marsrl.kernels import PolicyObjective, linear_logprob

ROW, TARGET, OTHER, VOCAB, LARGE = 1, 3, 70, 131, 1e20
KINDS = {
    "nan": {OTHER: torch.nan},
    "+inf": {OTHER: LARGE},
    "+inf at the target": {TARGET: LARGE},
    "-inf": {OTHER: -LARGE},
    "-inf at the target": {TARGET: -LARGE},
    "-inf in all columns": dict.fromkeys(range(VOCAB), -LARGE),
}
FINITE = ("-inf", "-inf at the target")


def case(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, targets: products of 1e20 overflow, in row ROW alone, the one that the first hidden unit is for."""
    hidden, weight = torch.randn(5, 8), torch.randn(VOCAB, 8)
    hidden[:, 0], weight[:, 0] = 0, 0
    hidden[ROW, 0] = LARGE
    for column, value in KINDS[kind].items():
        weight[column, 0] = 0 if value != value else value
    if kind == "nan":
        hidden[ROW, 1] = torch.nan
    return hidden.requires_grad_(), weight.requires_grad_(), torch.full((5,), TARGET)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.t(), dim=-1)
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def check_logprobs(kind: str) -> None:
    hidden, weight, targets = case(kind)
    found = linear_logprob(hidden, weight, targets)
    logprobs, entropy = plain(hidden.detach(), weight.detach(), targets)
    torch.testing.assert_close(found.logprobs.detach(), logprobs, equal_nan=True)
    torch.testing.assert_close(found.entropy.detach(), entropy, equal_nan=True)
    found.logprobs.sum().backward()
    assert hidden.grad is not None
    others = torch.arange(5) != ROW
    clean = hidden.detach()[others].requires_grad_()
    plain(clean, weight.detach(), targets[others])[0].sum().backward()
    torch.testing.assert_close(hidden.grad[others, 1:], clean.grad[:, 1:])  # the first unit meets 1e20
    assert bool(hidden.grad[ROW].isfinite().all()) == (kind in FINITE)


def check_loss(kind: str) -> None:
    """A trained row that is NaN makes a loss that is: it does not vanish. A masked one is not read."""
    mask = torch.ones(5, dtype=torch.bool)
    for is_trained in (True, False):
        mask[ROW] = is_trained
        hidden, weight, targets = case(kind)
        result = linear_policy_loss(
            hidden,
            weight,
            targets,
            objective=PolicyObjective(mpt_probability=None),
            cu_seqlens=torch.tensor([0, 2, 5]),
            advantages=torch.tensor([1.0, -1.0]),
            mask=mask,
            old_logprobs=torch.full((5,), -3.0),
            normaliser=5.0,
        )
        result.loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        is_finite = not is_trained or kind in FINITE
        assert bool(result.loss.isfinite()) == is_finite, (kind, is_trained)
        if not is_trained:
            assert weight.grad.isfinite().all() and not hidden.grad[ROW].any()
