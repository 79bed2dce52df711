"""Invariants of stages, in whatever order samples end: many random scripts, no model, no thread (6 s)."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

import pytest
from letters import Play, assert_of_the_script, completions, judge, letter_config, next_batch

from marsrl.rollout.player.completion import State
from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Problem, Reward

CONFIGS = {
    "one segment": letter_config(),
    "four segments": letter_config(segments=4),
    "two engines, two ahead": letter_config(segments=3, overlap=2, engines=2),
    "three ahead, half of a stage": letter_config(segments=2, overlap=3, finish_share=0.5),
    "stragglers dropped": letter_config(segments=8, group_completion="drop_stragglers", max_group_age=1, overlap=2),
    "small pool": letter_config(segments=8, max_unfinished=4),
    "trajectories": letter_config(pipeline="trajectory", segments=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_run_goes_on_with_every_problem_once(name: str) -> None:
    """Up to each checkpoint and after it, all is trained that one run trains: nothing twice, nothing lost, in whatever order
    samples end."""
    again, trained = Play(CONFIGS[name]), []
    for life in range(4):
        trained += again.train(2, rounds_while_training=3 * life)
        state = decode(RolloutState, encode(again.stages.snapshot()))
        again.train(1)  # lost: the process is killed here
        again = Play(CONFIGS[name], version=2 * life + 2, state=state)
    trained += again.train(2)
    groups = [g for batch in trained for g in batch]
    books = again.stages.state
    assert len(groups) > 12
    assert_of_the_script(groups, 3 if CONFIGS[name].group_completion == "wait" else None)
    assert all([g.group_id for g in batch] == sorted(g.group_id for g in batch) for batch in trained)
    # every problem drawn is trained, or waits somewhere: each of them in one place
    waiting = [g for batch in books.ready for g in batch.groups] + books.closed
    solver = [g.rollout_id for g in [*groups, *waiting] if g.agent == "solver"]
    solver += [each.ask.episode_id for each in books.open.values() if each.ask.agent == "solver"]
    assert sorted(solver) == [f"{i:06d}" for i in range(1, books.num_instances + 1)]
    problems = Counter(s.problem_id for g in groups if g.agent == "solver" for s in g.samples[:1])
    assert max(problems.values()) == 1 and books.num_instances <= 60


@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_the_decoder_is_at_most_overlap_stages_ahead(overlap: int) -> None:
    play = Play(letter_config(overlap=overlap))
    for step in range(1, 5):
        taken = next_batch(play.stages)
        assert min(g.rollout_id for g in taken.groups if g.agent == "solver") == f"{2 * step - 1:06d}"  # the oldest
        for _ in range(200):  # a trainer that is very slow
            play.stages.advance(0.0)
        books = play.stages.state
        assert books.num_taken == step and len(books.ready) == overlap
        assert books.num_instances == 2 * (step + overlap)


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
    again = Play(letter_config(), state=state, judge=slow)  # what was decoded is judged again, and not decoded again
    assert len(asked) == 2 * len(completions(again.stages, State.JUDGING)) > 6
    assert again.engines[0].num_decoded() == 0 and not completions(again.stages, State.DUE, State.DECODING)
