"""Restriction of logits to the columns that a token was drawn from.

A logit of -inf has probability 0 and gradient 0, so statistics, objective and gradients are those of the softmax over the
kept columns, in every implementation. Setting them costs one pass over the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.checks import check
from marsrl.kernels.head.rows.subset import Rows


@dataclass(frozen=True)
class Support:
    """Columns of the whole vocabulary that each of T tokens was drawn from.

    ids [n] int32: columns of all tokens, concatenated. starts, counts [T] int64: token t has ids[starts[t]:][:counts[t]], without
    duplicates; count 0: every column. most: upper bound of counts, known to the host.
    """

    ids: Tensor
    starts: Tensor
    counts: Tensor
    most: int

    def take(self, tokens: Tensor) -> Support:
        """Return the support of these tokens [R] int64 alone."""
        return Support(self.ids, self.starts[tokens], self.counts[tokens], self.most)

    def restrict_(self, logits: Tensor, rows: Rows, first_column: int, num_columns: int) -> None:
        """Set logits [R, columns] of a part of the vocabulary to -inf outside of each row's support, in place.

        first_column, num_columns: the part's offset, and its number of real columns. Each row gets `most` slots, so that the
        number of ids is not read from the device.
        """
        if rows.count == 0 or num_columns == 0:
            return
        starts, counts = rows.take(self.starts), rows.take(self.counts)
        slot = torch.arange(self.most, device=logits.device)
        columns = self.ids[(starts[:, None] + slot).clamp_(max=self.ids.numel() - 1)].long() - first_column
        is_out = (slot >= counts[:, None]) | (columns < 0) | (columns >= num_columns)  # [R, most]
        columns.masked_fill_(is_out, 0)
        kept_logits = logits.gather(1, columns).masked_fill_(is_out, -torch.inf)
        logits.masked_fill_(counts[:, None] > 0, -torch.inf)
        # Unused slots write -inf to column 0, which amax ignores.
        logits.scatter_reduce_(1, columns, kept_logits, "amax")


def check_support(op: str, support: Support, num_tokens: int, device: torch.device) -> None:
    """Raise ValueError unless the arrays' shapes fit together; the column ids are not read."""
    check(op, "support.ids", support.ids, (None,), (torch.int32,), device)
    for name in ("starts", "counts"):
        check(op, f"support.{name}", getattr(support, name), (num_tokens,), (torch.int64,), device)
    if support.ids.numel() == 0:
        raise ValueError(f"{op}: support.ids is empty; pass no support if all tokens use the whole vocabulary")
