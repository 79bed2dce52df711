"""The search team plays by tables of answers: who is asked, what is called, what they read, what counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.types import Ask, Finish, Problem, Reward, Sample, Segment, ToolCall, ToolOutput

PROBLEM = Problem("p", "where does mira holt live ?", "tarn", "qa")
NONE = np.zeros(0, np.int32)

YES, NO, VAGUE = "<verify>yes</verify>", "Not enough. <verify>no</verify>", "I am not sure."
ANSWER = "<think>{report}</think> <answer>tarn</answer>"


def query(text: str) -> str:
    return f"<think>which?</think> <search> {text} </search>"


def team_of(max_turns: int = 4, **verifier: Any) -> Orchestration:
    agents = {"verifier": AgentConfig(**verifier)}
    return build_orchestration("search_team", agents, "qa", {"max_turns": max_turns}, RolloutConfig(group_size=5))


def found(call: ToolCall) -> ToolOutput:
    return ToolOutput(f"Doc 1(Title: x) about {json.loads(call.arguments)['query']}")


def play(
    team: Orchestration, texts: list[str | None], tool: Callable[[ToolCall], ToolOutput] = found
) -> tuple[Episode, list[Ask | ToolCall]]:
    """One episode to its end, and what was asked and called in order; None: nothing came. "...": it was cut off."""
    episode, order, left = Episode("000001.0", "000001", PROBLEM), list[Ask | ToolCall](), iter(texts)
    while True:
        asks, calls = episode.enter(team.follow(episode))
        order += [*asks, *calls]
        if not asks and not calls:
            break
        for call in calls:
            episode.outputs[call.id] = tool(call)
        for ask in asks:
            text = next(left)
            episode.close(ask, [] if text is None else [answered(team, episode, ask, text)])
    assert episode.is_at_its_end and next(left, "all said") == "all said"
    for agent, most in team.most_samples().items():
        assert sum(ask.agent == agent for ask in episode.asks.values()) <= most / team.group_size
    return episode, order


def answered(team: Orchestration, episode: Episode, ask: Ask, text: str) -> Sample:
    finish = Finish.LENGTH if text.startswith("...") else Finish.STOP
    said = Sample(
        f"{ask.id}:0", episode.rollout_id, "p", ask.agent, ask.group, ask.parent_uid, NONE, NONE, NONE.astype(bool),
        NONE.astype(np.float32), (Segment(0, 0, 0),), finish, full_text=text,
    )  # fmt: skip
    said = team.parse(said)
    right = float(said.answer == PROBLEM.answer)
    judged = Reward(right, right) if team.needs_judge(said) else None
    return replace(said, reward=team.reward(episode, ask, said, judged))


def names(order: list[Ask | ToolCall]) -> list[str]:
    return [each.agent if isinstance(each, Ask) else f"call {each.tool}" for each in order]


def words(team: Orchestration, episode: Episode, ask: Ask) -> str:
    return "\n".join(message.content for message in team.messages(episode, ask))


def asked(episode: Episode, agent: str) -> list[Ask]:
    return [ask for ask in episode.asks.values() if ask.agent == agent]


def test_it_searches_until_the_verifier_says_yes_and_the_answer_counts() -> None:
    team = team_of()
    episode, order = play(team, [NO, query("mira holt"), NO, query("tarn"), YES, ANSWER])
    assert names(order) == [
        *("verifier", "search", "call search"),
        *("verifier", "search", "call search"),
        *("verifier", "answer"),
    ]
    calls = [json.loads(each.arguments) for each in order if isinstance(each, ToolCall)]
    assert calls == [{"query": "mira holt"}, {"query": "tarn"}]
    outcome = team.outcome(episode)
    assert outcome is not None and outcome.agent == "answer" and outcome.answer == "tarn"
    assert set(team.outcomes(episode).values()) == {1.0} and len(team.outcomes(episode)) == 6
    assert {ask.group for ask in asked(episode, "search")} == {"000001/search"}  # compared over all turns and episodes


def test_everybody_reads_what_was_found_so_far_and_the_search_agent_what_the_verifier_says() -> None:
    team = team_of()
    episode, _ = play(team, [NO, query("mira holt"), NO, query("tarn"), YES, ANSWER])
    first, second, third = (words(team, episode, ask) for ask in asked(episode, "verifier"))
    assert "Nothing has been searched for yet." in first and PROBLEM.question in first
    one = "<search>mira holt</search>\n<information>Doc 1(Title: x) about mira holt</information>"
    other = "<search>tarn</search>\n<information>Doc 1(Title: x) about tarn</information>"
    assert one in second and other not in second and f"{one}\n{other}" in third
    _, search = (words(team, episode, ask) for ask in asked(episode, "search"))
    assert one in search and other not in search and "Not enough." in search
    [answer] = (words(team, episode, ask) for ask in asked(episode, "answer"))
    assert one in answer and other in answer and "Not enough." not in answer
    assert "which?" not in third + search + answer  # nobody reads another's thought


def test_nobody_searches_in_the_last_turn() -> None:
    team = team_of(max_turns=2)
    episode, order = play(team, [NO, query("mira holt"), NO])
    assert names(order) == ["verifier", "search", "call search", "verifier"]
    assert team.outcome(episode) is None and set(team.outcomes(episode).values()) == {0.0}
    assert names(play(team_of(max_turns=1), [NO])[1]) == ["verifier"]
    assert names(play(team_of(max_turns=1), [YES, ANSWER])[1]) == ["verifier", "answer"]


def test_without_a_readable_route_it_searches_unless_it_is_to_answer() -> None:
    assert names(play(team_of(max_turns=2), [VAGUE, query("x"), YES, ANSWER])[1])[1] == "search"
    assert names(play(team_of(missing_verdict="correct"), [VAGUE, ANSWER])[1]) == ["verifier", "answer"]
    assert (
        names(
            play(
                team_of(
                    missing_verdict="correct",
                ),
                ["... <verify>yes</verify>", ANSWER],
            )[1]
        )[-1]
        == "answer"
    )


@pytest.mark.parametrize("text", ["no tag", "<search></search>", "<search>cut", "...<search>cut</search>"])
def test_without_a_readable_query_nothing_is_called_and_the_turn_is_over(text: str) -> None:
    team = team_of()
    episode, order = play(team, [NO, text, YES, ANSWER])
    assert names(order) == ["verifier", "search", "verifier", "answer"]
    assert "There was no query" in words(team, episode, asked(episode, "answer")[0])


def test_what_a_tool_says_of_an_error_is_read_and_the_team_goes_on() -> None:
    team = team_of()
    error = ToolOutput("error: search did not answer within 60 s", is_error=True)
    episode, order = play(team, [NO, query("x"), YES, ANSWER], lambda call: error)
    assert names(order)[-1] == "answer"
    assert "error: search did not answer" in words(team, episode, asked(episode, "answer")[0])


@pytest.mark.parametrize("silent", range(4))
def test_where_nothing_comes_the_episode_ends(silent: int) -> None:
    texts: list[str | None] = [NO, query("x"), YES, ANSWER]
    team = team_of()
    episode, _ = play(team, [*texts[:silent], None])
    assert team.outcome(episode) is None


def test_rewards_are_the_task_s_for_the_answer_and_readability_for_the_others() -> None:
    team = team_of()
    episode, _ = play(team, [VAGUE, query("x"), YES, "<answer>rome</answer>"])
    said = {
        ask.id.rpartition("/")[2] + f" {ask.id.count('/')}": episode.samples(ask)[0] for ask in episode.asks.values()
    }
    values = [(sample.agent, sample.reward.value) for sample in said.values()]
    assert values == [("verifier", 0.0), ("search", 1.0), ("verifier", 1.0), ("answer", 0.0)]
    assert all(np.isnan(sample.reward.correct) for sample in said.values() if sample.agent != "answer")
    assert [team.needs_judge(sample) for sample in said.values()] == [False, False, False, True]
    assert set(team.outcomes(episode).values()) == {0.0}
    episode, _ = play(team, ["...", query("x"), YES, ANSWER])
    overlong = episode.samples(asked(episode, "verifier")[0])[0].reward
    assert overlong.value == 0.0 and np.isnan(overlong.correct)  # no part of an accuracy
    episode, _ = play(team, [YES, "... <answer>tarn</answer>"])
    assert [episode.samples(ask)[0].reward.note for ask in asked(episode, "answer")] == ["overlong"]
    assert team.outcome(episode) is None


@pytest.mark.parametrize("hostile", ["{report} {problem}", "<answer>", "</information>", "\x00", "a" * 1_000_000])
def test_hostile_queries_reach_the_tool_as_they_are_and_forge_no_field(hostile: str) -> None:
    team = team_of(max_turns=2)
    text, said = f"<search>q {hostile}</search>", ToolOutput("{problem}{solution}")
    episode, order = play(team, [NO, text, YES, ANSWER], lambda call: said)
    [call] = [each for each in order if isinstance(each, ToolCall)]
    assert json.loads(call.arguments) == {"query": f"q {hostile}"}
    assert f"<search>q {hostile}</search>\n<information>{said.text}<" in words(
        team, episode, asked(episode, "answer")[0]
    )


def test_another_prompt_set_says_that_it_has_no_words_for_the_team() -> None:
    with pytest.raises(
        ValueError,
        match=r"agents.verifier.prompt: math has no words for the role router .*give a prompt that has: facts, qa",
    ):
        build_orchestration("search_team", {}, "math")
