"""Reference definition of log-probs and entropy of a linear head."""

import torch
from torch import Tensor

from marsrl.kernels.head.support import Support


def linear_logprob_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    num_columns: int,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the target's log-prob and the entropy, both [T], in float32, or float64 for float64 input.

    All logits are stored.

    Logits of padding columns, and outside of a token's support, are -inf, where p and p log p are 0.

    z = hidden @ weight.T / temperature;  log p_y = z_y - logsumexp z;  H = -sum_v p_v log p_v
    """
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logits = hidden.to(dtype) @ weight[:num_columns].to(dtype).t()
    logits = logits / (temperature.to(dtype)[:, None] if isinstance(temperature, Tensor) else temperature)
    logits = logits.masked_fill(_left_out(logits, support), -torch.inf)
    logp = torch.log_softmax(logits, dim=-1)
    terms = logp.exp() * logp.masked_fill(logits == -torch.inf, 0.0)
    return logp.gather(1, targets[:, None].long())[:, 0], -terms.sum(dim=-1)


def _left_out(logits: Tensor, support: Support | None) -> Tensor:
    """Return [T, V] bool, True at the columns that are left out of a token's softmax."""
    is_out = torch.zeros_like(logits, dtype=torch.bool)
    if support is not None:
        for row, start, count in zip(is_out, support.starts.tolist(), support.counts.tolist(), strict=True):
            if count:
                row.fill_(True)[support.ids[start : start + count].long()] = False
    return is_out
