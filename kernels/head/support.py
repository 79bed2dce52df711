"""Restriction of logits to the tokens that the sampler could have drawn (after top-k or top-p).

The other logits are set to -inf, which costs one pass over them. They then have probability 0 and gradient 0, so every
implementation computes the softmax over the kept columns alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.checks import check
from marsrl.kernels.head.rows.subset import Rows


@dataclass(frozen=True)
class Support:
    """Columns of the whole vocabulary from which each of T tokens was drawn.

    ids: [n] int32, the columns of all tokens, concatenated.
    starts, counts: [T] int64. Token t has the columns ids[starts[t]:][:counts[t]], without duplicates; a count of 0 stands for
        every column.
    most: upper bound of counts, known to the host.
    """

    ids: Tensor
    starts: Tensor
    counts: Tensor
    most: int

    def take(self, tokens: Tensor) -> Support:
        """Return the support of these tokens only; tokens is [R] int64."""
        return Support(self.ids, self.starts[tokens], self.counts[tokens], self.most)

    def restrict_(self, logits: Tensor, rows: Rows, first_column: int, num_columns: int) -> None:
        """Set the logits [R, columns] of a vocabulary part to -inf outside of each row's support.

        first_column, num_columns: the part's offset in the vocabulary, and its number of real columns. Each row gets `most` slots
        for ids, so that the host does not have to read counts from the device.
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
