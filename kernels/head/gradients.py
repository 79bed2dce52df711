"""Gradients of a head, dX and dW, accumulated over chunks of rows of dz."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head


@dataclass(frozen=True)
class Wanted:
    """Choice of the gradients to compute.

    hidden, weight: whether to compute dX and dW. weight_dtype: final dtype of dW; the caller rounds a float32 dW to it.
    """

    hidden: bool = False
    weight: bool = False
    weight_dtype: torch.dtype = torch.float32

    @property
    def any(self) -> bool:
        return self.hidden or self.weight


NOTHING = Wanted()


class HeadGradients:
    """Accumulator of a head's gradients dX [T, H] and dW [V, H] over chunks of rows.

    A gradient that is not wanted is None.

    grad_weight is also None if no row was active. It is float32, or wanted.weight_dtype if a single product on the CPU computes
    all of it.
    """

    def __init__(self, head: Head, hidden: Tensor, wanted: Wanted, in_pieces: bool = False):
        """Start with empty gradients.

        in_pieces: compute dX and dW of one vocabulary piece together, so that its weight is converted to float32 once.
        """
        self.gemms = HeadGemms(head.weight, hidden.dtype)
        self.wanted = wanted
        self._in_pieces = in_pieces and self.gemms.is_converted
        self.hidden = hidden
        self._grad_hidden: Tensor | None = None
        self.grad_weight: Tensor | None = None

    @property
    def grad_hidden(self) -> Tensor | None:
        """Return dX [T, H] in the dtype of hidden; rows that were never added have gradient 0."""
        if self._grad_hidden is None and self.wanted.hidden:
            self._grad_hidden = torch.zeros(self.hidden.shape, dtype=self.hidden.dtype, device=self.hidden.device)
        return self._grad_hidden

    def add(self, dz: Tensor, tokens: Tensor, is_last: bool) -> None:
        """Add the gradients of n rows.

        dz: [n, V]. tokens: [n] int64, ascending. is_last: True if no more rows will be added.
        """
        if tokens.numel() == 0:
            return
        if self._in_pieces:
            self.add_pieces(lambda tile: dz[:, tile].float(), tokens, is_last)
            return
        rows = _contiguous_or_listed(tokens)
        if self.wanted.hidden:
            self.put(rows, self.gemms.hidden_gradient(dz))
        if self.wanted.weight:
            self.grad_weight = self.gemms.add_weight_gradient(self.grad_weight, dz, rows.take(self.hidden))

    def add_pieces(
        self, dz_of: Callable[[slice], Tensor], tokens: Tensor, is_last: bool, room: Tensor | None = None
    ) -> None:
        """Add gradients like `add`, with dz computed one piece of the vocabulary at a time.

        dz_of: takes a slice from gemms.tiles(), and returns these columns of dz, [n, columns] float32.
        room: [>= n, V] bfloat16, memory for all of dz, required if gemms.collects_dz. A piece is written only after dz_of has
            returned it, so `room` may hold the exponentials that dz_of reads.
        """
        rows = _contiguous_or_listed(tokens)
        grad_hidden, adds = None, self.grad_weight is not None
        if self.wanted.hidden:
            shape = rows.count, self.hidden.shape[1]
            dtype = torch.float32 if room is None else room.dtype
            grad_hidden = torch.empty(shape, dtype=dtype, device=self.hidden.device)
        if self.wanted.weight and self.grad_weight is None:
            dtype = self.wanted.weight_dtype if is_last else torch.float32
            self.grad_weight = torch.empty(self.gemms.weight.shape, dtype=dtype, device=self.hidden.device)
        dz = None if room is None else room[: rows.count]
        self.gemms.hidden_and_weight_gradient(dz_of, rows.take(self.hidden), grad_hidden, self.grad_weight, adds, dz)
        if grad_hidden is not None:
            self.put(rows, grad_hidden)

    def put(self, rows: Rows, gradient: Tensor) -> None:
        """Set these rows of grad_hidden to the gradient [R, H], which may have any dtype."""
        if rows.count == self.hidden.shape[0]:  # one chunk has all rows, as with a small vocabulary
            self._grad_hidden = gradient.to(self.hidden.dtype)
            return
        assert self.grad_hidden is not None
        rows.put(self.grad_hidden, gradient.to(self.hidden.dtype))


def _contiguous_or_listed(tokens: Tensor) -> Rows:
    """Return the tokens as Rows, as a range if they are contiguous in CPU memory.

    On a device this check would synchronise.
    """
    if tokens.device.type == "cpu":
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 == tokens.numel():
            return Rows(None, first, tokens.numel())
    return Rows(tokens, 0, tokens.numel())
