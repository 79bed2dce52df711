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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.sampler import RowSampling, draw_from, kept_ids, truncated, uniform
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.types import FloatArray, IntArray

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

_KEY = "marsrl_draw"
_CHOSEN = 1e30  # above every logit
_NO_SLOT = -1
_EMPTY = (_NO_SLOT, 0, 0, 0, 0, 0)  # of _ROW


def draw_arguments(key: str, request: DecodeRequest) -> dict[str, Any]:
    """SamplingParams.extra_args of a request that is drawn here.

    key: under which its log-probs are taken; no two requests that are alive may share it.
    """
    sampling = request.sampling
    # one string: vLLM looks through the arguments, several times a request
    drawn = [key, sampling.temperature, sampling.top_p, sampling.top_k, request.seed, sampling.records_kept]
    return {_KEY: json.dumps(drawn)}


_ROW = np.dtype(
    [
        ("slot", np.int64),
        ("prompt_length", np.int64),
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("temperature", np.float32),
    ]
)
"""A place in the batch: the slot of its request's log-probs (_NO_SLOT: nothing is drawn here), and what it asks for."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The R rows drawn in a step; made anew when the batch changes."""

    rows: npt.NDArray[np.void]  # [R] _ROW
    outputs: list[list[int]]  # vLLM's own lists, which grow
    index: Tensor  # [R] int64, where they stand in the batch
    slots: Tensor  # [R] int64
    sampling: RowSampling
    recorded: list[tuple[int, list[IntArray]]]  # rows whose kept ids are wanted, and where they go


class _Alive:
    """Requests that are alive, a slot each; the slots grow with their number.

    logprobs [slots, completion tokens] float32, nats, on the device. kept: by slot, of requests that record it, the ids kept
    at each place. truncating, greedy: slots.
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        """longest: completion, tokens."""
        self.logprobs = torch.zeros(0, longest, device=device)
        self.kept: dict[int, list[IntArray]] = {}
        self.truncating: set[int] = set()
        self.greedy: set[int] = set()
        self._slots: dict[str, int] = {}  # by key, until its log-probs are taken
        self._free: list[int] = []

    def slot(self, key: str) -> int:
        """The slot of this request, which may have one already: vLLM preempts and brings back."""
        if key not in self._slots:
            if not self._free:
                first = len(self.logprobs)
                more = max(64, first)
                self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(more, self.logprobs.shape[1])])
                self._free = list(range(first + more - 1, first - 1, -1))
            self._slots[key] = self._free.pop()
        return self._slots[key]

    def free(self, key: str) -> tuple[int, list[IntArray] | None]:
        """The slot that it had, whose contents are there until the next request comes, and what was kept at its places."""
        slot = self._slots.pop(key)
        self._free.append(slot)
        self.truncating.discard(slot)
        self.greedy.discard(slot)
        return slot, self.kept.pop(slot, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Free the slots of those that have one."""
        for key in self._slots.keys() & keys:
            self.free(key)


class DrawTokens(LogitsProcessor):
    """See the module. vLLM makes one for its persistent batch and calls it every step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        places = vllm_config.scheduler_config.max_num_seqs
        self._rows = np.array([_EMPTY] * places, _ROW)
        self._outputs: list[list[int]] = [[]] * places  # by place
        self._alive = _Alive(vllm_config.model_config.max_model_len, device)
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
        rows, outputs = self._rows, self._outputs
        for place in batch_update.removed:
            rows[place] = _EMPTY
        for place, params, prompt, output in batch_update.added:
            rows[place], outputs[place] = self._row(params, len(prompt or ())), output
        for source, target, direction in batch_update.moved:
            replaced = rows[target].copy() if direction is MoveDirectionality.SWAP else _EMPTY
            rows[target], rows[source] = rows[source], replaced
            outputs[target], outputs[source] = outputs[source], outputs[target]

    def apply(self, logits: Tensor) -> Tensor:
        """logits [B, V] float32; those of the drawn tokens are raised in place."""
        batch = self._batch or self._gather()
        if not batch.outputs:
            return logits
        done = np.fromiter(map(len, batch.outputs), np.int64, len(batch.outputs))
        noise = torch.from_numpy(uniform(batch.rows["seed"], batch.rows["prompt_length"] + done)).to(self._device)
        mine = logits if len(done) == len(logits) else logits[batch.index]
        scaled = truncated(mine, batch.sampling)
        tokens, logprobs = draw_from(scaled, batch.sampling, noise)
        if batch.recorded:
            self._record(batch, scaled)
        self._alive.logprobs[batch.slots, torch.from_numpy(done).to(self._device)] = logprobs
        logits[batch.index, tokens] = _CHOSEN
        return logits

    def take(self, keys: list[str], lengths: list[int]) -> list[tuple[FloatArray, KeptTokens | None]]:
        """Log-probs [n] float32 of the first n tokens of finished requests, nats, and what was kept at their places, where
        that was asked for; they are forgotten here."""
        freed = [self._alive.free(key) for key in keys]
        drawn = self._alive.logprobs[[slot for slot, _ in freed], : max(lengths, default=0)].cpu().numpy()
        return [
            (row[:length].copy(), None if kept is None else KeptTokens.of(kept[:length]))
            for row, (_, kept), length in zip(drawn, freed, lengths, strict=True)
        ]

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what aborted requests left."""
        self._alive.forget(keys)

    @staticmethod
    def _record(batch: _Batch, scaled: Tensor) -> None:
        """Record the ids that could be drawn from scaled [R, V], at the places that are drawn now."""
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

    def _row(self, params: SamplingParams, prompt_length: int) -> tuple[float, ...]:
        """A request's _ROW."""
        asked = self._asked(params)
        if asked is None:
            return _EMPTY
        key, temperature, top_p, top_k, seed, records_kept = json.loads(asked)
        slot = self._alive.slot(key)
        if records_kept:
            self._alive.kept.setdefault(slot, [])
        if top_p < 1 or top_k > 0:
            self._alive.truncating.add(slot)
        if temperature <= 0:
            self._alive.greedy.add(slot)
        return slot, prompt_length, seed % (1 << 64), top_k, top_p, temperature

    def _gather(self) -> _Batch:
        places = np.flatnonzero(self._rows["slot"] != _NO_SLOT)
        rows = self._rows[places]
        temperature, top_p, top_k, slots, index = (
            torch.from_numpy(column).to(self._device)
            for column in (rows["temperature"], rows["top_p"], rows["top_k"], rows["slot"], places)
        )
        kept = self._alive.kept
        self._batch = _Batch(
            rows,
            [self._outputs[place] for place in places.tolist()],
            index,
            slots,
            RowSampling(temperature, top_p, top_k, bool(self._alive.truncating), bool(self._alive.greedy)),
            [(i, kept[slot]) for i, slot in enumerate(rows["slot"].tolist()) if slot in kept] if kept else [],
        )
        return self._batch
