"""The tutors of the built-in questions: they read and write what the teams would, in words of the tokenizers, with slips as
asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from letters import bare

from marsrl.rollout.agents.parsers import tagged
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.tasks.config import DualSystemSlips, FactsOptions, SearchSlips
from marsrl.rollout.tasks.facts_tutor import (
    CALLS_TOKENIZER,
    FACTS_TOKENIZER,
    call_traces,
    distilling_drill,
    reading_drill,
    search_traces,
)
from marsrl.rollout.tasks.linked_facts import Calculation, World
from marsrl.rollout.tasks.word_tokenizer import Trace, WordTokenizer
from marsrl.rollout.tools.search import CorpusSearch, build_index
from marsrl.rollout.types import Finish, Problem, Reward, ToolCall, ToolOutput

OPTIONS = FactsOptions(people=12, places=4, max_hops=2, wording="terse")
AGENTS = {"verifier": Role.ROUTER, "search": Role.SEARCHER, "answer": Role.ANSWERER}


def search_slips(share: float) -> SearchSlips:
    return SearchSlips(slip_router=share, slip_searcher=share, slip_answerer=share)


def call_slips(share: float) -> DualSystemSlips:
    return DualSystemSlips(slip_call=share, slip_purpose=share, slip_guess=share, slip_distiller=share)


NEVER, ALWAYS = search_slips(0.0), search_slips(1.0)


@pytest.fixture(scope="module")
def world() -> World:
    return World(OPTIONS)


@pytest.fixture(scope="module")
def calculating() -> World:
    """The same facts, and calculations among the questions."""
    return World(OPTIONS.model_copy(update={"calculations": 0.3}))


@pytest.fixture(scope="module")
def tool(world: World) -> Iterator[CorpusSearch]:
    tool = CorpusSearch(build_index(world.documents), top_k=1)
    yield tool
    tool.close()


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[WordTokenizer, ChatRenderer]:
    made = {}
    for tokenizer in (FACTS_TOKENIZER, CALLS_TOKENIZER):
        folder = tmp_path_factory.mktemp("words")
        tokenizer.write(folder)
        made[tokenizer] = ChatRenderer(folder)
    return made


def searches(world: World, rates: SearchSlips) -> Iterator[list[Trace]]:
    rng = random.Random(1)
    for _ in range(40):
        yield search_traces(rng, world, rates)


def calls(world: World, rates: DualSystemSlips) -> Iterator[tuple[Problem, list[Trace]]]:
    asked, rng = random.Random(1), random.Random(1)
    for _ in range(60):
        asked.setstate(rng.getstate())  # the tutor's first draw is the question
        yield world.draw(asked, held_out=False), call_traces(rng, world, rates)


def problem_of(trace: Trace, world: World) -> Problem:
    """The one that a trace's prompt ends with."""
    assert not isinstance(trace.prompt, str)
    rng = random.Random(0)
    while f" {(problem := world.draw(rng, held_out=False)).question} " not in trace.prompt[-1].content:
        pass
    return problem


def words_of(trace: Trace, renderer: ChatRenderer) -> tuple[list[int], list[int]]:
    """The ids of what it reads and of what it writes."""
    is_text = isinstance(trace.prompt, str)
    prompt = renderer.encode_trusted(trace.prompt) if is_text else renderer.render(trace.prompt)[0]  # type: ignore[arg-type]
    return prompt.tolist(), renderer.encode_trusted(trace.completion).tolist()


@pytest.mark.parametrize(
    ("tokenizer", "longest"), [(FACTS_TOKENIZER, 128), (CALLS_TOKENIZER, 64)], ids=["facts", "calls"]
)
def test_every_word_that_a_team_reads_or_writes_is_one_token(
    tokenizer: WordTokenizer,
    longest: int,
    world: World,
    calculating: World,
    renderers: dict[WordTokenizer, ChatRenderer],
) -> None:
    rng, renderer, unknown = random.Random(0), renderers[tokenizer], len(tokenizer.vocabulary) - 1
    if tokenizer is FACTS_TOKENIZER:
        traces = [trace for traces in searches(world, search_slips(0.3)) for trace in traces]
        traces += [reading_drill(rng, world, number) for number in (1, 2) for _ in range(8)]
    else:
        traces = [trace for _, traces in calls(calculating, call_slips(0.2)) for trace in traces]
        traces += [distilling_drill(rng, calculating) for _ in range(8)]
    for trace in traces:
        prompt, written = words_of(trace, renderer)
        assert unknown not in prompt and unknown not in written and len(prompt) <= longest
        assert len(written) + trace.ends == len(trace.weights(6.0))
        assert not trace.ends or renderer.decode(np.array(written)) == trace.completion


@pytest.mark.parametrize("rates", [NEVER, SearchSlips(slip_router=0.0, slip_searcher=0.5, slip_answerer=0.5)])
def test_the_search_team_reads_its_tutors_prompts(world: World, tool: CorpusSearch, rates: SearchSlips) -> None:
    """The team is played by what the tutors wrote, and asks each agent with the tutor's prompt, in the tutor's order."""
    agents = {name: AgentConfig(prompt="facts") for name in AGENTS}
    team = build_orchestration("search_team", agents, "qa", {"max_turns": 4}, RolloutConfig(group_size=1))
    num_whole = 0
    for traces in searches(world, rates):
        episode, left = Episode("0.0", "0", problem_of(traces[0], world)), list(traces)
        while left:
            asks, called = episode.enter(team.follow(episode))
            for call in called:
                episode.outputs[call.id] = ToolOutput.of(tool.run(json.loads(call.arguments)))
            for ask in asks:
                trace = left.pop(0)
                assert AGENTS[ask.agent] is trace.role and team.messages(episode, ask) == trace.prompt
                said = team.parse(bare(f"{ask.id}:0", ask.agent, trace.completion))
                assert ask.agent == "verifier" or said.answer == trace.completion.split()[-2]
                episode.close(ask, [replace(said, reward=team.reward(episode, ask, said, Reward(1.0, 1.0)))])
        num_whole += traces[-1].role is Role.ANSWERER and not episode.enter(team.follow(episode))[0]
        assert rates is not NEVER or said.answer == episode.problem.answer
    assert num_whole == 40 if rates is NEVER else 10 < num_whole < 40


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_both_systems_read_their_tutors_prompts_token_by_token(
    calculating: World, tool: CorpusSearch, renderers: dict[WordTokenizer, ChatRenderer], share: float
) -> None:
    renderer = renderers[CALLS_TOKENIZER]
    agents = {name: AgentConfig(prompt="facts") for name in ("system2", "system1")}
    team = build_orchestration(
        "dual_system", agents, "qa", {}, RolloutConfig(group_size=1), tools=("search", "python"),
        renderers=dict.fromkeys(agents, renderer),
    )  # fmt: skip
    num_right = 0
    for problem, traces in calls(calculating, call_slips(share)):
        episode, left = Episode("0.0", "0", problem), list(traces)
        ((ask,), _) = episode.enter(team.follow(episode))
        ids = renderer.render(team.messages(episode, ask))[0].tolist()
        said = bare(f"{ask.id}:0", ask.agent, "")
        while left:
            trace = left.pop(0)
            assert trace.role is Role.REASONER and ids == words_of(trace, renderer)[0]
            said = team.parse(replace(said, full_text=trace.completion, finish=Finish.STOP))
            ids += [*words_of(trace, renderer)[1], renderer.eos_id]
            if said.finish is not Finish.WAITING:
                break
            episode.wait(said)
            _, called = episode.enter(team.follow(episode))
            episode.outputs |= {call.id: ToolOutput.of(answered(call, problem, tool)) for call in called}
            # what cannot be read does not run
            assert len(called) == (tagged("tool_call", trace.completion) or "").endswith("}")
            for read in episode.enter(team.follow(episode))[0]:
                trace = left.pop(0)
                assert renderer.render(team.messages(episode, read))[0].tolist() == words_of(trace, renderer)[0]
                note = team.parse(bare(f"{read.id}:0", read.agent, trace.completion))
                episode.close(read, [replace(note, reward=team.reward(episode, read, note))])
            going_on = team.continuation(episode, said)
            assert going_on is not None and not isinstance(going_on, str)
            ids += renderer.next_turn(going_on).tolist()
            said = replace(said, turn=said.turn + 1)
        num_right += said.answer == problem.answer
        assert not left
    assert num_right == 60 if share == 0.0 else 15 < num_right < 50


def answered(call: ToolCall, problem: Problem, tool: CorpusSearch) -> list[str]:
    arguments = json.loads(call.arguments)
    if call.tool == "search":
        return list(tool.run(arguments))
    calculation = Calculation.of(problem)
    assert calculation is not None
    assert arguments["code"].replace(" ", "") == f"print({calculation.code})".replace(" ", "")
    return [str(calculation.value)]
