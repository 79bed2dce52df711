"""Batch of the local engine: rows with their requests, cache, drawn tokens and records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from marsrl.rollout.engines.local.model import LocalModel
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult
from marsrl.rollout.engines.sampler import RowSampling, kept_ids, low_bits, uniform
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, IntArray

_CACHE_STEP = 64  # positions; the cache's capacity is a multiple of this


@dataclass(slots=True)
class Row:
    """A request in the batch. num_cached: number of prompt tokens computed by another row with the same prompt. finish: reason
    for the end; None while the row runs.

    record: routed experts [tokens, layers, K] of tokens from experts_from on, as one array for the prompt and one for each new
    token; None: not requested.
    """

    request: DecodeRequest
    num_cached: int
    record: list[ExpertArray] | None = None
    finish: Finish | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[IntArray] = field(default_factory=list)  # ids kept by top_k and top_p at each position, if requested

    def result(self, version: int, error: str = "") -> DecodeResult:
        return DecodeResult(
            uid=self.request.uid,
            token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            finish=self.finish or Finish.UNFINISHED,
            version=version,
            num_cached_tokens=self.num_cached,
            error=error,
            routed_experts=self._routed_experts(),
            kept_tokens=KeptTokens.of(self.kept) if self.request.sampling.records_kept else None,
        )

    def _routed_experts(self) -> ExpertArray | None:
        if self.record is None or not self.tokens:
            return None
        assert self.request.experts_from is not None
        num_fed = len(self.request.token_ids) + len(self.tokens) - 1
        return np.concatenate(self.record)[: num_fed - self.request.experts_from]


class DecodeBatch:
    """State of B rows that decode together, just before their next draw.

    hidden: [B, H], states of each row's last token. lengths: [B] int64, number of tokens in each row. drawn: [B], the last drawn
    tokens. experts: [B, layers, K], routed experts of the last drawn tokens until they are copied to the rows' records; None if
    no row records them.
    """

    def __init__(self, rows: list[Row], cache: Cache, hidden: Tensor, lengths: Tensor) -> None:
        self.rows, self.cache, self.hidden, self.lengths = rows, cache, hidden, lengths
        self.drawn = lengths  # undefined before the first draw
        self.experts: Tensor | None = None
        requests = [row.request for row in rows]
        self.sampling = RowSampling.of([r.sampling for r in requests], hidden.device)
        self._seeds = low_bits([r.seed for r in requests])

    @property
    def num_going(self) -> int:
        return sum(row.finish is None for row in self.rows)

    def noise(self) -> Tensor:
        """Return [B] float64 in [0, 1) for the next draw."""
        lengths = np.array([len(row.request.token_ids) + len(row.tokens) for row in self.rows])
        return torch.from_numpy(uniform(self._seeds, lengths)).to(self.hidden.device)

    def keep_experts(self) -> None:
        if self.experts is None:
            return
        for row, experts in zip(self.rows, self.experts.cpu().numpy(), strict=True):
            if row.record is not None and row.finish is None:
                row.record.append(experts[None])
        self.experts = None

    def record_kept(self, scaled: Tensor) -> None:
        """Record the tokens that can be drawn from the truncated logits `scaled` [B, V], for rows that request it."""
        recording = [i for i, row in enumerate(self.rows) if row.finish is None and row.request.sampling.records_kept]
        if recording:
            for i, ids in zip(recording, kept_ids(scaled, recording), strict=True):
                self.rows[i].kept.append(ids)

    def keep_going(self) -> None:
        going = [i for i, row in enumerate(self.rows) if row.finish is None]
        if len(going) == len(self.rows):
            return
        keep = torch.tensor(going, device=self.hidden.device)
        self.rows = [self.rows[i] for i in going]
        self.cache.select(keep)
        self.hidden, self.lengths, self.drawn = self.hidden[keep], self.lengths[keep], self.drawn[keep]
        self.sampling, self._seeds = self.sampling.select(keep), self._seeds[going]

    def joined_by(self, other: DecodeBatch) -> DecodeBatch:
        """Merge two batches; neither may be used afterwards."""
        self.cache.append(other.cache)
        return DecodeBatch(
            self.rows + other.rows,
            self.cache,
            torch.cat([self.hidden, other.hidden]),
            torch.cat([self.lengths, other.lengths]),
        )


class Cache:
    """Keys and values of every layer, [rows, kv heads, capacity, D]. Positions beyond a row's length are masked."""

    def __init__(self, model: LocalModel, rows: int, longest: int) -> None:
        shape = model.shape
        self._capacity = -(-(longest + 1) // _CACHE_STEP) * _CACHE_STEP
        size = (rows, shape.num_kv_heads, self._capacity, shape.head_size)
        # Initialised with zeros, because NaN would spread through the product with the values even under a mask.
        self.keys = [torch.zeros(size, dtype=model.dtype, device=model.device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(size, dtype=model.dtype, device=model.device) for _ in range(shape.num_layers)]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]

    def append(self, other: Cache) -> None:
        room = max(self._capacity, other._capacity)

        def joined(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([F.pad(each, (0, 0, 0, room - each.shape[2])) for each in (ours, theirs)])

        self.keys = [joined(*pair) for pair in zip(self.keys, other.keys, strict=True)]
        self.values = [joined(*pair) for pair in zip(self.values, other.values, strict=True)]
        self._capacity = room

    def grow(self, needed: int) -> None:
        """Make room for `needed` positions. Growing at least doubles the capacity, so that a long decode copies little."""
        if needed <= self._capacity:
            return
        extra = max(self._capacity, -(-(needed - self._capacity) // _CACHE_STEP) * _CACHE_STEP)
        self._capacity += extra
        self.keys = [F.pad(k, (0, 0, 0, extra)) for k in self.keys]
        self.values = [F.pad(v, (0, 0, 0, extra)) for v in self.values]
