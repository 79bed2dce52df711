"""Draws vLLM's tokens with the local engine's sampler, and keeps their log-probs.

vLLM's own way costs Python work for every token: a generator a request, and log-probs as objects. Here a step's rows are
drawn together, from noise that depends on (seed, position) alone: a sample's tokens do not change with the requests that
share its batch, with a prefill that is cut in two, or with a resubmission. It is vLLM's public interface for logits
processors: the drawn token's logit is raised above all others, and vLLM takes the largest (temperature 0).

    SamplingParams(temperature=0, extra_args=draw_arguments(key, request))      asks for it
    collective_rpc("marsrl_take_draws", args=(keys, lengths))                   what is known of them, when all have finished
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.logits_processor.interface import AddedRequest

from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.engines.sampler import RowSampling, draw_from, kept_ids, truncated
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.types import FloatArray, IntArray

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

_KEY = "marsrl_draw"
_CHOSEN = 1e30  # above every logit


def draw_arguments(key: str, request: DecodeRequest) -> dict[str, Any]:
    """SamplingParams.extra_args of a request that is drawn here.

    key: under which its log-probs are taken; no two requests that are alive may share it.
    """
    sampling = request.sampling
    # one string: vLLM looks through the arguments, several times a request
    drawn = [key, sampling.temperature, sampling.top_p, sampling.top_k, request.seed, sampling.records_kept]
    return {_KEY: json.dumps(drawn)}


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in the batch. output: vLLM's own list, which grows. slot: its row of the tables. kept: the ids that each
    token was drawn from; None: not wanted."""

    output: list[int]
    slot: int
    truncates: bool
    kept: list[IntArray] | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows drawn in a step, as tensors; made anew when the batch changes."""

    outputs: list[list[int]]
    index: Tensor  # [R] int64, where they stand in the batch
    slots: Tensor  # [R] int64
    sampling: RowSampling
    prompt_lengths: Tensor  # [R] int64
    recorded: list[tuple[int, list[IntArray]]]  # rows whose kept ids are wanted, and where they go


class _Tables:
    """What is known of every request that is alive, a slot each, on the device; they grow with their number."""

    def __init__(self, longest: int, device: torch.device) -> None:
        """longest: completion, tokens."""
        self.sampling = RowSampling.of([], [], device)  # [slots]
        self.prompt_lengths = torch.zeros(0, dtype=torch.int64, device=device)  # [slots]
        self.logprobs = torch.zeros(0, longest, device=device)  # [slots, completion tokens] float32, nats
        self._device = device
        self._slots: dict[str, int] = {}  # by key, until its log-probs are taken
        self._free: list[int] = []
        self.kept: dict[int, list[IntArray]] = {}  # by slot, of requests that record it, the ids kept at each place

    def slot(self, key: str) -> int:
        """The slot of this request, which may have one already: vLLM preempts and brings back."""
        if key not in self._slots:
            if not self._free:
                first = len(self.logprobs)
                self._grow(max(64, first))
                self._free = list(range(len(self.logprobs) - 1, first - 1, -1))
            self._slots[key] = self._free.pop()
        return self._slots[key]

    def put(
        self, slots: Sequence[int], samplings: Sequence[Sampling], seeds: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """lengths: of the prompts."""
        at = torch.tensor(slots, device=self._device)
        self.sampling.put(at, RowSampling.of(samplings, seeds, self._device))
        self.prompt_lengths[at] = torch.tensor(lengths, device=self._device)

    def free(self, key: str) -> tuple[int, list[IntArray] | None]:
        """The slot that it had, whose contents are there until the next request comes, and what was kept at its places."""
        slot = self._slots.pop(key)
        self._free.append(slot)
        return slot, self.kept.pop(slot, None)

    def clear(self) -> None:
        self._free += self._slots.values()
        self._slots.clear()
        self.kept.clear()

    def _grow(self, more: int) -> None:
        size, longest = self.logprobs.shape
        self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(more, longest)])
        self.prompt_lengths = torch.cat([self.prompt_lengths, self.prompt_lengths.new_zeros(more)])
        sampling = RowSampling.of([Sampling()] * (size + more), [0] * (size + more), self._device)
        sampling.put(torch.arange(size, device=self._device), self.sampling)
        self.sampling = sampling


class DrawTokens(LogitsProcessor):
    """See the module. vLLM makes one for its persistent batch and calls it every step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}  # by place in the batch
        self._tables = _Tables(vllm_config.model_config.max_model_len, device)
        self._batch: _Batch | None = None

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError where a request asks for draws and for vLLM's sampling too."""
        if cls._asked(sampling_params) and sampling_params.temperature != 0:
            raise ValueError(f"{_KEY} goes with temperature 0, found {sampling_params.temperature}")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they enter, leave and move within the batch."""
        if batch_update is None:
            return
        self._batch = None
        for place in batch_update.removed:
            self._rows.pop(place, None)
        self._add(batch_update.added)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """logits [B, V] float32; those of the drawn tokens are raised in place."""
        if not self._rows:
            return logits
        batch = self._batch or self._gather()
        outputs = torch.tensor([len(output) for output in batch.outputs], device=self._device)
        mine = logits if len(outputs) == len(logits) else logits[batch.index]
        scaled = truncated(mine, batch.sampling)
        tokens, logprobs = draw_from(scaled, batch.sampling, batch.prompt_lengths + outputs)
        if batch.recorded:
            self._record(batch, scaled)
        self._tables.logprobs[batch.slots, outputs] = logprobs
        logits[batch.index, tokens] = _CHOSEN
        return logits

    def take(self, keys: list[str], lengths: list[int]) -> list[tuple[FloatArray, KeptTokens | None]]:
        """Log-probs [n] float32 of the first n tokens of finished requests, nats, and what was kept at their places, where
        that was asked for; they are forgotten here."""
        freed = [self._tables.free(key) for key in keys]
        drawn = self._tables.logprobs[[slot for slot, _ in freed], : max(lengths, default=0)].cpu().numpy()
        return [
            (row[:length].copy(), None if kept is None else KeptTokens.of(kept[:length]))
            for row, (_, kept), length in zip(drawn, freed, lengths, strict=True)
        ]

    def forget(self) -> None:
        """Drop what aborted requests left; none of ours is running."""
        self._tables.clear()

    @staticmethod
    def _record(batch: _Batch, scaled: Tensor) -> None:
        """What could be drawn from scaled [R, V], at the places that are drawn now."""
        rows = [row for row, _ in batch.recorded]
        of_wanted = scaled if len(rows) == len(scaled) else scaled[torch.tensor(rows, device=scaled.device)]
        for (row, kept), ids in zip(batch.recorded, kept_ids(of_wanted), strict=True):
            place = len(batch.outputs[row])
            del kept[place:]  # of a draw that vLLM threw away: a part of a prefill, a preemption
            assert len(kept) == place, f"{len(kept)} places are recorded, and place {place} is drawn"
            kept.append(ids)

    @staticmethod
    def _asked(params: SamplingParams) -> str | None:
        return (params.extra_args or {}).get(_KEY)

    def _add(self, added: Sequence[AddedRequest]) -> None:
        samplings, seeds, lengths, slots = list[Sampling](), list[int](), list[int](), list[int]()
        for place, params, prompt, output in added:
            self._rows.pop(place, None)
            asked = self._asked(params)
            if asked is None:
                continue
            key, temperature, top_p, top_k, seed, records_kept = json.loads(asked)
            samplings.append(Sampling(temperature, top_p, top_k))
            seeds.append(seed)
            lengths.append(len(prompt or ()))
            slots.append(self._tables.slot(key))
            kept = self._tables.kept.setdefault(slots[-1], []) if records_kept else None
            self._rows[place] = _Row(output, slots[-1], samplings[-1].truncates, kept)
        if slots:
            self._tables.put(slots, samplings, seeds, lengths)

    def _gather(self) -> _Batch:
        places = sorted(self._rows)
        rows = [self._rows[place] for place in places]
        index, slots = torch.tensor([places, [row.slot for row in rows]], device=self._device)
        self._batch = _Batch(
            [row.output for row in rows],
            index,
            slots,
            replace(self._tables.sampling.select(slots), truncates=any(row.truncates for row in rows)),
            self._tables.prompt_lengths[slots],
            [(i, row.kept) for i, row in enumerate(rows) if row.kept is not None],
        )
        return self._batch
