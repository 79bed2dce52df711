"""Copies of tokens to rows, and sums of rows, by PyTorch's CPU kernels.

They read each value once, and sum in float32, in the order of the rows. PyTorch's GPU kernels are not used, because the order of
their sums is unspecified.
"""

from torch import Tensor
from torch.nn.functional import embedding_bag

from marsrl.kernels.moe_permute.two_moves import Moves


def _copies(tokens: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    return tokens.index_select(0, token_of)


def _sums(rows: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    return embedding_bag(row_of, rows, bounds, mode="sum", include_last_offset=True)


CPU_MOVES = Moves(_copies, _sums)
