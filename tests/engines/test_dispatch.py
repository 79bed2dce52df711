"""Requests are dealt to replicas, and results gathered while others are decoded."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from engine_cases import prompt, request

from marsrl.rollout.engines.protocol import AdapterUpdate, EngineLost, WrongVersion
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.engines.time_shares import TimeShares
from marsrl.rollout.pool.dispatch import Dispatcher
from marsrl.rollout.pool.engine_thread import EngineThread
from marsrl.rollout.types import Finish


def ask(uid, length=10, new=100, expected=None):
    return replace(request(uid, prompt(length), new), expected_new_tokens=expected)


def uids(shares):
    return {replica: [r.uid for r in share] for replica, share in shares.items()}


def test_a_group_stays_together_and_groups_are_spread():
    dispatch = Dispatcher(2, None)
    dispatch.add([ask(f"{g}.{i}") for g in "abcd" for i in range(3)])
    shares = uids(dispatch.take())
    assert {replica: len(share) for replica, share in shares.items()} == {0: 6, 1: 6}
    assert all(len({r for r, share in shares.items() for uid in share if uid[0] == g}) == 1 for g in "abcd")


def test_a_sample_goes_back_to_where_its_prefix_is_unless_that_costs_more_than_a_prefill():
    dispatch = Dispatcher(2, None)
    dispatch.add([ask("a.0"), ask("b.0")])
    home = {uid: r for r, share in uids(dispatch.take()).items() for uid in share}
    dispatch.end("a.0")
    dispatch.add([ask("a.0", length=500)])  # replica 0 and 1 have 0 and 101 tokens of work
    assert uids(dispatch.take()) == {home["a.0"]: ["a.0"]}
    dispatch.end("a.0")
    dispatch.add([ask("c.0", new=60)])  # goes where nothing runs
    dispatch.take()
    dispatch.add([ask("a.0", length=500)])
    assert uids(dispatch.take()) == {home["a.0"]: ["a.0"]}
    dispatch.end("a.0")
    dispatch.add([ask("a.0", length=20)])  # 62 tokens of work against 101: it stays
    assert uids(dispatch.take()) == {home["a.0"]: ["a.0"]}
    dispatch.end("a.0")
    dispatch.add([ask("c.1", new=300)])  # a new one, so where there is least
    dispatch.add([ask("a.0", length=500)])  # 362 tokens of work against 101 and a prefill worth 50
    assert uids(dispatch.take()) == {home["a.0"]: ["c.1"], 1 - home["a.0"]: ["a.0"]}


def test_the_longest_is_sent_first():
    dispatch = Dispatcher(1, 2)
    dispatch.add([ask("a", expected=5), ask("b", expected=50), ask("c", expected=500), ask("d", expected=None)])
    assert uids(dispatch.take()) == {0: ["c", "d"]}  # without a guess: its whole budget, 100
    assert dispatch.take() == {} and dispatch.num_waiting == 2
    dispatch.end("c")
    assert uids(dispatch.take()) == {0: ["b"]}


def test_no_replica_idles_while_requests_wait():
    rng = random.Random(0)
    dispatch = Dispatcher(4, 3)
    running, done, total = {}, set(), 60
    asks = [ask(f"{i % 9}.{i}", length=rng.randrange(5, 400), new=rng.randrange(1, 300)) for i in range(total)]
    dispatch.add(asks[:40])
    while len(done) < total:
        for replica, share in dispatch.take().items():
            running.update((r.uid, replica) for r in share)
        decoding = [sum(at == r for at in running.values()) for r in range(4)]
        assert max(decoding) <= 3 and dispatch.busy == [r for r, num in enumerate(decoding) if num]
        if dispatch.num_waiting:
            assert min(decoding) == 3
        uid = rng.choice(sorted(running))
        assert dispatch.end(uid) == running.pop(uid)
        done.add(uid)
        if len(done) == 20:
            dispatch.add(asks[40:])
    assert dispatch.busy == []


def test_a_step_is_shared_by_those_in_it_and_one_that_waits_for_a_slot_pays_nothing() -> None:
    shares = TimeShares(slots=2)
    for uid in ("a", "b", "c", "d"):
        shares.add(uid)
    shares.step(0.2)  # a, b
    assert shares.end("a") == pytest.approx(0.1)
    assert shares.end("d") == 0  # never had a slot
    shares.step(0.4)  # b, c
    assert shares.end("b") == pytest.approx(0.1 + 0.2)
    shares.step(0.5)  # c
    assert shares.end("c") == pytest.approx(0.2 + 0.5)
    shares.step(9.0)  # nobody's
    shares.add("e")
    shares.step(0.25)
    assert shares.end("e") == 0.25 and shares.end("stranger") == 0


SOON_S = 60.0  # by the engine's clock, and far more than a test takes


class Steps(ScriptedEngine):
    """A token a step; stops before each of the steps `halts` until it is let go. threads: that have called it."""

    def __init__(self, *halts):
        super().__init__(lambda r: [5] * 100, tokens_per_step=1, adapters=["a"])
        self.now, self.go = 0, {step: threading.Event() for step in halts}
        self.threads, self.is_lost = set(), False
        self.on_clock = lambda: None  # called when somebody has read the clock

    def clock(self):
        now = float(self.now)
        self.on_clock()
        return now

    def collect(self, timeout_s):
        self.threads.add(threading.get_ident())
        if self.is_lost:
            raise EngineLost("gone")
        if self.now + 1 in self.go:
            assert self.go[self.now + 1].wait(60)
        time.sleep(0.005)  # whoever would take too early has the time for it
        self.now += 1
        return super().collect(timeout_s)


def thread_of(engine):
    thread = EngineThread(clock=engine.clock)
    thread.start(lambda: engine)
    return thread


def asks(*lengths):
    return [request(f"{length}.0", prompt(5), length) for length in lengths]


def lengths_of(collected):
    return [len(result.token_ids) for result in collected.value]


def test_a_result_waits_for_others_for_a_tenth_of_the_time_that_it_took():
    engine = Steps(30)
    thread = thread_of(engine)
    thread.submit(asks(20, 21, 22, 40), version=0)
    assert lengths_of(thread.collect(SOON_S, is_urgent=True)) == [20, 21, 22]  # of step 20, due at 22
    engine.go[30].set()
    assert lengths_of(thread.collect(SOON_S, is_urgent=True)) == [40]  # the last: nothing else is under way


def test_results_that_nothing_follows_from_come_all_together():
    engine = Steps(41, 130)
    thread = thread_of(engine)
    thread.submit(asks(3, 9, 20, 40), version=0)
    assert lengths_of(thread.collect(SOON_S, is_urgent=False)) == [3, 9, 20, 40]
    thread.submit(asks(5, 90), version=0)
    engine.on_clock = engine.go[41].set  # the time that is given begins before the next step
    assert lengths_of(thread.collect(60.0, is_urgent=False)) == [5]  # but not for longer than the time that was given
    assert thread.collect(0.0, is_urgent=True).value == []
    engine.go[130].set()
    assert lengths_of(thread.collect(SOON_S, is_urgent=False)) == [90]


def test_an_engine_is_called_between_two_steps_of_what_it_decodes():
    engine = Steps(*range(20, 200))
    thread = thread_of(engine)
    own, other = asks(100, 90)
    thread.submit([replace(own, adapter="a"), other], version=0)
    while engine.now < 19:
        time.sleep(0.001)
    thread.abort("a")
    engine.go[20].set()
    (result,) = thread.collect(SOON_S, is_urgent=True).value  # at once
    assert result.uid == own.uid and result.finish is Finish.UNFINISHED and 0 < len(result.token_ids) <= 20
    update = AdapterUpdate("a", "", 5)
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(thread.call, lambda: (engine.update_adapter(update).version, engine.now))
        for step, go in engine.go.items():
            if not call.done():
                time.sleep(0.01 if step > 20 else 0)
            go.set()
    version, step = call.result()
    assert version == 5 and step < 90  # the other one is under way
    assert lengths_of(thread.collect(2 * SOON_S, is_urgent=True)) == [90]


def test_an_engine_is_called_in_one_thread_and_what_it_raises_is_raised_to_who_collects():
    engine = Steps()
    thread = thread_of(engine)
    with pytest.raises(WrongVersion):
        thread.submit(asks(3), version=7)
    for _ in range(3):
        thread.submit(asks(2, 3), version=0)
        assert lengths_of(thread.collect(SOON_S, is_urgent=False)) == [2, 3]
    assert engine.threads == {thread.call(threading.get_ident)}
    engine.is_lost = True
    thread.submit(asks(3), version=0)
    with pytest.raises(EngineLost, match="gone"):
        thread.collect(SOON_S, is_urgent=True)
