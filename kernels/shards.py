"""Statistics of a vocabulary that is cut over ranks: each shard's part, put together by two small all-reduces."""

import torch
import torch.distributed as dist
from torch import Tensor

from .rows.protocol import RowKernels, Statistics
from .rows.selection import Rows
from .vocabulary import Head


def sharded_statistics(kernels: RowKernels, head: Head, logits: Tensor, rows: Rows, out: Statistics) -> None:
    """Fill `out` at these rows from this rank's logits [R, V]; the same bits on every rank of head.tp_group."""
    partials = kernels.partials(logits, rows, head)
    targets = rows.take(head.targets)
    local = targets - head.first_column
    inverse = head.inverse_temperature_at(rows)
    maximum = partials[0].clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=head.tp_group)
    # e^(d + shift) for sums that were taken relative to this shard's own maximum; -1e4 stands for "nothing here"
    shift = ((partials[0] - maximum) * inverse).clamp_(min=-1e4)
    scale = shift.exp()
    is_mine = (local >= 0) & (local < head.num_columns)
    centred = torch.where(is_mine, (partials[3] - maximum) * inverse, 0.0)
    sums = torch.stack((partials[1] * scale, (partials[2] + shift * partials[1]) * scale, centred))
    dist.all_reduce(sums, group=head.tp_group)
    log_sum = sums[0].log()
    logprobs = sums[2] - log_sum
    if not kernels.is_host:  # a bad target belongs to no shard: its row is told from log p = -log_sum
        logprobs = torch.where((targets >= 0) & (targets < head.vocab_size), logprobs, torch.nan)
    rows.put(out.logprobs, logprobs.float())
    rows.put(out.entropy, (log_sum - sums[1] / sums[0]).float())
    rows.put(out.maximum, maximum.float())
    rows.put(out.log_sum, log_sum.float())
