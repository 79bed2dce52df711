"""Statistics of a vocabulary that is cut over ranks: each shard's part, put together after one small all-gather."""

import torch
import torch.distributed as dist
from torch import Tensor

from .rows.protocol import Statistics
from .rows.selection import Rows
from .vocabulary import Head


class ShardStatistics:
    """Statistics of a chunk while the parts of the shards, four numbers a row, travel between the ranks.

    flight = ShardStatistics(head, rows, partials)   # returns at once
    ...                                              # the logits of the next chunk
    flight.put(statistics)
    """

    def __init__(self, head: Head, rows: Rows, own: Tensor, is_host: bool):
        """own: [4, R] float64, RowKernels.partials of this shard."""
        self._head, self._rows, self._is_host = head, rows, is_host
        self._own = own  # lives until it is sent
        world = dist.get_world_size(head.tp_group)
        self._all = self._own.new_empty(world * self._own.shape[0], rows.count)  # [W 4, R] float64
        self._work = dist.all_gather_into_tensor(self._all, self._own, group=head.tp_group, async_op=True)

    def put(self, out: Statistics) -> None:
        """Fill `out` at the rows of the chunk: every rank adds in the order of the ranks, to the same bits."""
        self._work.wait()
        head, rows = self._head, self._rows
        maxima, sums, weighted, target_logits = self._all.unflatten(0, (-1, 4)).unbind(1)  # [W, R] each
        inverse = head.inverse_temperature_at(rows)
        maximum = maxima.amax(0)
        # e^(d + shift) for sums that were taken relative to a shard's own maximum; -1e4 stands for "nothing there"
        shift = ((maxima - maximum) * inverse).clamp_(min=-1e4)
        scale = shift.exp()
        total = (sums * scale).sum(0)
        log_sum = total.log()
        # one shard owns the target, the others gave 0
        logprobs = (target_logits.sum(0) - maximum) * inverse - log_sum
        if not self._is_host:  # a bad target belongs to no shard
            targets = rows.take(head.targets)
            logprobs = torch.where((targets >= 0) & (targets < head.vocab_size), logprobs, torch.nan)
        rows.put(out.logprobs, logprobs.float())
        rows.put(out.entropy, (log_sum - ((weighted + shift * sums) * scale).sum(0) / total).float())
        rows.put(out.maximum, maximum.float())
        rows.put(out.log_sum, log_sum.float())
