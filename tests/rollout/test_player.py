"""Completions from request to group, with made-up results; and evaluations, which take as long as their longest episode."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from letters import letter_config, letter_problems, letter_team, set_team

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.episode import Episode
from marsrl.rollout.kept_tokens import KeptTokens
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.player.completion import Completion, OpenAsk, State
from marsrl.rollout.player.evaluation import EvaluationPlay, Played
from marsrl.rollout.player.stages import Stages
from marsrl.rollout.pool.recovery import Faults
from marsrl.rollout.types import Finish, Group, Message, Problem, Reward, Sample

VERSION = {"main": 3}


class Hand:
    """Stands in for a pool: it records requests, and a test makes up the results."""

    def __init__(self) -> None:
        self.sent: dict[str, DecodeRequest] = {}
        self.faults = Faults()

    @property
    def num_under_way(self) -> int:
        return len(self.sent)

    has_room = False

    def submit(self, requests: Sequence[DecodeRequest], *, version: int, at_once: bool) -> None:
        assert version == VERSION["main"] and not at_once
        self.sent.update((request.uid, request) for request in requests)

    def drain(self, adapter: str | None = None) -> list[DecodeResult]:
        cut = [DecodeResult.without_tokens(uid, Finish.UNFINISHED, 3) for uid in self.sent]
        self.sent.clear()
        return cut

    def take_faults(self) -> Faults:
        faults, self.faults = self.faults, Faults()
        return faults


def stages_of(questions: Sequence[str] = (), **options: Any) -> Stages:
    """Return stages with overlap, before anything has begun. questions: the problems' questions; every answer is 7."""
    config = letter_config(**options)

    def question(number: int) -> Problem:
        return Problem(f"p{number}", questions[number % len(questions)], "7", "math")

    team = replace(letter_team(config)[0], pools={"main": Hand()})  # type: ignore[dict-item]
    return Stages(config, team, question if questions else letter_problems(9), seed=5)


def sent(stages: Stages) -> dict[str, DecodeRequest]:
    """Return the requests that engines have."""
    stages.player.submit()
    return stages.team.pools["main"].sent  # type: ignore[attr-defined, no-any-return]


def begun(stages: Stages) -> list[OpenAsk]:
    """Begin the first stage, and return its asks."""
    stages.resume(VERSION)
    stages.want()
    return [*stages.state.open.values()]


def answer(completion: Completion, tokens: int | str, finish: Finish = Finish.STOP, **more: Any) -> DecodeResult:
    ids = np.array([ord(c) for c in tokens] if isinstance(tokens, str) else range(40, 40 + tokens), np.int32)
    return DecodeResult(completion.uid, ids, -ids.astype(np.float32), finish, 7, **more)


def says(
    stages: Stages, completion: Completion, tokens: int | str, finish: Finish = Finish.STOP, **more: Any
) -> Sample | None:
    """Give the completion this segment; return its sample once it is over."""
    del sent(stages)[completion.uid]
    stages.absorb([answer(completion, tokens, finish, **more)])
    return completion.sample if completion.state is State.OVER else None


def groups(stages: Stages) -> list[Group]:
    """Return the closed groups."""
    return [*(group for batch in stages.state.ready for group in batch.groups), *stages.state.closed]


def counts(stages: Stages) -> Counter[str]:
    """Return all metrics so far."""
    total = Counter(stages.player.counts)
    for batch in stages.state.ready:
        total.update(batch.metrics)
    return total


@pytest.mark.parametrize(
    ("settings", "read"),
    [({}, []), ({"long_prompts": "cut_middle"}, ["abcdefnopqr"]), ({"long_prompts": "cut_left"}, ["hijklmnopqr"])],
    ids=str,
)
def test_a_long_prompt_is_counted_and_cut_if_configured(
    renderer: ChatRenderer, settings: dict[str, str], read: list[str]
) -> None:
    most = len(renderer.render([Message("user", "")])[0]) + 11
    for limit, opened, num_cut in ((most, [*read, "abcdefghijk", "a"], len(read)), (most - 11, [], 0)):
        stages = stages_of(["abcdefghijklmnopqr", "abcdefghijk", "a"], prompts_per_step=3)
        # The prompt set `chain` sends the bare problem.
        solver = AgentConfig.model_validate({"max_input_tokens": limit, "prompt": "chain", **settings})
        agents = {**stages.team.agents, "solver": solver}
        team = build_orchestration(stages.team.orchestration.name, agents, "math", rollout=stages.config)
        set_team(stages, replace(stages.team, agents=agents, renderers={"main": renderer}, orchestration=team))
        asks = begun(stages)
        prompts = [each.prompt_text for each in asks]
        assert sorted(prompts) == sorted(renderer.render([Message("user", text)])[1] for text in opened)
        # Prompts that are too long end their episodes.
        assert list(stages.state.instances) == [each.ask.episode_id for each in asks]
        found, drawn = counts(stages), 3 if opened else 3 * (1 + bool(stages.state.num_batches))
        names = ("prompts_cut", "prompts_too_long", "failed_episodes")
        assert [found[f"rollout/{name}"] for name in names] == [num_cut, drawn - len(opened), 0]


def test_a_sample_has_the_engine_s_text_or_is_decoded_here() -> None:
    stages = stages_of(prompts_per_step=1, group_size=3, segments=2, segment_length=24)
    first, second, third = begun(stages)[0].completions
    assert [sent(stages)[each.uid].text_from for each in (first, second, third)] == [len(first.of.prompt_ids)] * 3
    assert says(stages, first, "a", text="by the engine").text == "by the engine"  # type: ignore[union-attr]
    assert says(stages, second, "b").text == "b"  # type: ignore[union-attr]
    says(stages, third, "c" * 24, Finish.LENGTH, text="c" * 24)
    assert says(stages, third, 0, Finish.ERROR).text == "c" * 24  # type: ignore[union-attr]


def test_unreadable_outputs_are_penalised_if_configured() -> None:
    stages = stages_of()
    first, second, third = begun(stages)[0].completions
    sample = says(stages, first, "hm")
    assert sample is not None and sample.reward == Reward(0.0, 0.0, note="no answer")
    set_team(stages, replace(stages.team, agents={**stages.team.agents, "solver": AgentConfig(format_penalty=0.1)}))
    sample = says(stages, second, "hm")
    assert sample is not None and sample.reward == Reward(-0.1, 0.0, {"format": -0.1}, note="no answer")
    sample = says(stages, third, "\\boxed{8}")
    assert sample is not None and sample.reward.value == 0.0


def test_a_long_completion_is_penalised_over_the_last_tokens() -> None:
    # A completion has at most 48 tokens, with a penalty from 38 on. Only the length decides, not the answer or the finish reason.
    def reward(settings: dict[str, Any], text: str, finish: Finish = Finish.STOP, **options: Any) -> Reward:
        stages = stages_of(**options)
        solver = AgentConfig.model_validate(settings)
        set_team(stages, replace(stages.team, agents={**stages.team.agents, "solver": solver}))
        sample = says(stages, begun(stages)[0].completions[0], text, finish)
        assert sample is not None
        return sample.reward

    def said(tokens: int) -> str:
        return "." * (tokens - 10) + r"\boxed{7}" + "\x01"

    overlong = {"overlong": {"buffer": 10}}
    assert reward(overlong, said(38)) == Reward(1.0, 1.0, {"overlong": 0.0})
    assert reward(overlong, said(43)) == Reward(0.5, 1.0, {"overlong": -0.5})
    assert reward(overlong, "." * 48, Finish.LENGTH) == Reward(-1.0, 0.0, {"overlong": -1.0}, note="overlong")
    assert reward({"overlong": {"buffer": 10, "penalty": 0.2}}, said(43)).value == pytest.approx(0.9)
    # This agent has its own limit, and a penalty for the form of its answer.
    cut = reward({**overlong, "max_response_tokens": 30, "format_penalty": 0.5}, "." * 30, Finish.LENGTH)
    assert cut == Reward(-1.5, 0.0, {"format": -0.5, "overlong": -1.0}, note="overlong")
    # This sample began before the limit was lowered.
    carried_over = reward({**overlong, "max_response_tokens": 30}, "." * 40, Finish.LENGTH)
    assert carried_over.value == -1
    assert reward({}, "." * 48, Finish.LENGTH) == Reward(0.0, 0.0, note="overlong")


def test_the_end_of_a_segment_is_not_the_end_of_a_sample() -> None:
    stages = stages_of(prompts_per_step=1, segments=2, segment_length=24)
    overlong = AgentConfig.model_validate({"overlong": {"buffer": 10}})
    set_team(stages, replace(stages.team, agents={**stages.team.agents, "solver": overlong}))
    first = begun(stages)[0].completions[0]
    assert says(stages, first, "." * 24, Finish.LENGTH) is None and first.finish is Finish.UNFINISHED
    sample = says(stages, first, ".." + r"\boxed{7}", Finish.STOP)
    assert sample is not None and sample.finish is Finish.STOP and sample.reward.value == 1


def test_trained_truncated_sampling_is_bounded_and_recorded() -> None:
    for top_k, most in ((-1, 30), (0, 30), (7, 7)):
        stages = stages_of()
        own = {**stages.team.agents, "solver": AgentConfig(top_p=0.9, top_k=top_k)}
        set_team(stages, replace(stages.team, agents=own, max_kept={"solver": 30}))
        first, second, _ = begun(stages)[0].completions
        asked = sent(stages)[first.uid].sampling
        assert (asked.top_p, asked.top_k, asked.records_kept) == (0.9, most, True)
    assert not stages.team.sampling("verifier1").records_kept and stages.team.sampling("verifier1").top_k == -1
    kept = KeptTokens.of([np.array([40, 50], np.int32), np.array([41], np.int32)])
    says(stages, first, 2, Finish.LENGTH, kept_tokens=kept)
    assert counts(stages)["rollout/kept_tokens"] == 3
    with pytest.raises(RuntimeError, match="solver:1: .* truncate, but the engine did not return the kept tokens"):
        says(stages, second, 2)


def test_tokens_that_drafts_proposed_are_counted() -> None:
    stages = stages_of()
    first, second, third = begun(stages)[0].completions
    says(stages, first, 2)
    assert "rollout/accepted_tokens" not in counts(stages)  # an engine without drafts
    says(stages, second, 5, num_accepted=0)
    assert counts(stages)["rollout/accepted_tokens"] == 0
    says(stages, third, 5, num_accepted=3)
    assert counts(stages)["rollout/accepted_tokens"] == 3


@pytest.mark.parametrize(("completion", "closes"), [("wait", []), ("drop_stragglers", [6, 7])])
def test_a_group_drops_its_stragglers_at_its_age_limit(completion: str, closes: list[int]) -> None:
    closed_at = []
    for version in range(3, 8):
        stages = stages_of(group_completion=completion, max_group_age=2, group_size=4)
        first, other = begun(stages)  # the asks begin at version 3
        for index in (2, 0):
            says(stages, first.completions[index], "no answer")
        says(stages, first.completions[3], 0, Finish.ERROR)
        stages.rest()
        stages.resume({"main": version})
        closed = {group.group_id: group for group in groups(stages)}
        if "000001/solver" not in closed:
            continue
        closed_at.append(version)
        assert [sample.uid[-1] for sample in closed["000001/solver"].samples] == ["0", "2", "3"]
        assert closed["000002/solver"].samples == () and other.ask.id not in stages.state.open
        assert (counts(stages)["rollout/dropped_stragglers"], counts(stages)["rollout/errors"]) == (1 + 4, 1)
        assert not {"000001", "000002"} & set(stages.state.instances)
    assert closed_at == closes


@pytest.mark.parametrize(("stage_size", "drawn"), [("new", [4, 4, 4, 4]), ("total", [4, 4, 3, 2])])
def test_only_total_stage_size_counts_carried_over_groups(stage_size: str, drawn: list[int]) -> None:
    """The number of new problems is rounded to the nearest integer."""
    num_new = []
    for num_carried in (0, 1, 2, 5):
        stages = stages_of(stage_size=stage_size, prompts_per_step=4, segments=2)  # groups of 3
        begun(stages)
        opened = [completion for ask in stages.state.open.values() for completion in ask.completions]
        for carried, completion in enumerate(opened):
            says(stages, completion, *((24, Finish.LENGTH) if carried < num_carried else ("no answer", Finish.STOP)))
        num_new.append(stages.state.num_instances - 4)
    assert num_new == drawn


PER_STEP = 3


def play(
    numbers: Sequence[int], most_open: int | None = None
) -> tuple[list[Played], list[tuple[int, int, int, str]], int]:
    """Play these episodes. Return them in the order of their ends, the reported progress, and the number of engine steps, each of
    which takes one second of the clock.
    """
    team, (engine,) = letter_team(letter_config(), tokens_per_step=PER_STEP)
    collect, ended, reported, num_steps = engine.collect, list[Played](), list[tuple[int, int, int, str]](), 0

    def counted(timeout_s: float) -> list[DecodeResult]:
        nonlocal num_steps
        num_steps += 1
        return [replace(result, seconds=0.5) for result in collect(timeout_s)]

    engine.collect = counted  # type: ignore[method-assign]
    play = EvaluationPlay(
        team, {"main": 0}, 48, Sampling(), progress=lambda *progress: reported.append(progress), on_end=ended.append,
        most_open=most_open, now=lambda: float(num_steps),
    )  # fmt: skip
    problem = Problem("p", "question", "7", "math")
    play.add([Episode(f"e{i}", f"e{i}", problem, purpose="evaluate") for i in numbers], seed=0)
    play.finish()
    assert sorted(each.episode.id for each in ended) == sorted(f"e{i}" for i in numbers)  # reported once
    for each in ended:
        assert each.episode.is_at_its_end
        assert {sample.uid for sample in each.samples} == {f"{ask}:0" for ask in each.episode.answers}
        assert each.seconds == {sample.uid: 0.5 for sample in each.samples}
    return ended, reported, num_steps


@pytest.mark.parametrize("most_open", [None, 3, 1])
def test_free_slots_are_used_and_latency_is_per_episode(
    most_open: int | None,
) -> None:
    ended, reported, num_steps = play(range(10), most_open)
    steps = [[math.ceil(len(sample.token_ids) / PER_STEP) for sample in each.samples] for each in ended]
    rounds = [max(each[k] for each in steps if k < len(each)) for k in range(max(map(len, steps)))]
    assert most_open or (len(rounds) > 3 and num_steps == max(map(sum, steps)) < sum(rounds))
    assert reported[-1] == (10, 10, sum(len(sample.token_ids) for each in ended for sample in each.samples), "")
    assert [each.latency_s for each in ended] == list(map(sum, steps))
    if most_open == 1:
        assert num_steps == sum(map(sum, steps))


def test_single_asks_end_with_their_sample_and_play_no_further() -> None:
    team, (engine,) = letter_team(letter_config())
    collect, reported, completed = engine.collect, list[tuple[int, int, int, str]](), list[Completion]()

    def cut(timeout_s: float) -> list[DecodeResult]:
        two = [(each, each.token_ids[:2], each.logprobs[:2]) for each in collect(timeout_s)]
        return [replace(each, token_ids=ids, logprobs=logprobs, finish=Finish.LENGTH) for each, ids, logprobs in two]

    engine.collect = cut  # type: ignore[method-assign]
    agents = {**team.agents, "corrector1": AgentConfig(max_input_tokens=1)}
    play = EvaluationPlay(
        replace(team, agents=agents), {"main": 0}, 48, Sampling(), on_said=completed.append,
        progress=lambda *progress: reported.append(progress),
    )  # fmt: skip
    problem = Problem("p", "question", "7", "math")
    one, two, other = (Episode(f"e{i}", f"e{i}", problem, purpose="evaluate") for i in range(3))
    asks = (one, "solver", 0), (one, "solver", 1), (two, "solver", 0), (two, "corrector1", 0)
    asked = play.ask([(episode, episode.ask(agent, turn=turn)) for episode, agent, turn in asks], seed=0)
    play.finish()
    assert sorted(each.uid for each in completed) == sorted(each.uid for each in asked)
    ends = [(len(each.token_ids), each.sample and each.sample.finish) for each in asked]
    assert ends == [(2, Finish.LENGTH)] * 3 + [(0, Finish.LENGTH)] and reported[-1][3] == ""
    ended, too_long = list[Played](), dict.fromkeys(team.agents, AgentConfig(max_input_tokens=1))
    play = EvaluationPlay(replace(team, agents=too_long), {"main": 0}, 48, Sampling(), on_end=ended.append)
    play.add([other], seed=0)
    play.finish()
    assert [each.latency_s for each in ended] == [None]  # nothing was asked
