"""Requests for vLLM's core, built and checked here instead of in LLMEngine.add_request."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from marsrl.rollout.config import Sampler
from marsrl.rollout.engines.protocol import DecodeRequest, Records, Sampling, why_not_decodable
from marsrl.rollout.engines.vllm.own_sampler import asked_of_vllm, why_not_drawn
from marsrl.rollout.types import IntArray

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreRequest


class RequestMaker:
    """Builds requests for one engine. draws: its sampler. max_model_len: prompt and completion together, tokens."""

    def __init__(self, draws: Sampler, records: Records, *, max_model_len: int, vocab_size: int) -> None:
        self._draws, self._records = draws, records
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self._alike: dict[Sampling, SamplingParams] = {}  # validated once by vLLM; each request gets a copy

    def why_not(self, request: DecodeRequest) -> str:
        """Why vLLM would reject the request, or ""."""
        reason = why_not_decodable(request, self._max_model_len, self._vocab_size)
        if not reason and self._draws == "engine":
            reason = why_not_drawn(request, self._records)
        return reason

    def made(self, key: str, request: DecodeRequest, adapter: LoRARequest | None) -> EngineCoreRequest:
        """The request that vLLM knows by `key`. adapter: as it was loaded; None: the bare weights."""
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
