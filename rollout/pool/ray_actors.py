"""Engines as Ray actors: one actor per engine, all called concurrently."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.build import build_engine, environment_of, import_library
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine, EngineSpec
from marsrl.rollout.imports import imports_for_good
from marsrl.rollout.pool.engine_thread import EngineThread
from marsrl.rollout.pool.ray_connection import CPU, GPU, RayCluster
from marsrl.rollout.pool.ray_faults import check_head, lost_or_raise
from marsrl.rollout.pool.replicas import Lost, OnLost, Replicas, Timed, call_one, ignore_loss, timed
from marsrl.rollout.state import decode, encode

_PROGRESS_S = 0.2
_COLLECT_S = 1.0  # batching time of results that trigger nothing: a lost engine loses at most this much
_GRACE_S = 30.0  # extra time, in which an engine can report on its own that the deadline has passed
# An engine's start, which loads and compiles, may take this multiple of the deadline while its process answers.
_LONGEST_START = 10
_PINGS = 10  # maximum pings within run.silence_s
_CALLS_AT_ONCE = 4  # calls that may run at once: collect, one in the engine's thread, num_decoded, is_there
_REQUESTS = "requests"  # submit and abort, executed in the order of their calls


class EngineActor:
    """Actor process: an engine in its own thread, and Ray's threads for messages."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._thread = EngineThread()

    def _make(self) -> Engine:
        with imports_for_good():
            import_library(self._spec.kind)
        self._engine = build_engine(self._spec)
        return self._engine

    def call(self, method: str, arguments: tuple[Any, ...]) -> Timed:
        """Call a method of the engine between decoding steps.

        The method "start" builds the engine. If __init__ did, an error would appear as the death of the process.
        """
        if method == "start":
            return timed(lambda: self._thread.start(self._make))
        return self._thread.call(lambda: timed(lambda: getattr(self._engine, method)(*arguments)))

    def is_there(self) -> None:
        """Answer a ping, whatever else is under way."""

    def num_decoded(self) -> int:
        return self._engine.num_decoded() if hasattr(self, "_engine") else 0  # 0 while the engine is still being built

    @ray.method(concurrency_group=_REQUESTS)
    def submit(self, requests: bytes, version: int) -> None:
        """Submit requests; an error is raised by `collect`."""
        try:
            self._thread.submit(decode(list[DecodeRequest], requests), version)
        except Exception as error:
            self._thread.fail(error)

    def collect(self, timeout_s: float, is_urgent: bool) -> Timed:
        """Collect as EngineThread.collect does, but return only with results: empty answers also cost time on rank 0."""
        gathered = self._thread.collect(timeout_s, is_urgent=is_urgent)
        while not gathered.value:
            gathered = replace(self._thread.collect(timeout_s, is_urgent=is_urgent), start=gathered.start)
        return replace(gathered, value=encode(gathered.value))

    @ray.method(concurrency_group=_REQUESTS)
    def abort(self, adapter: str | None) -> None:
        self._thread.abort(adapter)


class RayReplicas(Replicas):
    """Engines as actors of a Ray cluster (see Replicas). A call of an engine that dies or falls silent returns Lost.

    takes: resources of each engine, keyed by ray_connection.GPU and CPU.
    config.deadline_s: time limit of every call except collect, whose requests the pool watches. The first call, "start", builds
        the engine; it may take ten times as long while the engine's process answers pings.
    silence_s: time without an answer to pings after which an engine counts as lost, except during "start". Busy engines answer;
        stopped processes and dead hosts do not.
    config.join_s: time limit for finding another host for an engine that was lost with its own.
    """

    can_restart = True

    def __init__(
        self,
        cluster: RayCluster,
        spec: EngineSpec,
        config: RolloutConfig,
        *,
        takes: Mapping[str, float],
        silence_s: float,
    ) -> None:
        self._cluster, self._spec, self.takes = cluster, spec, takes
        self._deadline_s, self._join_s, self._silence_s = config.deadline_s, config.join_s, silence_s
        self._pings: dict[int, tuple[Any, float]] = {}  # last ping and its time, by replica
        self._collecting: dict[Any, int] = {}  # replica by pending call of `collect`
        self._decoded_before = [0] * config.engines  # tokens decoded by lost engines, by replica
        self._decoded = [0] * config.engines  # tokens decoded by current engines, by their last answers
        self._actors = {replica: self._start() for replica in range(config.engines)}

    def __len__(self) -> int:
        return len(self._decoded)

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        calls = {self._actors[replica].call.remote(method, each): replica for replica, each in arguments.items()}
        return self._answers(calls, method, on_lost)

    def stop(self, replica: int) -> None:
        check_head()
        if replica not in self._actors:
            return
        ray.kill(self._actors.pop(replica), no_restart=True)  # works for a stopped process too
        self._collecting = {call: at for call, at in self._collecting.items() if at != replica}
        self._pings.pop(replica, None)
        self._decoded_before[replica] += self._decoded[replica]
        self._decoded[replica] = 0

    def has_place(self, within_s: float) -> bool:
        return self._cluster.has_place(self.takes, within_s)

    def restart(self, replica: int) -> Lost | None:
        self.stop(replica)
        if replica == len(self):
            self._decoded.append(0)
            self._decoded_before.append(0)
        self._cluster.await_place(f"engine {replica}", self.takes, 1, self._join_s)
        self._actors[replica] = self._start()
        try:
            answer = call_one(self, replica, "start", ())
        except Exception as error:  # on a restart, the dead engine's memory may not be free yet
            return Lost(f"starting it raised {type(error).__name__}: {error}")
        return answer if isinstance(answer, Lost) else None

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        self._actors[replica].submit.remote(encode(requests), version)

    def collect(
        self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True
    ) -> list[tuple[int, Timed | Lost]]:
        for replica in set(busy).difference(self._collecting.values()):
            self._collecting[self._actors[replica].collect.remote(_COLLECT_S, is_urgent)] = replica
        calls = list(self._collecting)
        ray.wait(calls, num_returns=1, timeout=timeout_s)
        done = ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        check_head()
        answers: dict[int, Timed | Lost] = {replica: lost for replica in busy if (lost := self._silent(replica))}
        answers |= {self._collecting.pop(call): _answer(call, "collect") for call in done}
        return list(answers.items())

    def abort(self, busy: Sequence[int], adapter: str | None = None) -> None:
        for replica in busy:
            self._actors[replica].abort.remote(adapter)  # `collect` reports a loss

    def num_decoded(self, within_s: float) -> list[int]:
        calls = {actor.num_decoded.remote(): replica for replica, actor in list(self._actors.items())}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=within_s)[0]:
            with contextlib.suppress(RayError):  # `collect` reports the loss
                self._decoded[calls[call]] = ray.get(call)
        return [before + now for before, now in zip(self._decoded_before, self._decoded, strict=True)]

    def close(self) -> None:
        """Kill the actors, which may be decoding after Ctrl-C, and leave the cluster."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._cluster.close()

    def _start(self) -> Any:
        actor_class = ray.remote(concurrency_groups={_REQUESTS: 1})(EngineActor)  # type: ignore[call-overload]
        options = actor_class.options(
            num_cpus=self.takes.get(CPU, 0.0),
            num_gpus=self.takes.get(GPU, 0.0),
            max_concurrency=_CALLS_AT_ONCE,
            max_restarts=0,  # Ray would restart an engine with its initial weights (recovery.py)
            runtime_env={"env_vars": environment_of(self._spec)},
        )
        return options.remote(self._spec)

    def _answers(self, calls: Mapping[Any, int], method: str, on_lost: OnLost) -> dict[int, Timed | Lost]:
        """Return answers by replica; Lost for a replica that is silent, or has no answer shortly after the deadline.

        Engines check the same deadline, and the extra time lets them report that it has passed.
        """
        within_s = self._deadline_s + min(self._deadline_s, _GRACE_S)
        answers: dict[int, Timed | Lost] = {}
        pending, began = list(calls), time.monotonic()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_PROGRESS_S)
            came = {calls[call]: _answer(call, method) for call in done}
            check_head()
            elapsed_s = time.monotonic() - began
            for call in list(pending):
                lost, most_s = self._silent(calls[call]), within_s
                if method == "start":  # the engine's process may not exist yet
                    lost, most_s = None, within_s * (1 if lost else _LONGEST_START)
                if elapsed_s >= most_s:
                    lost = Lost(f"no answer to {method} within rollout.deadline_s = {self._deadline_s:g} s")
                if lost is not None:
                    came[calls[call]] = lost
                    pending.remove(call)
            for replica, answer in came.items():
                if isinstance(answer, Lost):
                    on_lost(replica, answer.reason)
            answers |= came
        return answers

    def _silent(self, replica: int) -> Lost | None:
        """Return Lost if the replica's process has not answered a ping for silence_s; ping it if it answered the last one."""
        ping, since = self._pings.get(replica, (None, 0.0))
        now = time.monotonic()
        if ping is None or (now - since > self._silence_s / _PINGS and ray.wait([ping], timeout=0)[0]):
            self._pings[replica] = (self._actors[replica].is_there.remote(), now)
        elif now - since > self._silence_s:
            return Lost(f"its process has not answered for run.silence_s = {self._silence_s:g} s")
        return None


def _answer(call: Any, method: str) -> Any:
    """Return the decoded result of a finished call, or Lost; raises as `lost_or_raise` does."""
    try:
        answer = ray.get(call)
    except RayError as error:
        return lost_or_raise(error, method)
    return replace(answer, value=decode(list[DecodeResult], answer.value)) if method == "collect" else answer
