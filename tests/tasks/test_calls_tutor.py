"""System 2's and System 1's tutors: they read and write what both would, in words of the tokenizer, with slips as asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from marsrl.rollout.agents.parsers import tagged
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.agents.roles import Role
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.tasks.calculations import Calculation
from marsrl.rollout.tasks.calls_tutor import call_traces, distilling_drill
from marsrl.rollout.tasks.config import DualSystemSlips, FactsOptions
from marsrl.rollout.tasks.facts_tokenizer import CALLS_TOKENIZER
from marsrl.rollout.tasks.linked_facts import World
from marsrl.rollout.tasks.trace import Trace
from marsrl.rollout.tools.search import CorpusSearch
from marsrl.rollout.types import Finish, Problem, Sample, Segment, ToolCall, ToolOutput

OPTIONS = FactsOptions(people=12, places=4, max_hops=2, wording="terse", calculations=0.3)
UNKNOWN = len(CALLS_TOKENIZER.vocabulary) - 1
NONE = np.zeros(0, np.int32)


def slips(share: float) -> DualSystemSlips:
    return DualSystemSlips(slip_call=share, slip_purpose=share, slip_guess=share, slip_distiller=share)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("calls")
    CALLS_TOKENIZER.write(folder)
    return ChatRenderer(folder)


def questions(world: World, rates: DualSystemSlips, count: int = 60) -> Iterator[tuple[Problem, list[Trace]]]:
    asked, rng = random.Random(1), random.Random(1)
    for _ in range(count):
        asked.setstate(rng.getstate())  # the tutor's first draw is the question
        yield world.draw(asked, held_out=False), call_traces(rng, world, rates)


def words_of(trace: Trace, renderer: ChatRenderer) -> tuple[list[int], list[int]]:
    """The ids of what it reads and of what it writes."""
    is_text = isinstance(trace.prompt, str)
    prompt = renderer.encode_trusted(trace.prompt) if is_text else renderer.render(trace.prompt)[0]  # type: ignore[arg-type]
    return prompt.tolist(), renderer.encode_trusted(trace.completion).tolist()


def test_every_word_that_both_systems_read_or_write_is_one_token(world: World, renderer: ChatRenderer) -> None:
    rng = random.Random(0)
    traces = [trace for _, traces in questions(world, slips(0.2)) for trace in traces]
    for trace in [*traces, *(distilling_drill(rng, world) for _ in range(8))]:
        prompt, written = words_of(trace, renderer)
        assert UNKNOWN not in prompt and UNKNOWN not in written and len(prompt) <= 64
        assert len(written) + trace.ends == len(trace.weights(6.0))
        assert not trace.ends or renderer.decode(np.array(written)) == trace.completion


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_the_tutors_read_what_both_systems_do(
    world: World, tool: CorpusSearch, renderer: ChatRenderer, share: float
) -> None:
    """Both are played by what the tutors wrote: their prompts and turns are the tutors', token by token."""
    agents = {name: AgentConfig(prompt="facts") for name in ("system2", "system1")}
    team = build_orchestration(
        "dual_system", agents, "qa", {}, RolloutConfig(group_size=1), tools=("search", "python"),
        renderers=dict.fromkeys(agents, renderer),
    )  # fmt: skip
    num_right = 0
    for problem, traces in questions(world, slips(share)):
        episode, left = Episode("0.0", "0", problem), list(traces)
        ((ask,), _) = episode.enter(team.follow(episode))
        ids = renderer.render(team.messages(episode, ask))[0].tolist()
        said = sample(episode, ask.id, "system2")
        while left:
            trace = left.pop(0)
            assert trace.role is Role.REASONER and ids == words_of(trace, renderer)[0]
            said = team.parse(replace(said, full_text=trace.completion, finish=Finish.STOP))
            ids += [*words_of(trace, renderer)[1], renderer.eos_id]
            if said.finish is not Finish.WAITING:
                break
            episode.wait(said)
            _, calls = episode.enter(team.follow(episode))
            episode.outputs |= {call.id: ToolOutput.of(answered(call, problem, tool)) for call in calls}
            # what cannot be read does not run
            assert len(calls) == (tagged("tool_call", trace.completion) or "").endswith("}")
            for read in episode.enter(team.follow(episode))[0]:
                trace = left.pop(0)
                assert renderer.render(team.messages(episode, read))[0].tolist() == words_of(trace, renderer)[0]
                note = team.parse(sample(episode, read.id, "system1", trace.completion))
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
    assert calculation is not None and arguments["code"].replace(" ", "") == f"print({calculation.code})".replace(
        " ", ""
    )
    return [str(calculation.value)]


def sample(episode: Episode, ask: str, agent: str, text: str = "") -> Sample:
    return Sample(
        f"{ask}:0", episode.rollout_id, "p", agent, ask, None, NONE, NONE, NONE.astype(bool), NONE.astype(np.float32),
        (Segment(0, 0, 0),), Finish.STOP, full_text=text,
    )  # fmt: skip
