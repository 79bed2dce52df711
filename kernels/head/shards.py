"""Statistics of a vocabulary in parts, combined from four numbers per row and part.

A part is the shard of a rank, or a tile of one rank's shard.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels.head.rows.protocol import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head


def combined(parts: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Combine the partial statistics of W parts, [W, 4, R] float64, into those of the whole vocabulary, [4, R].

    RowKernels.partials defines the four numbers. Parts are added in order, so that all ranks get the same bits.
    """
    maxima, sums, weighted, target_logits = parts.unbind(1)  # [W, R] each
    maximum = maxima.amax(0)
    # A part's sums are relative to its own maximum, and are rescaled by e^shift. An empty part has the shift -1e4.
    origin = torch.where(maximum == -torch.inf, 0.0, maximum)
    shift = ((maxima - origin) * inverse_temperature).clamp_(min=-1e4)
    scale = shift.exp()
    total, of_weighted = (sums * scale).sum(0), ((weighted + shift * sums) * scale).sum(0)
    # The shard that owns the target contributes its logit; all others contribute 0.
    return torch.stack((maximum, total, of_weighted, target_logits.sum(0)))


def put_statistics(whole: Tensor, head: Head, rows: Rows, is_host: bool, out: Statistics) -> None:
    """Fill `out` at the rows from the result of `combined`, [4, R]."""
    maximum, total, weighted, target_logit = whole
    log_sum = total.log()
    # In float32, as in the row kernels, so that a vocabulary in parts gives the same log-prob as a whole one.
    centred = (target_logit - maximum).float() * head.inverse_temperature_at(rows)
    logprobs = centred - log_sum
    if not is_host:  # a target outside the vocabulary has no logit in any part
        targets = rows.take(head.targets)
        logprobs = torch.where((targets >= 0) & (targets < head.vocab_size), logprobs, torch.nan)
    rows.put(out.logprobs, logprobs.float())
    rows.put(out.entropy, (log_sum - weighted / total).float())
    rows.put(out.maximum, maximum.float())
    rows.put(out.log_sum, log_sum.float())


class ShardStatistics:
    """Statistics of a chunk while the ranks exchange their shards' parts, four numbers per row.

    flight = ShardStatistics(part, head, rows, is_host)   # starts the all-gather
    ...                                                   # the logits of the next chunk
    flight.put(statistics)
    """

    def __init__(self, part: Tensor, head: Head, rows: Rows, is_host: bool):
        """Start the all-gather. part: [4, R] float64, the partials of this rank."""
        self._head, self._rows, self._is_host = head, rows, is_host
        self._part = part  # keeps the tensor alive until it is sent
        world = dist.get_world_size(head.tp_group)
        self._all = part.new_empty(world * part.shape[0], rows.count)  # [W 4, R] float64
        self._work = dist.all_gather_into_tensor(self._all, part, group=head.tp_group, async_op=True)

    def put(self, out: Statistics) -> None:
        """Wait for the all-gather and fill `out` at the rows of the chunk. All ranks get the same bits."""
        self._work.wait()
        head, rows = self._head, self._rows
        combined_parts = combined(self._all.unflatten(0, (-1, 4)), head.inverse_temperature_at(rows))
        put_statistics(combined_parts, head, rows, self._is_host, out)
