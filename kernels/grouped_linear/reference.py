"""Reference definition of grouped linear layers, differentiated by autograd."""

import torch
from torch import Tensor


def grouped_linear_reference(x: Tensor, weights: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return the output [T, N]: each expert's tokens_per_expert[e] rows of x, multiplied by weights[e].T."""
    parts = [rows @ weight.t() for rows, weight in zip(x.split(tokens_per_expert.tolist()), weights)]
    return torch.cat(parts) if parts else x.new_empty(0, weights.shape[1])
