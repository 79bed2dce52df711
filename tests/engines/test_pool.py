"""A pool distributes requests and collects results, from engines in this process or in Ray actors.

Real engines in Ray actors are killed or stopped, or fail to start. About 50 s, most of it starting actors.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray
import torch
from engine_cases import (
    actors,
    after,
    assert_same,
    descendants,
    generate,
    perturbed,
    pool_of,
    prompt,
    request,
    spec_of,
    tensors_of,
)
from held_port import held_port
from letters import WeighedEngine

from marsrl.rollout.config import LocalOptions, RolloutConfig, VllmOptions
from marsrl.rollout.engines.protocol import EngineLost, WeightUpdate, WrongVersion
from marsrl.rollout.engines.refusals import TrainerHost
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.engines.time_shares import TimeShares
from marsrl.rollout.pool.build import make_pool
from marsrl.rollout.pool.dispatch import Dispatcher
from marsrl.rollout.pool.engine_thread import EngineThread
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.ray_faults import lost_or_raise
from marsrl.rollout.pool.replicas import LocalReplicas, Timed, ignore_loss
from marsrl.trainer import build
from marsrl.trainer.config.read import read_config
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import FileSync


def test_replicas_share_out_what_a_teacher_scores():
    asked = []

    class Teacher(ScriptedEngine):
        def score(self, sequences, adapter="", temperature=None):
            asked.append(([len(each) for each in sequences], temperature))
            return [each[1:].astype(np.float32) for each in sequences]

    sequences = [np.arange(length, dtype=np.int32) for length in (2, 4, 5, 9)]
    shared = pool_of(*(Teacher(lambda r: [5]) for _ in range(2))).score_shared(sequences, 0.6)
    assert asked == [([9, 4], 0.6), ([5, 2], 0.6)]
    assert all(np.array_equal(scores, sequence[1:]) for scores, sequence in zip(shared, sequences, strict=True))


def test_colocated_engines_wake_the_memory_a_call_needs():
    calls = []

    class Noted(LocalReplicas):
        def call(self, method, arguments, on_lost=ignore_loss):
            calls.append(" ".join([method, *(each for each in arguments[0] if isinstance(each, str) and each)]))
            return super().call(method, arguments, on_lost)

    with EnginePool(Noted([WeighedEngine(lambda r: [5])]), sleeps=True) as pool:
        pool.submit([request("0.0", prompt(5), 3)], version=0)
        with pytest.raises(RuntimeError, match="cannot sleep with 1 requests under way"):
            pool.sleep(keeps_weights=True)
        pool.collect(1.0)
        for call in (lambda: pool.score([prompt(5)]), lambda: pool.update_weights(WeightUpdate("", 0)), pool.stand_by):
            pool.sleep(keeps_weights=True)
            pool.sleep(keeps_weights=True)
            call()
        pool.forget_prefixes()
    woken = ["sleep", "wake weights"]
    assert calls == [*woken, "wake kv_cache", "score", *woken, "update_weights", "wake kv_cache", *woken, "info",
                     "wake kv_cache", "forget_prefixes"]  # fmt: skip
    pool = EnginePool(Noted([WeighedEngine(lambda r: [5])]))
    pool.sleep(keeps_weights=True)  # a pool with its own GPUs stays awake
    assert calls[-1] == "forget_prefixes"


def test_local_engines_share_collect_time_unless_alone():
    given, engine = [], ScriptedEngine(lambda r: [5])
    engine.collect = lambda timeout_s: given.append(timeout_s) or [None]
    replicas = LocalReplicas([engine] * 2)
    _ = [replicas.collect(*each) for each in (([0], 0.0), ([0], 60.0), ([0, 1], 60.0))]
    engine.close = lambda: given.append("closed")
    replicas.close()
    assert given[0] == 0.0 and 1.0 < given[1] <= 60.0 and given[2:] == [0.05, 0.05, "closed", "closed"]


def test_draining_an_adapter_spares_its_later_requests():
    """An engine without requests of this adapter would keep the abort, and apply it to a later request."""
    asked = []

    class Noted(LocalReplicas):
        def abort(self, busy, adapter=None):
            asked.append(([*busy], adapter))
            super().abort(busy, adapter)

    engine = ScriptedEngine(lambda r: [5] * 5, tokens_per_step=1, adapters=("solver", "verifier"))
    with EnginePool(Noted([engine])) as pool:
        pool.submit([replace(request("0.0", prompt(5), 5), adapter="solver")], version=0)
        assert pool.drain("verifier") == [] and asked == [([], "verifier")]
        assert [result.uid for result in pool.drain("solver")] == ["0.0"] and asked[1:] == [([0], "solver")]


def test_collect_spans_end_at_a_gap_or_after_one_second():
    calls, times = [], [(-0.5, 0.0), (0.05, 0.5), (0.5, 0.75), (1.0, 1.25), (1.25, 1.5)]
    replicas = LocalReplicas([ScriptedEngine(lambda r: [5] * 5, tokens_per_step=1)])
    collect = replicas.collect
    replicas.collect = lambda busy, *_, **how: [(0, Timed(collect(busy, 0.0)[0][1].value, *times.pop(0)))]
    pool = EnginePool(replicas)
    pool.on_call = lambda *call: calls.append(call)
    generate(pool, [request("0.0", prompt(5), 5)])
    assert calls == [(0, "collect", *span) for span in ((-0.5, 0.5), (0.5, 0.75), (1.0, 1.5))]


def local_config(placement="disaggregated", **options):
    return RolloutConfig(engine="local", placement=placement, threads=1, local=LocalOptions(max_num_seqs=64), **options)


@pytest.mark.parametrize(("engine", "dtype", "slots"), [("vllm", "bfloat16", 3), ("local", "float32", 64)])
def test_an_engine_uses_the_settings_of_its_kind(engine, dtype, slots, monkeypatch):
    monkeypatch.setattr(build, "make_pool", lambda policy, spec, *others, **more: spec)
    words = [
        "policies.main.dtype=float32",
        "rollout.vllm={dtype: bfloat16, max_num_seqs: 3}",
        "rollout.local.max_num_seqs=64",
    ]
    config, _ = read_config(None, [f"rollout.engine={engine}", *words])
    engine_spec = build.open_pool(
        config, "main", "model", max_model_len=8, host=TrainerHost(0, 1, False), deadline_s=None
    )
    assert (engine_spec.dtype, config.rollout.slots) == (dtype, slots)


@pytest.mark.slow
def test_a_process_can_train_after_closing_its_vllm_engines(checkpoint):
    """Closing the engines also destroys vLLM's process groups, so that training can create its own."""
    if torch.distributed.is_initialized():
        pytest.skip("another test's process groups stand")
    options = VllmOptions(max_num_seqs=4, kv_cache_mib=32)
    config = RolloutConfig(engine="vllm", placement="local", threads=1, engines=2, vllm=options)
    with make_pool("main", spec_of(checkpoint("qwen3"), 64, "vllm"), config) as pool:
        assert torch.distributed.is_initialized()
        generate(pool, [request(f"{i}.0", prompt(5), 3) for i in range(2)], version=0)
    parallel.start(Layout(1, 1, 1, 1, 1), seed=0)
    parallel.stop()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.smoke
def test_two_actors_on_ray_serve_as_one_engine_in_process(checkpoint, tmp_path):
    """Also, an error while actors start reaches the caller."""
    directory = checkpoint("qwen3_moe")
    asks = [request(f"{i // 4}.{i}", prompt(20 + i // 4, seed=i // 4), 30, seed=i) for i in range(24)]
    here = make_pool("main", spec_of(directory, 128), local_config(placement="local"))
    alone = generate(here, asks, version=0)
    config = local_config(engines=2, object_store_mib=80)
    before = set(descendants())  # processes of other tests
    pool = make_pool("main", spec_of(directory, 128), config)
    children = set(descendants()) - before
    try:
        progress = []
        results = generate(pool, asks, version=0, progress=progress.append)
        assert_same(results, alone)
        assert sum(pool.num_decoded(within_s=300)) == 24 * 30 >= progress[-1] and all(pool.num_decoded())
        pool.submit(asks[:10], version=0)
        ended = pool.collect(0.0)
        pool.submit(asks[10:], version=0)  # submitted while the engines decode
        while len(ended) < 24:
            ended += pool.collect(5.0)
        assert_same(ended, alone)
        long = [request(f"long{i}.0", prompt(10), 118, seed=i) for i in range(4)]
        pool.submit(long, version=0)
        parts = pool.collect(0.05) + pool.drain()
        assert {r.uid for r in parts} == {r.uid for r in long} and pool.num_under_way == 0
        assert all(len(r.token_ids) == len(r.logprobs) for r in parts)
        assert [info.kind for info in pool.infos()] == ["local", "local"]
        # Each actor has 64 slots and a queue half as long; no GPU is taken.
        assert pool.num_slots == 2 * 96 and pool.takes == {}
        assert all(0 < result.seconds < 100 for result in results)
        with pytest.raises(WrongVersion):
            generate(pool, [request("early.0", prompt(5), 3)], version=1)
        with pytest.raises(ValueError, match="has no config.json"):
            make_pool("main", spec_of(tmp_path, 128), config)
    finally:
        pool.close()
    _, left = psutil.wait_procs(children, timeout=600)
    assert not left


def test_a_cluster_that_does_not_answer_is_named(checkpoint):
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        config = local_config(ray_address=address)
        with pytest.raises(RuntimeError, match=f"rollout.ray_address is {address}, but nothing answers"):
            make_pool("main", spec_of(checkpoint("qwen3"), 64), config)


def test_a_missing_library_is_an_error_that_says_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for config, word in ((RolloutConfig(), "install vllm"), (local_config(), "install ray")):
        with pytest.raises(ValueError, match=word):
            make_pool("main", spec_of(checkpoint("qwen3"), 64), config)


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
    dispatch.add([ask("e.0", new=10), ask("f.0", new=10), ask("g.0", new=900)])
    assert uids(dispatch.take()) == {0: ["g.0"], 1: ["e.0", "f.0"]}  # the costliest requests are sent first
    for twice, message in (([ask("h.0")] * 2, "only 1 distinct uids"), ([ask("e.0")], "is already being decoded")):
        with pytest.raises(ValueError, match=message):
            dispatch.add(twice)


def test_a_sample_returns_to_its_prefix_unless_load_costs_more():
    dispatch = Dispatcher(2, None)
    dispatch.add([ask("a.0"), ask("b.0")])
    home = {uid: r for r, share in uids(dispatch.take()).items() for uid in share}["a.0"]
    dispatch.end("a.0")
    dispatch.add([ask("c.0", new=140)])  # the request goes to an idle engine
    assert uids(dispatch.take()) == {home: ["c.0"]}
    dispatch.forget_homes(1 - home)
    # Home would have 141 tokens of work; the other engine 101, and a prefill worth 40.
    dispatch.add([ask("a.0", length=400)])
    assert uids(dispatch.take()) == {home: ["a.0"]}
    dispatch.end("a.0")
    dispatch.add([ask("a.0", length=300)])  # now the prefill is worth only 30
    assert uids(dispatch.take()) == {1 - home: ["a.0"]}
    for uid in ("a.0", "c.0"):
        dispatch.end(uid)
    dispatch.forget_homes()  # new weights invalidate all prefixes
    dispatch.add([ask("a.0", length=2000)])
    assert uids(dispatch.take()) == {home: ["a.0"]}


def test_the_queue_of_a_lost_replica_keeps_its_order():
    dispatch = Dispatcher(2, None)
    dispatch.add([ask(f"a.{i}") for i in range(3)])
    dispatch.close(0)
    assert uids(dispatch.take()) == {1: ["a.0", "a.1", "a.2"]}


def test_the_longest_is_sent_first():
    dispatch = Dispatcher(1, 2)
    dispatch.add([ask("a", expected=5), ask("b", expected=50), ask("c", expected=500), ask("d", expected=None)])
    assert uids(dispatch.take()) == {0: ["c", "d"]}  # without an estimate: the whole budget, 100
    assert dispatch.take() == {} and dispatch.num_waiting == 2
    dispatch.end("c")
    assert uids(dispatch.take()) == {0: ["b"]}


def test_no_replica_idles_while_requests_wait():
    rng = random.Random(0)
    dispatch = Dispatcher(4, 3)
    running, done, total = {}, set(), 60
    asks = [ask(f"{i % 9}.{i}", length=10 << rng.randrange(6), new=rng.randrange(1, 300)) for i in range(total)]
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
    fresh = Dispatcher(4, 3)
    dispatch.forget_homes()
    for each in (dispatch, fresh):
        each.add(asks[:40])
    assert uids(dispatch.take()) == uids(fresh.take())  # finished work does not influence later decisions


def test_a_steps_time_goes_only_to_requests_with_a_slot() -> None:
    shares = TimeShares(slots=2)
    for uid in ("a", "b", "c", "d"):
        shares.add(uid)
    shares.step(0.2)  # shares of a, b
    assert shares.end("a") == pytest.approx(0.1)
    assert shares.end("d") == 0  # never had a slot
    shares.step(0.4)  # shares of b, c
    assert shares.end("b") == pytest.approx(0.1 + 0.2)
    shares.step(0.5)  # share of c
    assert shares.end("c") == pytest.approx(0.2 + 0.5)
    shares.step(9.0)  # no share
    shares.add("e")
    shares.step(0.25)
    assert shares.end("e") == 0.25 and shares.end("stranger") == 0


SOON_S = 60.0  # on the engine's clock; far more than a test takes


class Steps(ScriptedEngine):
    """An engine that decodes one token per step, and pauses before each step in `halts`.

    threads: ids of the threads that have called the engine.
    """

    def __init__(self, *halts):
        super().__init__(lambda r: [5] * 100, tokens_per_step=1)
        self.now, self.go = 0, {step: threading.Event() for step in halts}
        self.threads, self.is_lost = set(), False
        self.on_clock = lambda: None  # called when the clock has been read

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
        time.sleep(0.005)  # gives a call that returns too early time to do so
        self.now += 1
        return super().collect(timeout_s)


def started(*halts):
    engine = Steps(*halts)
    thread = EngineThread(clock=engine.clock)
    thread.start(lambda: engine)
    return engine, thread


def asks(*lengths):
    return [request(f"{length}.0", prompt(5), length) for length in lengths]


def lengths_of(collected):
    return [len(result.token_ids) for result in collected.value]


def test_a_result_waits_a_tenth_of_its_time_for_others():
    engine, thread = started(30, 60)
    for lengths, together, halt in (((20, 21, 22, 40), [20, 21, 22], 30), ((10, 11, 40), [10, 11], 60)):
        thread.submit(asks(*lengths), version=0)
        # The first result, of step 20, waits until step 22. In the second round, that of step 50 waits until step 51.
        assert lengths_of(thread.collect(SOON_S, is_urgent=True)) == together
        engine.go[halt].set()
        assert lengths_of(thread.collect(SOON_S, is_urgent=True)) == [40]  # due at once, since nothing else is running


def test_results_that_are_not_urgent_come_together():
    engine, thread = started(41, 130)
    thread.submit(asks(3, 9, 20, 40), version=0)
    assert lengths_of(thread.collect(SOON_S, is_urgent=False)) == [3, 9, 20, 40]
    thread.submit(asks(5, 90), version=0)
    engine.on_clock = engine.go[41].set  # the time limit starts before the next step
    assert lengths_of(thread.collect(60.0, is_urgent=False)) == [5]  # results wait no longer than the time limit
    assert thread.collect(0.0, is_urgent=True).value == []
    engine.go[130].set()
    assert lengths_of(thread.collect(SOON_S, is_urgent=False)) == [90]


def test_one_thread_calls_the_engine_and_passes_on_its_errors():
    engine, thread = started()
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
    engine.is_lost = False
    thread.submit(asks(4), version=0)
    assert lengths_of(thread.collect(SOON_S, is_urgent=False)) == [3, 4]


def test_a_batch_is_timed_from_first_request_or_previous_end():
    engine, thread = started(1)
    thread.submit(asks(3), version=0)
    between = time.time()
    thread.submit(asks(4, 9), version=0)  # submitted before the first step
    engine.go[1].set()
    batch = thread.collect(SOON_S, is_urgent=False)
    assert lengths_of(batch) == [3, 4, 9] and batch.start <= between <= batch.end
    thread.submit(asks(5), version=0)
    assert batch.end <= thread.collect(SOON_S, is_urgent=False).start


def in_groups(count: int) -> list:
    return [request(f"{i // 4}.{i}", prompt(20 + i // 4, seed=i // 4), 90, seed=i) for i in range(count)]


@pytest.mark.slow
def test_a_killed_or_silent_engine_is_replaced_with_same_results(checkpoint, judge, caplog) -> None:
    directory = checkpoint("qwen3_moe")
    config = local_config(object_store_mib=80, deadline_s=120.0)
    earlier = actors()  # actors of other tests
    new_actors = lambda: [each for each in actors() if each not in earlier]  # noqa: E731
    killer = after(lambda: bool(new_actors()), lambda: new_actors()[0].kill())  # kills the engine while it starts
    # silence_s is much shorter than the deadline, and must be kept even if the caller rarely collects.
    with make_pool("main", spec_of(directory, 128), config, silence_s=6.0) as pool:
        killer.join()
        generate(pool, in_groups(1))  # the engine may have been killed just after its start
        assert pool.take_faults().engine_restarts >= 1
        sync = FileSync(CheckedEngines(pool, vocab_size=160), torch.float32)
        sync.publish(judge.learner(directory, perturbed(tensors_of(directory), "experts")), 1)
        alone = generate(pool, in_groups(24), version=1)
        *before, newest = actors()
        assert not psutil.wait_procs(before, timeout=300)[1]
        newest.send_signal(signal.SIGSTOP)
        pool.submit(in_groups(24), version=1)
        results, end = [], time.monotonic() + 900
        while len(results) < 24 and time.monotonic() < end:
            results += pool.collect(1.0)
        assert_same(results, alone)
        assert len(results) == 24
        assert pool.take_faults().engine_restarts >= 1
        assert "its process has not answered for run.silence_s = 6 s" in caplog.text
        sync.close()


FULL = ray.exceptions.ObjectStoreFullError("Failed to put object ffff in object store")


def in_the_actor(method: str, cause: Exception) -> Exception:
    return ray.exceptions.RayTaskError(method, "traceback", cause)


def test_ray_errors_lose_an_engine_or_end_the_run() -> None:
    for method, error, reason in (
        ("collect", ZeroDivisionError("a bad kernel"), "collect raised ZeroDivisionError: a bad kernel"),
        ("update_weights", EngineLost("no way\nno will"), "no way"),
    ):
        assert lost_or_raise(in_the_actor(method, error), method).reason == reason
    full = r"object store, .*, is full \(.*Failed to put.*rollout\.object_store_mib.*run\.resume"
    gone = ray.exceptions.RaySystemError("cannot connect to the raylet")
    for method, error, kind, message in (
        ("generate", FULL, RuntimeError, full),
        # The actor's return value does not fit into the object store.
        ("generate", in_the_actor("generate", FULL), RuntimeError, full),
        # Errors of the program, not of one engine: a new engine would fail in the same way.
        ("update_weights", in_the_actor("update_weights", ZeroDivisionError("x")), ZeroDivisionError, "traceback"),
        ("generate", in_the_actor("generate", ValueError("two uids")), ValueError, "traceback"),
        ("collect", gone, RuntimeError, r"Ray failed in collect \(RaySystemError: .*raylet.*run\.resume=auto"),
    ):
        with pytest.raises(kind, match=message):
            lost_or_raise(error, method)
