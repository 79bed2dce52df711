"""Results are gathered while others are decoded. The clock is the engine's: a second a step."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from engine_cases import prompt, request

from marsrl.rollout.engines.protocol import AdapterUpdate, EngineLost, WrongVersion
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.engine_thread import EngineThread
from marsrl.rollout.types import Finish

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
