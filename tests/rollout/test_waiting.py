"""Samples that wait for a tool, another agent or their next turn get the same completions under every schedule."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_cases import pool_of
from letters import (
    END,
    LetterRenderer,
    Looker,
    groups_of_a_while,
    letter_config,
    letter_problems,
    make_team,
    next_batch,
    submissions,
)

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.engines.scripted import ScriptedEngine
from marsrl.rollout.episode import Episode
from marsrl.rollout.player.completion import Completion
from marsrl.rollout.player.evaluation import EvaluationPlay, Played
from marsrl.rollout.player.stages import RolloutState, Stages
from marsrl.rollout.state import decode, encode
from marsrl.rollout.team import Team, present_turn
from marsrl.rollout.types import Ask, Finish, Message, Problem, Sample, ToolCall, ToolOutput

VERSIONS = {"main": 0}


class Seeker(Orchestration):
    """The Solver looks things up (`<look>x</look>`), asks a helper (`<ask>x</ask>`) or takes another turn (`more`)."""

    name = "seeker"
    agents = (AgentSpec("solver"), AgentSpec("helper"))
    tools = ("look",)

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        asks: list[Ask | ToolCall] = [episode.ask("solver", num_samples=1)]
        for sample in episode.waiting.values():
            if wanted := self.wanted(sample, "look"):
                asks.append(episode.call("look", sample, word=wanted))
            if self.wanted(sample, "ask"):
                asks.append(episode.ask("helper", sample, turn=sample.turn))
        return asks

    def continuation(self, episode: Episode, sample: Sample) -> str | Sequence[Message] | None:
        if sample.text.endswith("more"):
            return [Message("user", "go on")]
        if wanted := self.wanted(sample, "look"):
            output = episode.output(episode.call("look", sample, word=wanted))
            return None if output is None else f"[{output.text}]"
        said = episode.said(episode.ask("helper", sample, turn=sample.turn))
        return None if said is None else f"({said.shown})"

    def messages(self, episode: Episode, ask: Ask) -> tuple[Message, ...]:
        shown = "".join(self.wanted(each, "ask") for each in episode.inputs(ask) if each.finish is Finish.WAITING)
        return (Message("user", shown or episode.problem.question),)

    def parse(self, sample: Sample) -> Sample:
        if sample.finish is Finish.STOP and sample.text.endswith(("</look>", "</ask>", "more")):
            return replace(sample, finish=Finish.WAITING)
        boxed = re.search(r"=(\w)", sample.text)
        return replace(sample, shown=sample.text, answer=boxed[1] if boxed and sample.finish is Finish.STOP else None)

    @staticmethod
    def wanted(sample: Sample, tag: str) -> str:
        found = re.search(f"<{tag}>([^<]*)</{tag}>$", sample.text)
        return found[1] if found else ""


def looker() -> Looker:
    """Return a pool whose tool repeats a word."""
    return Looker(lambda call: ToolOutput(call.arguments.split('"')[3] * 2))


EVEN = ("a<look>ab</look>", "c more", "e=7")
ODD = ("b<ask>cd</ask>", "d<look>q</look>", "f=8")
ENDED = {  # whole text of the Solver in episodes with an even number (0), and with an odd number (1)
    0: "a<look>ab</look>[abab]c more|go on\ne=7",
    1: "b<ask>cd</ask>(help!!!)d<look>q</look>[qq]f=8",
}


def script(request: DecodeRequest) -> list[int]:
    """Return a completion's next tokens, given its tokens so far."""
    known = LetterRenderer().decode(request.token_ids).rpartition("\xff")[2]
    if "/helper" in request.uid:
        return [*map(ord, "help!!!"[len(known) :]), END]
    number = int(request.uid.partition("/")[0].rpartition(".")[2])
    said = (EVEN, ODD)[number % 2][sum(known.count(mark) for mark in "])\n")]
    begun = known[max(known.rfind(mark) for mark in "])\n") + 1 :]
    assert said.startswith(begun)
    ends = [] if said.endswith(("</look>", "</ask>")) else [END]
    return [*map(ord, said[len(begun) :]), *ends]


class Renderer(LetterRenderer):
    """Keeps letters unchanged, so that a completion's tokens can be read."""

    def render(self, messages: Sequence[Message], tools: object = (), **options: bool | str) -> tuple[np.ndarray, str]:
        text = "".join(message.content for message in messages)
        return np.asarray([*map(ord, text), 255], np.int32), text

    def completion_ids(self, text: str) -> np.ndarray:
        return np.asarray([*map(ord, text)], np.int32)

    def next_turn(self, messages: Sequence[Message], **options: bool | str) -> np.ndarray:
        return self.completion_ids("".join(f"|{message.content}" for message in messages) + "\n")


def team_of(config: RolloutConfig, tools: Looker | None, kind: type[Orchestration] = Seeker) -> Team:
    agents = {name: AgentConfig(stop=["</look>", "</ask>"]) for name in ("solver", "helper")}
    engine = ScriptedEngine(script, decode=LetterRenderer().decode, tokens_per_step=3)
    pool = pool_of(engine, slots=12, deadline_s=config.deadline_s)
    orchestration = kind(agents, "math", None, config)
    return make_team(agents, orchestration, pool, Renderer(), tools=tools)


def config_of(**options: object) -> RolloutConfig:
    base = {"overlap": 0, "group_size": 2, "prompts_per_step": 2, "max_response_tokens": 200}
    return letter_config(**base | options)


def number_of(sample: Sample) -> int:
    return int(sample.uid.partition("/")[0].rpartition(".")[2])


def is_right(sample: Sample) -> bool:
    """Return True if the sample has the expected text, and marks the tokens that it did not sample."""
    if sample.agent == "helper":
        return sample.text == "help!!!" and bool(sample.is_sampled.all())
    foreign = "".join(chr(t) for t, own in zip(sample.token_ids, sample.is_sampled, strict=True) if not own)
    same = sample.text == ENDED[number_of(sample)] and foreign == ("[abab]|go on\n", "(help!!!)[qq]")[number_of(sample)]
    n = len(sample.token_ids)
    sizes = {len(sample.is_sampled), len(sample.rollout_logprobs), sample.segments[-1].end}
    starts = [0, *(segment.end for segment in sample.segments)]
    return (
        same
        and sizes == {n}
        and sample.turn == 2
        and [segment.start for segment in sample.segments] == starts[:-1]
        and bool((sample.rollout_logprobs[~sample.is_sampled] == 0).all())
        and bool((sample.rollout_logprobs[sample.is_sampled] < 0).all())
        and sample.reward.value == 1 - number_of(sample)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": "agentic"},
        {"overlap": 2, "pipeline": "trajectory"},
        {"segments": 40},  # a segment has 5 tokens, so marks are split
        {"overlap": 1},
        {"overlap": 1, "segments": 40},
    ],
    ids=str,
)
def test_a_sample_cut_anywhere_goes_on_and_repeats_no_call(
    options: dict[str, object],
) -> None:
    """A sample continues after a tool's output, an agent's output and the next turn's messages."""
    config, lives = config_of(prompts_per_step=1, **options), random.Random(0)
    known = RolloutState({})
    trained: Counter[str] = Counter()
    num_kept = num_open = 0
    for _ in range(60):
        tools = looker()
        stages = Stages(config, team_of(config, tools), letter_problems(8), seed=3)
        stages.restore(decode(RolloutState, encode(known)))
        episodes = [e for each in stages.state.instances.values() for e in each.episodes.values()]
        is_open = {call.id for episode in episodes for call in episode.open_calls}
        kept = {name for episode in episodes for name in episode.outputs}
        for group in groups_of_a_while(stages, VERSIONS, lives):
            trained.update(sample.uid for sample in group.samples)
            assert all(is_right(sample) for sample in group.samples), [sample.text for sample in group.samples]
        snapshot = stages.snapshot()
        assert is_open <= set(tools.called) and not kept & set(tools.called) and set(tools.called.values()) <= {1}
        num_kept, num_open = num_kept + len(kept), num_open + len(is_open)
        groups_of_a_while(stages, VERSIONS, lives)  # these steps are lost: the next life begins from the snapshot
        known = decode(RolloutState, encode(snapshot))
    assert len(trained) >= 12 and set(trained.values()) == {1}
    assert {uid.rpartition("/")[2][:6] for uid in trained} == {"solver", "helper"}
    is_cut = config.overlap or config.segments > 1  # otherwise no episode is open at the end of a step
    assert bool(num_kept) == bool(is_cut) and (num_open or not config.overlap)  # some were cut in the middle


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "finish", "reason"),
    [
        ({"follow": lambda episode: [episode.ask("solver")]}, Finish.ERROR, "no open ask or call"),
        ({"continuation": lambda *_: {}["nothing"]}, Finish.ERROR, "continuation: KeyError: 'nothing'"),
        ({"tools": ()}, Finish.ERROR, "tools does not name 'look'"),
        ({"continuation": lambda *_: "x" * 200}, Finish.LENGTH, "overlong"),
    ],
)
def test_what_cannot_go_on_ends_and_says_why(wrong: dict[str, Any], finish: Finish, reason: str, overlap: int) -> None:
    config = config_of(overlap=overlap, pipeline="trajectory")
    team = replace(team_of(config, looker()), max_turns=20)
    vars(team.orchestration).update(wrong)
    batch = next_batch(Stages(config, team, letter_problems(8), seed=3), VERSIONS)
    solvers = [s for group in batch.groups for s in group.samples if s.uid.endswith(".0/solver:0")]
    assert len(solvers) == 2 and all(s.finish is finish and reason in s.reward.note for s in solvers)
    assert all(sample.text.startswith("a<look>ab</look>") and sample.turn == 0 for sample in solvers)
    play = EvaluationPlay(team, VERSIONS, 200, Sampling())
    episode = Episode("e.0", "e", Problem("p", "what", "7", "math"), purpose="evaluate")
    (asked,) = play.ask([(episode, ask) for ask in team.follow(episode)[0]], 0)
    play.finish()
    assert asked.sample is not None and asked.sample.finish is finish and reason in asked.sample.reward.note
    assert not episode.waiting


@pytest.mark.parametrize(("limit", "finish"), [(200, Finish.STOP), (26, Finish.LENGTH)])
def test_all_turns_of_an_evaluation_s_completion_have_one_limit(limit: int, finish: Finish) -> None:
    ended = list[Played]()
    play = EvaluationPlay(team_of(config_of(), looker()), VERSIONS, limit, Sampling(), on_end=ended.append)
    play.add([Episode("e.0", "e", Problem("p", "what", "7", "math"), purpose="evaluate")], seed=0)
    play.finish()
    ((sample,),) = (each.samples for each in ended)
    assert sample.finish is finish and LetterRenderer().decode(sample.token_ids) == ENDED[0][:limit]


@pytest.mark.parametrize(
    ("prompt", "runs", "turn", "in_thought"),
    [
        ("<think>", ["ab"], "ab", True),
        ("", ["<think>a", "[x]", "b</think>c"], "b</think>c", True),  # the sample pauses in the middle of a thought
        ("<think>", ["a", "[</think>]", "b"], "b", True),  # a foreign text ends no thought
        ("", ["a", "[<think>]", "b"], "b", False),  # a foreign text opens no thought
        # The next turn's messages end with an open thought.
        ("<think>", ["a</think>b\x01", "|next\n<think>\n", "c"], "c", True),
        # The last turn ended within its thought; the next one does not begin in it.
        ("<think>", ["a\x01", "|next\n", "c"], "c", False),
        ("", ["a", "[x]"], "", False),
    ],
)
def test_where_a_turn_begins_and_whether_within_a_thought(
    prompt: str, runs: list[str], turn: str, in_thought: bool
) -> None:
    """runs: texts that are sampled, foreign, sampled, and so on; \x01 ends a turn."""
    completion = Completion()
    for place, words in enumerate(runs):
        ids = np.asarray([*map(ord, words)], np.int32)
        if place % 2:
            completion.go_on_with(ids)
        else:
            completion.extend(DecodeResult("", ids, np.zeros(len(ids), np.float32), Finish.LENGTH, 0))
    text = Renderer().decode(completion.token_ids)
    start, begins = present_turn(Renderer(), prompt, completion, text)  # type: ignore[arg-type]
    assert (text[start:], begins) == (turn, in_thought)


class Twice(Seeker):
    """Team whose Solver looks things up twice, one after the other."""

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        asks: list[Ask | ToolCall] = [episode.ask("solver")]
        for sample in episode.waiting.values():
            if not self.wanted(sample, "look"):
                continue
            asks.append(first := episode.call("look", sample, word="one"))
            if episode.output(first) is not None:
                asks.append(episode.call("look", sample, 1, word="two"))
        return asks

    def continuation(self, episode: Episode, sample: Sample) -> str | Sequence[Message] | None:
        if not self.wanted(sample, "look"):
            return super().continuation(episode, sample)
        output = episode.output(episode.call("look", sample, 1, word="two"))
        return None if output is None else f"[{output.text}]"


def test_outputs_are_awaited_together_if_there_is_no_overlap() -> None:
    """If outputs went on one by one, timing would decide which an engine gets first, and runs would not be reproducible."""

    def found(call: ToolCall) -> ToolOutput:
        time.sleep(0.02 * tools.called.total())  # each call takes longer than the last
        return ToolOutput("xy")

    for overlap in (0, 1):
        pipeline = "trajectory" if overlap else "agentic"
        config = config_of(overlap=overlap, pipeline=pipeline, group_size=1, prompts_per_step=4)
        tools = Looker(found)
        team = team_of(config, tools, Twice)
        sent = submissions(team.pools["main"])
        batch = next_batch(Stages(config, team, letter_problems(8), seed=3), VERSIONS)
        said = [sample.text for group in batch.groups for sample in group.samples]
        assert said == [ENDED[0].replace("abab", "xy")] * 4
        assert batch.metrics["rollout/foreign_tokens"] == 4 * len("[xy]|go on\n")
        assert overlap or [len(uids) for uids, _ in sent] == [4, 4, 4]


class Together(Twice):
    """A problem's samples belong to one episode."""

    is_one_episode = True

    def follow(self, episode: Episode) -> Sequence[Ask | ToolCall]:
        return [episode.ask("solver", num_samples=2), *super().follow(episode)[1:]]


def test_a_sample_goes_on_while_another_of_its_episode_waits() -> None:
    first, second = "000002/solver:0", "000002/solver:1"  # the script looks things up in episodes with even numbers

    def asked() -> list[str]:
        return [uid for uids, _ in sent for uid in uids if uid in (first, second)]

    def found(call: ToolCall) -> ToolOutput:
        end = time.monotonic() + 60
        while call.id.startswith(first) and asked().count(second) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return ToolOutput("xy")

    config = config_of(overlap=1)
    team = team_of(config, Looker(found), Together)
    sent = submissions(team.pools["main"])
    next_batch(Stages(config, team, letter_problems(8), seed=3), VERSIONS)
    assert asked()[:3] == [first, second, second]
