"""Draws vLLM's tokens with the local engine's sampler, and keeps their log-probs.

vLLM's own way costs Python work for every token: a generator a request, and log-probs as objects. Here a step's rows are
drawn together, from noise that depends on (seed, position) alone: a sample's tokens do not change with the requests that
share its batch, with a prefill that is cut in two, or with a resubmission. It is vLLM's public interface for logits
processors: the drawn token's logit is raised above all others, and vLLM takes the largest (temperature 0).

    SamplingParams(temperature=0, extra_args=draw_arguments(key, request))      asks for it
    collective_rpc("marsrl_take_logprobs", args=(keys, lengths))                what was drawn, when all have finished
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.engines.sampler import RowSampling, draw
from marsrl.rollout.types import FloatArray

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
    # one string: vLLM copies the arguments deeply, several times a request
    return {_KEY: json.dumps([key, sampling.temperature, sampling.top_p, sampling.top_k, request.seed])}


@dataclass(slots=True)
class _Row:
    """A request in the batch. output: vLLM's own list, which grows. slot: its row of the log-prob buffer."""

    key: str
    sampling: Sampling
    seed: int
    prompt_length: int
    output: list[int]
    slot: int


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows drawn in a step, as tensors; made anew when the batch changes."""

    rows: list[_Row]
    index: Tensor  # [R] int64, where they stand in the batch
    sampling: RowSampling
    prompt_lengths: Tensor  # [R] int64
    slots: Tensor  # [R] int64


class DrawTokens(LogitsProcessor):
    """See the module. vLLM makes one for its persistent batch and calls it every step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}  # by place in the batch
        self._slots: dict[str, int] = {}  # by key, until its log-probs are taken
        self._free: list[int] = []
        # [slots, completion tokens] float32 on the device; grows with the requests that are alive together
        self._logprobs = torch.zeros(0, vllm_config.model_config.max_model_len, device=device)
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
        for place, params, prompt, output in batch_update.added:
            self._rows.pop(place, None)
            asked = self._asked(params)
            if asked is not None:
                self._rows[place] = self._row(asked, len(prompt or ()), output)
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
        outputs = torch.tensor([len(row.output) for row in batch.rows], device=self._device)
        mine = logits if len(batch.rows) == len(logits) else logits[batch.index]
        tokens, logprobs = draw(mine, batch.sampling, batch.prompt_lengths + outputs)
        self._logprobs[batch.slots, outputs] = logprobs
        logits[batch.index, tokens] = _CHOSEN
        return logits

    def take(self, keys: list[str], lengths: list[int]) -> list[FloatArray]:
        """Log-probs [n] float32 of the first n tokens of finished requests, nats; they are forgotten here."""
        taken = []
        for key, length in zip(keys, lengths, strict=True):
            slot = self._slots.pop(key)
            self._free.append(slot)
            taken.append(self._logprobs[slot, :length].cpu().numpy().astype(np.float32))
        return taken

    def forget(self) -> None:
        """Drop what aborted requests left; none of ours is running."""
        self._free += self._slots.values()
        self._slots.clear()

    @staticmethod
    def _asked(params: SamplingParams) -> str | None:
        return (params.extra_args or {}).get(_KEY)

    def _row(self, asked: str, prompt_length: int, output: list[int]) -> _Row:
        key, temperature, top_p, top_k, seed = json.loads(asked)
        if key not in self._slots:  # a preempted request comes back
            if not self._free:
                first, more = len(self._logprobs), max(64, len(self._logprobs))
                self._logprobs = torch.cat([self._logprobs, self._logprobs.new_zeros(more, self._logprobs.shape[1])])
                self._free = list(range(first + more - 1, first - 1, -1))
            self._slots[key] = self._free.pop()
        return _Row(key, Sampling(temperature, top_p, top_k), seed, prompt_length, output, self._slots[key])

    def _gather(self) -> _Batch:
        places = sorted(self._rows)
        rows = [self._rows[place] for place in places]
        self._batch = _Batch(
            rows,
            torch.tensor(places, device=self._device),
            RowSampling.of([row.sampling for row in rows], [row.seed for row in rows], self._device),
            torch.tensor([row.prompt_length for row in rows], device=self._device),
            torch.tensor([row.slot for row in rows], device=self._device),
        )
        return self._batch
