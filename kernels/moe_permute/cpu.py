"""Tokens to rows and back by PyTorch's own kernels for a CPU: each memory once, sums in float32 from the first row to the last.
Not by those for a GPU: there the order of the sums is open."""

from torch import Tensor
from torch.nn.functional import embedding_bag

from marsrl.kernels.moe_permute.two_moves import Moves


def _copies(tokens: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    return tokens.index_select(0, token_of)


def _sums(rows: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    return embedding_bag(row_of, rows, bounds, mode="sum", include_last_offset=True)


CPU_MOVES = Moves(_copies, _sums)
