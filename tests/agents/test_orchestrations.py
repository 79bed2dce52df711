"""Teams other than the Verifier-Corrector system: episodes played from tables of answers, and settings that are refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letters import bare

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.config import AgentConfig, RolloutConfig
from marsrl.rollout.episode import Episode
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.rollout.types import Ask, Finish, Problem, Reward, Sample, ToolCall, ToolOutput

PROBLEM = Problem("p", "a 3 b *7", "1", "arithmetic")
Say = Callable[[Ask], str | None]
FAILED = "FAILED"


def play(
    team: Orchestration,
    say: Say,
    problem: Problem = PROBLEM,
    tool: Callable[[ToolCall], ToolOutput] = lambda call: ToolOutput("7"),
    order: list[Ask | ToolCall] | None = None,
) -> Episode:
    """Play one episode to its end, and return it.

    say: returns an ask's answer (None: no answer arrives; FAILED: an engine error). Answers that start with "..." are truncated.
    order: receives the asks and tool calls, in order.
    """
    episode = Episode("000001.0", "000001", problem)
    while any(entered := episode.enter(team.follow(episode))):
        asks, calls = entered
        if order is not None:
            order += [*asks, *calls]
        episode.outputs.update({call.id: tool(call) for call in calls})
        for ask in reversed(asks):  # the order of arrival must not matter
            text = say(ask)
            episode.close(ask, [] if text is None else [answered(team, episode, ask, text)])
    assert episode.is_at_its_end
    for agent, most in team.most_samples().items():
        assert sum(ask.agent == agent for ask in episode.asks.values()) <= most / team.group_size
    return episode


def answered(team: Orchestration, episode: Episode, ask: Ask, text: str) -> Sample:
    finish = Finish.ERROR if text == FAILED else Finish.LENGTH if text.startswith("...") else Finish.STOP
    said = team.parse(bare(f"{ask.id}:0", ask.agent, text, finish=finish))
    right = float(said.answer == episode.problem.answer)
    judged = None if team.to_judge(episode, said) is None else Reward(right, right)
    return replace(said, reward=team.reward(episode, ask, said, judged))


def script(*texts: str) -> Say:
    left = iter(texts)
    return lambda ask: next(left)


def words(team: Orchestration, episode: Episode, ask: Ask) -> str:
    return " | ".join(message.content for message in team.messages(episode, ask))


def solver_verifier(loops: int = 3, **verifier: Any) -> Orchestration:
    agents = {"verifier": AgentConfig(**verifier)}
    return build_orchestration("solver_verifier", agents, "chain", {"max_loops": loops})


# max_loops; answers in order; rewards; whether the last solution is right
SOLVED: list[tuple[int, list[str], list[float], bool]] = [
    (3, ["Answer: 2", "Verdict: wrong", "Answer: 1", "Verdict: correct"], [0, 1, 1, 1], True),
    # The last solution is not verified.
    (3, [*["Answer: 2", "Verdict: wrong"] * 2, "Answer: 3"], [0, 1, 0, 1, 0], False),
    (1, ["Answer: 2"], [0], False),
    # a truncated (overlong) solution, its right rejection, a right solution
    (2, ["... Answer: 1 and", "Verdict: wrong", "Answer: 1"], [0, 1, 1], True),
    (2, ["... Answer: 1 and", "Verdict: correct"], [0, 0], False),
    (2, ["Answer: 2", "... looks", "Answer: 1"], [0, 0, 1], True),
    # The last solution counts even without an answer. A Verifier that rejects a right solution earns nothing.
    *((2, ["Answer: 1", "Verdict: wrong", last], [1, 0, 0], False) for last in ("... cut off", "I give up.")),
]


@pytest.mark.parametrize(("loops", "texts", "rewards", "is_right"), SOLVED)
def test_a_solver_repeats_until_approval_and_the_last_counts(
    loops: int, texts: list[str], rewards: list[float], is_right: bool
) -> None:
    team = solver_verifier(loops)
    episode = play(team, script(*texts))
    asks = list(episode.asks.values())
    assert [ask.group for ask in asks] == [f"000001/{('solver', 'verifier')[i % 2]}" for i in range(len(texts))]
    read = [
        f"grade | a 3 b *7 \n {text}" if i % 2 == 0 else f"a 3 b *7 | {texts[i - 1]} | {text} fix"
        for i, text in enumerate(texts)
    ]
    assert [words(team, episode, ask) for ask in asks] == ["a 3 b *7", *read[:-1]]
    assert [sample.reward.value for (sample,) in episode.answers.values()] == rewards
    outcome, last = team.outcome(episode), texts[(len(texts) - 1) // 2 * 2]
    assert outcome is not None and outcome.shown == last
    assert team.outcomes(episode) == {f"{ask.id}:0": float(is_right) for ask in asks}


def test_an_outcome_is_unknown_if_no_answer_precedes_a_failure() -> None:
    failed = [(solver_verifier(), ["Answer: 1", "Verdict: wrong", FAILED]), (solver_verifier(), [FAILED])]
    for team, said in [*failed, (team_of(), ["<verify>yes</verify>", FAILED])]:
        outcomes = team.outcomes(play(team, script(*said)))
        assert len(outcomes) == len(said) and all(map(np.isnan, outcomes.values()))
    team = solver_verifier()
    # If the Verifier fails, the last solution counts.
    assert set(team.outcomes(play(team, script("Answer: 1", FAILED))).values()) == {1.0}


def test_drmas_prompts_ask_for_tags_and_compat_needs_none() -> None:
    def team(**verifier: Any) -> Orchestration:
        agents = {"solver": AgentConfig(prompt="drmas_math"), "verifier": AgentConfig(prompt="drmas_math", **verifier)}
        return build_orchestration("solver_verifier", agents, "math")

    texts = ["it is \\boxed{2}", "<think>hm</think> step 1 <verify> reject </verify>", "then \\boxed{1}"]
    for parser, read in (
        ("strict", "step 1 <verify> reject </verify>"),
        ("compat", "<think>hm</think> step 1 <verify>reject</verify>"),
    ):
        episode = play(team(parser=parser), script(*texts))
        first, judged, second = (words(team(parser=parser), episode, ask) for ask in episode.asks.values())
        assert "a 3 b *7" in first and "said so far" not in first and "You are the Solver" in first
        assert "it is \\boxed{2}" in judged and "<verify>reject</verify> if" in judged
        assert "it is \\boxed{2}" in second and read in second and "You are the Solver" in second
        assert [s.reward.value for (s,) in episode.answers.values()] == [0.0, 1.0, 1.0]
    for settings, num_asks in (({}, 3), ({"missing_verdict": "correct"}, 2), ({"parser": "compat"}, 2)):
        episode = play(team(**settings), script("\\boxed{1}", "no tag", "\\boxed{1}"))
        (report,) = list(episode.answers.values())[1]
        # A report without a readable verdict earns nothing, even if it counts as acceptance.
        assert len(episode.asks) == num_asks and report.reward.value == 0


def test_debaters_read_each_other_and_the_majority_counts() -> None:
    team = build_orchestration("debate", {}, "chain", {"debaters": 3, "rounds": 2})
    answers = {"1": "1", "2": "2", "3": "1"}  # answers by debater; the second debater changes its answer

    def say(ask: Ask) -> str:
        return f"Answer: {answers[ask.id.split('#')[1][0]] if not ask.inputs else '1'}"

    episode = play(team, say)
    asks = [*episode.asks.values()]
    assert {(ask.agent, ask.group) for ask in asks} == {("debater", "000001/debater")} and len(asks) == 6
    _, second, _ = (ask for ask in asks if ask.inputs)
    assert second.parent_uid == "000001.0/debater#2:0"
    assert {*second.inputs} == {f"000001.0/debater#{i}:0" for i in (1, 2, 3)}
    assert words(team, episode, second) == "a 3 b *7 | Answer: 2 | Answer: 1\n\nAnswer: 1 fix"
    final = team.outcome(episode)
    assert final is not None and final.answer == "1"


def test_votes_are_answers_of_the_last_round_that_has_any() -> None:
    team = build_orchestration("debate", {}, "chain")

    def counts(*last: str) -> str | None:
        said = dict(zip("123", last, strict=True))
        outcome = team.outcome(play(team, lambda ask: said[ask.id.split("#")[1][0]] if ask.inputs else "Answer: 4"))
        return None if outcome is None else outcome.answer

    assert counts("Answer: 2", "Answer: 1", "Answer: 1") == counts("Answer: 1", "Answer: 1", "Answer: 2") == "1"
    assert counts("hm", "hm", "Answer: 2") == "2"  # an agent without an answer has no vote
    assert counts("hm", "hm", "hm") == "4"


QUESTION = Problem("p", "where does mira holt live ?", "tarn", "qa")
YES, NO, VAGUE = "<verify>yes</verify>", "Not enough. <verify>no</verify>", "I am not sure."
NO_QUERIES = ["no tag", "<search></search>", "<search>cut", "...<search>cut</search>"]
ANSWER = "<think>{report}</think> <answer>tarn</answer>"


def query(text: str) -> str:
    return f"<think>which?</think> <search> {text} </search>"


def team_of(max_turns: int = 4, **verifier: Any) -> Orchestration:
    agents = {"verifier": AgentConfig(**verifier)}
    return build_orchestration("search_team", agents, "qa", {"max_turns": max_turns}, RolloutConfig(group_size=5))


def found(call: ToolCall) -> ToolOutput:
    return ToolOutput(f"Doc 1(Title: x) about {json.loads(call.arguments)['query']}")


def play_search(team: Orchestration, texts: list[str | None]) -> tuple[Episode, list[Ask | ToolCall]]:
    """Play one episode to its end; return it, and its asks and tool calls in order."""
    order, left = list[Ask | ToolCall](), iter(texts)
    episode = play(team, lambda ask: next(left), QUESTION, found, order)
    assert next(left, "all said") == "all said"
    return episode, order


def names(order: list[Ask | ToolCall]) -> str:
    """Return a letter per step: v, s and a for the agents, c for a tool call."""
    return "".join(each.agent[0] if isinstance(each, Ask) else "c" for each in order)


def asked(episode: Episode, agent: str) -> list[Ask]:
    return [ask for ask in episode.asks.values() if ask.agent == agent]


@pytest.mark.parametrize(
    ("max_turns", "missing_verdict", "texts", "order"),
    [
        (4, "wrong", [NO, query("mira holt"), NO, query("tarn"), YES, ANSWER], "vscvscva"),
        (2, "wrong", [NO, query("mira holt"), NO], "vscv"),  # no search in the last turn
        (1, "wrong", [NO], "v"),
        (2, "wrong", [VAGUE, query("x"), YES, ANSWER], "vscva"),  # an unreadable route
        (4, "correct", [VAGUE, ANSWER], "va"),
        (4, "correct", ["... <verify>yes</verify>", ANSWER], "va"),
        *((4, "wrong", [NO, text, YES, ANSWER], "vsva") for text in NO_QUERIES),
        (4, "wrong", [NO, None], "vs"),
        (4, "wrong", [NO, query("x"), YES, None], "vscva"),
    ],
)
def test_the_team_searches_until_yes_and_the_answer_counts(
    max_turns: int, missing_verdict: str, texts: list[str | None], order: str
) -> None:
    team = team_of(max_turns, missing_verdict=missing_verdict)
    episode, made = play_search(team, texts)
    assert names(made) == order
    calls = [json.loads(each.arguments)["query"] for each in made if isinstance(each, ToolCall)]
    assert calls == [found.group(1) for text in texts if (found := re.search("<search> (.*) </search>", text or ""))]
    outcome, is_right = team.outcome(episode), texts[-1] == ANSWER
    assert is_right == (outcome is not None and outcome.agent == "answer" and outcome.answer == "tarn")
    assert set(team.outcomes(episode).values()) <= {float(is_right)}
    assert {ask.group for ask in asked(episode, "search")} <= {"000001/search"}  # one group over all turns and episodes
    if any(text in NO_QUERIES for text in texts):
        assert "There was no query" in words(team, episode, asked(episode, "answer")[0])


def test_search_reads_the_verifier_but_no_agent_reads_thoughts() -> None:
    team = team_of()
    episode, _ = play_search(team, [NO, query("mira holt"), NO, query("tarn"), YES, ANSWER])
    _, search = (words(team, episode, ask) for ask in asked(episode, "search"))
    [answer] = (words(team, episode, ask) for ask in asked(episode, "answer"))
    assert "Not enough." in search and "Not enough." not in answer and "which?" not in search + answer


def test_answers_earn_task_rewards_and_others_readability() -> None:
    team = team_of()
    episode, _ = play_search(team, [VAGUE, query("x"), YES, "<answer>rome</answer>"])
    said = [episode.samples(ask)[0] for ask in episode.asks.values()]
    values = [(sample.agent, sample.reward.value) for sample in said]
    assert values == [("verifier", 0.0), ("search", 1.0), ("verifier", 1.0), ("answer", 0.0)]
    assert all(np.isnan(sample.reward.correct) for sample in said[:3])
    assert [team.to_judge(episode, sample) for sample in said] == [None, None, None, "rome"]
    assert set(team.outcomes(episode).values()) == {0.0}
    episode, _ = play_search(team, ["...", query("x"), YES, ANSWER])
    overlong = episode.samples(asked(episode, "verifier")[0])[0].reward
    assert overlong.value == 0.0 and np.isnan(overlong.correct)  # an overlong output counts in no accuracy metric
    episode, _ = play_search(team, [YES, "... <answer>tarn</answer>"])
    assert [episode.samples(ask)[0].reward.note for ask in asked(episode, "answer")] == ["overlong"]
    assert team.outcome(episode) is None


OWN = """
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.roles import AgentSpec

class Nameless(Orchestration):
    agents = (AgentSpec("a b"),)

class Words(Orchestration):
    agents = ("solver",)

class One(Orchestration):
    agents = (AgentSpec("solver"))

class Plain(Orchestration):
    agents = (AgentSpec("solver"),)

    class Options:
        rounds = 2
"""
COMPAT = {"verifier2": AgentConfig(parser="compat")}
LACKS = r"^agents.verifier2.parser is compat, but agents.verifier2.prompt \({}\) does not ask .*\*\*Correctness\*\*"
NAMES = "debate, dual_system, external, search_team, solver, .*, verifier_corrector, or your own as FILE"
REFUSED: list[tuple[str, dict[str, AgentConfig], str, dict[str, object], str]] = [
    ("debates", {}, "math", {}, NAMES),
    ("verifier_corrector", {"solvr": AgentConfig()}, "math", {}, "corrector2"),
    ("verifier_corrector", {}, "maths", {}, "chain, drmas_math, facts, math"),
    ("debate", {}, "math", {"debaters": 1}, "options of debate: debaters: Input should be greater than 1"),
    ("solver", {}, "math", {"max_loops": 1}, "orchestration_options of solver: max_loops: Extra inputs"),
    *(("verifier_corrector", COMPAT, name, {}, LACKS.format(name)) for name in ("math", "chain", "qa")),
    # Other errors of files are tested in tests/tasks/test_data.py.
    ("my_team.py:Nameless", {}, "math", {}, "Nameless.agents names a b; expected at least one AgentSpec"),
    ("my_team.py:Words", {}, "math", {}, "Words.agents names none; expected at least one AgentSpec"),
    ("my_team.py:One", {}, "math", {}, "One.agents names none; expected at least one AgentSpec"),
    ("my_team.py:Plain", {}, "math", {}, "Plain.Options does not extend Orchestration.Options"),
]


@pytest.mark.parametrize(("team", "agents", "prompts", "options", "message"), REFUSED)
def test_unknown_names_and_invalid_options_are_refused(
    team: str, agents: dict[str, AgentConfig], prompts: str, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    os.chdir(tmp_path)
    Path("my_team.py").write_text(OWN)
    with pytest.raises(ValueError, match=message):
        build_orchestration(team, agents, prompts, options)
