"""LocalEngine: prefill packed, one prompt once; then decode all rows of a wave together until each has ended.

    requests -> waves of max_num_seqs -> prefill(distinct prompts) -> copy the cache to the group -> [step, compact]*
    -> results

The batch loses its finished rows once an eighth of them is done (a gather of the cache, so not at every row).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from marsrl.kernels import attention_decode, attention_varlen
from marsrl.rollout.engines.checksum import checksum
from marsrl.rollout.engines.fused_layout import WeightFiles
from marsrl.rollout.engines.local.model import LocalModel
from marsrl.rollout.engines.protocol import (
    DecodeRequest,
    DecodeResult,
    EngineInfo,
    WeightReceipt,
    WeightUpdate,
    WrongVersion,
)
from marsrl.rollout.engines.sampler import RowSampling, draw
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.types import Finish, FloatArray, IntArray

_PREFILL_TOKENS = 16384  # packed tokens of one prefill forward
_CACHE_STEP = 64  # the cache grows by this many positions


class LocalEngine:
    """Our own decoder for one policy, on a CPU or a GPU. See protocol.Engine for the contract."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: str,
        max_model_len: int,
        device: str = "cpu",
        version: int = 0,
        max_num_seqs: int = 512,
        threads: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        if threads is not None and device == "cpu":
            torch.set_num_threads(threads)
        self._shape = read_shape(model_dir)
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
        self._device = torch.device(device)
        self._model = LocalModel(self._shape, WeightFiles(model_dir), self._dtype, self._device)
        self._max_model_len, self._max_num_seqs = max_model_len, max_num_seqs
        self._version, self._deadline_s = version, deadline_s
        self._num_decoded = 0

    def info(self) -> EngineInfo:
        name = str(self._dtype).removeprefix("torch.")
        return EngineInfo("local", f"{__name__}.LocalEngine", "torch", torch.__version__, str(self._device), name)

    def num_decoded(self) -> int:
        return self._num_decoded

    @torch.inference_mode()
    def generate(self, requests: Sequence[DecodeRequest], *, version: int) -> list[DecodeResult]:
        if version != self._version:
            raise WrongVersion(
                f"LocalEngine: asked for policy version {version}, but version {self._version} is loaded"
            )
        end = None if self._deadline_s is None else time.monotonic() + self._deadline_s
        results: dict[int, DecodeResult] = {}
        served = []
        for i, request in enumerate(requests):
            if reason := self._refusal(request):
                none = np.zeros(0, np.int32)
                results[i] = DecodeResult(
                    request.uid, none, none.astype(np.float32), Finish.ERROR, self._version, error=reason
                )
            else:
                served.append(i)
        for start in range(0, len(served), self._max_num_seqs):
            wave = served[start : start + self._max_num_seqs]
            for i, result in zip(wave, self._decode([requests[i] for i in wave], end), strict=True):
                results[i] = result
        return [results[i] for i in range(len(requests))]

    @torch.inference_mode()
    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> list[FloatArray]:
        scores = []
        for sequence in sequences:
            hidden = self._prefill([sequence], None)
            ids = torch.from_numpy(sequence.astype(np.int64)).to(self._device)
            logprobs = (self._model.logits(hidden[:-1]) / temperature).log_softmax(-1)
            scores.append(logprobs.gather(-1, ids[1:, None])[:, 0].cpu().numpy())
        return scores

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        start = time.perf_counter()
        self._model = LocalModel(self._shape, WeightFiles(update.path), self._dtype, self._device)
        self._version = update.version  # caches live for one generate(): there is no prefix to drop
        loaded = time.perf_counter()
        checksums = {name: checksum(tensor) for name, tensor in self._model.weights.items()}
        end = time.perf_counter()
        return WeightReceipt(update.version, checksums, end - start, end - loaded)

    def close(self) -> None:
        self._model.weights.clear()

    def _refusal(self, request: DecodeRequest) -> str:
        n = len(request.token_ids)
        if n == 0:
            return "the prompt is empty"
        if n >= self._max_model_len:
            return f"the prompt has {n} tokens, which leaves no room in max_model_len {self._max_model_len}"
        if request.max_new_tokens < 1:
            return f"max_new_tokens is {request.max_new_tokens}"
        if int(request.token_ids.min()) < 0 or int(request.token_ids.max()) >= self._shape.vocab_size:
            return f"a token id is outside of the vocabulary of {self._shape.vocab_size}"
        return ""

    def _decode(self, requests: Sequence[DecodeRequest], end: float | None) -> list[DecodeResult]:
        """One wave: all requests together."""
        prompts, prompt_of, first = _distinct([request.token_ids for request in requests])
        cache = _Cache(self._model, len(prompts), max(len(p) for p in prompts))
        last = self._prefill_last(prompts, cache)
        rows = torch.tensor(prompt_of, device=self._device)
        cache.select(rows)
        budget = [min(r.max_new_tokens, self._max_model_len - len(r.token_ids)) for r in requests]
        lengths = torch.tensor([len(r.token_ids) for r in requests], device=self._device)  # [B] tokens known
        sampling = RowSampling.of([r.sampling for r in requests], [r.seed for r in requests], self._device)
        stops = [set(r.sampling.stop_token_ids) for r in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        finish: list[Finish | None] = [None] * len(requests)
        alive = list(range(len(requests)))  # row of the batch -> request
        hidden = last[rows]
        while True:
            drawn, drawn_logprobs = draw(self._model.logits(hidden), sampling, lengths)
            for i, token, logprob in zip(alive, drawn.tolist(), drawn_logprobs.tolist(), strict=True):
                if finish[i] is not None:
                    continue  # a finished row that is not compacted yet
                tokens[i].append(token)
                logprobs[i].append(logprob)
                self._num_decoded += 1
                if token in stops[i]:
                    finish[i] = Finish.STOP
                elif len(tokens[i]) >= budget[i]:
                    finish[i] = Finish.LENGTH
            going = [row for row, i in enumerate(alive) if finish[i] is None]
            if not going:
                break
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"LocalEngine: {len(going)} requests are unfinished after rollout.deadline_s = "
                    f"{self._deadline_s:g} s; "
                    "raise it, or ask for fewer or shorter completions"
                )
            if len(going) <= len(alive) * 7 // 8:
                keep = torch.tensor(going, device=self._device)
                cache.select(keep)
                drawn, lengths, sampling = drawn[keep], lengths[keep], sampling.select(keep)
                alive = [alive[row] for row in going]
            hidden = self._step(drawn, lengths, cache)
            lengths = lengths + 1
        return [
            DecodeResult(
                uid=request.uid,
                token_ids=np.asarray(tokens[i], np.int32),
                logprobs=np.asarray(logprobs[i], np.float32),
                finish=finish[i] or Finish.LENGTH,
                version=self._version,
                num_cached_tokens=0 if first[prompt_of[i]] == i else len(request.token_ids) - 1,
            )
            for i, request in enumerate(requests)
        ]

    def _prefill_last(self, prompts: Sequence[IntArray], cache: _Cache) -> Tensor:
        """Hidden state [P, H] of the last token of each prompt; the cache is filled, in forwards of bounded size."""
        states = []
        start = 0
        while start < len(prompts):
            stop, total = start + 1, len(prompts[start])
            while stop < len(prompts) and total + len(prompts[stop]) <= _PREFILL_TOKENS:
                total += len(prompts[stop])
                stop += 1
            hidden = self._prefill(prompts[start:stop], cache, first_row=start)
            ends = np.cumsum([len(p) for p in prompts[start:stop]]) - 1
            states.append(hidden[torch.from_numpy(ends).to(self._device)])
            start = stop
        return torch.cat(states)

    def _prefill(self, prompts: Sequence[IntArray], cache: _Cache | None, first_row: int = 0) -> Tensor:
        """Hidden states [T, H] of prompts laid end to end."""
        lengths = [len(p) for p in prompts]
        ids = torch.from_numpy(np.concatenate(prompts).astype(np.int64)).to(self._device)
        positions = torch.cat([torch.arange(n, device=self._device) for n in lengths])
        starts = [0, *np.cumsum(lengths).tolist()]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=self._device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None:
                for row, (a, b) in enumerate(itertools.pairwise(starts)):
                    cache.keys[layer][first_row + row, :, : b - a] = k[a:b].transpose(0, 1)
                    cache.values[layer][first_row + row, :, : b - a] = v[a:b].transpose(0, 1)
            return attention_varlen(q, k, v, cu_seqlens)

        return self._model.forward(ids, positions, attend)

    def _step(self, tokens: Tensor, lengths: Tensor, cache: _Cache) -> Tensor:
        """Hidden states [B, H] of the tokens [B] just drawn, each at position lengths [B]."""
        longest = int(lengths.max()) + 1
        cache.grow(longest)
        row = torch.arange(len(tokens), device=self._device)
        num_known = lengths + 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[row, :, lengths] = k
            values[row, :, lengths] = v
            known = (cache[:, :, :longest].transpose(1, 2) for cache in (keys, values))
            return attention_decode(q, *known, num_known)

        return self._model.forward(tokens, lengths, attend)


class _Cache:
    """Keys and values of every layer, [rows, kv heads, capacity, D]. What lies behind a row's length is masked."""

    def __init__(self, model: LocalModel, rows: int, longest: int) -> None:
        shape = model.shape
        self._capacity = -(-(longest + 1) // _CACHE_STEP) * _CACHE_STEP
        size = (rows, shape.num_kv_heads, self._capacity, shape.head_size)
        # zeros: a masked NaN would still poison the product with values
        self.keys = [torch.zeros(size, dtype=model.dtype, device=model.device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(size, dtype=model.dtype, device=model.device) for _ in range(shape.num_layers)]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) these rows."""
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]

    def grow(self, needed: int) -> None:
        """Make room for `needed` positions; doubles, so that a long decode copies little."""
        if needed <= self._capacity:
            return
        extra = max(self._capacity, -(-(needed - self._capacity) // _CACHE_STEP) * _CACHE_STEP)
        self._capacity += extra
        self.keys = [F.pad(k, (0, 0, 0, extra)) for k in self.keys]
        self.values = [F.pad(v, (0, 0, 0, extra)) for v in self.values]


def _distinct(prompts: Sequence[IntArray]) -> tuple[list[IntArray], list[int], list[int]]:
    """(distinct prompts, which of them each prompt is, which prompt was the first of each)."""
    place: dict[bytes, int] = {}
    distinct: list[IntArray] = []
    first: list[int] = []
    prompt_of = []
    for i, prompt in enumerate(prompts):
        key = prompt.astype(np.int32).tobytes()
        if key not in place:
            place[key] = len(distinct)
            distinct.append(prompt)
            first.append(i)
        prompt_of.append(place[key])
    return distinct, prompt_of, first
