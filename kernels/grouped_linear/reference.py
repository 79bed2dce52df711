"""A linear layer per group of rows, by autograd. The definition."""

import torch
from torch import Tensor

from marsrl.kernels.grouped_linear.counts import Counts


def grouped_linear_reference(x: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """[T, N]: the rows of expert e, counts[e] of them, times weights[e].T."""
    return torch.cat([rows @ weight.t() for rows, weight in zip(x.split(counts.on_host()), weights)])
