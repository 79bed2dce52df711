"""LocalEngine: prefills distinct prompts together, packed, and adds their rows to the running batch.

    submitted -> prefill(distinct prompts) -> copy the cache to the group -> join the batch -> [draw, drop ended rows, step]*
    -> results

Dropping finished rows and adding new ones copies the cache, so neither is done row by row. The batch drops finished rows once
they make up an eighth of it, and takes new rows when all waiting rows fit or an eighth is free.

Recorded experts are copied to the host one step late, when the host waits for the drawn tokens anyway.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from marsrl.kernels import attention_decode, attention_varlen
from marsrl.rollout.adapter import check_start, held_by_shard, read_tensors
from marsrl.rollout.engines.local.batch import Cache, DecodeBatch, Row
from marsrl.rollout.engines.local.model import Adapted, LocalModel
from marsrl.rollout.engines.protocol import (
    TORN,
    AdapterUpdate,
    DecodeRequest,
    DecodeResult,
    Engine,
    EngineInfo,
    EngineSpec,
    MemoryPart,
    WeightReceipt,
    WeightUpdate,
    taken_from,
    why_not_decodable,
)
from marsrl.rollout.engines.sampler import draw_from, truncated
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.engines.time_shares import TimeShares
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.routed_experts import ExpertArray, expert_dtype
from marsrl.rollout.state import decode
from marsrl.rollout.types import Finish, FloatArray, IntArray
from marsrl.rollout.weights.checksum import checksum
from marsrl.rollout.weights.connections import TransferBroken
from marsrl.rollout.weights.direct import ReceivePlan, WeightReceiver
from marsrl.rollout.weights.files import WeightFiles
from marsrl.rollout.weights.layout import EngineShard

_PREFILL_TOKENS = 16384  # packed tokens of one prefill forward
_SCORED_TOGETHER = 2048  # packed tokens of one scoring forward: short sequences share one read of the weights


class LocalEngine(Engine):
    """Our own decoder for one policy, on a CPU or a GPU. See protocol.Engine for the contract."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.adapters)
        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        self._shape = read_shape(spec.model_dir)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._device = torch.device(spec.device)
        self._model = LocalModel(self._shape, WeightFiles(spec.model_dir), self._dtype, self._device)
        self._texts = Texts.of_model(spec.model_dir)
        self._receiver = WeightReceiver(self._device)
        self._max_model_len, self._max_num_seqs = spec.max_model_len, spec.local.max_num_seqs
        self._configs = spec.adapters
        # Tensors A and B of each adapter, by name; an adapter that was never loaded is absent.
        self._adapters: dict[str, dict[str, Tensor]] = {}
        for name, adapter in spec.adapters.items():
            if adapter.start is not None:
                check_start(Path(adapter.start), self._shape, adapter)
                self._load_adapter(name, adapter.start)
        self._batch: DecodeBatch | None = None
        self._shares = TimeShares()

    def info(self) -> EngineInfo:
        name = str(self._dtype).removeprefix("torch.")
        settings = {key: (value,) for key, value in self._model.shape.settings().items()}
        return EngineInfo(
            "local",
            f"{__name__}.LocalEngine",
            "torch",
            torch.__version__,
            str(self._device),
            name,
            settings,
            adapters=tuple(self._configs),
        )

    @torch.inference_mode()
    def collect(self, timeout_s: float) -> list[DecodeResult]:
        end = time.monotonic() + timeout_s
        while True:
            if self._aborts:
                return self._billed(self._give_up())
            start = time.perf_counter()
            results = self._admit()
            if not results and self._batch is not None:
                results = self._step(self._batch)
            self._shares.step(time.perf_counter() - start)
            if results or self._batch is None or time.monotonic() >= end:
                return self._billed(results)

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "", temperature: float | None = None
    ) -> list[FloatArray]:
        names = [adapter] * len(sequences) if isinstance(adapter, str) else adapter
        parts = list[tuple[list[IntArray], list[str]]]()
        for sequence, name in zip(sequences, names, strict=True):
            if not parts or sum(map(len, parts[-1][0])) + len(sequence) > _SCORED_TOGETHER:
                parts.append(([], []))
            parts[-1][0].append(sequence)
            parts[-1][1].append(name)
        scores = []
        for part, of_part in parts:
            hidden = self._prefill(part, of_part, None)
            for sequence, rows in zip(part, hidden.split([*map(len, part)]), strict=True):
                ids = torch.from_numpy(sequence.astype(np.int64)).to(self._device)
                logits = self._model.logits(rows[:-1]).div(temperature or 1.0)
                # Not log_softmax: in float32 on a CPU its error is 1e-5 nats with a vocabulary of 50,000 tokens.
                logprobs = logits.gather(-1, ids[1:, None])[:, 0] - logits.logsumexp(-1)
                scores.append(logprobs.cpu().numpy())
        return scores

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self._refuse_under_way("update_weights")
        if update.receive_plans:
            self._versions[""] = TORN  # prevents decoding with partly received weights
            try:
                self._receiver.receive(decode(ReceivePlan, update.receive_plans[0]), self._model.weights.get)
            except TransferBroken as error:
                return WeightReceipt(TORN, (), broken=str(error))
        else:
            self._model = LocalModel(self._shape, WeightFiles(update.path), self._dtype, self._device)
        # There is no prefix cache to drop: keys and values are freed with their request.
        self._versions[""] = update.version
        return _receipt(update.version, self._model.weights)

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        self._refuse_under_way("update_adapter", update.name)
        held = self._load_adapter(update.name, update.path)
        self._versions[update.name] = update.version
        return _receipt(update.version, held)

    def _load_adapter(self, name: str, path: str) -> dict[str, Tensor]:
        tensors = read_tensors(Path(path))
        held = held_by_shard(self._shape, self._configs[name], tensors, self._dtype, EngineShard())
        self._adapters[name] = {each: tensor.to(self._device) for each, tensor in held}
        return self._adapters[name]

    def sleep(self, keeps_weights: bool) -> None:
        """Move the weights to the host, even if keeps_weights is False. Does nothing on a CPU. There are no caches to free."""
        self._refuse_under_way("sleep")
        self._move_weights(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, part: MemoryPart) -> None:
        if part == "weights":
            self._move_weights(self._device)

    def close(self) -> None:
        self._receiver.close()
        self._model.weights.clear()

    def _billed(self, results: Sequence[DecodeResult]) -> list[DecodeResult]:
        """Add each result's share of the engine's time."""
        return [replace(result, seconds=self._shares.end(result.uid)) for result in results]

    def _move_weights(self, device: torch.device) -> None:
        for pairs in self._adapters.values():
            pairs.update({name: tensor.to(device) for name, tensor in pairs.items()})
        weights = self._model.weights
        moved = {id(tensor): tensor.to(device) for tensor in weights.values()}  # tied weights stay shared
        weights.update({name: moved[id(tensor)] for name, tensor in weights.items()})

    def _admit(self) -> list[DecodeResult]:
        """Add submitted requests to the batch as far as there is room; return results of rejected ones."""
        refused: list[DecodeResult] = []
        joining: list[DecodeRequest] = []
        room = self._max_num_seqs - (self._batch.num_going if self._batch else 0)
        if room < min(len(self._inbox), self._max_num_seqs // 8):
            return []
        while self._inbox and len(joining) < room:
            request = self._inbox.popleft()
            if reason := why_not_decodable(request, self._max_model_len, self._shape.vocab_size):
                refused.append(self._result(Row(request, 0, finish=Finish.ERROR), reason))
            else:
                joining.append(request)
                self._shares.add(request.uid)
        if joining:
            joined = self._prefilled(joining)
            if self._batch is not None:
                self._batch.keep_experts()
                self._batch.keep_going()
                joined = self._batch.joined_by(joined)
            self._batch = joined
        return refused

    def _prefilled(self, requests: Sequence[DecodeRequest]) -> DecodeBatch:
        """Prefill requests and return their batch, ready for the first draw."""
        keys = [(request.adapter, request.token_ids.tobytes()) for request in requests]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}  # first request with these tokens
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}  # index among the distinct prompts
        prompts = [requests[first[key]].token_ids for key in number]
        cache = Cache(self._model, len(prompts), max(len(p) for p in prompts))
        records = any(request.experts_from is not None for request in requests)
        last, experts = self._prefill_last(prompts, [adapter for adapter, _ in number], cache, records=records)
        rows = torch.tensor([number[key] for key in keys], device=self._device)
        cache.select(rows)
        return DecodeBatch(
            rows=[
                Row(
                    request,
                    0 if first[key] == i else len(request.token_ids) - 1,
                    None if request.experts_from is None else [experts[number[key]][request.experts_from :]],
                )
                for i, (request, key) in enumerate(zip(requests, keys, strict=True))
            ],
            cache=cache,
            hidden=last[rows],
            lengths=torch.tensor([len(r.token_ids) for r in requests], device=self._device),
        )

    def _step(self, batch: DecodeBatch) -> list[DecodeResult]:
        """Draw a token for every row and compute the next state; return results of finished rows."""
        ended = []
        scaled = truncated(self._model.logits(batch.hidden), batch.sampling)
        drawn, drawn_logprobs = draw_from(scaled, batch.sampling, batch.noise())
        batch.record_kept(scaled)
        batch.keep_experts()
        for row, token, logprob in zip(batch.rows, drawn.tolist(), drawn_logprobs.tolist(), strict=True):
            if row.finish is not None:
                continue  # finished, but still in the batch
            row.tokens.append(token)
            row.logprobs.append(logprob)
            self._num_decoded += 1
            sampling = row.request.sampling
            if token in sampling.stop_token_ids or self._texts.is_ended(
                row.request.token_ids[row.request.stop_from :], row.tokens, sampling.stop
            ):
                row.finish = Finish.STOP
            elif len(row.tokens) >= min(row.request.max_new_tokens, self._max_model_len - len(row.request.token_ids)):
                row.finish = Finish.LENGTH
            if row.finish is not None:
                ended.append(self._result(row))
        batch.drawn = drawn
        if batch.num_going == 0:
            self._batch = None
            return ended
        if batch.num_going <= len(batch.rows) * 7 // 8:
            batch.keep_going()
        records = any(row.record is not None for row in batch.rows)
        batch.experts = self._room_for_experts(len(batch.rows)) if records else None
        batch.hidden = self._forward(batch)
        batch.lengths = batch.lengths + 1
        return ended

    def _give_up(self) -> list[DecodeResult]:
        """Remove aborted requests, and return their results with the tokens decoded so far."""
        ended: list[Row] = []
        while self._aborts:
            adapter = self._aborts.popleft()
            ended += [row for row in self._going() if row.request.uses(adapter)]
            ended += [Row(request, 0) for request in taken_from(self._inbox, adapter)]
            for row in ended:
                row.finish = Finish.UNFINISHED
        if not self._going():
            self._batch = None
        return [self._result(row) for row in ended]

    def _running(self) -> list[DecodeRequest]:
        return [row.request for row in self._going()]

    def _going(self) -> list[Row]:
        return [row for row in self._batch.rows if row.finish is None] if self._batch is not None else []

    def _result(self, row: Row, error: str = "") -> DecodeResult:
        return self._texts.told(row.request, row.result(self._versions[row.request.adapter], error))

    def _prefill_last(
        self, prompts: Sequence[IntArray], adapters: Sequence[str], cache: Cache, *, records: bool
    ) -> tuple[Tensor, list[ExpertArray]]:
        """Fill the cache, in forward passes of bounded size, and return each prompt's last hidden state and experts.

        Hidden states are [P, H]; experts are [tokens, layers, K] for each prompt (no arrays if not recorded).
        """
        states: list[Tensor] = []
        experts_of: list[ExpertArray] = []
        start = 0
        while start < len(prompts):
            stop, total = start + 1, len(prompts[start])
            while stop < len(prompts) and total + len(prompts[stop]) <= _PREFILL_TOKENS:
                total += len(prompts[stop])
                stop += 1
            experts = self._room_for_experts(total) if records else None
            hidden = self._prefill(prompts[start:stop], adapters[start:stop], cache, first_row=start, experts=experts)
            ends = np.cumsum([len(p) for p in prompts[start:stop]])
            states.append(hidden[torch.from_numpy(ends - 1).to(self._device)])
            if experts is not None:
                experts_of += np.split(experts.cpu().numpy(), ends[:-1])
            start = stop
        return torch.cat(states), experts_of

    def _room_for_experts(self, num_tokens: int) -> Tensor:
        """Return a buffer [tokens, layers, K] for a forward pass to fill."""
        shape = self._shape
        dtype = torch.uint8 if expert_dtype(shape.num_experts) == np.uint8 else torch.int16
        size = (num_tokens, shape.num_layers, shape.experts_per_token)
        return torch.empty(size, dtype=dtype, device=self._device)

    def _prefill(
        self,
        prompts: Sequence[IntArray],
        adapters: Sequence[str],
        cache: Cache | None,
        first_row: int = 0,
        experts: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [T, H] of concatenated prompts, each computed with its adapter."""
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
            return attention_varlen(q, k, v, cu_seqlens, max_seqlen=max(lengths))

        return self._model.forward(ids, positions, attend, experts, self._adapted(adapters, lengths))

    def _forward(self, batch: DecodeBatch) -> Tensor:
        """Return hidden states [B, H] of the tokens just drawn; a token's position is the length of its row."""
        tokens, lengths, cache = batch.drawn, batch.lengths, batch.cache
        longest = int(lengths.max()) + 1
        cache.grow(longest)
        row = torch.arange(len(tokens), device=self._device)
        num_known = lengths + 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[row, :, lengths] = k
            values[row, :, lengths] = v
            known_keys, known_values = (each[:, :, :longest].transpose(1, 2) for each in (keys, values))
            return attention_decode(q, known_keys, known_values, num_known)

        adapted = self._adapted([row.request.adapter for row in batch.rows], 1)
        return self._model.forward(tokens, lengths, attend, batch.experts, adapted)

    def _adapted(self, names: Sequence[str], num_tokens: int | Sequence[int]) -> Adapted:
        """Return the adapters of a forward pass, each with the rows of its tokens."""
        if not self._adapters:
            return ()
        of_tokens = np.repeat(names, num_tokens)
        rows = {name: np.flatnonzero(of_tokens == name) for name in self._adapters}
        return [
            (self._adapters[name], torch.from_numpy(own).to(self._device)) for name, own in rows.items() if len(own)
        ]


def _receipt(version: int, held: Mapping[str, Tensor]) -> WeightReceipt:
    loaded = time.perf_counter()
    checksums = {name: checksum(tensor) for name, tensor in held.items()}
    return WeightReceipt(version, (checksums,), time.perf_counter() - loaded)
