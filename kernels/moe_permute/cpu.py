"""Tokens to rows and back by PyTorch's own kernels for a CPU: each memory once, sums in float32 from the first row to the last.
Not by those for a GPU: there the order of the sums is open."""

from functools import cache

from torch import Tensor
from torch.nn.functional import embedding_bag

from marsrl.kernels.moe_permute.two_moves import Moves, Permute, Unpermute


def _copies(tokens: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    return tokens.index_select(0, token_of)


def _sums(rows: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    return embedding_bag(row_of, rows, bounds, mode="sum", include_last_offset=True)


_MOVES = Moves(_copies, _sums)


@cache
def cpu_permute() -> Permute:
    return Permute(_MOVES)


@cache
def cpu_unpermute() -> Unpermute:
    return Unpermute(_MOVES)
