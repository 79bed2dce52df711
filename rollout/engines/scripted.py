"""An engine without a model, for tests of our own logic: a function says what is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from marsrl.rollout.engines.fused_layout import WeightFiles, fused_checksums
from marsrl.rollout.engines.protocol import (
    DecodeRequest,
    DecodeResult,
    EngineInfo,
    WeightReceipt,
    WeightUpdate,
    WrongVersion,
)
from marsrl.rollout.types import Finish, FloatArray, IntArray

Script = Callable[[DecodeRequest], "str | Sequence[int]"]


class ScriptedEngine:
    """Answers each request with script(request).

        engine = ScriptedEngine(lambda request: "4 <|end|>", encode=tokenizer.encode)

    The script gives the whole completion (text is encoded), once for a uid: when a request comes back with a part of it
    behind its prompt, the engine goes on from there, as a model would. A completion that fits gets the first stop token
    at its end unless it has one; `fail(request)` may name a reason for which a request ends in ERROR. Log-probs are a
    fixed function of token and position. `score` gives those of the probe (default: the same function).
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        fail: Callable[[DecodeRequest], str | None] = lambda request: None,
        score: Callable[[IntArray], FloatArray] | None = None,
        version: int = 0,
    ) -> None:
        self._script, self._encode, self._fail, self._score, self._version = script, encode, fail, score, version
        self._answers: dict[str, tuple[int, list[int]]] = {}  # uid: (length of the prompt, whole completion)
        self._num_decoded = 0

    def info(self) -> EngineInfo:
        return EngineInfo("scripted", f"{__name__}.ScriptedEngine", "marsrl", "0", "cpu", "float32")

    def num_decoded(self) -> int:
        return self._num_decoded

    def generate(self, requests: Sequence[DecodeRequest], *, version: int) -> list[DecodeResult]:
        if version != self._version:
            raise WrongVersion(
                f"ScriptedEngine: asked for policy version {version}, but version {self._version} is loaded"
            )
        return [self._answer(request) for request in requests]

    def _answer(self, request: DecodeRequest) -> DecodeResult:
        if reason := self._fail(request):
            none = np.zeros(0, np.int32)
            return DecodeResult(request.uid, none, none.astype(np.float32), Finish.ERROR, self._version, error=reason)
        prompt_length, whole = self._answers.get(request.uid, (len(request.token_ids), []))
        done = len(request.token_ids) - prompt_length
        if not whole or request.token_ids[prompt_length:].tolist() != whole[:done]:
            prompt_length, whole, done = len(request.token_ids), self._whole(request), 0
        self._answers[request.uid] = (prompt_length, whole)
        ids = np.asarray(whole[done : done + request.max_new_tokens], np.int32)
        is_whole = done + len(ids) == len(whole) and len(ids) > 0 and int(ids[-1]) in request.sampling.stop_token_ids
        self._num_decoded += len(ids)
        logprobs = scripted_logprobs(ids, len(request.token_ids))
        finish = Finish.STOP if is_whole else Finish.LENGTH
        return DecodeResult(request.uid, ids, logprobs, finish, self._version, num_cached_tokens=max(done - 1, 0))

    def _whole(self, request: DecodeRequest) -> list[int]:
        answer = self._script(request)
        if isinstance(answer, str):
            if self._encode is None:
                raise ValueError("ScriptedEngine: the script gave text; pass encode=, or give token ids")
            answer = self._encode(answer)
        whole = [int(token) for token in answer]
        stops = request.sampling.stop_token_ids
        for i, token in enumerate(whole):
            if token in stops:
                return whole[: i + 1]
        return [*whole, stops[0]] if stops else whole

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> list[FloatArray]:
        return [self._score(s) if self._score else scripted_logprobs(s[1:], 1) for s in sequences]

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        start = time.perf_counter()
        checksums = fused_checksums(WeightFiles(update.path), torch.float32)
        self._version = update.version
        return WeightReceipt(update.version, checksums, time.perf_counter() - start)

    def close(self) -> None:
        self._answers.clear()


def scripted_logprobs(token_ids: IntArray, start: int) -> FloatArray:
    """[N] float32 nats in [-1, 0): a function of token and position alone."""
    position = np.arange(start, start + len(token_ids))
    return (-((token_ids.astype(np.int64) * 31 + position * 17) % 97 + 1) / 98.0).astype(np.float32)
