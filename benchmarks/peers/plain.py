"""PyTorch itself: eager, compiled, and its own fused head."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from case import Missing
from torch import Tensor

from peers import LogprobPeer, Peer


def eager_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy, through the full logits: what a trainer without kernels writes."""
    logp = torch.log_softmax(F.linear(hidden, weight).float(), -1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(logp.exp() * logp).sum(-1)


def eager_logprob_detached(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As eager_logprob, with the entropy only as a metric: nothing is saved for its gradient."""
    logp = torch.log_softmax(F.linear(hidden, weight).float(), -1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy


@cache
def compiled(function):  # type: ignore[no-untyped-def]
    return torch.compile(function, dynamic=False)


def torch_linear_cross_entropy() -> Peer | Missing:
    """torch >= 2.13. With reduction="none" it returns the dtype of its input: bfloat16 log-probs of bfloat16 states."""
    name = "torch F.linear_cross_entropy"
    if not hasattr(F, "linear_cross_entropy"):
        return Missing(name, f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    options = torch.nn.LinearCrossEntropyOptions()

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        return -F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options).float(), None

    return LogprobPeer(name, call)
