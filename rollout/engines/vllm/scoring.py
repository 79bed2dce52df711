"""Sequences that vLLM scores: their requests, which run beside those that decode, and what the outputs tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from marsrl.rollout.engines.vllm.requests import core_request
from marsrl.rollout.types import FloatArray, IntArray

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

SEATS = 16
"""Requests that an engine with adapters runs beside rollout.vllm.max_num_seqs: those that prove a new adapter do not wait until
others end."""


class Scored:
    """Sequences that are scored together.

    by_prefill: all tokens after the first of each, by a fresh prefill; else the last one alone, through the prefix cache, as a
        decoded token.
    top_k: of the draw with which vLLM ends each; None: it takes the likeliest token.
    """

    def __init__(self, sequences: dict[str, IntArray], *, by_prefill: bool, top_k: int | None) -> None:
        """sequences: [N] each, by the key that vLLM knows it by."""
        self._sequences, self._by_prefill, self._top_k = sequences, by_prefill, top_k
        self._told: dict[str, list[EngineCoreOutput]] = {key: [] for key in sequences}

    def requests(self, adapter: LoRARequest | None) -> list[EngineCoreRequest]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        drawn: dict[str, Any] = {"temperature": 0}
        if self._top_k is not None:
            drawn = {"temperature": 1, "top_k": self._top_k, "seed": 0}
        made = []
        for key, tokens in self._sequences.items():
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
        """Note an output; one of another request is left out."""
        if output.request_id in self._told:
            self._told[output.request_id].append(output)

    @property
    def is_over(self) -> bool:
        return all(told and told[-1].finish_reason is not None for told in self._told.values())

    @property
    def num_cached_tokens(self) -> list[int]:
        """Prompt tokens that vLLM took from its prefix cache, by sequence."""
        return [
            max(each.prefill_stats.num_cached_tokens if each.prefill_stats is not None else 0 for each in told)
            for told in self._told.values()
        ]

    def logprobs(self) -> list[FloatArray]:
        """[N-1] float32 of each by prefill, else [1]; nats."""
        read = _of_prompt if self._by_prefill else _of_last
        return [read(self._told[key], tokens) for key, tokens in self._sequences.items()]


def _of_prompt(told: Sequence[EngineCoreOutput], tokens: IntArray) -> FloatArray:
    parts = [each.new_prompt_logprobs_tensors for each in told if each.new_prompt_logprobs_tensors is not None]
    found = np.concatenate([part.logprobs[:, 0].float().numpy() for part in parts])
    assert len(found) == len(tokens) - 1, (len(found), len(tokens))
    return found


def _of_last(told: Sequence[EngineCoreOutput], tokens: IntArray) -> FloatArray:
    listed = told[-1].new_logprobs
    assert listed is not None, "the log-prob of a token was asked for"
    place = np.flatnonzero(listed.logprob_token_ids[0] == tokens[-1])[-1]
    return np.asarray([listed.logprobs[0][place]], np.float32)
