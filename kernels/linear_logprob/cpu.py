"""Sweeps over a head in chunks: statistics in the forward, recomputed logits and gradients in the backward."""

import torch
from torch import Tensor

from ..vocabulary import Head, HeadGradients, Rows, Statistics


def sweep_statistics(head: Head, hidden: Tensor, rows: Rows) -> Statistics:
    """Statistics of these rows of hidden [T, H]; 0 at the others. 2THV FLOPs."""
    statistics = Statistics.zeros(hidden.shape[0])
    chunks = rows.chunks(head.chunk_rows)
    buffer = torch.empty(max((chunk.count for chunk in chunks), default=0), head.width)
    for chunk in chunks:
        logits = buffer[: chunk.count]
        head.logits(chunk.take(hidden), logits)
        head.statistics(logits, chunk, statistics)
    return statistics


def sweep_gradients(
    head: Head,
    hidden: Tensor,
    statistics: Statistics,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    wants_hidden: bool,
    wants_weight: bool,
) -> HeadGradients:
    """dX and dW from dL/dlogp and dL/dH [T] float32, with logits computed again: 6THV for the rows that have any."""
    gradients = HeadGradients(head, hidden, wants_hidden, wants_weight)
    rows = Rows.of((coefficient != 0) | (entropy_coefficient != 0), hidden.shape[0])
    chunks = rows.chunks(head.chunk_rows)
    buffer = torch.empty(max((chunk.count for chunk in chunks), default=0), head.width)
    active = torch.empty(buffer.shape[0], dtype=torch.int64)
    for chunk in chunks:
        logits = buffer[: chunk.count]
        head.logits(chunk.take(hidden), logits)
        kept = head.gradients_(logits, chunk, statistics, coefficient, entropy_coefficient, active)
        gradients.add(logits[:kept], active[:kept])
    return gradients
