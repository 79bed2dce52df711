"""Engines as Ray actors: start or join a cluster, place one actor an engine, call all of them at once.

Token arrays cross as one numpy array a batch (Ray keeps those outside of the pickle), not as thousands of small ones.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from marsrl.rollout.engines.build import EngineSpec, build_engine
from marsrl.rollout.engines.pool import Timed, timed
from marsrl.rollout.engines.protocol import (
    DecodeRequest,
    DecodeResult,
    Sampling,
    WeightUpdate,
)
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, FloatArray, IntArray

_PROGRESS_S = 0.2
_COLLECT_S = 1.0  # how long a replica decodes at a time where nothing ends; an abort cuts it short
_COLLECTS = 2  # calls of collect that a replica has: one decodes, the next is there when it returns
_CALLS_AT_ONCE = _COLLECTS + 2  # beside them num_decoded, and submit or abort


class RayCluster:
    """A connection of this process to Ray; several pools may share it, the last one to close ends it.

    address None: a cluster is started on this machine, without dashboard, telemetry or network use, and ends with this
    process. Otherwise the cluster at host:port (or ray://host:port) is joined, and left at the end.
    """

    _users = 0
    _started_here = False
    _lock = threading.Lock()

    def __init__(self, *, address: str | None, timeout_s: float, object_store_mib: int) -> None:
        """Raises RuntimeError when the cluster cannot be reached within timeout_s."""
        with RayCluster._lock:
            if not ray.is_initialized():
                _start(object_store_mib) if address is None else _join(address, timeout_s)
                RayCluster._started_here = True
            RayCluster._users += 1
        self._is_open = True

    def close(self) -> None:
        """Shut down when nobody else uses the connection and it was made here."""
        if not self._is_open:
            return
        self._is_open = False
        with RayCluster._lock:
            RayCluster._users -= 1
            if RayCluster._users == 0 and RayCluster._started_here:
                RayCluster._started_here = False
                ray.shutdown()


def _start(object_store_mib: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 makes rollouts wait for whatever else the host does
    os.environ.pop("RAY_ADDRESS", None)  # asked for a cluster of our own: do not join a stranger's
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        num_gpus=None,
        include_dashboard=False,
        object_store_memory=object_store_mib << 20,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address="127.0.0.1",
    )


def _join(address: str, timeout_s: float) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    where = address.removeprefix("ray://")
    host, _, port = where.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=timeout_s).close()
        except OSError as error:
            raise RuntimeError(
                f"rollout.ray_address is {address}, but nothing answers there ({error}); start Ray with `ray "
                f"start --head`, "
                "correct the address, or leave it out to start a cluster on this machine"
            ) from error
    elif where != "auto":
        raise RuntimeError(f"rollout.ray_address is {address!r}; expected host:port, ray://host:port or auto")
    failure: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    # something that is not Ray may listen there, and ray.init would wait for minutes
    thread = threading.Thread(target=connect, name="marsrl-ray-init", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or failure:
        reason = f"no answer within rollout.ray_timeout_s = {timeout_s:g} s" if not failure else str(failure[0])
        raise RuntimeError(
            f"rollout.ray_address is {address}, but no Ray cluster could be joined there ({reason}); check that "
            f"it runs the "
            f"same Ray ({ray.__version__}) and Python"
        ) from (failure[0] if failure else None)


class EngineActor:
    """What runs in the actor's process. One thread decodes; num_decoded, submit and abort are answered meanwhile."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = build_engine(spec)
        self._decoding = threading.Lock()

    def info(self) -> Timed:
        return timed(self._engine.info)

    def num_decoded(self) -> int:
        return self._engine.num_decoded()

    def generate(self, requests: RequestBatch, version: int) -> Timed:
        with self._decoding:
            return timed(lambda: ResultBatch.pack(self._engine.generate(requests.unpack(), version=version)))

    def submit(self, requests: RequestBatch, version: int) -> None:
        self._engine.submit(requests.unpack(), version=version)

    def collect(self, timeout_s: float) -> Timed:
        with self._decoding:
            return timed(lambda: ResultBatch.pack(self._engine.collect(timeout_s)))

    def abort(self) -> None:
        self._engine.abort()

    def score(self, sequences: list[IntArray], temperature: float) -> Timed:
        with self._decoding:
            return timed(lambda: self._engine.score(sequences, temperature))

    def update_weights(self, update: WeightUpdate) -> Timed:
        with self._decoding:
            return timed(lambda: self._engine.update_weights(update))

    def close(self) -> None:
        self._engine.close()


class RayReplicas:
    """Engines as actors of a cluster (see pool.Replicas)."""

    def __init__(self, cluster: RayCluster, specs: Sequence[EngineSpec], *, num_gpus: int) -> None:
        self._cluster = cluster
        # num_cpus 0: threads are set by us, and the trainer's own cores must not keep an engine from being placed
        actor = ray.remote(EngineActor)
        self._actors: list[Any] = []
        self._collecting: dict[Any, int] = {}  # calls of collect that are under way: replica
        self._submitting: list[Any] = []
        try:
            for spec in specs:
                options = actor.options(
                    num_cpus=0,
                    num_gpus=num_gpus,
                    max_concurrency=_CALLS_AT_ONCE,
                    max_restarts=0,  # a restarted engine would hold the weights of the start
                    runtime_env={"env_vars": spec.environment()},
                )
                self._actors.append(options.remote(spec))
            ray.get([a.info.remote() for a in self._actors])
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None
    ) -> list[Timed]:
        if method == "generate":
            arguments = [(RequestBatch.pack(requests), version) for requests, version in arguments]
        calls = [getattr(a, method).remote(*args) for a, args in zip(self._actors, arguments, strict=True)]
        if on_wait is not None:
            pending = calls
            while pending:
                pending = ray.wait(pending, num_returns=len(pending), timeout=_PROGRESS_S)[1]
                if pending:
                    on_wait()
        answers = _get(calls)
        if method != "generate":
            return answers
        return [_unpacked(answer) for answer in answers]

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        self._submitting.append(self._actors[replica].submit.remote(RequestBatch.pack(requests), version))

    def collect(self, busy: Sequence[int], timeout_s: float) -> list[tuple[int, Timed]]:
        calls_of = Counter(self._collecting.values())
        for replica in busy:
            for _ in range(calls_of[replica], _COLLECTS):
                self._collecting[self._actors[replica].collect.remote(_COLLECT_S)] = replica
        calls = list(self._collecting)
        ray.wait(calls, num_returns=1, timeout=timeout_s)
        done = ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        if self._submitting:
            _get(self._submitting)  # a refused one raises here
            self._submitting.clear()
        return [(self._collecting.pop(call), _unpacked(answer)) for call, answer in zip(done, _get(done), strict=True)]

    def abort(self, busy: Sequence[int]) -> None:
        _get(self._submitting)  # none may arrive behind the abort
        self._submitting.clear()
        _get([self._actors[replica].abort.remote() for replica in busy])

    def num_decoded(self) -> list[int]:
        return ray.get([actor.num_decoded.remote() for actor in self._actors])

    def close(self) -> None:
        """Kill the actors (they may be in the middle of decoding after Ctrl-C) and leave the cluster."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._cluster.close()


def _get(calls: Sequence[Any]) -> list[Any]:
    try:
        return ray.get(list(calls))
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None  # WrongVersion stays WrongVersion


def _unpacked(answer: Timed) -> Timed:
    return Timed(answer.value.unpack(), answer.start, answer.end)


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """DecodeRequests with their tokens in one array; offsets [n+1] cut it."""

    uids: list[str]
    tokens: IntArray
    offsets: IntArray
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
    """DecodeResults with their tokens and log-probs in one array each; records of experts, which are long, as they are."""

    uids: list[str]
    tokens: IntArray
    logprobs: FloatArray
    offsets: IntArray
    finishes: list[str]
    versions: list[int]
    num_cached_tokens: list[int]
    errors: list[str]
    routed_experts: list[ExpertArray | None]

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
        )

    def unpack(self) -> list[DecodeResult]:
        tokens, logprobs = _cut(self.tokens, self.offsets), _cut(self.logprobs, self.offsets)
        finishes = [Finish(value) for value in self.finishes]
        fields = zip(
            self.uids, tokens, logprobs, finishes, self.versions, self.num_cached_tokens, self.errors,
            self.routed_experts, strict=True,
        )  # fmt: skip
        return [DecodeResult(*each) for each in fields]


def _join_arrays(arrays: Sequence[Any], dtype: Any) -> tuple[Any, IntArray]:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return (np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)), offsets


def _cut(joined: Any, offsets: IntArray) -> list[Any]:
    return [joined[a:b] for a, b in itertools.pairwise(offsets.tolist())]
