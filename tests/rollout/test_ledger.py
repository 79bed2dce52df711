"""The books by hand: what each step of a group's life writes into them."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from letters import PROMPT_ENDS, letter_config, letter_problems, letter_team

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.engines.protocol import DecodeResult
from marsrl.rollout.pool.recovery import Faults
from marsrl.rollout.schedule.ledger import Batch, Ledger, SchedulerState
from marsrl.rollout.schedule.partial_rollouts import OpenGroup, Partial, Round
from marsrl.rollout.state import encode
from marsrl.rollout.team import derive_seed
from marsrl.rollout.types import Ask, Finish, Group, Problem, Sample

VERSION = {"main": 3}


def ledger(**options: Any) -> Ledger:
    config = letter_config(**options)
    return Ledger(config, letter_team(config)[0], letter_problems(9), seed=5)


def opened(books: Ledger) -> list[OpenGroup]:
    return books.open_groups(books.draw(), VERSION)


def result(count: int, finish: Finish = Finish.LENGTH, **more: Any) -> DecodeResult:
    tokens = np.arange(40, 40 + count, dtype=np.int32)
    return DecodeResult("uid", tokens, -tokens.astype(np.float32), finish, 7, **more)


def decode(books: Ledger, group: OpenGroup, index: int, text: str) -> Sample:
    """The sample has said this and is judged."""
    partial = Partial()
    partial.extend(np.array([ord(c) for c in text], np.int32), np.zeros(len(text), np.float32), 3)
    (judged,) = books.team.judged([(group.ask, books.sample(group, index, partial, Finish.STOP, ""))])
    group.finished[index] = judged
    del group.partial[index]
    return judged


def test_every_problem_that_is_drawn_is_an_instance_of_its_own() -> None:
    books = ledger()
    asks = books.draw() + books.draw()
    assert [ask.rollout_id for ask in asks] == ["000001", "000002", "000003", "000004"]
    assert {ask.agent for ask in asks} == {"solver"} and len({ask.problem.id for ask in asks}) == 4
    assert books.state.num_instances == 4


def test_a_group_opens_with_as_many_samples_as_it_has_and_no_token() -> None:
    books = ledger(group_size=3)
    first, second = opened(books)
    assert list(books.state.open) == ["000001/solver", "000002/solver"] and books.num_unfinished == 6
    assert first.prompt_text == first.ask.problem.question and first.prompt_ids[-1] == PROMPT_ENDS
    assert (first.opened_version, sorted(first.partial), first.finished) == (3, [0, 1, 2], {})
    assert not any(partial.segments for partial in second.partial.values())
    del first.partial[1]
    assert books.num_unfinished == 5
    # two groups of one agent and instance share a round
    solver = replace(decode(books, second, 0, "\\boxed{7}"), uid="000002/solver:0")
    other = replace(solver, uid="000002/solver:1")
    books.open_groups([Ask("000002", second.ask.problem, "verifier1", each, each) for each in (solver, other)], VERSION)
    assert set(books.state.rounds) == {("000001", "solver"), ("000002", "solver"), ("000002", "verifier1")}
    asked = books.state.rounds["000002", "verifier1"].asks
    assert list(asked) == [f"000002/solver:{i}/verifier1" for i in (0, 1)]


def test_a_prompt_that_is_too_long_is_counted_and_the_others_are_asked() -> None:
    books = ledger()
    agents = {**books.team.agents, "solver": AgentConfig(max_input_tokens=10)}
    books.team = replace(books.team, agents=agents)
    asks = [Ask(f"{i}", Problem("p", "x" * n, "7", "math"), "solver") for i, n in enumerate([10, 9, 11, 1])]
    assert [group.ask.rollout_id for group in books.open_groups(asks, VERSION)] == ["1", "3"]
    assert books.counts == {"rollout/prompts_too_long": 2} and set(books.state.rounds) == {
        ("1", "solver"),
        ("3", "solver"),
    }


def test_a_request_goes_on_from_what_is_known_for_one_stage() -> None:
    books = ledger(segments=4)  # 12 tokens a stage of 48
    group = opened(books)[0]
    first = books.request(group, 1)
    assert (first.uid, first.affinity) == ("000001/solver:1", "000001/solver")
    assert first.token_ids.tolist() == group.prompt_ids.tolist() and first.max_new_tokens == 12
    assert first.sampling == books.team.sampling("solver") and first.experts_from is None
    assert first.seed == derive_seed(5, "decode", first.uid, 0) != books.request(group, 2).seed
    assert [books.request(group, 1, num_decoded=n).max_new_tokens for n in (5, 11, 12, 13)] == [7, 1, 1, 1]
    group.partial[1].extend(np.full(40, 65), np.zeros(40), 0)
    last = books.request(group, 1)
    assert last.token_ids.tolist() == [*group.prompt_ids.tolist(), *[65] * 40] and last.token_ids.dtype == np.int32
    assert (last.max_new_tokens, last.seed) == (8, derive_seed(5, "decode", first.uid, 40))
    assert books.request(group, 1, num_decoded=6).max_new_tokens == 6


def test_experts_are_asked_for_from_where_the_record_ends() -> None:
    books = ledger()
    books.team = replace(books.team, records_experts=frozenset({"main"}))
    group = opened(books)[0]
    assert books.request(group, 0).experts_from == 0
    group.partial[0].extend(np.zeros(2, np.int32), np.zeros(2), 0, np.zeros((7, 1, 2), np.uint8))
    assert books.request(group, 0).experts_from == 7
    books.team = replace(books.team, records_experts=frozenset({"other"}))
    assert books.request(group, 0).experts_from is None


def test_a_segment_is_counted_and_put_behind_what_was_there() -> None:
    books = ledger()  # 48 tokens at most
    group = opened(books)[0]
    prompt = len(group.prompt_ids)
    experts = np.ones((4, 1, 2), np.uint8)
    partial, finish = books.extended(group, 0, result(20, num_cached_tokens=3, routed_experts=experts))
    assert finish is Finish.UNFINISHED and len(group.partial[0].token_ids) == 0  # the books are as they were
    assert partial.token_ids.tolist() == list(range(40, 60)) and partial.logprobs.tolist() == [
        -n for n in range(40, 60)
    ]
    assert [(s.start, s.end, s.version) for s in partial.segments] == [
        (0, 20, 7)
    ] and partial.routed_experts is not None
    group.partial[0] = partial
    for count, given, finish in [
        (27, Finish.LENGTH, Finish.UNFINISHED),
        (27, Finish.UNFINISHED, Finish.UNFINISHED),
        (28, Finish.LENGTH, Finish.LENGTH),
        (28, Finish.UNFINISHED, Finish.LENGTH),
        (28, Finish.STOP, Finish.STOP),
        (1, Finish.STOP, Finish.STOP),
        (0, Finish.ERROR, Finish.ERROR),
        (2, Finish.ERROR, Finish.ERROR),
    ]:
        cached = 4 if given is Finish.STOP and count > 1 else 0
        assert books.extended(group, 0, result(count, given, num_cached_tokens=cached))[1] is finish
    assert books.counts == {
        "rollout/tokens": 20 + 27 + 27 + 28 + 28 + 28 + 1 + 2,
        "rollout/prompt_tokens": prompt + 8 * (prompt + 20),
        "rollout/cached_tokens": 3 + 4,
        "rollout/errors": 2,
    }


def test_a_sample_is_of_its_group_and_keeps_the_reason_of_its_error() -> None:
    books = ledger()
    group = opened(books)[0]
    sample = books.sample(group, 2, group.partial[2], Finish.ERROR, "burnt")
    assert (sample.uid, sample.group_id, sample.finish) == ("000001/solver:2", "000001/solver", Finish.ERROR)
    assert sample.prompt_ids is group.prompt_ids and sample.prompt_text == group.prompt_text
    assert sample.reward.note == "burnt"


@pytest.mark.parametrize(("completion", "overdue"), [("wait", []), ("drop_stragglers", [6, 7])])
def test_a_group_is_overdue_when_it_is_older_than_it_may_be(completion: str, overdue: list[int]) -> None:
    books = ledger(group_completion=completion, max_group_age=2)
    group = opened(books)[0]  # at version 3
    assert [v for v in range(3, 8) if books.is_overdue(group, {"main": v})] == overdue


def test_a_closed_group_holds_what_has_finished_in_order() -> None:
    books = ledger(group_size=4)
    group, other = opened(books)
    samples = {index: decode(books, group, index, "\\boxed{7}") for index in (2, 0)}
    closed = books.close_group(group)
    assert closed == Group("000001/solver", "000001", "solver", (samples[0], samples[2]))
    assert books.counts["rollout/dropped_stragglers"] == 2 and books.state.open == {"000002/solver": other}
    assert books.state.rounds["000001", "solver"].groups == {"000001/solver": closed}
    books.close_group(other)
    assert books.counts["rollout/dropped_stragglers"] == 2 + 4


def test_picks_are_made_once_when_every_group_of_the_round_is_closed() -> None:
    books = ledger(picks=2, group_size=4)
    solver = opened(books)[0]
    for index in range(4):
        decode(books, solver, index, "\\boxed{7}")
    assert books.pick("000001", "solver") == []  # its only group is open
    closed = books.close_group(solver)
    asks = books.pick("000001", "solver")
    rng = random.Random(derive_seed(5, "pick", "000001", "solver"))
    assert asks == books.team.orchestration.next_asks([(solver.ask, closed)], rng) and len(asks) == 2
    assert ("000001", "solver") not in books.state.rounds and ("000002", "solver") in books.state.rounds
    groups = books.open_groups(asks, VERSION)
    for group in groups:
        for index in range(4):
            decode(books, group, index, "Verdict: wrong")
    pairs = [
        (group.ask, books.close_group(group)) for group in reversed(groups) if not books.pick("000001", "verifier1")
    ]
    rng = random.Random(derive_seed(5, "pick", "000001", "verifier1"))
    assert books.pick("000001", "verifier1") == books.team.orchestration.next_asks(pairs[::-1], rng)


def test_what_pools_have_mended_is_in_the_metrics_once() -> None:
    books = ledger()
    books.team.pools["main"]._faults = Faults(engine_restarts=1, resubmitted=20, failed=3)
    for _ in range(2):
        books.note_faults()
        found = {name: n for name, n in books.counts.items() if n}
        assert found == {"rollout/engine_restarts": 1, "rollout/resubmitted": 20, "rollout/failed_requests": 3}


def test_a_listener_hears_of_a_stage() -> None:
    books, told = ledger(), list[int]()
    books.note_stage()
    books.on_stage = lambda: told.append(1)
    books.note_stage()
    assert told == [1]


def test_a_run_begins_with_empty_books() -> None:
    state = SchedulerState()
    assert [state.num_instances, state.num_stages, state.num_batches, state.num_taken] == [0, 0, 0, 0]
    assert not (state.pending or state.open or state.rounds or state.closed or state.ready)


def test_a_copy_of_the_state_is_equal_in_everything_and_stays_so() -> None:
    books = ledger()
    first, second = opened(books)
    decode(books, second, 0, "\\boxed{7}")
    first.partial[0].extend(np.zeros(2, np.int32), np.zeros(2), 0)
    state = books.state
    state.pending, state.closed = [first.ask], [Group("g", "r", "solver", ())]
    state.ready, state.num_stages, state.num_batches, state.num_taken = [Batch((), {"x": 1.0})], 4, 3, 2
    assert all(getattr(state, f.name) for f in fields(SchedulerState))  # nothing is at its default
    copied = state.copy()
    taken = encode(copied)
    assert taken == encode(state)
    first.partial[0].extend(np.zeros(2, np.int32), np.zeros(2), 0)
    decode(books, second, 1, "\\boxed{7}")
    state.rounds["000001", "solver"].asks.clear()
    state.rounds["000002", "solver"].groups["g"] = state.closed[0]
    state.rounds["a", "b"] = Round()
    for each in (state.pending, state.closed, state.ready, state.open):
        each.clear()
    assert encode(copied) == taken
