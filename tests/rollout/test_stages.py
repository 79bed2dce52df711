"""One stage after the other, on scripted letters: what is sent where, what is told, what a share of finished ones does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from letters import END, letter_config, letter_problems, letter_team, with_two_policies

from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.pool.recovery import Faults
from marsrl.rollout.schedule.ledger import RolloutState, StepBatch
from marsrl.rollout.schedule.partial_rollouts import tokens_behind
from marsrl.rollout.schedule.scheduler import Scheduler
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish, Group


def player(*, team: dict[str, Any] | None = None, **options: Any) -> tuple[Scheduler, ScriptedEngine]:
    """A scheduler and its engine. team: options of letter_team."""
    config = letter_config(overlap=0, **options)
    made, engines = letter_team(config, **(team or {}))
    return Scheduler(config, made, letter_problems(40), seed=0), engines[0]


def play(scheduler: Scheduler, engine: ScriptedEngine, stages: Sequence[int]) -> list[StepBatch]:
    """One version a stage."""
    batches = []
    for version in stages:
        engine._version = version
        batches.append(scheduler.next_batch({"main": version}))
    return batches


def endless(request: DecodeRequest) -> list[int]:
    return [ord(".")] * 100


def test_everything_is_sent_at_once_in_order_of_groups_and_the_batch_is_in_that_order() -> None:
    scheduler, engine = player(segments=3, prompts_per_step=3)
    sent, opened = list[list[str]](), list[list[str]]()
    generate = scheduler.team.pools["main"].generate
    scheduler.team.pools["main"].generate = lambda requests, **words: (  # type: ignore[method-assign]
        sent.append([request.uid for request in requests]),
        opened.append(list(scheduler.state.open)),
        generate(requests, **words),
    )[2]
    batches = play(scheduler, engine, range(6))
    assert len(sent) == 6 and all(uids == sorted(uids) for uids in sent)
    assert any(groups != sorted(groups) for groups in opened)
    for batch in batches:
        assert [group.group_id for group in batch.groups] == sorted(group.group_id for group in batch.groups)
    assert sum(len(batch.groups) for batch in batches) > 8


def test_each_policy_decodes_its_agents_under_its_own_version_and_progress_is_told_over_both() -> None:
    config = letter_config(overlap=0, finish_share=0.99, pipeline="trajectory", prompts_per_step=4)
    team, (engine,) = letter_team(config)
    engine._version = 3
    second = ScriptedEngine(engine._script, version=5, tokens_per_step=9)
    scheduler = Scheduler(config, with_two_policies(team, second), letter_problems(9), seed=0)
    told: list[int] = []
    batch = scheduler.next_batch({"main": 3, "other": 5}, told.append)
    versions = {(s.agent[0], segment.version) for g in batch.groups for s in g.samples for segment in s.segments}
    assert versions == {("s", 3), ("v", 5), ("c", 3)}
    assert told == sorted(told) and told[0] > 0
    assert told[-1] == batch.metrics["rollout/tokens"] == engine.num_decoded() + second.num_decoded()


def test_progress_within_a_stage_goes_on_from_one_policy_to_the_next() -> None:
    config = letter_config(overlap=0, finish_share=0.99, prompts_per_step=4)
    team, (engine,) = letter_team(config)
    second = ScriptedEngine(engine._script, tokens_per_step=9)
    scheduler = Scheduler(config, with_two_policies(team, second), letter_problems(9), seed=0)
    scheduler.next_batch({"main": 0, "other": 0})
    assert second.num_decoded() == 0
    told: list[int] = []
    batch = scheduler.next_batch({"main": 0, "other": 0}, told.append)
    assert second.num_decoded() > 0
    assert told == sorted(told) and told[-1] == batch.metrics["rollout/tokens"]


def test_progress_goes_on_from_what_was_decoded_before() -> None:
    told: list[int] = []
    behind = tokens_behind(5, told.append)
    assert behind is not None and tokens_behind(5, None) is None
    behind(3)
    assert told == [8]
    scheduler, _ = player()
    heard: list[Any] = []
    pool = scheduler.team.pools["main"]
    generate = pool.generate
    pool.generate = lambda requests, **words: (  # type: ignore[method-assign]
        heard.append((words["version"], words["on_progress"])),
        generate(requests, **words),
    )[1]
    scheduler.next_batch({"main": 0}, told.append)
    scheduler.next_batch({"main": 0})
    (version, on_progress), (_, silent) = heard
    on_progress(4)
    assert version == 0 and told[-1] == 4 and silent is None


def test_a_batch_that_an_overlapping_run_left_is_taken_before_anything_is_played() -> None:
    scheduler, engine = player()
    left = [StepBatch((), {"x": 1.0}), StepBatch((), {"x": 2.0})]
    scheduler.state.ready, scheduler.state.num_taken = list(left), 3
    closed = Group("000000/solver", "000000", "solver", ())
    scheduler.state.closed = [closed]
    assert [scheduler.next_batch({"main": 0}) for _ in left] == left
    assert (scheduler.state.num_taken, scheduler.state.num_instances, engine.num_decoded()) == (5, 0, 0)
    batch = scheduler.next_batch({"main": 0})
    assert batch.groups[0] == closed and scheduler.state.closed == [] and len(batch.groups) > 1


@pytest.mark.parametrize("pipeline", ["agentic", "trajectory"])
def test_stages_batches_and_unfinished_samples_are_counted(pipeline: str) -> None:
    scheduler, engine = player(pipeline=pipeline, segments=4)
    begun: list[int] = []
    scheduler.on_stage = lambda: begun.append(1)
    batches = play(scheduler, engine, range(2))
    state = scheduler.state
    assert (state.num_stages, state.num_batches, state.num_taken) == (2, 2, 2)
    assert sum(batch.metrics["rollout/stages"] for batch in batches) == len(begun)
    assert len(begun) == 2 if pipeline == "agentic" else len(begun) > 6
    assert batches[-1].metrics["rollout/unfinished"] == scheduler.num_unfinished
    assert (scheduler.num_unfinished > 0) == (pipeline == "agentic")
    assert sum(batch.metrics["rollout/tokens"] for batch in batches) == engine.num_decoded() > 0
    if pipeline == "trajectory":
        assert [{g.rollout_id for g in batch.groups} for batch in batches] == [
            {"000001", "000002"},
            {"000003", "000004"},
        ]


def test_what_pools_have_mended_is_in_the_batch() -> None:
    scheduler, engine = player()
    scheduler.team.pools["main"]._faults = Faults(engine_restarts=2)
    first, second = play(scheduler, engine, range(2))
    assert first.metrics["rollout/engine_restarts"] == 2 and second.metrics["rollout/engine_restarts"] == 0


@pytest.mark.parametrize(("most", "drawn"), [(5, 2), (6, 4)])
def test_problems_are_drawn_up_to_a_number_of_samples_under_way(most: int, drawn: int) -> None:
    scheduler, engine = player(team={"script": endless}, segments=4, max_unfinished=most)
    play(scheduler, engine, range(2))  # 2 groups of 3 are on their way when the second stage begins
    assert scheduler.state.num_instances == drawn


def test_engines_are_at_rest_between_stages_and_nothing_is_left_running() -> None:
    scheduler, engine = player()
    play(scheduler, engine, [0])
    with scheduler.resting({"main": 1}) as nothing:
        assert nothing is None and scheduler.team.pools["main"].num_under_way == 0
    scheduler.close()


def test_a_snapshot_goes_on_as_the_run_would_have() -> None:
    def ids(batches: list[StepBatch]) -> list[list[str]]:
        return [[s.uid + s.problem_id for g in batch.groups for s in g.samples] for batch in batches]

    scheduler, engine = player(segments=2)
    play(scheduler, engine, range(3))
    kept = decode(RolloutState, encode(scheduler.snapshot()))
    again, other = player(segments=2)
    again.restore(kept)
    assert ids(play(again, other, range(3, 6))) == ids(play(scheduler, engine, range(3, 6)))


@pytest.mark.parametrize(
    ("known", "num_decoded", "tokens"),
    [
        (44, 0, 4),  # the first of two has its last four tokens: half has finished, the other is cut off
        (20, 18, 24),  # the first ends its segment and goes on later: the other decodes to the end of its own
    ],
)
def test_a_share_counts_samples_that_are_over_and_not_segments(known: int, num_decoded: int, tokens: int) -> None:
    config: dict[str, Any] = {"segments": 2, "finish_share": 0.5, "group_size": 2, "prompts_per_step": 1}
    scheduler, _ = player(team={"script": endless, "tokens_per_step": 2}, **config)
    (group,) = scheduler.open_asks(scheduler.draw(), {"main": 0})
    group.partial[0].extend(np.full(known, ord("."), np.int32), np.zeros(known, np.float32), 0)
    requests = [scheduler.request(group, 0, num_decoded), scheduler.request(group, 1)]
    first, second = scheduler._play(scheduler.team.pools["main"], requests, 0, None)
    assert (first.uid, first.finish, len(first.token_ids)) == (
        "000001/solver:0",
        Finish.LENGTH,
        min(48 - known, 24 - num_decoded),
    )
    assert (second.uid, len(second.token_ids)) == ("000001/solver:1", tokens)
    assert (second.finish is Finish.UNFINISHED) == (tokens < 24)


def test_a_stage_ends_when_just_the_share_has_finished() -> None:
    def script(of: Callable[[int], int]) -> Callable[[DecodeRequest], list[int]]:
        return lambda request: [ord(".")] * of(int(request.uid[-1])) + [END]

    # of six samples three are short, and the others get as far as those
    options: dict[str, Any] = {"finish_share": 0.5, "group_size": 6, "prompts_per_step": 1}
    scheduler, _ = player(team={"script": script(lambda i: 1 if i < 3 else 40), "tokens_per_step": 2}, **options)
    told: list[int] = []
    batch = scheduler.next_batch({"main": 0}, told.append)
    assert batch.groups == () and scheduler.num_unfinished == 3
    (group,) = scheduler.state.open.values()
    assert sorted(group.finished) == [0, 1, 2] and {len(p.token_ids) for p in group.partial.values()} == {2}
    assert told[-1] == batch.metrics["rollout/tokens"] == 12
    # with one short sample fewer it goes on
    scheduler, _ = player(team={"script": script(lambda i: 1 if i < 2 else 40), "tokens_per_step": 2}, **options)
    assert [len(g.samples) for g in scheduler.next_batch({"main": 0}).groups] == [6]


def test_progress_is_told_several_times_a_second_where_a_share_may_end_the_stage() -> None:
    scheduler, _ = player(finish_share=0.5)
    waited: list[float] = []
    pool = scheduler.team.pools["main"]
    collect = pool.collect
    pool.collect = lambda timeout_s: (waited.append(timeout_s), collect(timeout_s))[1]  # type: ignore[method-assign]
    scheduler.next_batch({"main": 0})
    assert 0 < max(waited) < 0.5
