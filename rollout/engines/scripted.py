"""Engine without a model, for tests of marsrl's logic: a function returns the completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marsrl.rollout.engines.protocol import (
    TORN,
    AdapterUpdate,
    DecodeRequest,
    DecodeResult,
    Engine,
    EngineInfo,
    MemoryPart,
    WeightReceipt,
    WeightUpdate,
    taken_from,
)
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.types import Finish, FloatArray, IntArray

Script = Callable[[DecodeRequest], "str | Sequence[int]"]


@dataclass(slots=True)
class _UnderWay:
    """A request, its whole completion (None: not generated yet), and the number of tokens decoded."""

    request: DecodeRequest
    answer: DecodeResult | None = None
    num_done: int = 0


class ScriptedEngine(Engine):
    """Engine that answers each request with script(request).

        engine = ScriptedEngine(lambda request: "4 <|end|>", encode=tokenizer.encode)

    The script is called once per uid and returns the whole completion; text is encoded. If a later request has a part of the
    completion after its prompt, the engine continues from there, like a model. A completion that fits into the limit ends with a
    stop token; the first stop token is appended if there is none. `fail(request)` may return a reason to end a request in ERROR.
    Log-probs are a fixed function of token and position.

    decode: converts ids to text, for DecodeRequest.text_from and Sampling.stop; None: neither is supported.
    tokens_per_step: tokens that each `collect` decodes for each running request; None: all remaining tokens.
    adapters: names of adapters that requests may use; the same script answers them.
    """

    def __init__(
        self,
        script: Script,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        decode: Callable[[IntArray], str] | None = None,
        fail: Callable[[DecodeRequest], str | None] = lambda request: None,
        tokens_per_step: int | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        super().__init__(adapters)
        self._tokens_per_step = tokens_per_step
        self._under_way: list[_UnderWay] = []
        self._script, self._encode, self._fail = script, encode, fail
        self._texts = Texts(decode) if decode is not None else None
        self._answers: dict[str, tuple[int, list[int]]] = {}  # uid: (length of the prompt, whole completion)
        self._asleep: set[MemoryPart] = set()  # lets tests notice calls to a sleeping engine

    def info(self) -> EngineInfo:
        name, adapters = f"{__name__}.ScriptedEngine", tuple(filter(None, self._versions))
        return EngineInfo("scripted", name, "marsrl", "0", "cpu", "float32", adapters=adapters)

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        self._need("weights", "kv_cache")
        super().submit(requests, version=version)

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        results = []
        aborts = {self._aborts.popleft() for _ in range(len(self._aborts))}
        self._under_way += [_UnderWay(request) for request in taken_from(self._inbox, None)]
        running, self._under_way = self._under_way, []
        for work in running:
            if work.answer is None:
                work.answer = self._answer(work.request)
            answer, before = work.answer, work.num_done
            is_last = any(map(work.request.uses, aborts))
            if not is_last:
                work.num_done = min(len(answer.token_ids), before + (self._tokens_per_step or len(answer.token_ids)))
            self._num_decoded += work.num_done - before
            if work.num_done == len(answer.token_ids):
                results.append(answer)
            elif is_last:
                n = work.num_done
                part = replace(answer, token_ids=answer.token_ids[:n], logprobs=answer.logprobs[:n])
                results.append(replace(part, finish=Finish.UNFINISHED, text=None))
            else:
                self._under_way.append(work)
        return results

    def _answer(self, request: DecodeRequest) -> DecodeResult:
        """Return the rest of the script's completion for a request, as a result."""
        version = self._versions[request.adapter]
        if reason := self._fail(request):
            return DecodeResult.without_tokens(request.uid, Finish.ERROR, version, reason)
        prompt_length, whole = self._answers.get(request.uid, (len(request.token_ids), []))
        done = len(request.token_ids) - prompt_length
        if not whole or done < 0 or request.token_ids[prompt_length:].tolist() != whole[:done]:
            prompt_length, whole, done = len(request.token_ids), self._whole(request), 0
        self._answers[request.uid] = (prompt_length, whole)
        ids = np.asarray(whole[done : done + request.max_new_tokens], np.int32)
        is_whole = done + len(ids) == len(whole) and len(ids) > 0 and self._ends(whole, request)
        logprobs = scripted_logprobs(ids, len(request.token_ids))
        finish = Finish.STOP if is_whole else Finish.LENGTH
        result = DecodeResult(request.uid, ids, logprobs, finish, version, num_cached_tokens=max(done - 1, 0))
        return result if self._texts is None else self._texts.told(request, result)

    def _whole(self, request: DecodeRequest) -> list[int]:
        answer = self._script(request)
        if isinstance(answer, str):
            assert self._encode is not None, "the script returned text; pass encode="
            answer = self._encode(answer)
        whole = [int(token) for token in answer]
        for i in range(len(whole)):
            if self._ends(whole[: i + 1], request):
                return whole[: i + 1]
        stops = request.sampling.stop_token_ids
        return [*whole, stops[0]] if stops else whole

    def _ends(self, drawn: list[int], request: DecodeRequest) -> bool:
        """Return True if the last token ends the completion, or completes a stop string."""
        sampling, none = request.sampling, np.zeros(0, np.int32)
        return drawn[-1] in sampling.stop_token_ids or (
            self._texts is not None and self._texts.is_ended(none, drawn, sampling.stop)
        )

    def score(
        self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "", temperature: float | None = None
    ) -> list[FloatArray]:
        self._need("weights", "kv_cache")
        if self._versions[""] == TORN:
            raise RuntimeError(
                "ScriptedEngine.score: the weights were dropped and not replaced; call update_weights first"
            )
        return [scripted_logprobs(s[1:], 1) for s in sequences]

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Record the version: there is no model."""
        self._need("weights")
        self._versions[""] = update.version
        return WeightReceipt(update.version, ({},))

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        """Record the version."""
        self._need("weights")
        self._refuse_under_way("update_adapter", update.name)
        self._versions[update.name] = update.version
        return WeightReceipt(update.version, ({},))

    def sleep(self, keeps_weights: bool) -> None:
        self._refuse_under_way("sleep")
        self._asleep = {"weights", "kv_cache"}
        if not keeps_weights:
            self._versions[""] = TORN

    def wake(self, part: MemoryPart) -> None:
        self._asleep.discard(part)

    def _running(self) -> list[DecodeRequest]:
        return [work.request for work in self._under_way]

    def _need(self, *parts: MemoryPart) -> None:
        if missing := self._asleep.intersection(parts):
            raise RuntimeError(f"ScriptedEngine: asleep ({', '.join(sorted(missing))}); wake it first")

    def close(self) -> None:
        self._answers.clear()


def scripted_logprobs(token_ids: IntArray, start: int) -> FloatArray:
    """Return [N] float32 nats in [-1, 0): a function of token and position alone."""
    position = np.arange(start, start + len(token_ids))
    return (-((token_ids.astype(np.int64) * 31 + position * 17) % 97 + 1) / 98.0).astype(np.float32)
