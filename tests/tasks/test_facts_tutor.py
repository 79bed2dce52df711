"""The search team's tutors: they read and write what the team would, in words of the tokenizer, with slips as asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from marsrl.rollout.agents.parsers import route, tagged
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.tasks.config import FactsOptions, SearchSlips
from marsrl.rollout.tasks.facts_tokenizer import FACTS_TOKENIZER
from marsrl.rollout.tasks.facts_tutor import another_world, reading_drill, search_traces
from marsrl.rollout.tasks.linked_facts import World
from marsrl.rollout.tasks.trace import Trace
from marsrl.rollout.tools.search import CorpusSearch
from marsrl.rollout.types import Ask, Finish, Problem, Reward, Sample, Segment, ToolOutput

OPTIONS = FactsOptions(people=12, places=4, max_hops=2, wording="terse")


def slips(share: float) -> SearchSlips:
    return SearchSlips(slip_router=share, slip_searcher=share, slip_answerer=share)


NEVER, ALWAYS = slips(0.0), slips(1.0)
NONE = np.zeros(0, np.int32)
AGENTS = {"verifier": Role.ROUTER, "search": Role.SEARCHER, "answer": Role.ANSWERER}


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("facts")
    FACTS_TOKENIZER.write(folder)
    return ChatRenderer(folder)


def questions(world: World, rates: SearchSlips, count: int = 40) -> Iterator[list[Trace]]:
    rng = random.Random(1)
    for _ in range(count):
        yield search_traces(rng, world, rates)


def problem_of(trace: Trace, world: World) -> Problem:
    """The one that a trace's prompt ends with."""
    assert not isinstance(trace.prompt, str)
    rng = random.Random(0)
    while f" {(problem := world.draw(rng, held_out=False)).question} " not in trace.prompt[-1].content:
        pass
    return problem


def said_by(role: Role, traces: list[Trace]) -> list[str]:
    return [trace.completion for trace in traces if trace.role is role]


def test_every_word_that_the_team_reads_or_writes_is_one_token(world: World, renderer: ChatRenderer) -> None:
    unknown = len(FACTS_TOKENIZER.vocabulary) - 1
    rng = random.Random(0)
    drills = [reading_drill(rng, world, number) for number in (1, 2) for _ in range(8)]
    for trace in [*(trace for traces in questions(world, slips(0.3)) for trace in traces), *drills]:
        if isinstance(trace.prompt, str):
            prompt = renderer.encode_trusted(trace.prompt)
        else:
            prompt = renderer.render(trace.prompt)[0]
        written = renderer.encode_trusted(trace.completion)
        assert unknown not in prompt and unknown not in written and len(prompt) <= 128
        assert len(written) + trace.ends == len(trace.weights(6.0))
        assert not trace.ends or renderer.decode(written) == trace.completion


@pytest.mark.parametrize("rates", [NEVER, SearchSlips(slip_router=0.0, slip_searcher=0.5, slip_answerer=0.5)])
def test_a_tutors_prompts_are_the_teams(world: World, tool: CorpusSearch, rates: SearchSlips) -> None:
    """The team is played by what the tutors wrote, and asks each agent with the tutor's prompt, in the tutor's order."""
    agents = {name: AgentConfig(prompt="facts") for name in AGENTS}
    team = build_orchestration("search_team", agents, "qa", {"max_turns": 4}, RolloutConfig(group_size=1))
    num_whole = 0
    for traces in questions(world, rates):
        episode, left = Episode("0.0", "0", problem_of(traces[0], world)), list(traces)
        while left:
            asks, calls = episode.enter(team.follow(episode))
            for call in calls:
                episode.outputs[call.id] = ToolOutput.of(tool.run(json.loads(call.arguments)))
            for ask in asks:
                trace = left.pop(0)
                assert AGENTS[ask.agent] is trace.role and team.messages(episode, ask) == trace.prompt
                said = team.parse(sample(episode, ask, trace.completion))
                assert ask.agent == "verifier" or said.answer == trace.completion.split()[-2]
                episode.close(ask, [replace(said, reward=team.reward(episode, ask, said, Reward(1.0, 1.0)))])
        num_whole += traces[-1].role is Role.ANSWERER and not episode.enter(team.follow(episode))[0]
    assert num_whole == 40 if rates is NEVER else 10 < num_whole < 40


def sample(episode: Episode, ask: Ask, text: str) -> Sample:
    return Sample(
        f"{ask.id}:0", episode.rollout_id, "p", ask.agent, ask.group, ask.parent_uid, NONE, NONE, NONE.astype(bool),
        NONE.astype(np.float32), (Segment(0, 0, 0),), Finish.STOP, full_text=text,
    )  # fmt: skip


def test_without_slips_all_is_right_and_with_slips_only_nothing_is(world: World) -> None:
    for traces in questions(world, NEVER):
        steps = world.steps(problem_of(traces[0], world))
        assert [route(text) for text in said_by(Role.ROUTER, traces)] == [False] * len(steps) + [True]
        queries = [tagged("search", text) for text in said_by(Role.SEARCHER, traces)]
        assert queries == [entity for entity, _, _ in steps]
        _, relation, value = steps[-1]
        assert traces[-1].completion == f"{relation} {value} <answer> {value} </answer>"
    for traces in questions(world, ALWAYS):
        steps = world.steps(problem_of(traces[0], world))
        assert all(route(text) for text in said_by(Role.ROUTER, traces))
        entity, relation, _ = steps[0]
        said, value, *_ = traces[-1].completion.split()  # the Answer agent's after one link, the second query after two
        assert traces[-1].role is (Role.ANSWERER if len(steps) == 1 else Role.SEARCHER)
        assert said != relation and world.facts[entity, said] == value


def test_lessons_are_told_of_other_worlds_and_never_of_held_out_questions(world: World) -> None:
    rng = random.Random(0)
    first, second = another_world(rng, OPTIONS), another_world(rng, OPTIONS)
    assert len({tuple(each.facts.items()) for each in (world, first, second)}) == 3
    assert len(first.people) == OPTIONS.people and len(first.places) == OPTIONS.places
    held_out = {problem.question for problem in first.held_out(200, seed=0)}
    for traces in questions(first, NEVER):
        assert problem_of(traces[0], first).question not in held_out


def test_a_drill_asks_about_the_document_that_was_found_last(world: World) -> None:
    rng = random.Random(3)
    for number in (1, 2):
        drill = reading_drill(rng, world, number, num_questions=3)
        assert isinstance(drill.prompt, str) and drill.prompt.count("Title:") == number
        name = drill.prompt.rsplit("Title: ", 1)[1].split(")")[0]
        turns = drill.completion.split(" <|user|> ")
        assert len(turns) == 3
        for turn in turns:
            relation, value = turn.split()[0], tagged("answer", turn)
            assert world.facts[name, relation] == value
            assert turn == f"{relation} ? answer <|assistant|> {relation} {value} <answer> {value} </answer> <|end|>"
