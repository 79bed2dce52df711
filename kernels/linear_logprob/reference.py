"""Log-probs and entropy of a linear head in plain PyTorch: the definition."""

import torch
from torch import Tensor


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float | Tensor, num_columns: int
) -> tuple[Tensor, Tensor]:
    """(log p_y, H) [T] in float32, or float64 for such input; logits in full; padded columns left out.

    z = hidden @ weight.T / temperature;  log p_y = z_y - logsumexp z;  H = -sum_v p_v log p_v
    """
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    logits = hidden.to(dtype) @ weight[:num_columns].to(dtype).t()
    logits = logits / (temperature.to(dtype)[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = torch.log_softmax(logits, dim=-1)
    return logp.gather(1, targets[:, None].long())[:, 0], -(logp.exp() * logp).sum(dim=-1)
