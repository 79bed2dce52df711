"""Engine interface and its types.

An engine holds one policy's weights at one version, and low-rank adapters of these weights, each with its own policy and
version. It decodes, scores given tokens, and loads new weights:

    engine.submit([DecodeRequest, ...], version=3)                             also during decoding
    engine.collect(timeout_s=0.2)                      -> [DecodeResult, ...]  of finished requests, in any order
    engine.abort()                                                             unfinished requests return their tokens so far
    engine.update_weights(WeightUpdate(path, version)) -> WeightReceipt        a checksum for every tensor it holds
    engine.update_adapter(AdapterUpdate(name, path, version)) -> WeightReceipt also while other adapters decode
    engine.update_adapters([AdapterUpdate, ...])       -> [WeightReceipt]      several adapters in one call
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.config import LocalOptions, VllmOptions
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, FloatArray, IntArray
from marsrl.rollout.weights.layout import EngineShard


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a request. top_p 1 and top_k -1 do not truncate the distribution.

    stop: strings that end a completion. The completion keeps the string, and the rest of the token that completes it.
    records_kept: True to return the tokens kept by top_k and top_p at each position (DecodeResult.kept_tokens).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    records_kept: bool = False

    @property
    def truncates(self) -> bool:
        """True if tokens with non-zero probability are excluded."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Request to continue token_ids by at most max_new_tokens tokens.

    Example: the second segment of the Solver's fourth sample. The prompt is 5 9 4, and the first segment decoded 7 6 2:

        DecodeRequest(
            "000017/solver:3", token_ids=[5, 9, 4, 7, 6, 2], max_new_tokens=4096, sampling=Sampling(temperature=1.0),
            seed=811, affinity="000017/solver",
        )

    token_ids [N] int32: the prompt and the completion decoded in earlier segments.
    seed: seed of the draws, derived from (run seed, sample uid, segment index).
    affinity: requests with the same key share a prefix and are best served by one engine.
    expected_new_tokens: estimate that lets a pool send the longest requests first; None: max_new_tokens.
    experts_from: index of the first token whose routed experts are recorded (router replay); None: do not record.
    adapter: name of the adapter, at adapter_version; empty: the engine's bare weights.
    text_from: index of the token at which the returned text begins; it ends with the new tokens. None: return no text.
    stop_from: index of the token at which the turn begins; strings of Sampling.stop do not match text before it.
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
    text_from: int | None = None
    stop_from: int = 0

    def uses(self, adapter: str | None) -> bool:
        """Return True if the request uses this adapter (empty: the bare weights; None: any)."""
        return adapter is None or adapter == self.adapter


def why_not_decodable(request: DecodeRequest, max_model_len: int | None, vocab_size: int | None) -> str:
    """Explain why these tokens cannot be continued, or return "". max_model_len None: a server's unknown limit."""
    n = len(request.token_ids)
    if n == 0:
        return "the prompt is empty"
    if max_model_len is not None and n >= max_model_len:
        return f"the prompt's {n} tokens leave no room in max_model_len {max_model_len}"
    if request.max_new_tokens < 1:
        return f"max_new_tokens is {request.max_new_tokens}"
    if vocab_size is not None and (int(request.token_ids.min()) < 0 or int(request.token_ids.max()) >= vocab_size):
        return f"a token id is outside of the vocabulary of {vocab_size}"
    return ""


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Result of a request.

    finish: STOP, LENGTH (max_new_tokens used up), UNFINISHED (aborted) or ERROR.
    logprobs: log-probs of the drawn tokens, nats, at the sampling temperature, over the tokens kept by top_k and top_p.

        DecodeResult("000017/solver:3", token_ids=[8, 1], logprobs=[-0.7, -0.1], finish=Finish.STOP, version=5)

    num_accepted: number of new tokens that a draft proposed (rollout.vllm.draft_tokens); None: the engine has no drafts.
    routed_experts: [tokens, layers, top_k] indices of the experts of the request's and the new tokens, from experts_from on. The
    last token is left out, because no log-prob depends on it. None if not requested, or nothing was decoded.
    kept_tokens: tokens kept by top_k and top_p at each new token's position; None if not requested.
    seconds: this request's share of the engine's time (time_shares.py); for a server, its response time.
    usage: (prompt tokens, new tokens) as counted by a server with another tokenizer; None: as counted here.
    text: text of the tokens from text_from on (texts.py); None if not requested, or the request was aborted or failed.
    """

    uid: str
    token_ids: IntArray
    logprobs: FloatArray
    finish: Finish
    version: int
    num_cached_tokens: int = 0
    num_accepted: int | None = None
    error: str = ""
    routed_experts: ExpertArray | None = None
    kept_tokens: KeptTokens | None = None
    seconds: float = 0.0
    text: str | None = None
    usage: tuple[int, int] | None = None

    def usage_of(self, request: DecodeRequest) -> tuple[int, int]:
        """Return (prompt tokens, new tokens) for counts and prices."""
        return self.usage or (len(request.token_ids), len(self.token_ids))

    @classmethod
    def without_tokens(cls, uid: str, finish: Finish, version: int, error: str = "") -> DecodeResult:
        """Build the result of a request without a decoded token."""
        return cls(uid, np.zeros(0, np.int32), np.zeros(0, np.float32), finish, version, error=error)


@dataclass(frozen=True, slots=True)
class Records:
    """Data besides log-probs that requests may ask for; fixed when the engine starts.

    kept_tokens: True if requests may set Sampling.records_kept. experts: True if they may set DecodeRequest.experts_from.
    """

    kept_tokens: bool = False
    experts: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Settings from which one engine is built, in this process or another.

    kind: "vllm" or "local". dtype: "float32", "bfloat16" or "float16". max_model_len: maximum tokens of prompt and completion
    together. threads: number of torch's threads on a CPU. device: "cpu" or "cuda". sleeps: True if the engine shares its GPU with
    the trainer, and sleep() is used. records: data besides log-probs that requests may ask for. adapters: settings of the served
    adapters, by name.
    """

    kind: str
    model_dir: str
    dtype: str
    max_model_len: int
    threads: int = 1
    device: str = "cpu"
    vllm: VllmOptions = field(default_factory=VllmOptions)
    local: LocalOptions = field(default_factory=LocalOptions)
    sleeps: bool = False
    records: Records = field(default_factory=Records)
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a running engine, for summary.json and `doctor`.

    settings: {setting of ModelShape.settings(): distinct values that the layers compute with}, as far as the engine knows.
    sampler: description of the sampler. shards: each worker's part of the model. adapters: names of the served adapters.
    why_no_receive: why trainer ranks cannot send weights to the engine without files (sync.backend=nccl, ipc); "" if they can.
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
    why_no_receive: str = ""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New weights of one policy: a folder of safetensors with HF names, readable by every engine of this host.

    Alternatively path is empty, and `receive_plans` has an encoded ReceivePlan for each shard of this engine, which then receives
    the weights directly from the trainer's ranks.
    """

    path: str
    version: int
    receive_plans: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """New weights of one adapter: its PEFT directory (rollout/adapter.py), readable by every engine of this host.

    path: unique to the version; must exist until every engine holds a later version.
    """

    name: str
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """Version and checksums of an engine's weights after an update.

    checksums: for each shard, {tensor name: checksum}; names are those of the fused layout or, for an adapter, of
    rollout.adapter.held_by_shard.

    checksum_seconds: part of the update's time spent on checksums, in seconds.
    broken: why weights from the trainer's ranks did not arrive completely; empty if they did. If set, the version is TORN
        and there are no checksums.
    """

    version: int
    checksums: Sequence[Mapping[str, int]]
    checksum_seconds: float = 0.0
    broken: str = ""


TORN = -1
"""Version of an engine with incomplete weights: a transfer is under way or has failed."""

MemoryPart = Literal["weights", "kv_cache"]
"""Parts of an engine's memory, which are restored in this order when it wakes; new weights are loaded in between."""

Progress = Callable[[int], None]
"""Callback with the number of tokens decoded since the call began; called occasionally."""


class WrongVersion(RuntimeError):
    """A request was tagged with a policy version that the engine does not hold."""


def taken_from(inbox: deque[DecodeRequest], adapter: str | None) -> list[DecodeRequest]:
    """Remove and return requests that use the adapter (None: all); another thread may append meanwhile."""
    taken: list[DecodeRequest] = []
    for _ in range(len(inbox)):
        request = inbox.popleft()
        (taken if request.uses(adapter) else inbox).append(request)
    return taken


class EngineLost(RuntimeError):
    """Raised by an engine that cannot continue: its pool replaces it."""


class Engine(ABC):
    """One replica of one policy and its adapters.

    One thread builds and calls the engine. Other threads may call `submit`, `abort` and `num_decoded`, which use no device.
    """

    def __init__(self, adapters: Iterable[str] = ()) -> None:
        self._versions = {"": 0, **dict.fromkeys(adapters, 0)}  # current version by adapter; "" is the bare weights
        self._inbox: deque[DecodeRequest] = deque()  # requests submitted since the last `collect`
        self._aborts: deque[str | None] = deque()  # adapters whose requests to abort; None: all
        self._num_decoded = 0

    @abstractmethod
    def info(self) -> EngineInfo: ...

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        """Add requests without waiting.

        Raises WrongVersion unless the engine holds `version`, and the tagged version of each request's adapter.
        """
        self._check_versions(requests, version)
        self._inbox.extend(requests)

    @abstractmethod
    def collect(self, timeout_s: float) -> list[DecodeResult]:
        """Decode until requests finish or timeout_s has passed, but at least one step; return the results.

        Returns at once if there is nothing to decode. An invalid request returns with Finish.ERROR and the reason.
        """

    def abort(self, adapter: str | None = None) -> None:
        """Abort requests that use the adapter (None: all); others continue.

        The next `collect` returns every aborted request, partial ones as UNFINISHED.
        """
        self._aborts.append(adapter)

    def num_decoded(self) -> int:
        """Return the number of tokens decoded since the engine started (for progress bars)."""
        return self._num_decoded

    def score(
        self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "", temperature: float | None = None
    ) -> list[FloatArray]:
        """Return log-probs [N-1] of tokens 1..N-1 of each sequence, nats, over the whole vocabulary.

        adapter: one adapter for all sequences, or a list with one for each; "": the bare weights.
        temperature: temperature at which a teacher scores samples; nothing may be decoding. None: temperature 1, for probes that
            check a weight sync and the caches; running requests continue.
        """
        raise NotImplementedError

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load weights, drop all prefix caches, and report checksums of the held weights, or why they did not arrive.

        Adapters do not change.
        """
        raise NotImplementedError

    def update_adapter(self, update: AdapterUpdate) -> WeightReceipt:
        """Replace an adapter by its new version, and report checksums of the held weights.

        No request of this adapter may be running; others may decode.

        Before the first update an adapter is at version 0: its policy's `adapter.start`, or else the bare weights.
        """
        raise NotImplementedError

    def update_adapters(self, updates: Sequence[AdapterUpdate]) -> list[WeightReceipt]:
        """Replace several adapters in one call, each as update_adapter does."""
        return [self.update_adapter(update) for update in updates]

    def forget_prefixes(self) -> None:  # noqa: B027
        """Drop all prefix caches. Nothing may be running."""

    def sleep(self, keeps_weights: bool) -> None:  # noqa: B027
        """Free the device's memory: move weights to the host and drop caches. Nothing may be running.

        A sleeping engine serves nothing. Call wake("weights") before update_weights.
        keeps_weights: False if update_weights comes before any decoding or scoring; the weights may then be dropped.
        """

    def wake(self, part: MemoryPart) -> None:  # noqa: B027
        """Restore a part of the memory: first the weights (unchanged if kept), then the KV cache. A no-op when awake."""

    @abstractmethod
    def close(self) -> None: ...

    def _running(self) -> Iterable[DecodeRequest]:
        """Return requests that have left the inbox and have not been returned."""
        raise NotImplementedError

    def _check_versions(self, requests: Sequence[DecodeRequest], version: int) -> None:
        loaded, engine = self._versions, type(self).__name__
        if loaded[""] != version:
            raise WrongVersion(f"{engine}: requested policy version {version}, but version {loaded['']} is loaded")
        for request in requests:
            name, requested_version = request.adapter, request.adapter_version
            if name and name not in loaded:
                raise WrongVersion(
                    f"{engine}: requested adapter {name}; serves {', '.join(filter(None, loaded)) or 'none'}"
                )
            if name and loaded[name] != requested_version:
                raise WrongVersion(
                    f"{engine}: requested version {requested_version} of adapter {name}, but version {loaded[name]} is loaded"
                )

    def _refuse_under_way(self, call: str, adapter: str | None = None) -> None:
        """Raise RuntimeError if requests that use the adapter (None: any) are under way."""
        if any(request.uses(adapter) for request in (*self._inbox, *self._running())):
            whose = "requests" if adapter is None else f"requests of {adapter}"
            raise RuntimeError(f"{type(self).__name__}.{call}: {whose} are under way; abort and collect them first")
