"""Context parallelism of packed batches: each rank's tokens of every sequence, and the keys that they attend to.

Every sequence is cut into 2C equal chunks and rank r of C holds chunks r and 2C-1-r, so that all have equal work
under a causal mask. Keys and values are gathered from all ranks (arXiv:2407.21783, section 3.3.2), and a chunk attends to the
keys of its sequence up to the chunk's end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from marsrl.trainer.data.packing import PackedBatch, rows_of

_PER_TOKEN = (
    "token_ids", "targets", "mask", "token_advantages", "rollout_logprobs", "temperature", "routed_experts", "is_padding",
)  # fmt: skip


@dataclass(frozen=True)
class ContextCut:
    """One rank's part of a packed batch.

    batch: [T'] tokens, S sequences; cu_seqlens count this rank's tokens, position_ids are positions in the whole sequence.
    rows: [C, T'] int64, for each rank the index of its tokens in the whole batch; T for padding. Empty for C = 1, where the
        part is the whole batch.
    given: the whole batch, [T] tokens.
    """

    batch: PackedBatch
    rows: Tensor
    given: PackedBatch

    def whole(self, local_values: Tensor) -> Tensor:
        """Gather [T] CPU values of the whole batch from every rank's [T']. Collective over the context group."""
        if not len(self.rows):
            return local_values.cpu()
        parts = [torch.empty_like(local_values) for _ in range(len(self.rows))]
        dist.all_gather(parts, local_values.contiguous(), group=parallel_state.get_context_parallel_group())
        out = local_values.new_zeros(self.given.num_tokens + 1)
        out[self.rows.flatten()] = torch.cat(parts)
        return out[:-1].cpu()

    def own(self, whole: Tensor) -> Tensor:
        """Select this rank's values [T'] from the whole batch's CPU values [T]; 0 for padding.

        The result is on the batch's device.
        """
        values = whole.to(self.batch.token_ids.device)
        if not len(self.rows):
            return values
        return torch.nn.functional.pad(values, (0, 1))[self.rows[parallel_state.get_context_parallel_rank()]]


def cut(batch: PackedBatch, rank: int, size: int, align: int) -> ContextCut:
    """Return the part of rank `rank` of a batch that all context-parallel ranks hold.

    Sequences are padded (masked) to a multiple of 2C, and the last one until each rank has a multiple of `align` tokens.
    Indices are computed on the host, which waits for the lengths and, at the end, for the number of this rank's trained rows.
    """
    if size == 1:
        return ContextCut(batch, torch.zeros(0, dtype=torch.int64), batch)
    assert batch.paths is None, "a tree of samples is not split over context-parallel ranks"
    total, device = batch.num_tokens, batch.token_ids.device
    starts = batch.cu_seqlens.long().cpu()
    lengths = starts.diff()
    padded = (lengths + 2 * size - 1) // (2 * size) * (2 * size)
    unit = size * align * (2 if align % 2 else 1)  # Keeps the last sequence's length a multiple of 2C.
    padded[-1] += -int(padded.sum()) % unit
    chunks = padded // (2 * size)  # [S]
    bounds = torch.cat([padded.new_zeros(1), padded.cumsum(0)]) // size
    positions, rows = [], []
    for r in range(size):
        # Start of each chunk in its sequence.
        first = torch.stack([chunks * r, chunks * (2 * size - 1 - r)], 1).flatten()
        sizes = chunks.repeat_interleave(2)
        start = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
        position = torch.arange(int(sizes.sum())) + (first - start).repeat_interleave(sizes)
        sequence = torch.arange(len(chunks)).repeat_interleave(2 * chunks)
        row = starts[sequence] + position
        positions.append(position)
        rows.append(torch.where(position < lengths[sequence], row, total))
    places = torch.stack(rows).to(device)
    changes: dict[str, Any] = {}
    for name in _PER_TOKEN:
        values = getattr(batch, name)
        if isinstance(values, Tensor):
            padding = values.new_full((1, *values.shape[1:]), _padding(name, values.dtype))
            changes[name] = torch.cat([values, padding])[places[rank]]
    if batch.support is not None:
        starts_and_counts = torch.stack([batch.support.starts, batch.support.counts])
        own_ranges = torch.nn.functional.pad(starts_and_counts, (0, 1))[:, places[rank]]
        changes["support"] = dataclasses.replace(batch.support, starts=own_ranges[0], counts=own_ranges[1])
    cu_seqlens = bounds.to(device, torch.int32)
    trained_rows, positive_rows = rows_of(changes["mask"], batch.is_positive, cu_seqlens)
    own_batch = dataclasses.replace(
        batch,
        **changes,
        position_ids=positions[rank].to(device),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(padded.max()),
        trained_rows=trained_rows,
        positive_rows=positive_rows,
    )
    return ContextCut(own_batch, places, batch)


def _padding(name: str, dtype: torch.dtype) -> int:
    """Return the padding value of a batch's tensor.

    1 for temperature (a divisor) and is_padding, an index of no expert for routed_experts, 0 for others.
    """
    if name == "routed_experts":
        return int(torch.iinfo(dtype).max)
    return int(name in ("temperature", "is_padding"))


@dataclass(frozen=True)
class Keys:
    """Keys visible to this rank's queries, in 2S segments: the two chunks of each sequence.

    cu_seqlens: [2S+1] int32, bounds of the queries; cu_seqlens_k: [2S+1] int32, bounds of the keys. The queries and keys of a
    segment end at the same token.
    places: [(2C+1) T'/2] int64, each key's index among the keys gathered from all ranks, [C T'].
    """

    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    places: Tensor
    group: Any

    @classmethod
    def of(cls, cu_seqlens: Tensor, num_tokens: int, group: Any) -> Keys:
        """Build from the [S+1] bounds of this rank's T' tokens, on the bounds' device, without synchronisation."""
        rank, size = group.rank(), group.size()
        bounds = cu_seqlens.long()
        chunk = (bounds.diff() // 2).repeat_interleave(2, output_size=2 * (len(bounds) - 1))  # [2S]
        visible_chunks = torch.tensor([rank + 1, 2 * size - rank], device=bounds.device).repeat(len(bounds) - 1)
        zero = bounds.new_zeros(1)
        ends_q, ends_k = torch.cat([zero, chunk.cumsum(0)]), torch.cat([zero, (chunk * visible_chunks).cumsum(0)])
        num_keys = (2 * size + 1) * num_tokens // 2
        segment = torch.arange(len(chunk), device=bounds.device).repeat_interleave(
            chunk * visible_chunks, output_size=num_keys
        )
        offset = torch.arange(num_keys, device=bounds.device) - ends_k[segment]
        length = chunk[segment]
        index = offset // length  # Index of the key's chunk in its sequence.
        is_late = index >= size
        owner = torch.where(is_late, 2 * size - 1 - index, index)
        places = owner * num_tokens + bounds[segment // 2] + offset % length + is_late * length
        return cls(ends_q.int(), ends_k.int(), places, group)

    def gather(self, local_keys: Tensor) -> Tensor:
        """Gather keys or values [(2C+1) T'/2, N, D] from each rank's [T', N, D]; gradients are summed over ranks."""
        everyone = gather_from_sequence_parallel_region(
            local_keys.contiguous(), tensor_parallel_output_grad=True, group=self.group
        )
        return everyone.index_select(0, self.places)
