"""Real engines in Ray actors that are killed, stopped, and refused by Ray: about 30 s, most of it starting actors."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from engine_cases import ROUNDING, after, generate, perturbed, prompt, request, tensors_of
from processes import actors

from marsrl.rollout.config import LocalOptions, RolloutConfig
from marsrl.rollout.engines.protocol import EngineLost
from marsrl.rollout.pool import ray_pulse
from marsrl.rollout.pool.build import make_pool
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.ray_faults import lost_or_raise
from marsrl.rollout.pool.ray_pulse import EnginePulse
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync

SILENCE_S = 6.0  # much shorter than the deadline, also where somebody listens now and then only


@pytest.fixture(scope="module")
def pool(checkpoint: Callable[[str], Path]) -> Iterator[EnginePool]:
    config = RolloutConfig(
        engine="local", threads=1, object_store_mib=80, deadline_s=120.0, local=LocalOptions(max_num_seqs=16)
    )
    earlier = actors()  # of other tests
    own = lambda: [each for each in actors() if each not in earlier]  # noqa: E731
    killer = after(lambda: bool(own()), lambda: own()[0].kill())  # while it starts
    with make_pool(
        "main", str(checkpoint("qwen3_moe")), config, dtype="float32", max_model_len=128, silence_s=SILENCE_S
    ) as pool:
        killer.join()
        generate(pool, asks(1))  # it may have been killed just after its start
        assert pool.take_faults().engine_restarts >= 1
        yield pool


def the_one() -> psutil.Process:
    """The engine's process. Those before it are gone; Ray takes some seconds to kill one that is stopped."""
    *before, newest = actors()
    _, alive = psutil.wait_procs(before, timeout=300)
    assert not alive
    return newest


def test_an_engine_that_cannot_be_made_says_why_at_once(tmp_path: Path) -> None:
    config = RolloutConfig(engine="local", threads=1, object_store_mib=80)
    with pytest.raises(ValueError, match="has no config.json"):
        make_pool("main", str(tmp_path), config, dtype="float32", max_model_len=128)


def asks(count: int, length: int = 90) -> list:
    return [request(f"{i // 4}.{i}", prompt(20 + i // 4, seed=i // 4), length, seed=i) for i in range(count)]


@pytest.mark.slow
def test_killed_and_stopped_engines_are_replaced_and_say_what_they_would_have_said(
    pool, checkpoint, judge, caplog
) -> None:
    directory = checkpoint("qwen3_moe")
    new = perturbed(tensors_of(directory), "experts")
    sync = FileSync(CheckedEngines(pool, vocab_size=160), torch.float32)
    sync.publish(judge.learner(directory, new), 1)
    alone = generate(pool, asks(24), version=1)
    right = {result.uid: result for result in alone}

    def assert_right(results) -> None:
        assert {result.uid for result in results} == set(right) and len(results) == 24
        for result in results:
            np.testing.assert_array_equal(result.token_ids, right[result.uid].token_ids)
            np.testing.assert_allclose(result.logprobs, right[result.uid].logprobs, atol=ROUNDING)
            assert result.version == 1

    # SIGSTOP with requests under way
    first = the_one()
    first.send_signal(signal.SIGSTOP)
    pool.submit(asks(24), version=1)
    results, end = [], time.monotonic() + 900
    while len(results) < 24 and time.monotonic() < end:
        results += pool.collect(1.0)
    assert_right(results)
    assert pool.take_faults().engine_restarts >= 1
    assert "its process has said nothing for run.silence_s = 6 s" in caplog.text

    # SIGKILL before a sync
    second = the_one()
    assert second != first
    second.kill()
    report = sync.publish(judge.learner(directory, new), 2)
    sync.close()
    assert report.comparison.median < 1e-5
    assert {result.version for result in generate(pool, asks(24), version=2)} == {2}


class Answers:
    """In place of ray and of an actor: what is asked has been answered where `are_there` says so."""

    are_there, now, called = True, 0.0, 0

    @property
    def is_there(self) -> Answers:
        return self

    def remote(self) -> int:
        self.called += 1
        return self.called

    def wait(self, calls: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        return (calls, []) if self.are_there else ([], calls)


def listened(pulse: EnginePulse, engine: Answers, seconds: int) -> float:
    for _ in range(seconds):
        engine.now += 1.0
        pulse.listen({0: engine})
    return pulse.silent_for_s(0)


def test_an_engine_is_silent_for_as_long_as_somebody_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Answers()
    monkeypatch.setattr(ray_pulse, "ray", engine)
    pulse = EnginePulse(40.0, clock=lambda: engine.now)
    assert listened(pulse, engine, 30) == 0
    assert engine.called <= 7  # asked a few times in a silence, not each time
    engine.are_there = False
    engine.now += 3600  # the trainer trained, or was stopped itself
    assert listened(pulse, engine, 30) in (28, 29, 30)
    engine.are_there = True
    assert listened(pulse, engine, 1) == 0


FULL = ray.exceptions.ObjectStoreFullError("Failed to put object ffff in object store")


def in_the_actor(method: str, cause: Exception) -> Exception:
    return ray.exceptions.RayTaskError(method, "traceback", cause)


def test_errors_of_ray_are_an_engine_lost_or_a_clear_end() -> None:
    for method, error, reason in (
        ("collect", ZeroDivisionError("a bad kernel"), "collect raised ZeroDivisionError: a bad kernel"),
        ("update_weights", EngineLost("no way\nno will"), "no way"),
    ):
        assert lost_or_raise(in_the_actor(method, error), method).reason == reason
    full = r"object store is full \(.*Failed to put.*rollout\.object_store_mib.*run\.resume"
    gone = ray.exceptions.RaySystemError("cannot connect to the raylet")
    for method, error, kind, said in (
        ("generate", FULL, RuntimeError, full),
        ("generate", in_the_actor("generate", FULL), RuntimeError, full),  # for what it returns
        # says nothing of the engine: would be the same in a new one
        ("update_weights", in_the_actor("update_weights", ZeroDivisionError("x")), ZeroDivisionError, "traceback"),
        ("generate", in_the_actor("generate", ValueError("two uids")), ValueError, "traceback"),
        ("collect", gone, RuntimeError, r"Ray failed in collect \(RaySystemError: .*raylet.*run\.resume=auto"),
    ):
        with pytest.raises(kind, match=said):
            lost_or_raise(error, method)
