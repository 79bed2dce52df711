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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.engines.sampler import RowSampling, Seeds, draw_from, kept_ids, low_bits, truncated, uniform
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
    drawn = [key, request.seed, sampling.temperature, sampling.top_p, sampling.top_k, sampling.records_kept]
    return {_KEY: json.dumps(drawn)}


@dataclass(slots=True)
class _Request:
    """A request that is alive. logprobs: of its tokens, nats; kept: ids kept at each place, where it records them."""

    seed: int
    sampling: Sampling
    prompt_length: int = 0
    tokens: list[int] = field(default_factory=list)  # vLLM's own list, which grows
    logprobs: list[float] = field(default_factory=list)
    kept: list[IntArray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The R requests drawn in a step; made anew when the batch changes. index [R] int64: where they stand in it."""

    requests: list[_Request]
    index: Tensor
    sampling: RowSampling
    seeds: Seeds


class DrawTokens(LogitsProcessor):
    """See the module. vLLM makes one for its persistent batch and calls it every step."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._places: list[_Request | None] = [None] * vllm_config.scheduler_config.max_num_seqs
        self._alive: dict[str, _Request] = {}  # by key, until what is known of it is taken
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
        places = self._places
        for place in batch_update.removed:
            places[place] = None
        for place, params, prompt, output in batch_update.added:
            places[place] = self._entered(params, len(prompt or ()), output)
        for source, target, direction in batch_update.moved:
            replaced = places[target] if direction is MoveDirectionality.SWAP else None
            places[target], places[source] = places[source], replaced

    def apply(self, logits: Tensor) -> Tensor:
        """logits [B, V] float32; those of the drawn tokens are raised in place."""
        batch = self._batch = self._batch or self._gathered()
        if not batch.requests:
            return logits
        positions = np.array([request.prompt_length + len(request.tokens) for request in batch.requests])
        noise = torch.from_numpy(uniform(batch.seeds, positions)).to(self._device)
        scaled = truncated(logits if len(positions) == len(logits) else logits[batch.index], batch.sampling)
        tokens, logprobs = draw_from(scaled, batch.sampling, noise)
        wanted = [row for row, request in enumerate(batch.requests) if request.sampling.records_kept]
        of_wanted = scaled if len(wanted) == len(batch.requests) else scaled[wanted]
        kept = dict(zip(wanted, kept_ids(of_wanted), strict=True)) if wanted else {}
        for row, (request, logprob) in enumerate(zip(batch.requests, logprobs.tolist(), strict=True)):
            place = len(request.tokens)
            assert len(request.logprobs) >= place, (
                f"{len(request.logprobs)} places are known, and place {place} is drawn"
            )
            request.logprobs[place:] = [logprob]  # over a draw that vLLM threw away: a part of a prefill, a preemption
            if row in kept:
                request.kept[place:] = [kept[row]]
        logits[batch.index, tokens] = _CHOSEN
        return logits

    def take(self, keys: list[str], lengths: list[int]) -> list[tuple[FloatArray, KeptTokens | None]]:
        """Log-probs [n] float32 of the first n tokens of finished requests, nats, and what was kept at their places, where
        that was asked for; they are forgotten here."""
        taken = [self._alive.pop(key) for key in keys]
        return [
            (
                np.asarray(request.logprobs[:length], np.float32),
                KeptTokens.of(request.kept[:length]) if request.sampling.records_kept else None,
            )
            for request, length in zip(taken, lengths, strict=True)
        ]

    def forget(self) -> None:
        """Drop what aborted requests left; none of ours is running."""
        self._alive.clear()

    @staticmethod
    def _asked(params: SamplingParams) -> str | None:
        return (params.extra_args or {}).get(_KEY)

    def _entered(self, params: SamplingParams, prompt_length: int, tokens: list[int]) -> _Request | None:
        """The request, if it is drawn here; vLLM preempts and brings back, then it is known already."""
        if (asked := self._asked(params)) is None:
            return None
        key, seed, temperature, top_p, top_k, records_kept = json.loads(asked)
        sampling = Sampling(temperature, top_p, top_k, records_kept=records_kept)
        request = self._alive.setdefault(key, _Request(seed, sampling))
        request.prompt_length, request.tokens = prompt_length, tokens
        return request

    def _gathered(self) -> _Batch:
        drawn = [(place, request) for place, request in enumerate(self._places) if request is not None]
        requests = [request for _, request in drawn]
        index = torch.tensor([place for place, _ in drawn], dtype=torch.int64, device=self._device)
        sampling = RowSampling.of([request.sampling for request in requests], self._device)
        return _Batch(requests, index, sampling, low_bits([request.seed for request in requests]))
