"""Stages with scripted letters: what they send and report, invariants for any order of arrival, and errors in their thread."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
from letters import (
    Play,
    assert_of_the_script,
    completions,
    judge,
    letter_config,
    letter_problems,
    letter_team,
    next_batch,
    script,
    submissions,
)

from marsrl.rollout.engines.protocol import DecodeRequest
from marsrl.rollout.player.completion import State
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState, Stages
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish, Problem, Reward


def endless(request: DecodeRequest) -> list[int]:
    return [ord(".")] * 999


def test_inputs_picked_in_a_stage_are_sent_in_the_next_one() -> None:
    play = Play(letter_config(overlap=0, prompts_per_step=3))
    sent = submissions(play.pool)
    for version in range(5):
        pending = {ask.id for ask in play.stages.state.pending}
        play.train(1, rounds_while_training=0)
        asked = {uid.rpartition(":")[0] for uid in sent[version][0]}
        assert pending == {name for name in asked if not name.endswith("/solver")}
    assert pending and play.metrics["rollout/stages"] == 5


def test_samples_are_judged_while_others_decode() -> None:
    config = letter_config(overlap=0, prompts_per_step=1)
    judged_at: list[int] = []

    def noting(problem: Problem, answer: str) -> Future[Reward]:
        judged_at.append(engine.num_decoded())
        return judge(problem, answer)

    team, (engine,) = letter_team(config, judge=noting, tokens_per_step=3)
    Rollout(Stages(config, team, letter_problems(9), seed=0)).next_batch({"main": 0})
    assert len(judged_at) >= 2 and judged_at[0] < engine.num_decoded()


def test_a_completion_without_end_is_cut_off_at_its_length() -> None:
    config = letter_config(overlap=0, segments=3, max_response_tokens=300, pipeline="trajectory")
    play = Play(config, script=endless)
    *_, groups = play.train(3, rounds_while_training=0)
    samples = [sample for group in groups for sample in group.samples]
    assert [(sample.finish, len(sample.token_ids)) for sample in samples] == [(Finish.LENGTH, 300)] * 6
    assert play.metrics["rollout/stages"] == 3 * 3


@pytest.mark.parametrize(("most", "drawn"), [(5, 2), (6, 4)])
def test_problems_are_drawn_up_to_a_number_of_samples_under_way(most: int, drawn: int) -> None:
    play = Play(letter_config(overlap=0, segments=4, max_unfinished=most), script=endless)
    play.train(2, rounds_while_training=0)  # 2 groups of 3 are pending when the second stage begins
    assert play.stages.state.num_instances == drawn


@pytest.mark.parametrize(("segments", "trains_whole", "oldest"), [(1, False, 0), (4, False, 3), (1, True, 4)])
def test_a_sample_is_as_old_as_its_segments_or_its_team(segments: int, trains_whole: bool, oldest: int) -> None:
    """Ages are counted in versions, without overlap. Each of the five agents plays one step later than the agent before it."""
    play, ages = Play(letter_config(overlap=0, segments=segments)), list[int]()
    play.stages.trains_whole = trains_whole
    for version in range(12):
        (groups,) = play.train(1, rounds_while_training=0)
        ages += [version - sample.oldest_version for group in groups for sample in group.samples]
    assert max(ages) == oldest


def test_the_trainer_raises_thread_errors_with_their_traceback() -> None:
    asked, before = [], set(threading.enumerate())  # threads of other tests

    def broken(request: DecodeRequest) -> list[int]:
        asked.append(request.uid)
        if len(asked) > 10:
            raise ZeroDivisionError("the engine burns")
        return script(request)

    config = letter_config()
    rollout = Rollout(Stages(config, letter_team(config, script=broken)[0], letter_problems(40), seed=0))
    with pytest.raises(RuntimeError, match="the engine burns") as caught:
        for _ in range(3):
            rollout.next_batch({"main": 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "in broken" in "".join(traceback.format_exception(caught.value))
    for call in (rollout.snapshot, lambda: rollout.next_batch({"main": 0}), rollout.resting().__enter__):
        with pytest.raises(RuntimeError, match="the engine burns"):
            call()
    rollout.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("marsrl-")} <= before


def test_batches_report_tokens_and_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())  # threads of other tests
    for overlap in (0, 1):
        config = letter_config(overlap=overlap)
        team, (engine,) = letter_team(config)
        rollout = Rollout(Stages(config, team, letter_problems(40), seed=0))
        for _ in range(2):
            known, told = engine.num_decoded(), list[int]()
            rollout.next_batch({"main": 0}, told.append)
            assert told == sorted(told) and (overlap or told[-1] == engine.num_decoded() - known > 0)
        assert [thread.name for thread in threading.enumerate() if thread not in before] == ["marsrl-rollout"] * overlap
        rollout.close()
        assert set(threading.enumerate()) <= before


CONFIGS = {
    "one segment": letter_config(),
    "four segments": letter_config(segments=4),
    "two engines, two ahead": letter_config(segments=3, overlap=2, engines=2),
    "three ahead": letter_config(segments=2, overlap=3),
    "stragglers dropped": letter_config(segments=8, group_completion="drop_stragglers", max_group_age=1, overlap=2),
    "small pool": letter_config(segments=8, max_unfinished=4),
    "trajectories": letter_config(pipeline="trajectory", segments=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_run_goes_on_with_every_problem_once(name: str) -> None:
    """Across checkpoints, every problem is trained once, with the script's completions, in any order of arrival."""
    again, trained = Play(CONFIGS[name]), []
    for life in range(4):
        trained += again.train(2, rounds_while_training=3 * life)
        kept = again.stages.snapshot()
        again.train(1)  # this batch is lost: the process is killed before the next checkpoint
        again = Play(CONFIGS[name], version=2 * life + 2, state=decode(RolloutState, encode(kept)))
    trained += again.train(2)
    groups = [g for batch in trained for g in batch]
    books = again.stages.state
    assert len(groups) > 12
    assert_of_the_script(groups, 3 if CONFIGS[name].group_completion == "wait" else None)
    assert all([g.group_id for g in batch] == sorted(g.group_id for g in batch) for batch in trained)
    # Every drawn problem is trained or waits, in exactly one place.
    waiting = [g for batch in books.ready for g in batch.groups] + books.closed
    solver = [g.rollout_id for g in [*groups, *waiting] if g.agent == "solver"]
    solver += [each.ask.episode_id for each in books.open.values() if each.ask.agent == "solver"]
    assert sorted(solver) == [f"{i:06d}" for i in range(1, books.num_instances + 1)]
    problems = Counter(s.problem_id for g in groups if g.agent == "solver" for s in g.samples[:1])
    assert max(problems.values()) == 1 and books.num_instances <= 60


@pytest.mark.parametrize("trains_whole", [False, True])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "stragglers dropped"])
def test_batches_count_every_token_even_after_a_restart(name: str, trains_whole: bool) -> None:
    def play(**state: Any) -> Play:
        found = Play(CONFIGS[name], **state)
        found.stages.trains_whole = trains_whole
        return found

    again, decoded, trained = play(), 0.0, 0
    for life in range(3):
        for _ in range(2):
            batch = next_batch(again.stages)
            decoded += batch.metrics.get("rollout/tokens", 0)
            trained += sum(sample.num_sampled for group in batch.groups for sample in group.samples)
            assert decoded == trained + batch.metrics["rollout/carried_tokens/main"]
            for _ in range(3):
                again.stages.advance(0.0)
            again.stages.rest()
            again.publish(again.version + 1)
        again.stages.advance(0.0)  # decodes a part of what the process will decode again
        again = play(version=2 * life + 2, state=decode(RolloutState, encode(again.stages.snapshot())))


def test_a_run_can_go_on_without_its_unfinished_problems() -> None:
    play = Play(letter_config(overlap=2))
    play.train(2)
    state = decode(RolloutState, encode(play.stages.snapshot().without_work()))
    again = Play(letter_config(overlap=2), version=2, state=state)
    first = next_batch(again.stages)
    assert min(group.rollout_id for group in first.groups) == f"{play.stages.state.num_instances + 1:06d}"


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_the_decoder_is_at_most_overlap_stages_ahead(overlap: int) -> None:
    play = Play(letter_config(overlap=overlap))
    for step in range(1, 5):
        taken = next_batch(play.stages)
        assert min(g.rollout_id for g in taken.groups if g.agent == "solver") == f"{2 * step - 1:06d}"  # the oldest
        for _ in range(200):  # a very slow trainer
            play.stages.advance(0.0)
        books = play.stages.state
        assert books.num_taken == step and len(books.ready) == overlap
        assert books.num_instances == 2 * (step + overlap)


@pytest.mark.parametrize(("pipeline", "drawn"), [("agentic", 4), ("trajectory", 2)])
def test_a_stage_begins_before_the_last_ends_if_there_is_room(pipeline: str, drawn: int) -> None:
    play = Play(letter_config(pipeline=pipeline))
    play.stages.want()
    play.stages.advance(0.0)
    assert (play.stages.state.num_instances, play.stages.state.num_batches) == (drawn, 0)


def test_judgements_go_on_over_a_rest_and_are_taken_after_it() -> None:
    asked: list[tuple[Problem, str, Future[Reward]]] = []

    def slow(problem: Problem, answer: str) -> Future[Reward]:
        asked.append((problem, answer, Future()))
        return asked[-1][2]

    play = Play(letter_config(), judge=slow)
    play.stages.want()
    while not asked or play.stages.player.is_decoding:
        play.stages.advance(0.0)
    play.stages.rest()
    assert len(completions(play.stages, State.JUDGING)) == len(asked) > 3
    state = decode(RolloutState, encode(play.stages.snapshot()))
    for problem, answer, reward in asked:
        reward.set_result(judge(problem, answer).result())
    play.publish(1)
    play.stages.advance(0.0)
    assert not completions(play.stages, State.JUDGING)
    assert {g.agent for g in next_batch(play.stages).groups} == {"solver"}
    again = Play(letter_config(), state=state, judge=slow)  # decoded samples are judged again, not decoded again
    assert len(asked) == 2 * len(completions(again.stages, State.JUDGING)) > 6
    assert again.engines[0].num_decoded() == 0 and not completions(again.stages, State.DUE, State.DECODING)
