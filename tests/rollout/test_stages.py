"""Stages on scripted letters: what is sent where and told, what holds in whatever order samples end, how their thread fails."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from letters import (
    END,
    Play,
    assert_of_the_script,
    completion,
    completions,
    judge,
    letter_config,
    letter_problems,
    letter_team,
    next_batch,
    script,
    set_version,
    submissions,
)

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.engines.protocol import AdapterUpdate, DecodeRequest
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.player.completion import State
from marsrl.rollout.player.rollout import Rollout
from marsrl.rollout.player.stages import RolloutState, Stages, StepBatch
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish, Group, Problem, Reward


def played(*, team: dict[str, Any] | None = None, **options: Any) -> tuple[Rollout, ScriptedEngine]:
    """A rollout and its engine. team: options of letter_team."""
    config = letter_config(**{"overlap": 0, **options})
    made, engines = letter_team(config, **(team or {}))
    return Rollout(config, made, letter_problems(40), seed=0), engines[0]


def play(rollout: Rollout, engine: ScriptedEngine, stages: Sequence[int]) -> list[StepBatch]:
    """One version a stage."""
    batches = []
    for version in stages:
        set_version(version, engine)
        batches.append(rollout.next_batch({"main": version}))
    return batches


def endless(request: DecodeRequest) -> list[int]:
    return [ord(".")] * 999


def test_what_is_picked_in_a_stage_is_asked_in_the_next_one() -> None:
    rollout, engine = played(prompts_per_step=3)
    sent = submissions(rollout.stages.team.pools["main"])
    for version in range(5):
        set_version(version, engine)
        pending = {ask.id for ask in rollout.snapshot().stages.pending}
        rollout.next_batch({"main": version})
        asked = {uid.rpartition(":")[0] for uid in sent[version][0]}
        assert pending == {name for name in asked if not name.endswith("/solver")}
    assert pending


def test_samples_are_judged_while_others_decode() -> None:
    config = letter_config(overlap=0, prompts_per_step=1)
    judged_at: list[int] = []

    def noting(problem: Problem, answer: str) -> Future[Reward]:
        judged_at.append(engine.num_decoded())
        return judge(problem, answer)

    team, (engine,) = letter_team(config, judge=noting, tokens_per_step=3)
    Rollout(config, team, letter_problems(9), seed=0).next_batch({"main": 0})
    assert len(judged_at) >= 2 and judged_at[0] < engine.num_decoded()


def test_an_adapter_comes_while_requests_of_the_other_decode_on() -> None:
    config = letter_config(overlap=1, segments=3, prompts_per_step=4)
    team, _ = letter_team(config, tokens_per_step=3)
    agents = {name: AgentConfig(policy="other" if "verifier" in name else "main") for name in team.agents}
    renderers = dict.fromkeys(("main", "other"), team.renderers["main"])
    team = replace(team, agents=agents, renderers=renderers, adapters={"main": "main", "other": "main"})
    pool, stages = team.pools["main"], Stages(config, team, letter_problems(40), seed=0)
    versions = {"main": 0, "other": 0}
    for name in versions:
        pool.update_adapter(AdapterUpdate(name, f"{name}/0", 0))

    def decoding() -> Counter[str]:
        return Counter(team.agents[each.agent].policy for each in completions(stages, State.DECODING))

    num_beside, groups = Counter[str](), list[Group]()
    for _ in range(8):
        groups += next_batch(stages, versions).groups
        for name in versions:
            stages.advance(0.0)
            stages.rest(name)
            versions[name] += 1
            assert decoding()[name] == 0 and pool.num_under_way == decoding().total()
            pool.update_adapter(AdapterUpdate(name, f"{name}/{versions[name]}", versions[name]))
            num_beside[name] += pool.num_under_way
            stages.resume(versions)
    assert min(num_beside["main"], num_beside["other"]) > 0
    samples = [sample for group in groups for sample in group.samples]
    assert len({sample.uid for sample in samples}) == len(samples) > 50
    for sample in samples:
        assert sample.token_ids.tolist() == completion(sample.uid)[: len(sample.token_ids)]
    several = {team.agents[each.agent].policy for each in samples if len({part.version for part in each.segments}) > 1}
    assert several == {"main", "other"}


@pytest.mark.parametrize("segments", [1, 4])
def test_a_state_through_bytes_goes_on_as_if_nothing_had_happened(segments: int) -> None:
    unbroken = play(*played(segments=segments), range(8))
    first, engine = played(segments=segments)
    before = play(first, engine, range(4))
    resumed, other = played(segments=segments)
    resumed.restore(decode(RolloutState, encode(first.snapshot())))
    after = play(resumed, other, range(4, 8))
    assert encode([batch.groups for batch in before + after]) == encode([batch.groups for batch in unbroken])


def test_a_completion_without_end_is_cut_off_at_its_length() -> None:
    longest = {"max_response_tokens": 300, "pipeline": "trajectory"}
    rollout, engine = played(team={"script": endless}, segments=3, **longest)
    *_, batch = play(rollout, engine, range(3))
    samples = [sample for group in batch.groups for sample in group.samples]
    assert [(sample.finish, len(sample.token_ids)) for sample in samples] == [(Finish.LENGTH, 300)] * 6


@pytest.mark.parametrize(("most", "drawn"), [(5, 2), (6, 4)])
def test_problems_are_drawn_up_to_a_number_of_samples_under_way(most: int, drawn: int) -> None:
    rollout, engine = played(team={"script": endless}, segments=4, max_unfinished=most)
    play(rollout, engine, range(2))  # 2 groups of 3 are on their way when the second stage begins
    assert rollout.stages.state.num_instances == drawn


def test_a_stage_ends_when_just_the_share_has_finished() -> None:
    def dots(of: Callable[[int], int]) -> Callable[[DecodeRequest], list[int]]:
        return lambda request: [ord(".")] * of(int(request.uid[-1])) + [END]

    # of six samples three are short, and the others get as far as those
    options: dict[str, Any] = {"finish_share": 0.5, "group_size": 6, "prompts_per_step": 1}
    rollout, _ = played(team={"script": dots(lambda i: 1 if i < 3 else 40), "tokens_per_step": 2}, **options)
    told: list[int] = []
    batch = rollout.next_batch({"main": 0}, told.append)
    assert batch.groups == () and rollout.num_unfinished == 3
    (group,) = rollout.snapshot().stages.open.values()
    assert [sample.uid[-1] for sample in group.samples] == ["0", "1", "2"]
    assert {len(each.token_ids) for each in group.unfinished} == {2}
    assert told[-1] == batch.metrics["rollout/tokens"] == 12
    # with one short sample fewer it goes on
    rollout, _ = played(team={"script": dots(lambda i: 1 if i < 2 else 40), "tokens_per_step": 2}, **options)
    assert [len(g.samples) for g in rollout.next_batch({"main": 0}).groups] == [6]


def test_an_error_in_the_thread_is_raised_in_the_trainer_with_its_traceback() -> None:
    asked, before = [], set(threading.enumerate())  # of other tests

    def broken(request: DecodeRequest) -> list[int]:
        asked.append(request.uid)
        if len(asked) > 10:
            raise ZeroDivisionError("the engine burns")
        return script(request)

    rollout, _ = played(overlap=1, team={"script": broken})
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
