"""Requests and results as they cross between processes: the token arrays of a batch as one, not as thousands of small ones.

Ray keeps a numpy array outside of the pickle, and does not copy it where both processes are on one host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, FloatArray, IntArray

_Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """DecodeRequests with their tokens in one array; offsets [n+1] cut it."""

    uids: list[str]
    tokens: IntArray
    offsets: _Offsets
    max_new_tokens: list[int]
    samplings: list[Sampling]
    seeds: list[int]
    affinities: list[str]
    experts_from: list[int | None]

    @classmethod
    def pack(cls, requests: Sequence[DecodeRequest]) -> RequestBatch:
        tokens, offsets = _join_arrays([r.token_ids for r in requests], np.int32)
        return cls(
            [r.uid for r in requests],
            tokens,
            offsets,
            [r.max_new_tokens for r in requests],
            [r.sampling for r in requests],
            [r.seed for r in requests],
            [r.affinity for r in requests],
            [r.experts_from for r in requests],
        )

    def unpack(self) -> list[DecodeRequest]:
        fields = zip(
            self.uids, _cut(self.tokens, self.offsets), self.max_new_tokens, self.samplings, self.seeds,
            self.affinities, [None] * len(self.uids), self.experts_from,
            strict=True,
        )  # fmt: skip
        return [DecodeRequest(*each) for each in fields]


@dataclass(frozen=True, slots=True)
class ResultBatch:
    """DecodeResults with their tokens and log-probs in one array each; records of experts and of kept tokens, which are
    long, as they are."""

    uids: list[str]
    tokens: IntArray
    logprobs: FloatArray
    offsets: _Offsets
    finishes: list[str]
    versions: list[int]
    num_cached_tokens: list[int]
    errors: list[str]
    routed_experts: list[ExpertArray | None]
    kept_tokens: list[KeptTokens | None]
    seconds: list[float]

    @classmethod
    def pack(cls, results: Sequence[DecodeResult]) -> ResultBatch:
        tokens, offsets = _join_arrays([r.token_ids for r in results], np.int32)
        logprobs, _ = _join_arrays([r.logprobs for r in results], np.float32)
        return cls(
            [r.uid for r in results],
            tokens,
            logprobs,
            offsets,
            [r.finish.value for r in results],
            [r.version for r in results],
            [r.num_cached_tokens for r in results],
            [r.error for r in results],
            [r.routed_experts for r in results],
            [r.kept_tokens for r in results],
            [r.seconds for r in results],
        )

    def unpack(self) -> list[DecodeResult]:
        tokens, logprobs = _cut(self.tokens, self.offsets), _cut(self.logprobs, self.offsets)
        finishes = [Finish(value) for value in self.finishes]
        fields = zip(
            self.uids, tokens, logprobs, finishes, self.versions, self.num_cached_tokens, self.errors,
            self.routed_experts, self.kept_tokens, self.seconds, strict=True,
        )  # fmt: skip
        return [DecodeResult(*each) for each in fields]


def _join_arrays(arrays: Sequence[Any], dtype: Any) -> tuple[Any, _Offsets]:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return (np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)), offsets


def _cut(joined: Any, offsets: _Offsets) -> list[Any]:
    return [joined[a:b] for a, b in itertools.pairwise(offsets.tolist())]
