"""vLLM as an Engine. vLLM's core runs in this process; with several GPUs, each has a worker process.

    os.environ.update(vllm_environment(threads=1))            # set by the parent process, before vLLM is imported
    engine = VllmEngine(EngineSpec("vllm", model_dir, dtype="float32", max_model_len=1024))
    engine.submit(requests, version=0)
    results = engine.collect(timeout_s=1.0)

The engine runs its own loop over the steps of vLLM's core, so that requests can be added, aborted and counted between steps. It
skips LLMEngine's output processing (texts, RequestOutputs). vLLM is imported when an engine is created, not with this file.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from marsrl.rollout.adapter import check_start
from marsrl.rollout.engines.protocol import (
    TORN,
    AdapterUpdate,
    DecodeRequest,
    DecodeResult,
    Engine,
    EngineInfo,
    EngineLost,
    EngineSpec,
    MemoryPart,
    WeightReceipt,
    WeightUpdate,
    taken_from,
)
from marsrl.rollout.engines.texts import Texts
from marsrl.rollout.engines.time_shares import TimeShares
from marsrl.rollout.engines.vllm.arguments import engine_arguments, who_draws
from marsrl.rollout.engines.vllm.requests import RequestMaker, Scored, experts_told, kept_tokens_told
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, FloatArray, IntArray

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput


@dataclass(slots=True)
class _Running:
    """A request in vLLM and its tokens so far. logprobs: log-probs in nats; empty if marsrl's sampler draws.

    num_steps: number of vLLM's steps that returned tokens. num_watched: number of tokens searched for Sampling.stop. told:
    outputs of the request's steps, stored only if kept tokens or experts are recorded, since a step's output takes hundreds of
    bytes and refers to arrays of the whole step.
    """

    key: str
    request: DecodeRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    num_steps: int = 0
    num_watched: int = 0
    num_cached_tokens: int = 0
    told: list[EngineCoreOutput] = field(default_factory=list)


class VllmEngine(Engine):
    """One vLLM replica of one policy; see protocol.Engine for the contract."""

    num_open: ClassVar[int] = 0  # engines in this process
    made_groups: ClassVar[bool] = False  # True if vLLM, not the trainer, created the process groups

    def __init__(self, spec: EngineSpec) -> None:
        """Start vLLM with the weights of spec.model_dir as version 0."""
        super().__init__(spec.adapters)
        self._spec, self._draws = spec, spec.vllm.sampler_on(spec.device)
        # Adapters as last loaded. One that was never loaded is absent, and equals the bare weights; unknown names are rejected.
        self._adapters: dict[str, LoRARequest] = {}
        self._texts = Texts.of_model(spec.model_dir)
        self._under_way: dict[str, _Running] = {}  # by vLLM's request id
        self._watched: set[str] = set()  # keys of requests with Sampling.stop
        self._keys = itertools.count()
        # Maximum number of decoding requests in vLLM, so that seats for scoring stay free; None without adapters.
        self._most = spec.vllm.max_num_seqs if spec.adapters else None
        self._scoring: Scored | None = None
        self._ended: list[DecodeResult] = []  # results that ended while something was scored
        self._untried = set[str]()  # names in _versions whose new weights have not been used yet
        self._shares = TimeShares(spec.vllm.max_num_seqs)
        for adapter in spec.adapters.values():
            if adapter.start is not None:  # check here, since vLLM ignores unknown settings and tensors
                check_start(Path(adapter.start), read_shape(spec.model_dir), adapter)
        self._llm: Any = _started(spec)
        self._core: Any = self._llm.llm_engine.engine_core
        rendezvous = self._llm.collective_rpc("marsrl_started")[0]
        self._rendezvous = Path(rendezvous) if rendezvous else None
        if spec.vllm.tensor_parallel == 1:
            self._forget_rendezvous()  # kept with several workers, which may still create groups through it
        model = self._llm.model_config
        self._vocab_size, self._num_experts = int(model.get_vocab_size()), int(model.get_num_experts())
        self._maker = RequestMaker(
            self._draws, spec.records, max_model_len=spec.max_model_len, vocab_size=self._vocab_size
        )
        for name, adapter in spec.adapters.items():
            if adapter.start is not None:
                self._load_adapter(name, adapter.start)
        logging.getLogger("vllm").setLevel(logging.ERROR)

    def info(self) -> EngineInfo:
        import vllm

        core = type(self._llm)
        return EngineInfo(
            kind="vllm",
            engine_class=f"{core.__module__}.{core.__qualname__}",
            library="vllm",
            library_version=str(vllm.__version__),
            device=self._spec.device,
            dtype=self._spec.dtype,
            settings=_together(self._llm.collective_rpc("marsrl_settings")),
            shards=tuple(self._llm.collective_rpc("marsrl_shard")),
            sampler=who_draws(self._spec.vllm, self._spec.device),
            adapters=tuple(filter(None, self._versions)),
            why_no_receive=next(filter(None, self._llm.collective_rpc("marsrl_why_no_receive")), ""),
        )

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        super().submit(requests, version=version)
        self._untried.difference_update(request.adapter for request in requests)

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        self._check_workers()
        end = time.monotonic() + timeout_s
        while True:
            results, self._ended = [*self._ended, *self._admit()], []
            if self._aborts:
                return results + self._give_up()
            if results or not self._under_way:
                return results
            results = self._step() + self._stopped()
            if results or time.monotonic() >= end:
                return results

    def score(
        self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "", temperature: float | None = None
    ) -> list[FloatArray]:
        """Return log-probs [N-1] of tokens 1..N-1 of each sequence, nats.

        adapter: as Engine.score.

        Without a temperature, all tokens but the last are scored by a fresh prefill, and the last one through the prefix cache,
        like a decoded token. This exposes cached blocks of older weights that survived an update.

        Raises RuntimeError: right after an update, vLLM's cache still has a prefix computed with older weights; or running
        requests would be affected by a teacher's temperature.
        """
        names = [adapter] * len(sequences) if isinstance(adapter, str) else adapter
        if temperature is not None:
            self._refuse_under_way("score")
            self._ask_workers("marsrl_divide_logits", temperature)
            try:
                return self._scored(sequences, names, by_prefill=True).logprobs()
            finally:
                self._ask_workers("marsrl_divide_logits", 1.0)
        last = self._scored(sequences, names, by_prefill=False)
        starts = {(name, *s[:8]) for name, s in zip(names, sequences, strict=True)}
        none_has_anothers_prefix = len(starts) == len(sequences)
        if none_has_anothers_prefix:
            cached = list(zip(names, last.num_cached_tokens(), strict=True))
            for name in self._untried.intersection(names):
                self._refuse_old_prefixes(max(num for own, num in cached if own == name), name)
        self._untried.difference_update(names)
        first = self._scored([s[:-1] for s in sequences], names, by_prefill=True)
        return [np.concatenate(each) for each in zip(first.logprobs(), last.logprobs(), strict=True)]

    def _scored(self, sequences: Sequence[IntArray], names: Sequence[str], *, by_prefill: bool) -> Scored:
        """Score sequences, each with the adapter of this name, without interrupting other requests."""
        top_k = self._vocab_size if self._spec.records.kept_tokens else None  # required if vLLM records kept tokens
        keys = [str(next(self._keys)) for _ in sequences]
        self._scoring = scoring = Scored(dict(zip(keys, sequences, strict=True)), by_prefill=by_prefill, top_k=top_k)
        for request in scoring.requests([self._adapters.get(name) for name in names]):
            self._core.add_request(request)
        while not scoring.is_over:
            self._ended += self._step() + self._stopped()
        self._scoring = None
        return scoring

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load or receive weights, drop cached prefixes, and return checksums of what the kernels hold."""
        self._settle()
        if update.receive_plans:
            self._versions[""] = TORN  # prevents decoding with a partial transfer
            reasons = self._ask_workers("marsrl_receive", list(update.receive_plans))
            if broken := next(filter(None, reasons), ""):
                return WeightReceipt(TORN, (), broken=broken)
        else:
            self._ask_workers("marsrl_load", update.path)  # drops adapters; vLLM reloads each with its next request
        self._reset_prefix_cache()
        loaded = time.perf_counter()
        ask = ("marsrl_received_checksums",) if update.receive_plans else ("marsrl_checksums", update.path)
        checksums = self._ask_workers(*ask)
        self._versions[""] = update.version
        self._untried.update(self._versions)
        return WeightReceipt(update.version, checksums, time.perf_counter() - loaded)

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        """Load an adapter between two steps, while others decode. Its new path makes its cached prefixes unreachable."""
        self._refuse_under_way("update_adapter", update.name)
        number = self._load_adapter(update.name, update.path)
        loaded = time.perf_counter()
        checksums = self._ask_workers("marsrl_adapter_checksums", number, update.path)
        self._versions[update.name] = update.version
        self._untried.add(update.name)
        return WeightReceipt(update.version, checksums, time.perf_counter() - loaded)

    def _load_adapter(self, name: str, path: str) -> int:
        """Load a version of an adapter in place of the previous one; return the adapter's number in the workers.

        Name and number never change; each version has its own path. vLLM identifies cached prefixes by name and path, so with
        an unchanged path it would reuse keys and values of the previous version.
        """
        from vllm.lora.request import LoRARequest

        number = 1 + list(self._spec.adapters).index(name)
        # Requests get a LoRARequest without load_inplace: with it, vLLM would read the file again at every step.
        self._llm.llm_engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
        self._adapters[name] = LoRARequest(name, number, path)
        return number

    def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of WorkerExtension on each worker and return the results."""
        try:
            return list(self._llm.collective_rpc(method, args=args))
        except RuntimeError as error:
            self._check_workers(error)
            raise

    def forget_prefixes(self) -> None:
        self._settle()
        self._reset_prefix_cache()

    def sleep(self, keeps_weights: bool) -> None:
        """Sleep at vLLM's level 1 if keeps_weights, else at level 2, which drops weights and adapters.

        wake("weights") restores buffers and the draft model.
        """
        self._settle()
        if not keeps_weights:
            self._versions[""] = TORN
            if self._spec.vllm.draft_model:
                self._ask_workers("marsrl_keep_draft")
        self._llm.sleep(level=1 if keeps_weights else 2)

    def wake(self, part: MemoryPart) -> None:
        self._llm.wake_up(tags=[part])
        if part == "weights" and self._spec.vllm.draft_model:
            self._ask_workers("marsrl_restore_draft")

    def close(self) -> None:
        """Shut down vLLM's core and workers.

        The last engine of a process also destroys the process groups that vLLM created, so that later code in the process, such
        as training after an evaluation, can create its own.
        """
        self._core.shutdown()
        self._forget_rendezvous()
        VllmEngine.num_open -= 1
        if VllmEngine.made_groups and not VllmEngine.num_open:
            from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

            destroy_model_parallel()
            destroy_distributed_environment()
            VllmEngine.made_groups = False

    def _forget_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.unlink(missing_ok=True)

    def _check_workers(self, cause: BaseException | None = None) -> None:
        executor = self._llm.llm_engine.model_executor
        # Only executors with worker processes have `workers`. A worker's error may arrive before its end is detected.
        ends = [each.proc.sentinel for each in getattr(executor, "workers", ())] if cause is not None else []
        if getattr(executor, "is_failed", False) or (ends and wait(ends, timeout=2.0)):
            raise EngineLost("VllmEngine: a GPU's worker process has ended; see the end of its log") from cause

    def _reset_prefix_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "VllmEngine: vLLM did not reset its prefix cache, because requests are still running; abort and collect them "
                "before an update, or vLLM would serve prefixes of the old weights"
            )

    def _refuse_old_prefixes(self, num_cached_tokens: int, adapter: str) -> None:
        if num_cached_tokens:
            raise RuntimeError(
                f"VllmEngine.score: right after the update to version {self._versions[adapter]}, vLLM took up to "
                f"{num_cached_tokens} tokens of a sequence from its prefix cache, which still holds prefixes of older weights"
            )

    def _admit(self) -> list[DecodeResult]:
        """Pass submitted requests to vLLM; return results of invalid ones."""
        refused = []
        while self._inbox and (self._most is None or len(self._under_way) < self._most):
            request = self._inbox.popleft()
            if reason := self._maker.why_not(request):
                version = self._versions[request.adapter]
                refused.append(DecodeResult.without_tokens(request.uid, Finish.ERROR, version, reason))
                continue
            key = str(next(self._keys))
            self._core.add_request(self._maker.made(key, request, self._adapters.get(request.adapter)))
            self._under_way[key] = _Running(key, request)
            if request.sampling.stop:
                self._watched.add(key)
            self._shares.add(request.uid)
        return refused

    def _step(self) -> list[DecodeResult]:
        """Run one step of vLLM; return results of requests that it finished."""
        start = time.perf_counter()
        try:
            outputs: Sequence[EngineCoreOutput] = self._core.get_output().outputs
        except RuntimeError as error:
            self._check_workers(error)
            raise
        self._shares.step(time.perf_counter() - start)
        ended: dict[str, Finish] = {}
        records, is_drawn = self._spec.records, self._draws == "engine"
        keeps_told = records.experts or (records.kept_tokens and is_drawn)
        for output in outputs:
            running = self._under_way.get(output.request_id)
            if running is None:  # a request that is scored, or was aborted during the step
                if self._scoring is not None:
                    self._scoring.take(output)
                continue
            if output.prefill_stats is not None and not running.token_ids:
                running.num_cached_tokens = output.prefill_stats.num_cached_tokens
            running.token_ids += output.new_token_ids
            running.num_steps += bool(output.new_token_ids)
            self._num_decoded += len(output.new_token_ids)
            if is_drawn and output.new_logprobs is not None:
                # Column 0 has the log-probs of the drawn tokens.
                running.logprobs.extend(output.new_logprobs.logprobs[:, 0])
            if keeps_told:
                running.told.append(output)
            if output.finish_reason is not None:
                ended[running.key] = Finish.STOP if str(output.finish_reason) == "stop" else Finish.LENGTH
                is_cut = running.key in self._watched and self._is_cut(running)
                # Cut at a stop string within the step's tokens.
                if is_cut and len(running.token_ids) < running.num_watched:
                    ended[running.key] = Finish.STOP
        return self._results(ended)

    def _results(self, ended: Mapping[str, Finish]) -> list[DecodeResult]:
        """Remove ended requests (by key) and return their results."""
        running = [self._under_way.pop(key) for key in ended]
        self._watched.difference_update(ended)
        return [
            self._texts.told(
                each.request,
                DecodeResult(
                    uid=each.request.uid,
                    token_ids=np.asarray(each.token_ids, np.int32),
                    logprobs=logprobs,
                    finish=ended[each.key],
                    version=self._versions[each.request.adapter],
                    num_cached_tokens=each.num_cached_tokens,
                    # Each step returns the accepted draft tokens and one token that the policy draws.
                    num_accepted=len(each.token_ids) - each.num_steps if self._spec.vllm.draft_tokens else None,
                    routed_experts=self._experts(each),
                    kept_tokens=kept if each.request.sampling.records_kept else None,
                    seconds=self._shares.end(each.request.uid),
                ),
            )
            for each, (logprobs, kept) in zip(running, self._drawn(running), strict=True)
        ]

    def _experts(self, ended: _Running) -> ExpertArray | None:
        """Return experts of all tokens but the last, from the request's experts_from on; None if not requested."""
        request = ended.request
        if request.experts_from is None:
            return None
        num_tokens = len(request.token_ids) + len(ended.token_ids) - 1 - request.experts_from
        return experts_told(ended.told, num_tokens, self._num_experts)

    def _stopped(self) -> list[DecodeResult]:
        """End requests that completed a string of Sampling.stop, and return their results.

        vLLM itself cannot search for strings, since it has no tokenizer here.
        """
        return self._end_here([key for key in self._watched if self._is_cut(self._under_way[key])], Finish.STOP)

    def _is_cut(self, running: _Running) -> bool:
        """Return True if a stop string is complete; drop tokens after it, which a step with draft tokens may have added."""
        drawn, request = running.token_ids, running.request
        known = request.token_ids[request.stop_from :]
        end = self._texts.first_end(known, drawn, request.sampling.stop, running.num_watched)
        running.num_watched = len(drawn)
        if end is not None:
            del drawn[end:]
        return end is not None

    def _give_up(self) -> list[DecodeResult]:
        """Remove aborted requests, and return their results with the tokens decoded so far."""
        results: list[DecodeResult] = []
        while self._aborts:
            adapter = self._aborts.popleft()
            keys = [key for key, running in self._under_way.items() if running.request.uses(adapter)]
            results += self._end_here(keys, Finish.UNFINISHED)
            if self._draws == "marsrl":
                self._llm.collective_rpc("marsrl_forget_draws", args=(keys,))
            for request in taken_from(self._inbox, adapter):
                version = self._versions[request.adapter]
                results.append(DecodeResult.without_tokens(request.uid, Finish.UNFINISHED, version))
        if not self._under_way:
            self._settle()
        return results

    def _end_here(self, keys: list[str], finish: Finish) -> list[DecodeResult]:
        """Abort these requests in vLLM and return their results."""
        self._core.abort_requests(keys)
        return self._results(dict.fromkeys(keys, finish))

    def _running(self) -> list[DecodeRequest]:
        return [running.request for running in self._under_way.values()]

    def _settle(self) -> None:
        """Finish the step that async scheduling has started ahead; called once requests have ended."""
        while self._core.engine_core.batch_queue:
            self._core.get_output()

    def _drawn(self, ended: Sequence[_Running]) -> list[tuple[FloatArray, KeptTokens | None]]:
        """Return (log-probs [n] in nats, kept tokens or None) of each request."""
        if self._draws == "engine":
            return [
                (
                    np.array(each.logprobs[: len(each.token_ids)], np.float32),
                    kept_tokens_told(each.told, len(each.token_ids), self._vocab_size),
                )
                for each in ended
            ]
        lengths = {each.key: len(each.token_ids) for each in ended if each.token_ids}
        taken: list[Any] = []
        if lengths:
            (taken, *_) = self._llm.collective_rpc("marsrl_take_draws", args=(list(lengths), list(lengths.values())))
        draws = dict(zip(lengths, taken, strict=True))
        return [draws.get(each.key, (np.zeros(0, np.float32), None)) for each in ended]


def _started(spec: EngineSpec) -> Any:
    """Start vLLM's LLM with its worker processes."""
    import torch
    from vllm import LLM

    from marsrl.rollout.engines.vllm.worker import wait_asleep
    from marsrl.rollout.engines.vllm.worker_adapters import experts_without_adapters

    if is_cpu := spec.device == "cpu":
        torch.set_num_threads(spec.threads)
    has_groups = torch.distributed.is_initialized()
    with experts_without_adapters() if spec.adapters and is_cpu else nullcontext():
        llm = LLM(**engine_arguments(spec))
    VllmEngine.num_open += 1
    VllmEngine.made_groups |= not has_groups and torch.distributed.is_initialized()
    if is_cpu and spec.vllm.tensor_parallel > 1:
        wait_asleep()
    return llm


def _together(settings: Sequence[Mapping[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    """Merge the distinct values of each setting over all workers."""
    names = {name: None for of_worker in settings for name in of_worker}
    return {name: tuple(sorted({v for of_worker in settings for v in of_worker.get(name, ())})) for name in names}
