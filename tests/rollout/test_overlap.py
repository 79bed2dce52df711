"""Invariants of stages, in whatever order samples end: many random scripts, no model, no thread (6 s)."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from letters import (
    END,
    PROMPT_ENDS,
    completion,
    completions,
    judge,
    letter_config,
    letter_problems,
    letter_team,
    next_batch,
    set_team,
    set_version,
)

from marsrl.rollout.config import AgentConfig, RolloutConfig
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
    """Up to a checkpoint and after it, all is trained that one run trains: nothing twice, nothing lost."""
    play = Play(CONFIGS[name])
    trained = play.train(3)
    state = decode(RolloutState, encode(play.stages.snapshot()))
    play.train(1)  # lost: the process is killed here
    again = Play(CONFIGS[name], version=3, state=state)
    trained += again.train(5)
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


@pytest.mark.parametrize("team", ["solver_verifier", "debate"])
def test_episodes_that_go_on_alone_are_trained_whole_and_once_across_a_restore(team: str) -> None:
    config = letter_config(segments=2, prompts_per_step=3)
    play = Play(config, orchestration=team)
    trained = play.train(4)
    state = decode(RolloutState, encode(play.stages.snapshot()))
    play.train(2)  # lost: the process is killed here
    again = Play(config, version=4, state=state, orchestration=team)
    trained += again.train(8)
    samples = [sample for batch in trained for group in batch for sample in group.samples]
    assert len({sample.uid for sample in samples}) == len(samples)
    steps: dict[str, set[int]] = {}
    episodes: dict[str, set[str]] = {}
    for step, batch in enumerate(trained):
        for sample in (sample for group in batch for sample in group.samples):
            steps.setdefault(sample.rollout_id, set()).add(step)
            episodes.setdefault(sample.rollout_id, set()).add(sample.uid.partition("/")[0])
            assert sample.text == "".join(chr(token) for token in completion(sample.uid)[:-1])[: len(sample.text)]
    assert all(len(each) == 1 for each in steps.values())  # all of an instance in one step
    assert all(episodes[name] == {f"{name}.{i}" for i in range(3)} for name in episodes)
    books = again.stages.state
    waiting = {group.rollout_id for batch in books.ready for group in batch.groups} | set(books.instances)
    waiting |= {group.rollout_id for group in books.closed}
    drawn = {f"{number:06d}" for number in range(1, books.num_instances + 1)}
    assert not waiting & set(steps) and waiting | set(steps) == drawn and len(steps) > 6


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


def test_a_stage_in_which_nothing_is_to_be_decoded_is_over_at_once() -> None:
    play = Play(letter_config(overlap=0))
    agents = {**play.stages.team.agents, "solver": AgentConfig(max_input_tokens=1)}
    set_team(play.stages, replace(play.stages.team, agents=agents))
    play.stages.want()
    batch = play.stages.take()
    assert batch is not None and batch.groups == () and batch.metrics["rollout/prompts_too_long"] == 2


def test_nothing_begins_at_rest() -> None:
    play = Play(letter_config(overlap=1))
    next_batch(play.stages)
    for _ in range(200):  # as far ahead as it may be
        play.stages.advance(0.0)
    play.stages.rest()
    play.stages.want()
    assert play.stages.state.num_stages == 2
    play.resume()
    assert play.stages.state.num_stages == 3
    play.stages.rest()
    play.stages.player.submit()
    assert not play.stages.player.is_decoding
    play.resume()
    play.stages.player.submit()
    assert play.stages.player.is_decoding


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


def test_a_straggler_that_is_being_judged_is_dropped_like_any_other() -> None:
    first: list[Future[Reward]] = []

    def never_once(problem: Problem, answer: str) -> Future[Reward]:
        if not first:
            first.append(Future())
            return first[0]
        return judge(problem, answer)

    config = letter_config(prompts_per_step=1, group_completion="drop_stragglers", max_group_age=0)
    play = Play(config, judge=never_once)
    play.stages.want()
    while not (first and len(completions(play.stages, State.OVER)) == 2):
        play.stages.advance(0.0)
    play.stages.rest()
    play.version = 1
    play.resume()
    closed = {group.group_id: len(group.samples) for group in play.stages.state.closed}
    assert not play.stages.state.open.get("000001/solver") and closed["000001/solver"] == 2
    first[0].set_result(Reward(1.0, 1.0))
    play.stages.advance(0.0)


def test_a_run_without_overlap_goes_on_from_a_checkpoint_with_it_and_back() -> None:
    play = Play(letter_config(overlap=2))
    trained = play.train(3, rounds_while_training=50)
    state = play.stages.snapshot()
    assert state.stages.ready
    config = letter_config(overlap=0)
    team, engines = letter_team(config)
    plain = Stages(config, team, letter_problems(40), seed=0)
    plain.restore(state)
    for version in range(3, 9):
        set_version(version, *engines)
        trained.append(next_batch(plain, {"main": version}).groups)
    picked = {ask.id for ask in plain.state.pending}
    again = Play(letter_config(overlap=1), version=9, state=plain.snapshot())
    trained += again.train(4)
    ids = [g.group_id for batch in trained for g in batch]
    assert len(set(ids)) == len(ids)
    assert picked and picked <= set(ids) | set(again.stages.state.open)
    solved = {g.rollout_id for batch in trained for g in batch if g.agent == "solver"}
    assert {f"{i:06d}" for i in range(1, 15)} <= solved


def _one_is_long(request: Any) -> list[int]:
    """A single sample takes four segments of twelve, all others a single step."""
    known = len(request.token_ids) - request.token_ids.tolist().index(PROMPT_ENDS) - 1
    return [ord(".")] * (47 - known) + [END] if request.uid == "000001/solver:0" else [ord("."), END]


def test_a_stage_waits_for_a_segment_of_every_sample_that_it_began_with() -> None:
    play = Play(letter_config(segments=4, overlap=3), script=_one_is_long, tokens_per_step=3)
    play.stages.want()
    for num_over in (1, 2, 3):
        while play.stages.state.num_batches < num_over:
            play.stages.advance(0.0)
        assert len(play.stages.state.open["000001/solver"].completions[0].token_ids) == 12 * num_over
        play.stages.advance(0.0)
        state = decode(RolloutState, encode(play.stages.snapshot()))
        play = Play(letter_config(segments=4, overlap=3), state=state, script=_one_is_long, tokens_per_step=3)
        play.stages.want()  # and a stage that was restored for what it waited for


def test_a_stage_begins_beside_the_longest_sample_of_the_one_before_where_engines_have_room() -> None:
    beside = Play(letter_config(segments=4, overlap=1), script=_one_is_long, tokens_per_step=3)
    whole = Play(letter_config(segments=4, overlap=1, pipeline="trajectory"), script=_one_is_long, tokens_per_step=3)
    for play in (beside, whole):
        play.stages.want()
        while play.stages.state.num_stages < 2:
            play.stages.advance(0.0)
    assert beside.stages.state.num_batches == 0 and whole.stages.state.num_batches == 1


def test_what_was_picked_in_a_stage_is_not_of_its_finish_share() -> None:
    def second_problem_is_long(request: Any) -> list[int]:
        known = len(request.token_ids) - request.token_ids.tolist().index(PROMPT_ENDS) - 1
        if request.uid.startswith("000002/"):
            return [ord(".")] * (47 - known) + [END]
        place = int(request.uid[-1])
        return [*(ord(c) for c in f"\\boxed{{{7 + place % 2}}}"), END][known:]

    # of six solvers three finish at once, their verifiers soon after: the share of six needs five
    play = Play(letter_config(finish_share=0.75, picks=2), script=second_problem_is_long, tokens_per_step=3)
    play.stages.want()
    while play.stages.state.num_batches < 1:
        play.stages.advance(0.0)
    batch = play.stages.take()
    assert batch is not None
    agents = Counter(group.agent for group in batch.groups if group.rollout_id in ("000001", "000002"))
    assert agents["solver"] == 2 and agents["verifier1"] > 0
