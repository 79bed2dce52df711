"""moe_permute and moe_unpermute, built from two operations that are each other's backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """Two functions that move rows, of one implementation.

    copies: (tokens [T, H], token_of, row_of, bounds) -> rows [R, H].
    sums: (rows [R, H], row_of, bounds) -> tokens [T, H].
    """

    copies: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    sums: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Permute:
    """Kernels of moe_permute."""

    moves: Moves

    def forward(
        self, hidden: Tensor, weights: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor, weight_of: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = self.moves.copies(hidden, token_of, row_of, bounds)
        return rows, weights.flatten().index_select(0, weight_of)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        _, weights, _, row_of, bounds, weight_of = args
        grad_hidden = grad_weights = None
        if needs[0]:
            grad_hidden = self.moves.sums(grads[0], row_of, bounds)
        if needs[1]:
            grad_weights = weights.new_zeros(weights.numel()).index_copy_(0, weight_of, grads[1]).view(weights.shape)
        return grad_hidden, grad_weights, None, None, None, None


@dataclass(frozen=True)
class Unpermute:
    """Kernels of moe_unpermute."""

    moves: Moves

    def forward(self, rows: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> tuple[Tensor]:
        return (self.moves.sums(rows, row_of, bounds),)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        return self.moves.copies(grads[0], *args[1:]), None, None, None
