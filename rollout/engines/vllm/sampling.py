"""Sampling of vLLM's tokens with the local engine's sampler, and storage of their log-probs.

vLLM's own sampler needs Python work for every token: a generator per request, and log-probs as objects. Here all rows of a
step are sampled together, with noise that depends only on (seed, position). A sample's tokens therefore do not depend on
other requests in its batch, chunked prefill, or resubmission. This uses vLLM's public interface for logits processors: the
logit of the drawn token is raised above all others, and vLLM takes the largest (temperature 0).

    SamplingParams(temperature=0, extra_args=draw_arguments(key, request))      a request sampled here
    collective_rpc("marsrl_take_draws", args=(keys, lengths))                   log-probs of finished requests
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
_EMPTY = (_NO_SLOT, 0, 0, 0, 0, 0)  # _ROW of an empty position


def draw_arguments(key: str, request: DecodeRequest) -> dict[str, Any]:
    """Return SamplingParams.extra_args of a request that is sampled here.

    key: identifies the request's log-probs; unique among live requests.
    """
    sampling = request.sampling
    # Packed into one string, because vLLM walks the arguments several times per request.
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
"""A position in the batch: the slot of its request's log-probs (_NO_SLOT: not sampled here), and sampling settings."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The R rows sampled in a step; rebuilt when the batch changes."""

    rows: npt.NDArray[np.void]  # [R] _ROW
    outputs: list[list[int]]  # vLLM's lists of output tokens, which grow
    index: Tensor  # [R] int64, positions in the batch
    slots: Tensor  # [R] int64
    sampling: RowSampling
    recorded: list[tuple[int, list[IntArray]]]  # rows whose kept ids are recorded: (row, list to append to)


class _Alive:
    """Live requests, each with a slot: a row of `logprobs`. Rows are added on demand.

    logprobs [slots, completion tokens] float32, nats, on the device. kept: ids kept at each position, by slot, for requests
    that record them.
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        """Create without requests. longest: maximum tokens of a completion."""
        self.logprobs = torch.zeros(0, longest, device=device)
        self.kept: dict[int, list[IntArray]] = {}
        self._slots: dict[str, int] = {}  # slot by key, until the request's log-probs are taken
        self._free: list[int] = []

    def slot(self, key: str) -> int:
        """Return the request's slot, allocated if needed: a preempted request returns to its own."""
        if key not in self._slots:
            if not self._free:
                first = len(self.logprobs)
                more = max(64, first)
                self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(more, self.logprobs.shape[1])])
                self._free = list(range(first + more - 1, first - 1, -1))
            self._slots[key] = self._free.pop()
        return self._slots[key]

    def free(self, key: str) -> tuple[int, list[IntArray] | None]:
        """Free the request's slot. Return (slot, kept ids); the slot can be read until the next request arrives."""
        slot = self._slots.pop(key)
        self._free.append(slot)
        return slot, self.kept.pop(slot, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Free the slots of these requests, if they have one."""
        for key in self._slots.keys() & keys:
            self.free(key)


class DrawTokens(LogitsProcessor):
    """Logits processor that draws tokens; see the module. vLLM creates one for its persistent batch and calls it at every
    step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        places = vllm_config.scheduler_config.max_num_seqs
        self._rows = np.array([_EMPTY] * places, _ROW)
        self._outputs: list[list[int]] = [[]] * places  # by position in the batch
        self.alive = _Alive(vllm_config.model_config.max_model_len, device)
        self._batch: _Batch | None = None

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
        """Raise the logits [B, V] float32 of the drawn tokens in place."""
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
        self.alive.logprobs[batch.slots, torch.from_numpy(done).to(self._device)] = logprobs
        logits[batch.index, tokens] = _CHOSEN
        return logits

    def take(self, keys: list[str], lengths: list[int]) -> list[tuple[FloatArray, KeptTokens | None]]:
        """Remove finished requests, and return (log-probs [n] float32 in nats, kept tokens or None) of each.

        keys: keys of the requests. lengths: number n of tokens of each request whose results are returned.
        """
        freed = [self.alive.free(key) for key in keys]
        drawn = self.alive.logprobs[[slot for slot, _ in freed], : max(lengths, default=0)].cpu().numpy()
        return [
            (row[:length].copy(), None if kept is None else KeptTokens.of(kept[:length]))
            for row, (_, kept), length in zip(drawn, freed, lengths, strict=True)
        ]

    @staticmethod
    def _record(batch: _Batch, scaled: Tensor) -> None:
        """Record the ids that can be drawn from scaled [R, V] at the current positions."""
        of_rows = kept_ids(scaled, [row for row, _ in batch.recorded])
        for (row, kept), ids in zip(batch.recorded, of_rows, strict=True):
            place = len(batch.outputs[row])
            del kept[place:]  # draws that vLLM discarded, in chunked prefill or by preemption
            assert len(kept) == place, f"{len(kept)} positions are recorded, and position {place} is drawn"
            kept.append(ids)

    def _row(self, params: SamplingParams, prompt_length: int) -> tuple[float, ...]:
        """Return the values of a request's _ROW."""
        asked = (params.extra_args or {}).get(_KEY)
        if asked is None:
            return _EMPTY
        key, temperature, top_p, top_k, seed, records_kept = json.loads(asked)
        slot = self.alive.slot(key)
        if records_kept:
            self.alive.kept.setdefault(slot, [])
        return slot, prompt_length, seed % (1 << 64), top_k, top_p, temperature

    def _gather(self) -> _Batch:
        places = np.flatnonzero(self._rows["slot"] != _NO_SLOT)
        rows = self._rows[places]
        temperature, top_p, top_k, slots, index = (
            torch.from_numpy(column).to(self._device)
            for column in (rows["temperature"], rows["top_p"], rows["top_k"], rows["slot"], places)
        )
        kept, truncates = self.alive.kept, bool(((rows["top_p"] < 1) | (rows["top_k"] > 0)).any())
        self._batch = _Batch(
            rows,
            [self._outputs[place] for place in places.tolist()],
            index,
            slots,
            RowSampling(temperature, top_p, top_k, truncates, bool((rows["temperature"] <= 0).any())),
            [(i, kept[slot]) for i, slot in enumerate(rows["slot"].tolist()) if slot in kept] if kept else [],
        )
        return self._batch
