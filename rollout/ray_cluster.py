"""Engines as Ray actors: start or join a cluster, place one actor an engine, call all of them at once.

Token arrays cross as one numpy array a batch (Ray keeps those outside of the pickle), not as thousands of small ones.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import RayError

from marsrl.rollout.engines.build import EngineSpec, build_engine
from marsrl.rollout.engines.protocol import (
    DecodeRequest,
    DecodeResult,
    MemoryPart,
    Sampling,
    WeightUpdate,
)
from marsrl.rollout.engines.recovery import Lost
from marsrl.rollout.engines.replicas import Timed, timed
from marsrl.rollout.ray_faults import check_ray, judged
from marsrl.rollout.routed_experts import ExpertArray
from marsrl.rollout.types import Finish, FloatArray, IntArray

# ray.init says with a warning that its own default is on: only who has the token of this machine may join the cluster.
_AUTHENTICATION_LOG = logging.getLogger("ray._private.authentication.authentication_token_setup")
_PROGRESS_S = 0.2
_COLLECT_S = 1.0  # how long a replica decodes at a time where nothing ends; an abort cuts it short
_COLLECTS = 2  # calls of collect that a replica has: one decodes, the next is there when it returns
_HEARD_S = 1.0  # how long an engine is waited for to say how far it is
_ABORT_S = 60.0  # an engine that is not heard of for so long when it is to end what it decodes is lost
_GRACE_S = 30.0  # that an engine gets to say itself that it has passed the deadline
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
                _AUTHENTICATION_LOG.setLevel(logging.ERROR)
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

    def sleep(self) -> Timed:
        return timed(self._engine.sleep)

    def wake(self, part: MemoryPart) -> Timed:
        return timed(lambda: self._engine.wake(part))

    def close(self) -> None:
        self._engine.close()


class RayReplicas:
    """Engines as actors of a cluster (see pool.Replicas). One that dies or is silent for deadline_s is answered for by Lost.

    deadline_s: of every call but collect, whose requests the pool watches; the start of an engine counts as one.
    """

    can_restart = True

    def __init__(self, cluster: RayCluster, specs: Sequence[EngineSpec], *, num_gpus: float, deadline_s: float) -> None:
        self._cluster, self._specs, self._num_gpus, self._deadline_s = cluster, list(specs), num_gpus, deadline_s
        self._actors: list[Any] = []
        self._collecting: dict[Any, int] = {}  # calls of collect that are under way: replica
        self._submitting: dict[Any, int] = {}
        self._lost: dict[int, Lost] = {}  # found on the way; told by the next collect
        self._decoded_before = [0] * len(specs)  # by engines that were lost
        self._decoded = [0] * len(specs)  # when last heard
        try:
            self._actors += [self._start(spec) for spec in specs]
            ray.get([a.info.remote() for a in self._actors])
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None
    ) -> list[Timed | Lost]:
        calls = {self._call(replica, method, each): replica for replica, each in enumerate(arguments)}
        answers = self._answers(calls, method, on_wait)
        return [answers[replica] for replica in range(len(self._actors))]

    def call_one(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Timed | Lost:
        return self._answers({self._call(replica, method, arguments): replica}, method)[replica]

    def restart(self, replica: int) -> Lost | None:
        check_ray()
        ray.kill(self._actors[replica], no_restart=True)  # a stopped process too
        for calls in (self._collecting, self._submitting):
            for call in [call for call, at in calls.items() if at == replica]:
                del calls[call]
        self._lost.pop(replica, None)
        self._decoded_before[replica] += self._decoded[replica]
        self._decoded[replica] = 0
        self._actors[replica] = self._start(self._specs[replica])
        answer = self.call_one(replica, "info", ())
        return answer if isinstance(answer, Lost) else None

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        self._submitting[self._actors[replica].submit.remote(RequestBatch.pack(requests), version)] = replica

    def collect(self, busy: Sequence[int], timeout_s: float) -> list[tuple[int, Timed | Lost]]:
        calls_of = Counter(self._collecting.values())
        for replica in busy:
            for _ in range(calls_of[replica], _COLLECTS):
                self._collecting[self._actors[replica].collect.remote(_COLLECT_S)] = replica
        calls = list(self._collecting)
        ray.wait(calls, num_returns=1, timeout=timeout_s)
        done = ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        self._settle_submits()
        answers: list[tuple[int, Timed | Lost]] = []
        for call in done:
            replica = self._collecting.pop(call)
            answer = _answer(call, "collect")
            self._note(replica, answer)  # both calls of collect end with a lost engine: told once
            if not isinstance(answer, Lost):
                answers.append((replica, answer))
        answers += self._lost.items()
        self._lost = {}
        return answers

    def abort(self, busy: Sequence[int]) -> None:
        self._settle_submits(_ABORT_S)  # none may arrive behind the abort
        calls = {self._actors[replica].abort.remote(): replica for replica in busy}
        for replica, answer in self._answers(calls, "abort", within_s=_ABORT_S).items():
            self._note(replica, answer)

    def num_decoded(self) -> list[int]:
        """Of an engine that does not answer at once, what it last said."""
        calls = {actor.num_decoded.remote(): replica for replica, actor in enumerate(list(self._actors))}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=_HEARD_S)[0]:
            with contextlib.suppress(RayError):  # whoever waits for its results hears of it
                self._decoded[calls[call]] = ray.get(call)
        return [before + now for before, now in zip(self._decoded_before, self._decoded, strict=True)]

    def close(self) -> None:
        """Kill the actors (they may be in the middle of decoding after Ctrl-C) and leave the cluster."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._cluster.close()

    def _start(self, spec: EngineSpec) -> Any:
        # num_cpus 0: threads are set by us, and the trainer's own cores must not keep an engine from being placed
        options = ray.remote(EngineActor).options(
            num_cpus=0,
            num_gpus=self._num_gpus,
            max_concurrency=_CALLS_AT_ONCE,
            max_restarts=0,  # an engine that Ray restarts would hold the weights of the start (recovery.py)
            runtime_env={"env_vars": spec.environment()},
        )
        return options.remote(spec)

    def _call(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "generate":
            arguments = (RequestBatch.pack(arguments[0]), arguments[1])
        return getattr(self._actors[replica], method).remote(*arguments)

    def _answers(
        self,
        calls: Mapping[Any, int],
        method: str,
        on_wait: Callable[[], None] | None = None,
        within_s: float | None = None,
    ) -> dict[int, Timed | Lost]:
        """By replica; Lost where there is none within_s seconds (default: the deadline, and some more: engines have the
        same one and say so themselves)."""
        within_s = within_s or self._deadline_s + min(self._deadline_s, _GRACE_S)
        answers: dict[int, Timed | Lost] = {}
        pending, end = list(calls), time.monotonic() + within_s
        while pending and (left := end - time.monotonic()) > 0:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=min(left, _PROGRESS_S))
            answers.update((calls[call], _answer(call, method)) for call in done)
            if pending and on_wait is not None:
                on_wait()
        silent = Lost(f"no answer to {method} in {within_s:g} s (rollout.deadline_s = {self._deadline_s:g})")
        return answers | {calls[call]: silent for call in pending}

    def _settle_submits(self, timeout_s: float = 0.0) -> None:
        """A refused submit raises here; an engine that has not taken one within timeout_s is lost, where that is not 0."""
        calls = list(self._submitting)
        done, pending = ray.wait(calls, num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        for call in done:
            self._note(self._submitting.pop(call), _answer(call, "submit"))
        for call in pending if timeout_s else ():
            self._note(self._submitting.pop(call), Lost(f"requests were not taken within {timeout_s:g} s"))

    def _note(self, replica: int, answer: Timed | Lost) -> None:
        if isinstance(answer, Lost):
            self._lost.setdefault(replica, answer)


def _answer(call: Any, method: str) -> Any:
    """What a call that is done returned (batches unpacked), or that its engine is lost; raises as `judged` does."""
    try:
        answer = ray.get(call)
    except RayError as error:
        return judged(error, method)
    return _unpacked(answer) if method in ("generate", "collect") else answer


def _unpacked(answer: Timed) -> Timed:
    return Timed(answer.value.unpack(), answer.start, answer.end)


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
    """DecodeResults with their tokens and log-probs in one array each; records of experts, which are long, as they are."""

    uids: list[str]
    tokens: IntArray
    logprobs: FloatArray
    offsets: _Offsets
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


def _join_arrays(arrays: Sequence[Any], dtype: Any) -> tuple[Any, _Offsets]:
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return (np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)), offsets


def _cut(joined: Any, offsets: _Offsets) -> list[Any]:
    return [joined[a:b] for a, b in itertools.pairwise(offsets.tolist())]
