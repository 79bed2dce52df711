"""The interface of an engine, and the types that cross it.

An engine holds one policy's weights at one version, and low-rank adapters of them, each of a policy of its own at a version of
its own. It decodes, scores given tokens, and takes new weights:

    engine.submit([DecodeRequest, ...], version=3)                             also while it decodes others
    engine.collect(timeout_s=0.2)                      -> [DecodeResult, ...]  what has ended, in any order
    engine.abort()                                                             the rest comes back as far as it got
    engine.update_weights(WeightUpdate(path, version)) -> WeightReceipt        a checksum for every tensor it holds
    engine.update_adapter(AdapterUpdate(name, path, version)) -> WeightReceipt also while it decodes for others
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, FloatArray, IntArray
from marsrl.rollout.weights.layout import EngineShard


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a request. top_p 1 and top_k -1 leave the distribution whole.

    stop: texts that end a completion, which keeps them, with whatever else the last token holds.
    records_kept: say which tokens top_k and top_p kept at each place (DecodeResult.kept_tokens).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    records_kept: bool = False

    @property
    def truncates(self) -> bool:
        """Are tokens left out that have a probability?"""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Go on from these tokens by at most max_new_tokens.

    The second segment of the Solver's fourth sample, whose prompt 5 9 4 has got 7 6 2 in the first:

        DecodeRequest(
            "000017/solver:3", token_ids=[5, 9, 4, 7, 6, 2], max_new_tokens=4096, sampling=Sampling(temperature=1.0),
            seed=811, affinity="000017/solver",
        )

    token_ids [N] int32: the prompt and what was decoded of the completion in earlier segments.
    seed: of this request alone, derived from (run seed, sample uid, segment index).
    affinity: requests with the same key share a prefix and are best served by one engine.
    expected_new_tokens: a guess, by which a pool sends the longest first; None: max_new_tokens.
    experts_from: record the experts of the tokens fed to the model from this place on (router replay); None: of none.
    adapter: name of the one to decode with, at adapter_version; empty: the engine's weights as they are.
    """

    uid: str
    token_ids: IntArray
    max_new_tokens: int
    sampling: Sampling
    seed: int
    affinity: str
    expected_new_tokens: float | None = None
    experts_from: int | None = None
    adapter: str = ""
    adapter_version: int = 0


def why_not_decodable(request: DecodeRequest, max_model_len: int | None, vocab_size: int | None) -> str:
    """Why nothing can follow these tokens, or "". None: not known, of a server."""
    n = len(request.token_ids)
    if n == 0:
        return "the prompt is empty"
    if max_model_len is not None and n >= max_model_len:
        return f"the prompt has {n} tokens, which leaves no room in max_model_len {max_model_len}"
    if request.max_new_tokens < 1:
        return f"max_new_tokens is {request.max_new_tokens}"
    if vocab_size is not None and (int(request.token_ids.min()) < 0 or int(request.token_ids.max()) >= vocab_size):
        return f"a token id is outside of the vocabulary of {vocab_size}"
    return ""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The result of a request. finish is STOP, LENGTH (max_new_tokens used up), UNFINISHED (aborted on the way) or ERROR;
    logprobs in nats, at the sampling temperature, of exactly the tokens drawn, among those that top_k and top_p kept.

        DecodeResult("000017/solver:3", token_ids=[8, 1], logprobs=[-0.7, -0.1], finish=Finish.STOP, version=5)

    routed_experts: of the request's tokens and the new ones from experts_from on, without the last one, which no log-prob
    rests on; None where none were asked for, or nothing was decoded.
    kept_tokens: of each new token's place; None where they were not asked for.
    seconds: this request's part of the engine's time (time_shares.py); of a server, how long it took to answer.
    """

    uid: str
    token_ids: IntArray
    logprobs: FloatArray
    finish: Finish
    version: int
    num_cached_tokens: int = 0
    error: str = ""
    routed_experts: ExpertArray | None = None
    kept_tokens: KeptTokens | None = None
    seconds: float = 0.0

    @classmethod
    def without_tokens(cls, uid: str, finish: Finish, version: int, error: str = "") -> DecodeResult:
        """The result of a request that nothing was decoded for."""
        return cls(uid, np.zeros(0, np.int32), np.zeros(0, np.float32), finish, version, error=error)


@dataclass(frozen=True, slots=True)
class Records:
    """Records beside log-probs that requests will ask for, as is known when the engine starts.

    kept_tokens: requests with Sampling.records_kept come. experts: requests with DecodeRequest.experts_from do.
    """

    kept_tokens: bool = False
    experts: bool = False


NOTHING_RECORDED = Records()
NO_ADAPTERS: Mapping[str, AdapterConfig] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Class and version of the library that serves, for summary.json and `doctor`.

    settings: {one of ModelShape.settings(): the different values that its layers compute with}; what it cannot tell is not
    among them. sampler: who draws its tokens.
    shards: what each of its workers holds of the model. adapters: names of those that it serves.
    """

    kind: str
    engine_class: str
    library: str
    library_version: str
    device: str
    dtype: str
    settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sampler: str = ""
    shards: tuple[EngineShard, ...] = (EngineShard(),)
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights of one policy: safetensors with HF names, in a place every engine of this host can read; or, with
    `receive_plans` (then path is empty), what comes to each shard of this one engine straight from the trainer's ranks: an
    encoded ReceivePlan each.

    WeightUpdate("/dev/shm/marsrl/main/v5", version=5)
    """

    path: str
    version: int
    receive_plans: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """New numbers of one adapter: its PEFT directory (rollout/adapter.py), in a place every engine of this host can read.

    AdapterUpdate("verifier", "/dev/shm/marsrl/verifier/version_5", version=5)

    path: another one for each version; it stays until every engine holds a later one.
    """

    name: str
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """The weights of an engine after an update. checksums: of each shard {tensor name in its own fused layout: checksum}; of an
    adapter, {tensor of it: checksum} as rollout.adapter.held_by_shard has them.

        WeightReceipt(version=5, checksums=[{"model.norm.weight": 0x5EED, ...}], seconds=0.8)

    seconds: of the whole update; checksum_seconds: of the checksums in it.
    broken: why weights from the trainer's ranks did not arrive whole (then the version is TORN, and nothing is said of what is
        held); empty: they did.
    """

    version: int
    checksums: Sequence[Mapping[str, int]]
    seconds: float
    checksum_seconds: float = 0.0
    broken: str = ""


TORN = -1
"""No policy version: what an engine holds while weights arrive in its tensors, and after that has failed."""

MemoryPart = Literal["weights", "kv_cache"]
"""Parts of memory that an engine gets back when it wakes, in this order: new weights are loaded between the two."""

Progress = Callable[[int], None]
"""Called now and then with the number of tokens decoded since the call began."""


class WrongVersion(RuntimeError):
    """A request was tagged with a policy version that the engine does not hold."""


def check_versions(engine: str, held: Mapping[str, int], requests: Sequence[DecodeRequest], version: int) -> None:
    """Raise WrongVersion unless an engine holds what requests are tagged with.

    Args:
        engine: its name, for messages. held: version by adapter; "": of the weights themselves.
        version: policy version that all are tagged with, beside their adapters.
    """
    if held[""] != version:
        raise WrongVersion(f"{engine}: asked for policy version {version}, but version {held['']} is loaded")
    for request in requests:
        name, asked = request.adapter, request.adapter_version
        if name and name not in held:
            raise WrongVersion(
                f"{engine}: asked for adapter {name}; it serves {', '.join(filter(None, held)) or 'none'}"
            )
        if name and held[name] != asked:
            raise WrongVersion(f"{engine}: asked for version {asked} of adapter {name}, but {held[name]} is loaded")


class EngineLost(RuntimeError):
    """Raised by an engine that cannot go on: its pool makes another."""


class Engine(Protocol):
    """One replica of one policy and its adapters. One thread makes it and calls it; `submit`, `abort` and `num_decoded`, which
    touch no device, may be called by another meanwhile."""

    def info(self) -> EngineInfo: ...

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        """Take more requests, without waiting; raises WrongVersion unless the engine holds `version`, and of each request's
        adapter the version that it is tagged with."""

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        """Decode until some requests have ended (these are returned) or timeout_s has passed; at least one step.

        Returns at once where there is nothing to decode.
        """

    def abort(self) -> None:
        """End all requests where they are: the next `collect` returns every one, partial ones as UNFINISHED."""

    def num_decoded(self) -> int:
        """Tokens decoded since the engine started (for progress bars)."""

    def score(self, sequences: Sequence[IntArray], adapter: str = "", is_probe: bool = True) -> list[FloatArray]:
        """Log-probs [N-1] of tokens 1..N-1 of each sequence, nats, at temperature 1, over the whole vocabulary.

        is_probe: it checks a weight sync, and the caches with it; else a teacher scores samples.
        """

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load, drop every cached prefix, and report checksums of what is now held, or why the weights did not arrive.

        Adapters stay as they are.
        """

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        """Load an adapter in place of its version before, and report checksums of what is now held. Nothing of this adapter is
        under way; others may decode.

        Before the first update an adapter is at version 0: its policy's `adapter.start`, or without one the bare weights.
        """

    def forget_prefixes(self) -> None:
        """Drop every cached prefix. Nothing is under way."""

    def sleep(self, keeps_weights: bool) -> None:
        """Give the device's memory to others: weights go to the host, caches are dropped. Nothing is under way.

        Until it is awake again an engine serves nothing; update_weights needs its weights awake.
        keeps_weights: False where update_weights comes before anything is decoded or scored: weights may be dropped.
        """

    def wake(self, part: MemoryPart) -> None:
        """Take memory back, one part after the other: weights (as they were, if kept), then the cache; nothing when awake."""

    def close(self) -> None: ...
