"""Builder of requests for vLLM's core, in place of LLMEngine.add_request, and readers of the core's outputs.

vLLM draws with noise that depends on the request's seed and, in Model Runner V2, on the token's position; in V1 each request
has a generator with that seed. Each segment of a sample has its own seed (DecodeRequest.seed), so noise is never reused.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from marsrl.rollout.config import Sampler
from marsrl.rollout.engines.protocol import DecodeRequest, Records, Sampling, why_not_decodable
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray, expert_dtype
from marsrl.rollout.types import FloatArray, IntArray

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

COLDEST = 0.01
"""Lowest temperature above 0 that vLLM uses; vLLM raises lower temperatures to this."""
SEATS = 16
"""Requests that an engine with adapters runs in addition to rollout.vllm.max_num_seqs, so that checks of a new adapter need not
wait."""


class RequestMaker:
    """Builder of requests for one engine. draws: the sampler used. max_model_len: maximum tokens of prompt and completion."""

    def __init__(self, draws: Sampler, records: Records, *, max_model_len: int, vocab_size: int) -> None:
        self._draws, self._records = draws, records
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._alike: dict[Sampling, SamplingParams] = {}  # arguments that vLLM has validated; each request gets a copy

    def why_not(self, request: DecodeRequest) -> str:
        """Explain why vLLM would reject the request, or return ""."""
        reason = why_not_decodable(request, self._max_model_len, self._vocab_size)
        if not reason and self._draws == "engine":
            reason = why_not_drawn(request, self._records)
        return reason

    def made(self, key: str, request: DecodeRequest, adapter: LoRARequest | None) -> EngineCoreRequest:
        """Build the request with the id `key`. adapter: the latest LoRARequest of the adapter; None: the bare weights."""
        return core_request(key, request.token_ids, self._sampling_params(key, request), adapter)

    def _sampling_params(self, key: str, request: DecodeRequest) -> SamplingParams:
        if self._draws == "engine":
            params = self._new_params(request, **asked_of_vllm(request, self._vocab_size, self._records))
        else:
            from marsrl.rollout.engines.vllm.sampling import draw_arguments

            if request.sampling not in self._alike:
                self._alike[request.sampling] = self._new_params(request, temperature=0)
            params = copy.copy(self._alike[request.sampling])
            params.extra_args = draw_arguments(key, request)
        params.max_tokens = min(request.max_new_tokens, self._max_model_len - len(request.token_ids))
        return params

    @staticmethod
    def _new_params(request: DecodeRequest, **drawn: Any) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            stop_token_ids=list(request.sampling.stop_token_ids),
            ignore_eos=True,  # only stop_token_ids end a completion
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # not shared, so vLLM need not deepcopy it
            **drawn,
        )


def core_request(
    key: str, token_ids: IntArray, params: SamplingParams, adapter: LoRARequest | None
) -> EngineCoreRequest:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=key,
        prompt_token_ids=token_ids.tolist(),
        sampling_params=params,
        arrival_time=time.time(),
        mm_features=None,
        pooling_params=None,
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
    )


def why_not_drawn(request: DecodeRequest, records: Records) -> str:
    """Explain why vLLM's sampler cannot serve the request, or return "". records: what the engine records."""
    temperature = request.sampling.temperature
    if 0 < temperature < COLDEST:
        return f"temperature is {temperature}, but vLLM's sampler raises it to {COLDEST}"
    if records.kept_tokens and temperature == 0:
        return "temperature is 0, but a vLLM engine that returns kept tokens needs a temperature above 0"
    assert records.kept_tokens or not request.sampling.records_kept, "the engine was not started to record kept tokens"
    assert records.experts or request.experts_from is None, "the engine was not started to record experts"
    return ""


def asked_of_vllm(request: DecodeRequest, vocab_size: int, records: Records) -> dict[str, Any]:
    """Return the arguments of SamplingParams with which vLLM's own sampler draws and records."""
    sampling = request.sampling
    top_k = sampling.top_k
    if records.kept_tokens and top_k <= 0:
        top_k = vocab_size  # required by vLLM to return kept tokens
    asked = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k,
        "seed": request.seed,
        "logprobs": 0,  # log-prob of the sampled token only
    }
    if records.experts:
        place = request.experts_from
        asked["routed_experts_prompt_start"] = len(request.token_ids) if place is None else place
    return asked


def kept_tokens_told(outputs: Sequence[EngineCoreOutput], num_tokens: int, vocab_size: int) -> KeptTokens | None:
    """Return token ids kept by top_k and top_p at each position (empty: all ids); None if the engine records none."""
    masks = [output.new_sampling_mask for output in outputs if output.new_sampling_mask]
    places = [np.asarray(ids, np.int32) for mask in masks for ids in mask.to_nested_list()][:num_tokens]
    return KeptTokens.of([ids if len(ids) < vocab_size else ids[:0] for ids in places]) if masks else None


def experts_told(outputs: Sequence[EngineCoreOutput], num_tokens: int, num_experts: int) -> ExpertArray | None:
    """Return experts [num_tokens, layers, top_k] of the tokens from experts_from on; None if no token was decoded."""
    experts = [output.routed_experts for output in outputs if output.routed_experts is not None]
    return np.concatenate(experts)[:num_tokens].astype(expert_dtype(num_experts)) if experts else None


class Scored:
    """Sequences that are scored together.

    by_prefill: True to score all tokens after the first by a fresh prefill; False to score only the last one, through the prefix
        cache, as a decoded token.
    top_k: top_k of the token that vLLM draws at the end of each sequence; None: draw greedily.
    """

    def __init__(self, sequences: dict[str, IntArray], *, by_prefill: bool, top_k: int | None) -> None:
        """Create without outputs. sequences: token ids [N] of each sequence, by vLLM's request id."""
        self._sequences, self._by_prefill, self._top_k = sequences, by_prefill, top_k
        self._told: dict[str, list[EngineCoreOutput]] = {key: [] for key in sequences}

    def requests(self, adapters: Sequence[LoRARequest | None]) -> list[EngineCoreRequest]:
        """Return a request for each sequence, with its adapter."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        drawn: dict[str, Any] = {"temperature": 0}
        if self._top_k is not None:
            drawn = {"temperature": 1, "top_k": self._top_k, "seed": 0}
        made = []
        for (key, tokens), adapter in zip(self._sequences.items(), adapters, strict=True):
            asked: dict[str, Any] = (
                {"prompt_logprobs": 0} if self._by_prefill else {"logprob_token_ids": [int(tokens[-1])]}
            )
            params = SamplingParams(
                max_tokens=1,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **drawn,
                **asked,
            )
            made.append(core_request(key, tokens if self._by_prefill else tokens[:-1], params, adapter))
        return made

    def take(self, output: EngineCoreOutput) -> None:
        """Record an output; ignore one of another request."""
        if output.request_id in self._told:
            self._told[output.request_id].append(output)

    @property
    def is_over(self) -> bool:
        return all(told and told[-1].finish_reason is not None for told in self._told.values())

    def num_cached_tokens(self) -> list[int]:
        """Return the number of prompt tokens of each sequence that vLLM took from its prefix cache."""
        stats = ([each.prefill_stats for each in told] for told in self._told.values())
        return [max((each.num_cached_tokens for each in of_one if each is not None), default=0) for of_one in stats]

    def logprobs(self) -> list[FloatArray]:
        """Return log-probs of each sequence, float32, nats: [N-1] if by_prefill, else [1]."""
        read = _of_prompt if self._by_prefill else _of_last
        return [read(self._told[key], tokens) for key, tokens in self._sequences.items()]


def _of_prompt(outputs: Sequence[EngineCoreOutput], tokens: IntArray) -> FloatArray:
    parts = [each.new_prompt_logprobs_tensors for each in outputs if each.new_prompt_logprobs_tensors is not None]
    found = np.concatenate([part.logprobs[:, 0].float().numpy() for part in parts])
    assert len(found) == len(tokens) - 1, (len(found), len(tokens))
    return found


def _of_last(outputs: Sequence[EngineCoreOutput], tokens: IntArray) -> FloatArray:
    listed = outputs[-1].new_logprobs
    assert listed is not None, "vLLM returned no log-prob for a token"
    place = np.flatnonzero(listed.logprob_token_ids[0] == tokens[-1])[-1]
    return np.asarray([listed.logprobs[0][place]], np.float32)
