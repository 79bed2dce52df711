"""One thread of a real actor makes every call that may touch its engine's device: about 5 s, Ray's start."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from engine_cases import prompt, request

from marsrl.rollout.config import LocalOptions, VllmOptions
from marsrl.rollout.engines.build import EngineSpec
from marsrl.rollout.engines.protocol import WeightReceipt, WeightUpdate
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool import ray_actors
from marsrl.rollout.pool.ray_actors import EngineActor, RayReplicas
from marsrl.rollout.pool.ray_connection import RayCluster

LIMIT_S = 120.0
BESIDE = ("submit", "abort", "num_decoded")  # answered while collect decodes


class Noted(ScriptedEngine):
    """Notes in which thread it is called. It decodes until it is told to abort."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(lambda request: [5, 6, 7])
        self.calls: list[tuple[str, int]] = []
        self.may_end = threading.Event()
        self.note("start")

    def note(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))

    def info(self) -> Any:
        self.note("info")
        return self.calls

    def submit(self, *words: Any, **options: Any) -> None:
        self.note("submit")
        super().submit(*words, **options)

    def collect(self, timeout_s: float) -> Any:
        self.note("collect")
        assert self.may_end.wait(LIMIT_S)
        return super().collect(timeout_s)

    def abort(self) -> None:
        self.note("abort")
        super().abort()
        self.may_end.set()

    def num_decoded(self) -> int:
        self.note("num_decoded")
        return int("collect" in [name for name, _ in self.calls])

    def score(self, *words: Any) -> Any:
        self.note("score")
        return super().score(*words)

    def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.note("update_weights")
        return WeightReceipt(update.version, (), 0.0)

    def forget_prefixes(self) -> None:
        self.note("forget_prefixes")

    def sleep(self, keeps_weights: bool) -> None:
        self.note("sleep")

    def wake(self, part: str) -> None:
        self.note(f"wake {part}")


class NotedActor(EngineActor):
    """Makes such an engine whatever the spec says."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        ray_actors.build_engine = Noted  # type: ignore[assignment]  # in the actor's process


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayReplicas]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(ray_actors, "EngineActor", NotedActor)
    spec = EngineSpec("local", "", "float32", 64, 0, 1, "cpu", VllmOptions(), LocalOptions())
    cluster = RayCluster(address=None, timeout_s=LIMIT_S, object_store_mib=80)
    replicas = RayReplicas(cluster, [spec], resources={}, deadline_s=LIMIT_S, silence_s=LIMIT_S, join_s=0.0)
    yield replicas
    replicas.close()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_one_thread_of_an_actor_touches_the_device_and_others_answer_meanwhile(replicas: RayReplicas) -> None:
    def call(method: str, *words: Any) -> Any:
        return replicas.call(method, {0: words})[0].value  # type: ignore[union-attr]

    call("start")
    replicas.submit(0, [request("a", prompt(4), 3)], 0)
    assert replicas.collect([0], 0.0) == []
    while replicas.num_decoded() == [0]:  # until collect is under way, which waits for the abort
        pass
    replicas.abort([0])
    while not (answers := replicas.collect([0], 1.0)):
        pass
    assert [result.uid for result in answers[0][1].value] == ["a"]  # type: ignore[union-attr]
    for method, *words in (
        ("score", [np.arange(3, dtype=np.int32)], 1.0), ("sleep", False), ("wake", "weights"),
        ("update_weights", WeightUpdate("nowhere", 1)), ("wake", "kv_cache"), ("forget_prefixes",),
    ):  # fmt: skip
        call(method, *words)
    calls = call("info")
    on_device = {thread for name, thread in calls if name not in BESIDE}
    others = {thread for name, thread in calls if name in BESIDE}
    assert len({name for name, _ in calls}) == 12
    assert len(on_device) == 1 and not on_device & others
