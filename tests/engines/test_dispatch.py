"""Requests are dealt to replicas: by their prefixes, the longest first."""

from __future__ import annotations

import random
from dataclasses import replace

from engine_cases import prompt, request

from marsrl.rollout.pool.dispatch import Dispatcher


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
