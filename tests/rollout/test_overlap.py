"""Invariants of stages, in whatever order samples end: many random scripts, no model, no thread (6 s)."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
from letters import (
    completion,
    completions,
    judge,
    letter_config,
    letter_problems,
    letter_team,
    next_batch,
    set_version,
)

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.player.completion import State
from marsrl.rollout.player.stages import RolloutState, Stages
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Group, Problem, Reward


class Play:
    """Stages with their engines, driven as a trainer would, without a thread."""

    def __init__(
        self,
        config: RolloutConfig,
        seed: int = 0,
        version: int = 0,
        state: RolloutState | None = None,
        **options: Any,
    ) -> None:
        team, self.engines = letter_team(config, **options)
        self.stages = Stages(config, team, letter_problems(40, seed), seed=seed)
        self.version = version
        if state is not None:
            self.stages.restore(state)
        self.resume()

    def resume(self) -> None:
        set_version(self.version, *self.engines)
        self.stages.resume({"main": self.version})

    def train(self, steps: int, rounds_while_training: int = 4) -> list[tuple[Group, ...]]:
        trained = []
        for _ in range(steps):
            trained.append(next_batch(self.stages).groups)
            for _ in range(rounds_while_training):
                self.stages.advance(0.0)
            self.stages.rest()
            self.version += 1
            self.resume()
        return trained


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
def test_a_sample_is_trained_once_and_its_group_is_whole(name: str) -> None:
    config = CONFIGS[name]
    play = Play(config)
    rng = random.Random(0)
    batches = [batch for _ in range(8) for batch in play.train(1, rng.randrange(8))]
    assert all([g.group_id for g in batch] == sorted(g.group_id for g in batch) for batch in batches)
    groups = [g for batch in batches for g in batch]
    uids = Counter(s.uid for g in groups for s in g.samples)
    assert len(groups) > 12 and max(uids.values()) == 1
    assert len({g.group_id for g in groups}) == len(groups)
    for group in groups:
        assert [s.uid for s in group.samples] == sorted(s.uid for s in group.samples)
        assert {s.group_id for s in group.samples} <= {group.group_id}
        if config.group_completion == "wait":
            assert len(group.samples) == 3
        for sample in group.samples:
            ends = [segment.end for segment in sample.segments]
            assert [segment.start for segment in sample.segments] == [0, *ends[:-1]]
            assert ends[-1] == len(sample.token_ids) == len(sample.rollout_logprobs)
            versions = [segment.version for segment in sample.segments]
            assert versions == sorted(versions)
            assert sample.token_ids.tolist() == completion(sample.uid)[: len(sample.token_ids)]
            assert sample.parent_uid is None or sample.parent_uid in uids


@pytest.mark.parametrize("name", CONFIGS)
def test_a_restored_run_goes_on_with_every_problem_once(name: str) -> None:
    """Up to each checkpoint and after it, all is trained that one run trains: nothing twice, nothing lost."""
    again, trained = Play(CONFIGS[name]), []
    for life in range(4):
        trained += again.train(2, rounds_while_training=3 * life)
        state = decode(RolloutState, encode(again.stages.snapshot()))
        again.train(1)  # lost: the process is killed here
        again = Play(CONFIGS[name], version=2 * life + 2, state=state)
    trained += again.train(2)
    groups = [g for batch in trained for g in batch]
    books = again.stages.state
    assert len({g.group_id for g in groups}) == len(groups)
    # every problem drawn is trained, or waits somewhere: each of them in one place
    waiting = [g for batch in books.ready for g in batch.groups] + books.closed
    solver = [g.rollout_id for g in [*groups, *waiting] if g.agent == "solver"]
    solver += [each.ask.episode_id for each in books.open.values() if each.ask.agent == "solver"]
    assert sorted(solver) == [f"{i:06d}" for i in range(1, books.num_instances + 1)]
    problems = Counter(s.problem_id for g in groups if g.agent == "solver" for s in g.samples[:1])
    assert max(problems.values()) == 1 and books.num_instances <= 40


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


@pytest.mark.parametrize(("overlap", "segments", "rounds"), [(1, 1, 200), (1, 4, 3), (3, 2, 0), (3, 2, 200)])
def test_samples_are_at_most_overlap_and_segments_versions_old(overlap: int, segments: int, rounds: int) -> None:
    """However slow the trainer is: a stage's samples are of weights that are overlap old at most, a segment takes a
    stage, and picks that are made late in a stage belong to the next."""
    play = Play(letter_config(overlap=overlap, segments=segments))
    ages = Counter(
        step - s.oldest_version
        for step, groups in enumerate(play.train(8, rounds_while_training=rounds))
        for g in groups
        for s in g.samples
    )
    assert 0 < max(ages) <= overlap + segments


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
    play.version = 1
    play.resume()
    play.stages.advance(0.0)
    assert not completions(play.stages, State.JUDGING)
    assert {g.agent for g in next_batch(play.stages).groups} == {"solver"}
    again = Play(letter_config(), state=state, judge=slow)  # what was decoded is judged again, and not decoded again
    assert len(asked) == 2 * len(completions(again.stages, State.JUDGING)) > 6
    assert again.engines[0].num_decoded() == 0 and not completions(again.stages, State.DUE, State.DECODING)
