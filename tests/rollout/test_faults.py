"""Engines that die, hang, or fail at one request: a fault costs only time, and at most one sample."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_cases import generate
from letters import Play, assert_of_the_script, completion, letter_config
from mortal import MortalReplicas, Places, asks, is_whole

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeRequest, DecodeResult, WeightUpdate
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.ray_start import start_head
from marsrl.rollout.pool.replicas import Lost, Timed, call_one
from marsrl.rollout.state import encode
from marsrl.rollout.types import Finish


def served(pool: EnginePool, requests: list[DecodeRequest], how: str, version: int = 0) -> list[DecodeResult]:
    """Return results in the order of the requests, sent all at once or as slots become free."""
    return generate(pool, requests, version, at_once=how == "at once")


@pytest.mark.parametrize("how", ["at once", "slots"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("attempts", [1, 3])
def test_only_a_request_that_no_engine_survives_fails(how: str, count: int, attempts: int) -> None:
    replicas = MortalReplicas(count, deadly=lambda request: request.uid == "7/solver:0")
    pool = replicas.pool(slots=8, attempts=attempts)
    results = served(pool, asks(24), how)
    (failed,) = [result for result in results if not is_whole(result)]
    assert failed.uid == "7/solver:0" and failed.finish is Finish.ERROR and len(failed.token_ids) == 0
    assert "rollout.max_request_attempts" in failed.error and "has died" in failed.error
    num_had = sum(had.count("7/solver:0") for had in replicas.had)
    assert attempts <= num_had == len(replicas.restarts) <= attempts + 1  # the last attempt sends the request alone
    faults = pool.take_faults()
    assert (faults.failed, faults.resubmitted) == (1, sum(map(len, replicas.had)) - 24)
    assert all(map(is_whole, served(pool, asks(7), how)))  # the pool continues to serve
    served_before = [len(had) for had in replicas.had]
    assert all(map(is_whole, served(pool, asks(7), how)))
    assert sum(len(had) > before for had, before in zip(replicas.had, served_before, strict=True)) == count


def test_nothing_is_sent_beside_a_request_that_is_retried_alone() -> None:
    replicas = MortalReplicas(2, deadly=lambda request: request.uid == "0/solver:0")
    pool = replicas.pool(attempts=1)
    culprit, victim, *others = asks(6)
    pool.submit([culprit, victim], version=0)
    while not replicas.restarts:
        assert pool.collect(0.0) == []
    pool.submit(others, version=0)
    assert [*itertools.chain(*replicas.had)] == [culprit.uid, victim.uid, culprit.uid]
    results = {result.uid: result for _ in range(60) for result in pool.collect(0.0)}
    assert [is_whole(results[each.uid]) for each in (culprit, victim, *others)] == [False] + [True] * 5


def test_losses_are_forgotten_once_a_request_came_back() -> None:
    replicas = MortalReplicas(1)
    pool = replicas.pool(attempts=2)
    for _ in range(5):
        replicas.doomed.add(0)
        assert all(map(is_whole, served(pool, asks(1), "slots")))
    assert pool.take_faults().engine_restarts == 5


def test_a_pool_fills_its_free_slots_and_then_has_no_room() -> None:
    replicas = MortalReplicas(2)
    pool = replicas.pool(slots=3)
    assert pool.num_slots == 6
    for number, request in enumerate(asks(12)):
        assert pool.has_room == (number < 6) and pool.num_under_way == number
        pool.submit([request], version=0)
    while not (ended := pool.collect(0.0)):
        assert [len(had) for had in replicas.had] == [3, 3]
    num_sent = 6 + len(ended)
    # A drain gives up no request.
    assert [each.finish for each in pool.drain()] == [Finish.UNFINISHED] * (12 - len(ended))
    assert sum(map(len, replicas.had)) == num_sent  # a drain sends no waiting request
    unlimited = MortalReplicas(2).pool()
    assert unlimited.num_slots is None and not unlimited.has_room


def test_a_place_for_a_lost_engine_is_sought_every_5_seconds() -> None:
    replicas = MortalReplicas(4)
    replicas.places = Places()
    pool = replicas.pool()
    generations = {pool.generation}
    replicas.now = 100.0
    for dead, engines in ((1, [0, 2, 3]), (0, [2, 3]), (3, [2])):
        replicas.dead.add(dead)
        assert all(map(is_whole, served(pool, asks(9), "slots")))
        assert pool.engines == engines and not pool.is_whole and pool.generation not in generations
        generations.add(pool.generation)
    assert replicas.now == 130.0  # a freed place may take 10 s to appear; nothing waits for it while engines decode
    for now, free, engines in (
        (134.9, 1, [2]), (135.0, 0, [2]), (139.9, 1, [2]), (140.0, 1, [1, 2]), (145.0, 2, [0, 1, 2, 3])
    ):  # fmt: skip
        replicas.now, replicas.places.free = now, free
        pool.collect(0.0)
        assert pool.engines == engines and pool.is_whole == (len(engines) == 4) and replicas.now == now
    assert pool.generation not in generations
    assert all(map(is_whole, served(pool, asks(9), "slots"))) and all(replicas.had)
    replicas.dead, replicas.places.free = {0, 1, 2, 3}, 0
    # Without any engine, the pool waits for a place and then gives up.
    with pytest.raises(RuntimeError, match="has no place"):
        served(pool, asks(9), "slots")


def test_a_restarted_engine_gets_the_current_weights() -> None:
    replicas = MortalReplicas(2)
    pool = replicas.pool()
    pool.update_weights(WeightUpdate("version_1", 1))
    replicas.dead.add(1)
    receipts = pool.update_weights(WeightUpdate("version_2", 2))  # the engine dies during a sync
    assert [receipt.version for receipt in receipts] == [2, 2] and receipts[0].checksums == receipts[1].checksums
    replicas.dead |= {0, 1}
    assert [r.version for r in served(pool, asks(4), "slots", version=2)] == [2] * 4
    replicas.hung.add(0)
    sequences = [np.arange(length, dtype=np.int32) for length in (5, 9, 3)]
    scores, other = pool.score(sequences)  # as a sync's probe does
    replicas.dead.add(0)
    # A teacher scores sequences by score_shared.
    for one, *same in zip(pool.score_shared(sequences, 1.0), scores, other, strict=True):
        assert all(np.array_equal(one, each) for each in same)
    assert [r.version for r in served(pool, asks(4), "slots", version=2)] == [2] * 4


def test_an_engine_lost_during_a_send_gets_the_weights_later() -> None:
    replicas, calls, reasons, can_send = MortalReplicas(2, tokens_per_step=None), list[Any](), dict[int, str](), True
    pool = replicas.pool()
    pool.on_call = lambda replica, method, start, end: calls.append((replica, method))
    update = WeightUpdate("", 1)

    def feed(replica: int) -> Timed | Lost | None:
        return call_one(replicas, replica, "update_weights", (update,)) if can_send else None

    pool.set_feed(feed)
    replicas.dead.add(1)
    answers = pool.receive_weights(dict.fromkeys(pool.engines, update), reasons.__setitem__)
    assert reasons == {1: "its process has died"} and calls == [(0, "update_weights")]
    pool.replace(reasons)
    answers = pool.receive_weights(dict.fromkeys(pool.engines, update))
    pool.note_weights(1, [answer.value.checksums[0] for answer in answers.values() if isinstance(answer, Timed)][:1])
    assert replicas.restarts == [1] and all(map(is_whole, served(pool, asks(6), "slots", version=1)))
    can_send, replicas.dead = False, {0, 1}  # in the middle of a step
    pool.submit(asks(6), version=1)
    pool.collect(0.0)
    assert pool.collect(0.0) == [] and pool.num_under_way == 6 and replicas.restarts[1:] == [0, 1]
    can_send, replicas.dead = True, {1}  # the engine dies again before it has the weights
    pool.give_weights()
    ended = [result for _ in range(20) for result in pool.collect(0.0)]
    assert all(map(is_whole, ended)) and len(ended) == 6 and {result.version for result in ended} == {1}
    assert replicas.restarts[3:] == [1] and pool.take_faults().resubmitted == 6
    calls.clear()
    assert served(pool, asks(1), "at once", version=1) and [method for _, method in calls] == ["collect"]


class Mistaken(MortalReplicas):
    """Replicas that, once restarted, find other weights and another adapter in the files than were sent."""

    def restart(self, replica: int) -> Lost | None:
        lost, engine = super().restart(replica), self.engines[replica]
        weights, adapter = engine.update_weights, engine.update_adapter
        engine.update_weights = lambda update: weights(replace(update, path="other"))  # type: ignore[method-assign]
        engine.update_adapter = lambda update: adapter(replace(update, path="other"))  # type: ignore[method-assign]
        return lost


@pytest.mark.parametrize("what", ["weights", "adapter a"])
def test_wrong_weights_in_a_restarted_engine_end_the_run(what: str) -> None:
    replicas = Mistaken(2, adapters=["a"])
    pool = replicas.pool()
    if what == "weights":
        pool.update_weights(WeightUpdate("version_1", 1))
    else:
        pool.update_adapters([AdapterUpdate("a", "a/1", 1)])
    replicas.dead.add(1)
    said = rf"engine 1 was restarted with the {what} of version 1.*1 of 1 tensors differ, first name"
    with pytest.raises(RuntimeError, match=said):
        served(pool, asks(4), "slots", version=int(what == "weights"))


def test_weights_that_cannot_be_sent_again_end_the_run() -> None:
    replicas = MortalReplicas(2)
    pool = replicas.pool()
    pool.note_weights(1, [{}])
    replicas.dead.add(1)
    with pytest.raises(
        RuntimeError,
        match=r"engine 1 is lost, and the weights of version 1 are not in a file, and no trainer can send them",
    ):
        pool.infos()


def of_adapters(requests: list[DecodeRequest], versions: dict[str, int]) -> list[DecodeRequest]:
    """Return the requests, in turn for the base model and for each adapter at its version."""
    names = itertools.cycle(["", *versions])
    return [replace(each, adapter=name, adapter_version=versions.get(name, 0)) for each, name in zip(requests, names)]


@pytest.mark.parametrize("weights", [None, 3])
@pytest.mark.parametrize("fault", ["dead", "doomed"])
def test_a_replacement_engine_has_all_adapters(fault: str, weights: int | None) -> None:
    replicas = MortalReplicas(2, adapters=["a", "b", "c"])
    pool = replicas.pool(slots=4)
    if weights is not None:
        pool.update_weights(WeightUpdate("version_3", weights))
    for version in (1, 2):
        pool.update_adapters([AdapterUpdate("a", f"a/{version}", version)])
    pool.update_adapters([AdapterUpdate("b", "b/7", 7)])
    versions = {"a": 2, "b": 7, "c": 0}
    getattr(replicas, fault).add(1)
    results = served(pool, of_adapters(asks(16), versions), "slots", version=weights or 0)
    assert all(map(is_whole, results)) and replicas.restarts == [1]
    assert [result.version for result in results[:4]] == [weights or 0, 2, 7, 0]


@pytest.mark.parametrize("fault", ["dead", "hung"])
@pytest.mark.parametrize("when", ["drained", "updated", "scored"])
def test_an_engine_lost_in_an_adapter_update_loses_no_request(when: str, fault: str) -> None:
    """Requests of the other adapter are decoded again. Those of the updated adapter continue under its new version."""
    replicas = MortalReplicas(2, adapters=["a", "b"])
    pool = replicas.pool(slots=4)
    requests = of_adapters(asks(24), {"a": 0, "b": 0})
    pool.submit(requests, version=0)
    ended = {result.uid: result for result in pool.collect(0.0)}
    strike = getattr(replicas, fault).add
    if when == "drained":
        strike(0)
    parts = {result.uid: result for result in pool.drain("a")}
    updated = [request for request in requests if request.uid in parts and request.adapter == "a"]
    ended |= {uid: result for uid, result in parts.items() if uid not in {request.uid for request in updated}}
    if when == "updated":
        strike(1)
    pool.update_adapters([AdapterUpdate("a", "a/1", 1)])
    if when == "scored":
        strike(1)
    pool.score([np.arange(5, dtype=np.int32)], "a")
    assert replicas.restarts and updated
    again = [
        replace(each, token_ids=np.concatenate([each.token_ids, parts[each.uid].token_ids]), adapter_version=1)
        for each in updated
        if parts[each.uid].finish is Finish.UNFINISHED
    ]
    pool.submit(again, version=0)
    while pool.num_under_way:
        ended |= {result.uid: result for result in pool.collect(0.0)}
    for request in requests:
        known = parts[request.uid].token_ids.tolist() if request in updated else []
        said = known + (ended[request.uid].token_ids.tolist() if request.uid in ended else [])
        assert said == completion(request.uid), request.uid
    assert {ended[each.uid].version for each in again} == {1}


def test_a_request_given_up_in_an_adapter_update_is_reported() -> None:
    replicas = MortalReplicas(adapters=["a"])
    pool = replicas.pool(attempts=1, slots=1)
    request, *others = asks(4)
    pool.submit([request, *others], version=0)
    replicas.dead.add(0)
    pool.update_adapters([AdapterUpdate("a", "a/1", 1)])
    assert pool.num_under_way == 4
    (result,) = pool.collect(0.0)
    assert (result.uid, result.finish) == (request.uid, Finish.ERROR) and pool.num_under_way == 3


@pytest.mark.parametrize("can_restart", [True, False])
def test_an_engine_that_exceeds_the_request_deadline_is_lost(can_restart: bool) -> None:
    replicas = MortalReplicas()
    replicas.can_restart = can_restart
    pool = replicas.pool()
    replicas.now = 100.0
    pool.submit(asks(1), version=0)
    replicas.hung.add(0)
    replicas.now = 109.6  # each call of collect takes 0.4 s
    assert pool.collect(0.0) == [] == replicas.restarts
    if can_restart:
        assert pool.collect(0.0) == [] and replicas.restarts == [0]
    else:
        with pytest.raises(TimeoutError, match="0/solver:0 has not returned within rollout.deadline_s = 10 s"):
            pool.collect(0.0)


@pytest.mark.parametrize(("is_beyond_repair", "reason"), [(False, "its process has died"), (True, "no such node")])
def test_too_many_restarts_end_the_run_with_the_reason(is_beyond_repair: bool, reason: str) -> None:
    replicas = MortalReplicas(2, deadly=lambda request: True)
    replicas.is_beyond_repair = is_beyond_repair
    pool = replicas.pool(most_restarts=5)
    with pytest.raises(RuntimeError, match=rf"{reason}\) after 5 restarts in this run .*max_engine_"):
        served(pool, asks(64), "slots")
    assert len(replicas.restarts) == 5


def played(config: RolloutConfig, replicas: MortalReplicas) -> Play:
    return Play(config, pool=replicas.pool(slots=12, attempts=config.max_request_attempts, most_restarts=10_000))


class Unlucky(MortalReplicas):
    """Replicas of which one dies or hangs now and then, at random."""

    def __init__(self, count: int, seed: int, share: float, **options: Any) -> None:
        super().__init__(count, **options)
        self._rng, self._share = random.Random(seed), share

    def _strike(self) -> None:
        if self._rng.random() < self._share:
            getattr(self, self._rng.choice(["dead", "hung", "doomed"])).add(self._rng.randrange(len(self.engines)))

    def call(self, method: str, arguments: Any, on_lost: Any = None) -> Any:
        self._strike()
        return super().call(method, arguments)

    def collect(self, busy: Any, timeout_s: float, *, is_urgent: bool = True) -> Any:
        self._strike()
        return super().collect(busy, timeout_s)


CONFIGS = {
    "stages": letter_config(overlap=0),
    "stages of segments": letter_config(overlap=0, segments=4, engines=2),
    "trajectories": letter_config(overlap=0, pipeline="trajectory"),
    "overlap": letter_config(overlap=1, segments=2),
    "two engines, two ahead": letter_config(overlap=2, segments=4, engines=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_engines_that_are_lost_change_nothing_that_is_trained(name: str) -> None:
    config = CONFIGS[name].model_copy(update={"max_request_attempts": 100})
    replicas = Unlucky(config.engines, seed=2, share=0.25)
    unlucky = played(config, replicas)
    groups = [group for batch in unlucky.train(8) for group in batch]
    # take_faults returns the faults that only the next batch would report.
    told = unlucky.metrics["rollout/engine_restarts"] + unlucky.pool.take_faults().engine_restarts
    assert told == len(replicas.restarts) > 3
    assert unlucky.metrics["rollout/resubmitted"] > 0 and unlucky.metrics["rollout/failed_requests"] == 0
    assert len(groups) >= 8
    assert_of_the_script(groups)
    for sample in (sample for group in groups for sample in group.samples):
        assert sample.finish in (Finish.STOP, Finish.LENGTH) and not sample.reward.is_missing
    if config.overlap == 0:  # without overlap, faults do not even change the order of training
        lucky = played(config, MortalReplicas(config.engines))
        assert encode(groups) == encode([group for batch in lucky.train(8) for group in batch])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sample_that_no_engine_survives_has_no_reward(name: str) -> None:
    config, culprit = CONFIGS[name], "000003/solver:1"
    run = played(config, MortalReplicas(config.engines, deadly=lambda request: request.uid == culprit))
    groups = [group for batch in run.train(7) for group in batch]
    samples = {sample.uid: sample for group in groups for sample in group.samples}
    failed = [sample.uid for sample in samples.values() if sample.reward.is_missing]
    judged_failed = [uid for uid in failed if samples[uid].agent.startswith("solver") or uid == culprit]
    assert judged_failed == [culprit] and samples[culprit].finish is Finish.ERROR
    assert "abandoned" in samples[culprit].reward.note
    # No other agent got the failed sample as input.
    assert not any(sample.parent_uid == culprit for sample in samples.values())
    assert run.metrics["rollout/failed_requests"] == 1 == run.metrics["rollout/errors"]
    assert all(len(group.samples) == 3 for group in groups)


def test_a_ray_that_never_starts_is_one_readable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_raylet(**_: object) -> None:
        raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", no_raylet)
    monkeypatch.setattr("marsrl.rollout.pool.ray_start.note_processes", lambda: None)
    with pytest.raises(RuntimeError, match="did not start within 30 s, three times.*rollout.placement=local"):
        start_head(100, (), ("127.0.0.1", 0), is_open=False)
